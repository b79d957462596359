"""Random dialogues in the form of each family: what is extended turn by turn is what the family's own template renders.

    OMP_NUM_THREADS=1 python -m benchmarks.random_dialogues [--num 1000] [--only TEMPLATE ...]

Six turns each, of random words (Unicode, code, white space, spelled control tokens, nothing), calls with random arguments by
the types of their schemas, several where the family can, thoughts where it can, and system messages. Each action is
`encode(message)`: `parse` must give the message back, and the context after it must be the tokens that
`tokenizer.apply_chat_template` makes of the whole. Where these are others, the reason is counted, and what has none fails. A
third of the dialogues spell control tokens: the template itself would make tokens of them, so there the context is compared
with a first rendering of the whole by the renderer. The last line printed is JSON.
"""

import argparse
import datetime as dt
import json
import random
import re
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat import AutoConfig, Dialogue, Renderer, TemplateRenderer
from agentrl.chat.chat_template import ChatTemplate, Shape
from agentrl.chat.encoder import Encoder
from agentrl.chat.renderer import Tools
from agentrl.errors import RendererError
from agentrl.types import Message
from benchmarks.models_table import Abilities, abilities
from tests.support.families import family_tokenizer, template_names

NUM_TURNS = 6
_DATE = dt.date(2026, 1, 1)
_WORDS = (
    ["the", "box", "is", "empty", "the", "door", "was", "locked", "open", "take", "look", "at", "three", "lamps"],
    ["Größe", "naïve", "Привет", "世界", "鍵", "🔑", "👩‍🚀", "e\u0301", "שלום", "ไทย", "\u200b", "½", "\ufffd"],
    [
        "def f(x):\n    return x",
        "a[1:] += {k: v}",
        "# c",
        '"q"',
        "x = y # z",
        "<b>&amp;</b>",
        "\\n",
        "a|b",
        "1,234.5",
        "3+4=7",
    ],
    ["\n", "\n\n", "  ", "\t", "\r\n", " \n "],
)
_EMPTY_THOUGHT = re.compile(
    r"(?:<think>\s*</think>|<\|channel>thought\s*<channel\|>|<\|channel\|>analysis<\|message\|><\|end\|>)\s*"
)
_TYPES: tuple[dict[str, Any], ...] = (
    {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "array"}, {"type": "object"},
    {"type": ["string", "null"]}, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"type": "string", "enum": ["a", "b"]},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A template with its tokenizer, and the renderer that it was given."""

    name: str
    tokenizer: Any
    renderer: Renderer
    can: Abilities
    shape: Shape
    spelled: tuple[str, ...]
    """The control tokens."""

    @classmethod
    def of(cls, name: str) -> "Row":
        """Return the row of a template."""
        tokenizer = family_tokenizer(name)
        renderer = AutoConfig(date=_DATE).build(tokenizer, name=name)
        if isinstance(renderer, TemplateRenderer):
            tokenizer.chat_template = renderer.text  # with the tools' part, if the family's has none
        encode = Encoder(tokenizer, spelled=tokenizer.chat_template)
        template = ChatTemplate(
            tokenizer, encode, template=tokenizer.chat_template, variables={}, date=_DATE, name=name
        )
        return cls(name, tokenizer, renderer, abilities(renderer), template.shape, tuple(encode.control_tokens))

    def whole(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = True) -> list[int]:
        """Return what transformers makes of a dialogue with the family's own template, or that with tools."""
        clock = dt.datetime.combine(_DATE, dt.time())
        ids: list[int] = self.tokenizer.apply_chat_template(
            [self._shaped(message) for message in messages], tools=list(tools) or None, add_generation_prompt=prompt,
            return_dict=False, strftime_now=clock.strftime,
        )  # fmt: skip
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _shaped(self, message: Message) -> Message:
        shaped, shape = dict(message), self.shape
        if shape.parts:
            shaped["content"] = [{"type": "text", "text": message["content"]}]
        if thought := shaped.pop("reasoning_content", None):
            shaped[shape.thought_key or ""] = thought
        if shape.text_arguments and (calls := shaped.pop("tool_calls", None)):
            functions = [call["function"] for call in calls]
            texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
            shaped["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": text}}
                for call, text in zip(calls, texts, strict=True)
            ]
        return shaped


