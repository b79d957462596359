import re
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.chat import ChatMLRenderer, TemplateConfig, TemplateRenderer, parse_assistant, train_tokenizer
from agentrl.chat.encoder import Encoder
from agentrl.chat.renderer import Thinking, Tools
from agentrl.errors import CheckError
from agentrl.testing import check_renderer
from agentrl.types import Message
from tests.support.each import each

TEXTS = ["user\nGo on, 1.", "assistant\nText-", 'system\nlook(n: integer){"name": "look", "arguments": {"n": 1}}'] * 3
TOKENIZER = train_tokenizer(TEXTS, vocab_size=300)

QWEN = """
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' + message.content }}
{%- for call in message.tool_calls or [] %}{%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def template_renderer(template: str, **options: Any) -> TemplateRenderer:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    tokenizer.chat_template = template
    return TemplateRenderer(tokenizer, TemplateConfig(**options))


def test_the_chatml_renderer_passes() -> None:
    check_renderer(ChatMLRenderer(TOKENIZER))


def test_the_template_renderer_passes() -> None:
    check_renderer(template_renderer(QWEN))


def test_a_template_renderer_that_cannot_extend_passes() -> None:
    forgetful = QWEN.replace(
        "+ message.content }}\n{%- for", "+ (message.content if loop.revindex < 3 else '') }}\n{%- for"
    )
    assert forgetful != QWEN
    check_renderer(template_renderer(forgetful))


def text_of(ids: Sequence[int]) -> str:
    text: str = TOKENIZER.backend_tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


class TokenizesAgain(ChatMLRenderer):
    """Decodes what was sampled, encodes it again, and cuts the new context where the sampled one ends."""

    def extend(
        self, context_ids: Sequence[int], action_ids: Sequence[int], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        action = self._control.encode(text_of(action_ids)).ids
        whole = (*context_ids, *action, *super().extend(context_ids, action, messages))
        return whole[len(context_ids) + len(action_ids) :]


class NeverCloses(ChatMLRenderer):
    def extend(
        self, context_ids: Sequence[int], action_ids: Sequence[int], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        return super().extend(context_ids, [*action_ids, self._end_id], messages)


class AlwaysCloses(ChatMLRenderer):
    def extend(self, context_ids: Sequence[int], action_ids: Sequence[int], messages: Sequence[Message]) -> Any:
        del action_ids
        return super().extend(context_ids, [], messages)


class ForgetsTheNewline(ChatMLRenderer):
    def extend(self, context_ids: Sequence[int], action_ids: Sequence[int], messages: Sequence[Message]) -> Any:
        ids = super().extend(context_ids, action_ids, messages)
        return ids[1:] if action_ids and action_ids[-1] == self._end_id else (ids[0], *ids[2:])


class DropsTools(ChatMLRenderer):
    def _messages(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return super()._messages([m for m in messages if m["role"] != "tool"])


class KeepsTheLastReply(ChatMLRenderer):
    def extend(self, context_ids: Sequence[int], action_ids: Sequence[int], messages: Sequence[Message]) -> Any:
        return super().extend(context_ids, action_ids, messages[-1:])


class DropsSchemas(ChatMLRenderer):
    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        del tools
        return super().start(messages, ())


class RewritesHistory(ChatMLRenderer):
    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        said = [{"role": "system", "content": f"{len(messages)} messages in all."}]
        return super().start([*said, *messages], tools)


class LeavesATrace(ChatMLRenderer):
    @property
    def thinking(self) -> Thinking:
        return "drop_at_user"


class KeepsThoughts(ChatMLRenderer):
    @property
    def thinking(self) -> Thinking:
        return "drop"


class HearsControlTokens(ChatMLRenderer):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._encode = Encoder(tokenizer)

    def _text(self, text: str) -> tuple[int, ...]:
        return self._encode(text)


class ActsOnDrafts(ChatMLRenderer):
    def parse(self, action_ids: Sequence[int], context_ids: Sequence[int] = (), tools: Tools = ()) -> Message:
        text = text_of(action_ids).removesuffix("<|im_end|>")
        return parse_assistant(text if "</think>" in text else text.replace("<think>", ""))


class CannotStartAgain(ChatMLRenderer):
    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        if any(m["role"] == "assistant" for m in messages):
            raise KeyError("assistant")
        return super().start(messages, tools)

    def extend(self, *_: object) -> Any:
        return None


class RaisesOnBadCalls(ChatMLRenderer):
    def parse(self, action_ids: Sequence[int], context_ids: Sequence[int] = (), tools: Tools = ()) -> Message:
        message = super().parse(action_ids, context_ids, tools)
        if any(not call["function"]["name"] for call in message.get("tool_calls", [])):
            raise ValueError("not a call")
        return message


class DropsBadCalls(ChatMLRenderer):
    def parse(self, action_ids: Sequence[int], context_ids: Sequence[int] = (), tools: Tools = ()) -> Message:
        message = super().parse(action_ids, context_ids, tools)
        message["tool_calls"] = [call for call in message.get("tool_calls", []) if call["function"]["name"]]
        return message


class MendsCalls(ChatMLRenderer):
    def parse(self, action_ids: Sequence[int], context_ids: Sequence[int] = (), tools: Tools = ()) -> Message:
        message = super().parse(action_ids, context_ids, tools)
        for call in message.get("tool_calls", []):
            if not call["function"]["name"] and (name := re.search(r'"name": "(\w+)"', call["function"]["arguments"])):
                call["function"] = {"name": name[1], "arguments": {}}
        return message


class RaisesOnNothing(ChatMLRenderer):
    def parse(self, action_ids: Sequence[int], context_ids: Sequence[int] = (), tools: Tools = ()) -> Message:
        assert action_ids[0] >= 0
        return super().parse(action_ids, context_ids, tools)


class OneCallAtMost(ChatMLRenderer):
    def parse(self, action_ids: Sequence[int], context_ids: Sequence[int] = (), tools: Tools = ()) -> Message:
        message = super().parse(action_ids, context_ids, tools)
        return message | ({"tool_calls": message["tool_calls"][:1]} if "tool_calls" in message else {})


class NoStopTokens(ChatMLRenderer):
    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return ()


class EncodesWithoutStop(ChatMLRenderer):
    def encode(self, message: Message) -> tuple[int, ...]:
        return super().encode(message)[:-1]


@each(
    ("broken", "line"),
    [
        (TokenizesAgain, "it must not depend on how the action is split"),
        (NeverCloses, "after an action without a stop token extend() must append one"),
        (AlwaysCloses, "after an action without a stop token extend() must append one"),
        (ForgetsTheNewline, "extend() appends other tokens than start() of the whole history ends with"),
        (DropsTools, "turn 1 (tool): extend() leaves out messages of the role 'tool'"),
        (KeepsTheLastReply, "turn 2 (tool, tool): extend() leaves out messages of the role 'tool'"),
        (DropsSchemas, "start() leaves out the tools"),
        (RewritesHistory, "start() of the whole history changes what was said before"),
        (LeavesATrace, "thinking is 'drop_at_user', and a thought leaves a trace when the user has spoken"),
        (KeepsThoughts, "thinking is 'drop', and a thought leaves a trace when the tool has spoken"),
        (HearsControlTokens, "'<|im_end|>' in what the tool says becomes a token: it would end a turn"),
        (ActsOnDrafts, "parse() gives calls of a thought that does not end"),
        (CannotStartAgain, "KeyError where messages of users are appended, and nothing before them changes"),
        (RaisesOnBadCalls, "parse() of the tool call '{' raises ValueError: it must never raise (not a call)"),
        (RaisesOnBadCalls, "parse() of an unfinished tool call raises ValueError"),
        (DropsBadCalls, "parse() drops an unfinished tool call"),
        (DropsBadCalls, "parse() of the tool call 'null' must give a call with an empty name"),
        (MendsCalls, "parse() makes another call of an unfinished one"),
        (RaisesOnNothing, "parse() of no tokens raises IndexError"),
        (OneCallAtMost, "does not give back two calls"),
        (NoStopTokens, "stop_token_ids is empty"),
        (EncodesWithoutStop, "encode() does not end with one of stop_token_ids"),
    ],
)
def test_a_broken_renderer_is_told_apart(broken: type[ChatMLRenderer], line: str) -> None:
    with pytest.raises(CheckError) as caught:
        check_renderer(broken(TOKENIZER))
    assert str(caught.value).startswith(f"renderer {broken.__name__}:\n- ")
    assert line in str(caught.value)
