"""Whether a renderer reads what was sampled: as it was written, and never more than that."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from agentrl.chat.proof_episode import Episode, functions, is_same, says
from agentrl.types import Message

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
_THOUGHTS = ("Hm: one?", "Hm: two!")


def words(episode: Episode) -> Iterator[str]:
    """Words are read as they were written."""
    yield from _round_trip(
        episode,
        {
            "text": says("Hello, world: 3 + 4 = 7."),
            "several lines": says("One.\n\n  Two;\n\tthree."),
            "text beyond ASCII": says("Größe, 鍵, 🔑"),
            "an empty message": says(""),
        },
    )


def calls(episode: Episode) -> Iterator[str]:
    """Calls are read as they were written."""
    episode.need_tools()
    first = episode.tools[0]["function"]["name"]
    yield from _round_trip(
        episode,
        {
            "a call": says("", (first, {"n": 1})),
            "a call without arguments": says("", (first, {})),
            "nested arguments": says("", (first, {"a": [1, 2.5, None, True], "b": {"c": "d"}})),
            "arguments with quotes and lines": says("", (first, {"text": 'say "é"\n\\ {}'})),
            "arguments with tags": says("", (first, {"text": "<tool_call> </tool_call> <think> </think>"})),
        },
    )


def text_and_calls(episode: Episode) -> Iterator[str]:
    """Text before a call is read."""
    episode.need_tools()
    call = (episode.tools[0]["function"]["name"], {"n": 1})
    yield from _round_trip(episode, {"text and a call": says("I look first.", call)})


def parallel_calls(episode: Episode) -> Iterator[str]:
    """Several calls in a turn are read."""
    episode.need_tools()
    first, second = (tool["function"]["name"] for tool in episode.tools[:2])
    yield from _round_trip(episode, {"two calls": says("", (first, {"n": 1}), (second, {"n": -2}))})


def thought_and_words(episode: Episode) -> Iterator[str]:
    """Thoughts before words are read."""
    yield from _round_trip(episode, {"what follows a thought": says("Yes.") | {"reasoning_content": "Hm."}})


def thought_and_calls(episode: Episode) -> Iterator[str]:
    """Thoughts before calls are read."""
    episode.need_tools()
    call = (episode.tools[0]["function"]["name"], {"n": 1})
    yield from _round_trip(episode, {"a call that follows a thought": says("", call) | {"reasoning_content": "Hm."}})


def _round_trip(episode: Episode, messages: Mapping[str, Message]) -> Iterator[str]:
    for what, message in messages.items():
        parsed = episode.renderer.parse(episode.encode(message), (), episode.tools)
        if not is_same(parsed, message) or (parsed.get("reasoning_content") != message.get("reasoning_content")):
            yield f"parse() of what encode() wrote does not give back {what}: {message!r} became {parsed!r}"


def _message_problems(parsed: object) -> Iterator[str]:
    """Tell what keeps a value from being an assistant message."""
    if not isinstance(parsed, dict) or parsed.get("role") != "assistant":
        yield f"parse() must return an assistant message, got {parsed!r:.80}"
        return
    if not isinstance(parsed.get("content") or "", str):
        yield f"parse() must give text as content, got {parsed['content']!r:.80}"
    for function in functions(parsed):
        if not isinstance(function.get("name"), str):
            yield f"parse() gives a call whose name is {function.get('name')!r:.80}: a malformed call has an empty name"
    try:
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        yield f"parse() gives what cannot be written as JSON: {error}"


def _parsed(episode: Episode, what: str, ids: Sequence[int]) -> tuple[Message, list[str]]:
    try:
        message = episode.renderer.parse(ids, (), episode.tools)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        return {}, [f"parse() of {what} raises {type(error).__name__}: it must never raise ({error!s:.120})"]
    problems = [f"{problem} (from {what})" for problem in _message_problems(message)]
    return ({} if problems else message), problems


def random_tokens(episode: Episode) -> Iterator[str]:
    """Any tokens can be read."""
    episode.start(episode.opening, episode.tools)
    for message, _ in episode.turns((0, 1) if episode.tools else (0,)):
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


def cut_calls(episode: Episode) -> Iterator[str]:
    """A call that breaks off is none."""
    episode.need_tools()
    whole = says("", (episode.tools[0]["function"]["name"], {"n": 12, "text": "a long enough text"}))
    ids = episode.encode(whole)[:-1]
    num_malformed = 0
    for length in range(len(ids)):
        message, problems = _parsed(episode, "an unfinished tool call", ids[:length])
        yield from problems
        for function in functions(message):
            num_malformed += _is_malformed(function)
            if not _is_malformed(function) and function != functions(whole)[0]:
                yield f"parse() makes another call of an unfinished one: {function!r}"
    if not num_malformed:
        yield "parse() drops an unfinished tool call: it must be a call with an empty name and the text as arguments"


def malformed_calls(episode: Episode) -> Iterator[str]:
    """A malformed call is data."""
    episode.need_tools()
    first = episode.tools[0]["function"]["name"]
    form = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
    if functions(episode.renderer.parse(episode.encode(says(form % first)))) != [{"name": first, "arguments": {}}]:
        return
    message, problems = _parsed(episode, "an unknown tool", episode.encode(says(form % "no_such_tool")))
    yield from problems
    if not problems and [function["name"] for function in functions(message)] != ["no_such_tool"]:
        yield "parse() does not hand on a call of an unknown tool: which tools there are is the environment's business"
    for body in _BAD_BODIES:
        what = f"the tool call {body[:40]!r}"
        message, problems = _parsed(episode, what, episode.encode(says(f"<tool_call>\n{body}\n</tool_call>")))
        yield from problems
        if not problems and not any(map(_is_malformed, functions(message))):
            yield f"parse() of {what} must give a call with an empty name and the text as arguments, got {message!r:.200}"


def _is_malformed(function: dict[str, Any]) -> bool:
    return function.get("name") == "" and isinstance(function.get("arguments"), str)


def drafted_calls(episode: Episode) -> Iterator[str]:
    """A call within a thought is not carried out."""
    episode.need_tools()
    answers = [says("Yes.") | {"reasoning_content": thought} for thought in _THOUGHTS]
    call: tuple[str, dict[str, Any]] = (episode.tools[0]["function"]["name"], {})
    acts = [says("", call) | {"reasoning_content": thought} for thought in _THOUGHTS]
    if any(episode.renderer.parse(episode.encode(m)).get("reasoning_content") not in _THOUGHTS for m in answers + acts):
        return
    said, done = ([episode.encode(message) for message in messages] for messages in (answers, acts))
    end, end_and_call = (_common(ids[::-1] for ids in actions)[::-1] for actions in (said, done))
    drafted = (*_common([*said, *done]), *end_and_call[len(_common([end, end_and_call])) :])
    message, problems = _parsed(episode, "a thought that does not end", drafted)
    yield from problems
    if functions(message):
        yield "parse() gives calls of a thought that does not end: it is thought, not said"


def _common(lists: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the tokens with which all of them begin."""
    return tuple(ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, zip(*lists, strict=False)))


READING = (
    words,
    calls,
    text_and_calls,
    parallel_calls,
    thought_and_words,
    thought_and_calls,
    random_tokens,
    cut_calls,
    malformed_calls,
    drafted_calls,
)
"""Each yields what is wrong; the first line of its docstring is the claim."""