@dataclass(slots=True)
class CaseCounts:
    """What came of a row's turns."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, where: str, what: str) -> None:
        """Note what has no reason."""
        self.outcomes["failed"] += 1
        self.failures.append(f"{where}: {what}")


class Speaker:
    """Says random things."""

    def __init__(self, row: Row, rng: random.Random, *, hostile: bool) -> None:
        self._row, self._rng, self._hostile = row, rng, hostile

    def text(self, *, hostile: bool | None = None) -> str:
        """Return words of anybody."""
        rng = self._rng
        if rng.random() < 0.05:
            return ""
        kinds = [*_WORDS, self._row.spelled] if (self._hostile if hostile is None else hostile) else _WORDS
        weights = [6, 2, 2, 2, 3][: len(kinds)]
        count = rng.choice((1, 2, 5, 12, 40))
        return rng.choice((" ", " ", "")).join(rng.choice(k) for k in rng.choices(kinds, weights, k=count))

    def said(self) -> str:
        """Return words of the assistant: nothing at the ends, where no form keeps white space, and no tags of calls."""
        return self.text(hostile=False).strip()

    def tools(self) -> list[dict[str, Any]]:
        """Return schemas of one to three tools."""
        if not self._row.can.tools:
            return []
        return [self._tool(name) for name in ("look", "take_it", "open-box")[: self._rng.randint(1, 3)]]

    def _tool(self, name: str) -> dict[str, Any]:
        kinds = self._rng.sample(_TYPES, k=self._rng.randint(1, 5))
        schema = {
            "type": "object",
            "properties": {f"arg_{i}": kind for i, kind in enumerate(kinds)},
            "required": ["arg_0"],
        }
        return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}

    def call(self, number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call with arguments as the schema has them."""
        function = tool["function"]
        arguments = {
            key: self._value(schema)
            for key, schema in function["parameters"]["properties"].items()
            if key == "arg_0" or self._rng.random() < 0.7
        }
        return {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }

    def _value(self, schema: Mapping[str, Any]) -> object:
        rng = self._rng
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "anyOf" in schema:
            return self._value(rng.choice(schema["anyOf"]))
        kind = schema["type"]
        if isinstance(kind, list):
            kind = rng.choice(kind)
        if kind == "string":
            return rng.choice((self.text(), self.text(), f" {self.text()}\n", "true!", "one 1"))
        return {
            "integer": lambda: rng.choice((0, -1, 7, 2**53, -(10**18))),
            "number": lambda: rng.choice((0.5, -2.25, 1e-9, 3, 6.02e23)),
            "boolean": lambda: rng.random() < 0.5,
            "null": lambda: None,
            "array": lambda: [self._value(rng.choice(_TYPES[:4])) for _ in range(rng.randrange(4))],
            "object": lambda: {f"k{i}": self._value(rng.choice(_TYPES[:5])) for i in range(rng.randrange(3))},
        }[kind]()

    def message(self, tools: Tools) -> Message:
        """Return what the assistant says."""
        rng, can = self._rng, self._row.can
        message: Message = {"role": "assistant", "content": self.said()}
        calls = rng.choice((0, 1, 1, 2, 3)) if tools else 0
        calls = min(calls, 1) if not can.parallel else calls
        if calls:
            message["tool_calls"] = [self.call(number, rng.choice(tools)) for number in range(calls)]
            if not can.text_beside_calls or rng.random() < 0.6:
                message["content"] = ""
        may_think = self._hostile or self._row.shape.thought_key  # where a family has no thoughts, they are text
        if may_think and rng.random() < 0.5 and (can.thoughts_before_calls if calls else can.thoughts_before_words):
            thought = self.said()
            if thought:
                message["reasoning_content"] = thought
        return message

    def replies(self, message: Message) -> list[Message]:
        """Return what is said to it."""
        return [
            {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": self.text()}
            for call in message.get("tool_calls", ())
        ] or [{"role": "user", "content": self.text()}]

    def opening(self) -> list[Message]:
        """Return how the dialogue begins."""
        user: Message = {"role": "user", "content": self.text()}
        if not self._row.shape.system or self._rng.random() < 0.5:
            return [user]
        return [{"role": "system", "content": self.text()}, user]


def play(row: Row, number: int, tally: CaseCounts) -> None:
    """Play a dialogue."""
    rng = random.Random(f"{row.name} {number}")
    is_hostile = number % 3 == 2
    speaker = Speaker(row, rng, hostile=is_hostile)
    tools = speaker.tools()
    try:
        dialogue = Dialogue.begin(speaker.opening(), tools, row.renderer)
        _compare(row, dialogue, tally, f"{row.name} {number}.0", hostile=is_hostile)
        for turn in range(1, NUM_TURNS + 1):
            message = speaker.message(tools)
            where = f"{row.name} {number}.{turn}"
            try:
                action = row.renderer.encode(message)
            except RendererError as error:
                if "is read otherwise than" in str(error):
                    tally.outcomes["actions refused: the template does not escape the arguments of calls"] += 1
                else:
                    tally.fail(where, f"encode() refuses {message!r}: {error}")
                continue
            read = row.renderer.parse(action, dialogue.context_ids, tools)
            tally.outcomes["actions"] += 1
            if _plain(read) != _plain(message):
                tally.fail(where, _difference(_plain(read), _plain(message), "what was written"))
            dialogue = dialogue.after(action, message, speaker.replies(message), row.renderer)
            _compare(row, dialogue, tally, where, hostile=is_hostile)
    except Exception as error:  # noqa: BLE001 - whatever is raised fails the dialogue
        tally.fail(f"{row.name} {number}", f"{type(error).__name__}: {error}")


def _compare(row: Row, dialogue: Dialogue, tally: CaseCounts, where: str, *, hostile: bool) -> None:
    context = list(dialogue.context_ids)
    if hostile:
        whole, by = list(row.renderer.start(dialogue.history, dialogue.tools)), "a first rendering's"
    else:
        whole, by = row.whole(dialogue.history, dialogue.tools), "the family's"
    reason = _reason(row, dialogue, context, whole)
    if reason is None:
        tally.fail(where, _difference(_text_without(row, context), _text_without(row, whole), by))
    else:
        tally.outcomes[f"{by}: {reason}"] += 1


def _reason(row: Row, dialogue: Dialogue, context: list[int], whole: list[int]) -> str | None:
    """Return how a context compares with the whole; None: it is another without a reason."""
    if context == whole:
        return "the same tokens" if dialogue.extends else "history rewritten, the same tokens"
    text, told = row.text(context), row.text(whole)
    if text == told:
        return "the same text, split otherwise where prompt and action meet"
    if _text_without(row, context) == _text_without(row, whole):
        return "a thought that holds nothing, or the token that ends a turn, stays as sampled"
    if not _is_consistent(row, dialogue):
        return "the template writes a turn elsewhere than its prompt asks for it"
    return None


def _is_consistent(row: Row, dialogue: Dialogue) -> bool:
    """Tell whether the family's own rendering writes each turn as if it were the first: right after the prompt."""
    history, user = dialogue.history, [{"role": "user", "content": "Hello."}]

    def added(before: Sequence[Message], message: Message) -> str:
        asked, told = (
            _text_without(row, row.whole(messages, dialogue.tools, prompt=prompt))
            for messages, prompt in ((before, True), ([*before, message], False))
        )
        return told[len(asked) :] if told.startswith(asked) else ""

    return all(
        added(history[:index], message) == added(user, message)
        for index, message in enumerate(history)
        if message["role"] == "assistant"
    )


def _text_without(row: Row, ids: Sequence[int]) -> str:
    """Return text without thoughts that hold nothing, and with one token in place of all that end a turn."""
    text = _EMPTY_THOUGHT.sub("", row.text(ids))
    return text.replace("<|return|>", "<|end|>")


def _difference(ours: str, theirs: str, by: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    around = slice(max(at - 60, 0), at + 60)
    return f"{ours[around]!r}, where {by} is {theirs[around]!r}"


def _plain(message: Message) -> str:
    """Return a message as text, composed (NFC): some tokenizers compose what they encode."""
    told = json.dumps({key: value for key, value in sorted(message.items()) if value}, ensure_ascii=False)
    return unicodedata.normalize("NFC", told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=1000, help="dialogues of a row")
    parser.add_argument("--only", nargs="+", choices=template_names(), default=template_names(), metavar="TEMPLATE")
    options = parser.parse_args()
    total, failures = Counter[str](), list[str]()
    for name in options.only:
        begin, tally, row = time.process_time(), CaseCounts(), Row.of(name)
        for number in range(options.num):
            play(row, number, tally)
        total += tally.outcomes
        failures += tally.failures
        print(
            f"{name}: {dict(tally.outcomes)} in {time.process_time() - begin:.1f} s", *tally.failures[:5], sep="\n    "
        )
        sys.stdout.flush()
    print(json.dumps({"dialogues": options.num * len(options.only), **total, "failures": len(failures)}))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
