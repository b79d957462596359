"""Any Hugging Face chat template: a dialogue is extended by what the template adds, and what was sampled stays."""

import datetime as dt
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from agentrl.chat.chat_template import TOOLS, ChatTemplate, Turns
from agentrl.chat.encoder import MARK, Encoder, unmarked
from agentrl.chat.forms import FORMS, ResponseTemplateForm
from agentrl.chat.forms.form import check_written
from agentrl.chat.proof.facts import describe_template, find_facts
from agentrl.chat.proof.template import prove
from agentrl.chat.renderer import (
    Description,
    DialogueConfig,
    Renderer,
    Thinking,
    Tools,
    own_template,
    prepared,
    stop_ids,
)
from agentrl.data.files import absolute
from agentrl.errors import RendererError
from agentrl.types import Message

ToolForm = Literal["hermes", "json"]
"""Forms in which tools are offered to a template that knows none."""


class TemplateConfig(DialogueConfig):
    """The tokenizer's own chat template, or one from a file."""

    renderer: str = "template"
    template: Path | None = None
    """A file with a chat template (Jinja), in place of the tokenizer's own."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """Variables passed to the template beside the messages, fixed for the run: `enable_thinking: false`,
    `reasoning_effort: low`."""
    date: dt.date = dt.date(2026, 1, 1)
    """Day whose midnight a chat template gets that asks for the time (`strftime_now`). Fixed, so that a dialogue
    is the same tokens on every day of a run, after a restart, and in the next run of the recipe."""

    tool_form: ToolForm = "hermes"
    """Form in which tools are offered and called where the template knows none: their schemas and this form go into the system
    message, results into the user's. `hermes`: JSON between tags; `json`: the whole answer is a JSON object."""

    def build(self, tokenizer: Any, *, name: str = "") -> Renderer:
        """Return the renderer, after proving it."""
        return self.proven(tokenizer, name=name)

    def proven(self, tokenizer: Any, *, name: str, encode: Encoder | None = None) -> "TemplateRenderer":
        """Return the renderer, after proving it."""
        renderer = TemplateRenderer(tokenizer, self, name=name, encode=encode)
        if renderer.facts.no_tools is not None:
            with_tools = TemplateRenderer(tokenizer, self, name=name, offering=offering(self.tool_form))
            renderer = renderer if with_tools.facts.no_tools else with_tools
        prove(renderer, name=name, tools=() if renderer.facts.no_tools else TOOLS)
        return renderer

    def exported_template(self, tokenizer: Any) -> str | None:
        """Return the recipe's template, or the tokenizer's own; with the tools' part where it knows none."""
        text = _read(self.template) if self.template else super().exported_template(tokenizer)
        return self.proven(tokenizer, name="").text if text else text


def offering(form: ToolForm) -> str:
    """Return the beginning of a template that writes tools, calls and results into messages of text."""
    text = Path(__file__).with_name("tools.jinja").read_text(encoding="utf-8")
    if form == "json":
        for theirs, ours in _AS_JSON.items():
            text = text.replace(theirs, ours)
    return text


_AS_JSON = {
    "a JSON object between these tags:\n<tool_call>\n": "a JSON object, and nothing else:\n",
    "\n</tool_call>\n{%- endset -%}": "\n{%- endset -%}",
    "'<tool_call>\\n' ~ body ~ '\\n</tool_call>'": "body",
    "'arguments': call": "'parameters': call",
    '"arguments": {"PARAMETER"': '"parameters": {"PARAMETER"',
}


_DEFAULT = TemplateConfig()


