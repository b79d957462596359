"""What every renderer must keep to, as one call: `check_renderer(MyRenderer(tokenizer))`."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.errors import CheckError
from agentrl.types import Message

if TYPE_CHECKING:
    from agentrl.chat.renderer import Renderer

_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": _SCHEMA}}
    for name in ("look", "take")
)
_MERGED = 4
_BAD_BODIES = (
    "",
    "{",
    "nothing",
    "null",
    "[]",
    '"look"',
    '{"name": "look", "arguments": {"n": 1}',
    '{"name": "look" "arguments": {}}',
    '{"name": 3, "arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"arguments": {}}',
    '{"name": "look", "arguments": ' + "1" * 5000 + "}",
    '{"name": "look", "arguments": ' + "[" * 5000 + "}",
    '{"name": "look", "arguments": "\\ud800"}',
    '<tool_call>{"name": "look"',
)
"""Between the tags of a call: what is no call."""


def check_renderer(renderer: "Renderer", *, tools: Sequence[dict[str, Any]] = TOOLS) -> None:
    """Raise with all that is wrong with a renderer; return where nothing is.

    It plays an episode of ten turns (plain ones, ones with one call and ones with two, three of them with a thought) whose
    actions are written in the renderer's own words, in other tokens than those words are encoded to, and without the stop
    token: what `extend` appends must be the same each time, after the stop token where it is missing. Every message must
    be heard in the context, `parse` must take any tokens, and give back what `encode` wrote; what is drafted in a thought
    is no call. A renderer that cannot extend (None) is held to the rest.

    Args:
        renderer: what to check.
        tools: at least two tools, as in the first context of an episode.

    Raises:
        CheckError: one line for each thing that is wrong.
    """
    episode = _Episode(renderer, list(tools))
    problems: list[str] = []
    for check in (
        _stop_tokens,
        _context,
        _extension,
        _round_trip,
        _random_tokens,
        _cut_calls,
        _malformed_calls,
        _drafted_calls,
    ):
        try:
            problems.extend(check(episode))
        except Exception as error:  # noqa: BLE001 - whatever a stranger's renderer raises belongs in the list
            problems.append(f"{type(error).__name__} in the check of {_words(check)}: {error}")
    if problems:
        lines = "".join(f"\n- {problem}" for problem in dict.fromkeys(problems))
        raise CheckError(f"renderer {type(renderer).__name__}:{lines}")


@dataclass(frozen=True, slots=True)
class _Episode:
    """The renderer under test, and ten turns to render."""

    renderer: "Renderer"
    tools: list[dict[str, Any]]
    opening: tuple[Message, ...] = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Find the key."},
    )
    seen_ids: set[int] = field(default_factory=set)
    """Every token id met so far: what is known of the vocabulary."""

    def turns(self) -> Iterator[tuple[Message, list[Message]]]:
        """Yield what the assistant says and what it hears: plain turns, turns with one call, turns with two."""
        for turn in range(10):
            names = [tool["function"]["name"] for tool in self.tools[: turn % 3]]
            message = _says("" if names else f"Text-{turn}", *((name, {"n": turn}) for name in names))
            if 6 <= turn < 9:
                message["reasoning_content"] = f"Thought-{turn}"
            replies = [
                {"role": "tool", "name": name, "tool_call_id": f"call_{i}", "content": f"result {turn} of {name}"}
                for i, name in enumerate(names)
            ]
            yield message, replies or [{"role": "user", "content": f"Go on, {turn}."}]

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        ids = self.renderer.start(messages, tools)
        self.seen_ids.update(ids)
        return tuple(ids)

    def encode(self, message: Message) -> tuple[int, ...]:
        ids = self.renderer.encode(message)
        self.seen_ids.update(ids)
        return tuple(ids)

    def spelled(self, text: str) -> tuple[int, ...]:
        """Return a plain message in tokens that its text as a whole is not encoded to: one letter after the other."""
        letters = [self.encode(_says(letter))[:-1] for letter in text]
        return (*(i for ids in letters for i in ids), self.renderer.stop_token_ids[0])

    def rng(self) -> random.Random:
        return random.Random(0)


def _says(content: str, *calls: tuple[str, object]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


def _functions(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls") or []]


def _words(check: Callable[..., object]) -> str:
    return check.__name__.strip("_").replace("_", " ")


def _stop_tokens(episode: _Episode) -> Iterator[str]:
    stops = episode.renderer.stop_token_ids
    if not stops:
        yield "stop_token_ids is empty: no turn would ever end"
    for message, _ in episode.turns():
        ids = episode.encode(message)
        if not ids or ids[-1] not in stops:
            yield "encode() does not end with one of stop_token_ids"
        if set(ids[:-1]) & set(stops):
            yield "encode() writes a stop token before the end: sampling would end there"


def _context(episode: _Episode) -> Iterator[str]:
    """The first context: told again it is the same, and it depends on all that it is made of."""
    opening, tools = list(episode.opening), episode.tools
    ids = episode.start(opening, tools)
    if not ids or not all(type(i) is int and i >= 0 for i in ids):
        yield f"start() must return token ids, got {ids!r:.80}"
    if episode.start(opening, tools) != ids:
        yield "start(), called twice, returns different tokens"
    if opening != list(episode.opening):
        yield "start() changes the messages it is given"
    if episode.start(opening, ()) == ids:
        yield "start() leaves out the tools"
    for index, message in enumerate(opening):
        other = [*opening]
        other[index] = message | {"content": "Something else."}
        if episode.start(other, tools) == ids:
            yield f"start() leaves out messages of the role {message['role']!r}"


def _extension(episode: _Episode) -> Iterator[str]:
    renderer, stops = episode.renderer, episode.renderer.stop_token_ids
    history: list[Message] = list(episode.opening)
    told = context = episode.start(history, episode.tools)
    for number, (message, replies) in enumerate(episode.turns(), start=1):
        where = f"turn {number} ({', '.join(reply['role'] for reply in replies)})"
        action = episode.encode(message)
        added = renderer.extend(context, action, replies)
        history += [message, *replies]
        told_before, told = told, episode.start(history, episode.tools)
        if added is None:
            if not told or told == told_before:
                yield f"{where}: extend() returns None, and start() of the whole history returns nothing new"
            context = told
            continue
        added = tuple(added)
        # The last tokens may differ where the tokenizer merges the end of the prompt with the action.
        if told[: len(told_before) - _MERGED] != told_before[: len(told_before) - _MERGED]:
            yield f"{where}: start() of the whole history changes what was said before: extend() must return None"
        if told[-len(added) - 1 :] != (action[-1], *added):
            yield f"{where}: extend() appends other tokens than start() of the whole history ends with"
        if not added:
            yield f"{where}: extend() appends nothing, not even the generation prompt"
        if tuple(renderer.extend(context, action, replies) or ()) != added:
            yield f"{where}: extend(), called twice, returns different tokens"
        for index, reply in enumerate(replies):
            other = [*replies]
            other[index] = reply | {"content": "Something else."}
            if renderer.extend(context, action, other) == added:
                yield f"{where}: extend() leaves out messages of the role {reply['role']!r}"
        for how, sampled in _other_actions(episode, message, action):
            if renderer.extend(context, sampled, replies) != added:
                yield f"{where}: extend() appends other tokens {how}: it must not depend on how the action is split"
        unclosed = tuple(renderer.extend(context, action[:-1], replies) or ())
        if not unclosed or unclosed[0] not in stops or unclosed[1:] != added:
            yield f"{where}: after an action without a stop token extend() must append one, and then the same as after one"
        context += (*action, *added)


def _other_actions(episode: _Episode, message: Message, action: tuple[int, ...]) -> Iterator[tuple[str, Sequence[int]]]:
    if not _functions(message):
        spelled = episode.spelled(message["content"])
        if spelled != action and _same(episode.renderer.parse(spelled), message):
            yield "after the same text in other tokens", spelled
    body = sorted(episode.seen_ids - set(episode.renderer.stop_token_ids))
    yield "after random tokens", [*episode.rng().choices(body, k=30), action[-1]]
    yield "after a lone stop token", [action[-1]]


def _same(parsed: Message, message: Message) -> bool:
    return (parsed.get("content") or "") == message["content"] and _functions(parsed) == _functions(message)


def _round_trip(episode: _Episode) -> Iterator[str]:
    first, second = (tool["function"]["name"] for tool in episode.tools[:2])
    messages = {
        "text": _says("Hello, world: 3 + 4 = 7."),
        "several lines": _says("One.\n\n  Two;\n\tthree."),
        "text beyond ASCII": _says("Größe, 鍵, 🔑"),
        "a call": _says("", (first, {"n": 1})),
        "a call without arguments": _says("", (first, {})),
        "two calls": _says("", (first, {"n": 1}), (second, {"n": -2})),
        "text and a call": _says("I look first.", (first, {"n": 1})),
        "nested arguments": _says("", (first, {"a": [1, 2.5, None, True], "b": {"c": "d"}})),
        "arguments with quotes and lines": _says("", (first, {"text": 'say "é"\n\\ {}'})),
        "arguments with tags": _says("", (first, {"text": "<tool_call> </tool_call> <think> </think>"})),
        "what follows a thought": _says("Yes.", (first, {"n": 1})) | {"reasoning_content": "Hm."},
    }
    for what, message in messages.items():
        if not _same(parsed := episode.renderer.parse(episode.encode(message)), message):
            yield f"parse() of what encode() wrote does not give back {what}: {message!r} became {parsed!r}"


def _message_problems(parsed: object) -> Iterator[str]:
    """Tell what keeps a value from being an assistant message."""
    if not isinstance(parsed, dict) or parsed.get("role") != "assistant":
        yield f"parse() must return an assistant message, got {parsed!r:.80}"
        return
    if not isinstance(parsed.get("content") or "", str):
        yield f"parse() must give text as content, got {parsed['content']!r:.80}"
    for function in _functions(parsed):
        if not isinstance(function.get("name"), str):
            yield f"parse() gives a call whose name is {function.get('name')!r:.80}: a malformed call has an empty name"
    try:
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        yield f"parse() gives what cannot be written as JSON: {error}"


def _parsed(episode: _Episode, what: str, ids: Sequence[int]) -> tuple[Message, list[str]]:
    try:
        message = episode.renderer.parse(ids)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        return {}, [f"parse() of {what} raises {type(error).__name__}: it must never raise ({error!s:.120})"]
    problems = [f"{problem} (from {what})" for problem in _message_problems(message)]
    return ({} if problems else message), problems


def _random_tokens(episode: _Episode) -> Iterator[str]:
    for message, _ in episode.turns():
        episode.encode(message)
    known, rng = sorted(episode.seen_ids), episode.rng()
    stop = episode.renderer.stop_token_ids[0]
    cases: dict[str, list[list[int]]] = {
        "no tokens": [[]],
        "a lone stop token": [[stop], [stop, stop]],
        "tokens it has written, in disorder": [rng.choices(known, k=rng.randrange(1, 40)) for _ in range(200)],
        "random tokens": [rng.choices(range(max(known) + 1), k=rng.randrange(1, 40)) for _ in range(200)],
        "tokens beyond its vocabulary (a model can have more)": [[max(known) + 10**6, stop]],
    }
    for what, lists in cases.items():
        yield from dict.fromkeys(line for ids in lists for line in _parsed(episode, what, ids)[1])


def _cut_calls(episode: _Episode) -> Iterator[str]:
    """Every beginning of a call: the call itself or data, and data somewhere."""
    whole = _says("", (episode.tools[0]["function"]["name"], {"n": 12, "text": "a long enough text"}))
    ids = episode.encode(whole)[:-1]
    num_malformed = 0
    for length in range(len(ids)):
        message, problems = _parsed(episode, "an unfinished tool call", ids[:length])
        yield from problems
        for function in _functions(message):
            num_malformed += _is_malformed(function)
            if not _is_malformed(function) and function != _functions(whole)[0]:
                yield f"parse() makes another call of an unfinished one: {function!r}"
    if not num_malformed:
        yield "parse() drops an unfinished tool call: it must be a call with an empty name and the text as arguments"


def _malformed_calls(episode: _Episode) -> Iterator[str]:
    """Calls in the form of Hermes, for renderers that read it."""
    first = episode.tools[0]["function"]["name"]
    form = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
    if _functions(episode.renderer.parse(episode.encode(_says(form % first)))) != [{"name": first, "arguments": {}}]:
        return
    message, problems = _parsed(episode, "an unknown tool", episode.encode(_says(form % "no_such_tool")))
    yield from problems
    if not problems and [function["name"] for function in _functions(message)] != ["no_such_tool"]:
        yield "parse() does not hand on a call of an unknown tool: which tools there are is the environment's business"
    for body in _BAD_BODIES:
        what = f"the tool call {body[:40]!r}"
        message, problems = _parsed(episode, what, episode.encode(_says(f"<tool_call>\n{body}\n</tool_call>")))
        yield from problems
        if not problems and not any(map(_is_malformed, _functions(message))):
            yield f"parse() of {what} must give a call with an empty name and the text as arguments, got {message!r:.200}"


def _is_malformed(function: dict[str, Any]) -> bool:
    return function.get("name") == "" and isinstance(function.get("arguments"), str)


def _drafted_calls(episode: _Episode) -> Iterator[str]:
    """Calls in a thought that does not end, for renderers that read thoughts."""
    thought = _says("Yes.") | {"reasoning_content": "Hm."}
    if episode.renderer.parse(episode.encode(thought)).get("reasoning_content") != "Hm.":
        return
    drafted = '<think>\nI could\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    message, problems = _parsed(episode, "a thought that does not end", episode.encode(_says(drafted)))
    yield from problems
    if _functions(message):
        yield "parse() gives calls of a thought that does not end: it is thought, not said"