class TemplateRenderer:
    """Renders new messages with a chat template, behind a stand-in of the assistant's turn, and keeps what they added.

    At construction the template is asked by rendering: what shape it wants messages in (`ChatTemplate`), how it ends a turn
    (`Turns`), in which form it writes calls, which thoughts of earlier turns it keeps, and after whose words it changes
    earlier turns (`find_facts`). After those `extend` returns None.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: TemplateConfig = _DEFAULT,
        *,
        name: str = "",
        encode: Encoder | None = None,
        offering: str = "",
    ) -> None:
        """Ask the template.

        Args:
            tokenizer: of the policy.
            config: the section `chat` of a recipe.
            name: of the model, for error messages.
            encode: what is made of the tokenizer for this template, where it is there already: it takes seconds.
            offering: put before the template, so that it knows tools.
        """
        self._tokenizer = tokenizer
        self._name = name
        self._system = config.system
        self._size = len(tokenizer)
        self.text = text = offering + template_text(tokenizer, config, name)
        """The whole template."""
        self._encode = encode or Encoder(tokenizer, spelled=text)
        self.template = ChatTemplate(
            tokenizer, self._encode, template=text, variables=config.template_variables, date=config.date, name=name
        )
        self.turns = Turns(self.template, self._encode, name=name)
        own = getattr(tokenizer, "response_template", None)  # how transformers parses what the model writes
        forms = (ResponseTemplateForm(own, ends=self.turns.stops), *FORMS) if own else FORMS
        self.facts = find_facts(self.template, self.turns, forms, name=name)
        ends = [end for end in (self.turns.said, self.turns.called) if end is not None]
        self._stop_ids = stop_ids(tokenizer, template=(end.stop_id for end in ends))
        self._closing = {end.stop_id: end.closing_id for end in ends}
        self._open_prompts = [self._encode(prompt) for prompt in self.facts.thinking_prompts]
        self._thinking = config.thinking or self.facts.thinking
        self._variables = config.template_variables

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens with which the template closes an assistant's turn, and those of `stop_ids`."""
        return self._stop_ids

    @property
    def max_token_chars(self) -> int | None:
        """Longest text that one token stands for."""
        return self._encode.max_chars

    @property
    def thinking(self) -> Thinking:
        """Return which thoughts of earlier turns a context holds."""
        return self._thinking

    def describe(self) -> Description:
        """Return what the template does, in words."""
        return describe_template(
            self.template,
            self.turns,
            self.facts,
            tokenizer=self._tokenizer,
            text=self.text,
            thinking=self._thinking,
            variables=self._variables,
        )

    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Return a whole context.

        Raises:
            RendererError: if there are tools and the template cannot be used with any.
        """
        if tools and self.facts.no_tools:
            raise RendererError(
                f"chat.renderer: the chat template of {self._name!r} cannot be used with tools: {self.facts.no_tools}. Set "
                "chat.template to a file with a template that can, or use an environment without tools"
            )
        said = prepared(messages, system=self._system, thinking=self._thinking)
        return self._encode(self.template.render(said, tools, prompt=True, form=self.facts.form))

    def extend(
        self,
        context_ids: Sequence[int],  # noqa: ARG002 - the probe has shown that history does not matter
        action_ids: Sequence[int],
        messages: Sequence[Message],
    ) -> tuple[int, ...] | None:
        """Return the tokens to append, or None if the template rewrites history."""
        if any(message["role"] in self.facts.rewrites for message in messages):
            return None
        ids = self.turns.extension(messages)
        last = action_ids[-1] if action_ids else None
        return ids[1:] if last is not None and ids[0] in (last, self._closing.get(last)) else ids

    def parse(self, action_ids: Sequence[int], context_ids: Sequence[int] = (), tools: Tools = ()) -> Message:
        """Return the assistant message of sampled tokens."""
        ids = action_ids[:-1] if action_ids and action_ids[-1] in self._stop_ids else action_ids
        known = [i for i in ids if i < self._size]  # a model can have more
        text = self._encode.decode(known)
        ends = [prompt for prompt in self._open_prompts if tuple(context_ids[-len(prompt) :]) == prompt]
        is_thinking = bool(ends if context_ids else self._open_prompts)
        message = self.facts.form.parse(text, tools, is_thinking=is_thinking)
        return unmarked(message) if MARK in text else message

    def encode(self, message: Message) -> tuple[int, ...]:
        """Return an assistant message as an action.

        Raises:
            RendererError: if the template cannot write it so that it would be read again.
        """
        is_lost = message.get("tool_calls") and message.get("content") and not self.facts.text_beside_calls
        if is_lost or (message.get("reasoning_content") and not self.facts.thoughts):
            what = "text beside a call" if is_lost else "a thought"
            raise RendererError(
                f"chat.renderer: the chat template of {self._name!r} does not write {what} in such a turn"
            )
        ids = self._encode(self.turns.written(message), after=self.turns.first)
        check_written(message, partial(self.parse, ids, ()), by=f"the chat template of {self._name!r}")
        return (*ids, self.turns.end_of(message).stop_id)


def template_text(tokenizer: Any, config: TemplateConfig, name: str) -> str:
    """Return the template that the recipe asks for.

    Raises:
        RendererError: when there is none.
    """
    if config.template is not None:
        return _read(config.template)
    text = own_template(tokenizer)
    if not text:
        raise RendererError(
            f"chat.renderer: the tokenizer {name!r} has no chat template; use the instruction-tuned version of the model, or "
            "set chat.template to a file with one"
        )
    return text


def _read(file: Path) -> str:
    try:
        return absolute(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RendererError(f"chat.template: {file} cannot be read: {error}") from error
