"""Proof of a renderer before the first sample: dialogues are played, and each promise of a renderer is a claim."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from agentrl.chat.chat_template import TOOLS
from agentrl.chat.renderer import Dialogue, Renderer, Tools
from agentrl.errors import RendererError, TemplateLimitError
from agentrl.types import Message


@dataclass(frozen=True, slots=True)
class Episode:
    """The renderer under test, and turns to render."""

    renderer: Renderer
    tools: list[dict[str, Any]]
    opening: tuple[Message, ...] = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Find the key."},
    )
    seen_ids: set[int] = field(default_factory=set)
    """Every token id met so far: what is known of the vocabulary."""

    def turns(self, counts: Sequence[int]) -> Iterator[tuple[Message, list[Message]]]:
        """Yield what the assistant says and what it hears: a turn for each number of calls."""
        for turn, count in enumerate(counts):
            names = [tool["function"]["name"] for tool in self.tools[:count]]
            message = says("" if names else f"Text-{turn}", *((name, {"n": turn}) for name in names))
            replies = [
                {"role": "tool", "name": name, "tool_call_id": f"call_{i}", "content": f"result {turn} of {name}"}
                for i, name in enumerate(names)
            ]
            yield message, replies or [{"role": "user", "content": f"Go on, {turn}."}]

    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Return a whole context."""
        ids = self.renderer.start(messages, tools)
        self.seen_ids.update(ids)
        return tuple(ids)

    def encode(self, message: Message) -> tuple[int, ...]:
        """Return a message as an action."""
        ids = self.renderer.encode(message)
        self.seen_ids.update(ids)
        return tuple(ids)

    def can(self, message: Message) -> bool:
        """Return whether the renderer can write a message; if it cannot, it is not asked to."""
        try:
            self.encode(message)
        except RendererError:
            return False
        return True

    def need_tools(self) -> None:
        """Skip a claim about tools if there are none.

        Raises:
            RendererError: if there are none.
        """
        if not self.tools:
            raise RendererError("there are no tools")

    def spelled(self, text: str) -> tuple[int, ...]:
        """Return a plain message in tokens that its text as a whole is not encoded to: one letter after the other."""
        letters = [self.encode(says(letter))[:-1] for letter in text]
        return (*(i for ids in letters for i in ids), self.renderer.stop_token_ids[0])

    def rng(self) -> random.Random:
        """Return random numbers, the same each time."""
        return random.Random(0)


def says(content: str, *calls: tuple[str, object]) -> Message:
    """Return an assistant's message."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


def functions(message: Message) -> list[dict[str, Any]]:
    """Return what a message calls."""
    return [call["function"] for call in message.get("tool_calls") or []]


def is_same(parsed: Message, message: Message) -> bool:
    """Return whether a message was read as it was written, its thought aside."""
    return (parsed.get("content") or "") == message["content"] and functions(parsed) == functions(message)


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
    """Yield what keeps a value from being an assistant message."""
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


_MERGED = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one claim."""

    claim: str
    """Promise of a renderer."""
    problems: tuple[str, ...] = ()
    """Cases in which it is broken."""
    lacks: str | None = None
    """Why it is not asked for: the renderer says that it cannot."""


class UnprovenError(RendererError):
    """A renderer that does not do what it should."""

    def __init__(self, words: str, *, renderer: Renderer, findings: list[Finding]) -> None:
        super().__init__(words)
        self.renderer, self.findings = renderer, findings


def examine(renderer: Renderer, *, tools: Tools = TOOLS) -> list[Finding]:
    """Play dialogues with a renderer, and return which promises it keeps and which it breaks.

    Six turns of words, six of tools and six of both are played (one call, several, with thoughts and without), with actions in
    the renderer's own words, in other tokens than those words are encoded to, and without the stop token: what `extend`
    appends must be the same each time, after the stop token where it is missing, and the same that `start` ends with. Every
    message must stand in the context; words that spell a control token must stay words; `parse` must take any tokens, and
    give back what `encode` wrote; what is drafted in a thought is no call. A renderer that cannot extend (None) is held to the
    rest.

    Args:
        renderer: what to examine.
        tools: at least two tools, as in the first context of an episode. None: there are none.
    """
    episode = Episode(renderer, list(tools))
    return [finding for check in _CHECKS for finding in _found(check, episode)]


def prove(renderer: Renderer, *, name: str, tools: Tools = TOOLS) -> list[Finding]:
    """Return what `examine` found of a renderer; refuse one that does not do what it should.

    Args:
        renderer: of a model.
        name: of the model, for the message.
        tools: at least two, or none if the renderer is not used with tools.

    Raises:
        UnprovenError: with what was not proven.
    """
    findings = examine(renderer, tools=tools)
    unproven = [finding for finding in findings if finding.problems]
    if unproven:
        lines = "".join(f"\n- {finding.claim}: not so. {finding.problems[0]}" for finding in unproven)
        raise UnprovenError(
            f"chat.renderer: the dialogues of {name!r} cannot be rendered exactly; `agentrl chat` shows the proof.{lines}\n"
            "Set chat.template to a file with another template, or chat.renderer to a renderer of your own ('module:Class')",
            renderer=renderer,
            findings=findings,
        )
    return findings


def _found(check: Callable[["Episode"], Iterator[str]], episode: "Episode") -> list[Finding]:
    claim = (check.__doc__ or check.__name__).partition("\n")[0].rstrip(".")
    try:
        return [Finding(claim, tuple(dict.fromkeys(check(episode))))]
    except RendererError as error:
        return [Finding(claim, lacks=str(error))]
    except TemplateLimitError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a stranger's renderer raises belongs in the list
        return [Finding(claim, (f"{type(error).__name__} where {claim[0].lower()}{claim[1:]}: {error}",))]


def _stop_tokens(episode: Episode) -> Iterator[str]:
    """Turns end by one token, and only there."""
    stops = episode.renderer.stop_token_ids
    if not stops:
        yield "stop_token_ids is empty: no turn would ever end"
    for message, _ in episode.turns((0, 1, 2) if episode.tools else (0,)):
        if len(functions(message)) > 1 and not episode.can(message):
            continue
        ids = episode.encode(message)
        if not ids or ids[-1] not in stops:
            yield "encode() does not end with one of stop_token_ids"
        if set(ids[:-1]) & set(stops):
            yield "encode() writes a stop token before the end: sampling would end there"


def _context(episode: Episode) -> Iterator[str]:
    """The first context holds all that it is made of."""
    opening, tools = list(episode.opening), episode.tools
    ids = episode.start(opening, tools)
    if not ids or not all(type(i) is int and i >= 0 for i in ids):
        yield f"start() must return token ids, got {ids!r:.80}"
    if episode.start(opening, tools) != ids:
        yield "start(), called twice, returns different tokens"
    if opening != list(episode.opening):
        yield "start() changes the messages it is given"
    if tools and episode.start(opening, ()) == ids:
        yield "start() leaves out the tools"
    for role in ("system", "developer"):
        contexts = {
            episode.start([{"role": role, "content": words}, episode.opening[1]], tools)
            for words in ("Be brief.", "Be kind.")
        }
        if len(contexts) == 1:
            yield f"start() leaves out messages of the role {role!r}"
    if episode.start([opening[0], {"role": "user", "content": "Something else."}], tools) == ids:
        yield "start() leaves out messages of the role 'user'"
    episode.start([{"role": "user", "content": ""}], tools)


def _extends_words(episode: Episode) -> Iterator[str]:
    """Messages of users are appended, and nothing before them changes."""
    yield from _extension(episode, (0,) * 6)


def _extends_tools(episode: Episode) -> Iterator[str]:
    """Results of tools are appended, and nothing before them changes."""
    episode.need_tools()
    yield from _extension(episode, (1, 2, 1, 1, 2, 1))


def _extends_both(episode: Episode) -> Iterator[str]:
    """Users and tools may follow each other."""
    episode.need_tools()
    yield from _extension(episode, (0, 1, 0, 2, 1, 0), is_mixed=True)


def _extension(episode: Episode, counts: Sequence[int], *, is_mixed: bool = False) -> Iterator[str]:
    renderer, stops = episode.renderer, episode.renderer.stop_token_ids
    dialogue = Dialogue.begin(episode.opening, episode.tools, renderer)
    told = dialogue.context_ids
    for number, (message, replies) in enumerate(episode.turns(counts), start=1):
        if len(functions(message)) > 1 and not episode.can(message):
            continue
        where = f"turn {number} ({', '.join(reply['role'] for reply in replies)})"
        context, action = dialogue.context_ids, episode.encode(message)
        dialogue = dialogue.after(action, message, replies, renderer)
        told_before, told = told, episode.start(dialogue.history, episode.tools)
        if not dialogue.extends:
            if not told or told == told_before:
                yield f"{where}: extend() returns None, and start() of the whole history returns nothing new"
            continue
        added = dialogue.observation_ids
        # The last tokens may differ where the tokenizer merges the end of the prompt with the action. Families take out
        # thoughts that hold nothing when a user speaks: that leaves what was sampled as it is.
        if not is_mixed and told[: len(told_before) - _MERGED] != told_before[: len(told_before) - _MERGED]:
            yield f"{where}: start() of the whole history changes what was said before: extend() must return None"
        unclosed = tuple(renderer.extend(context, action[:-1], replies) or ())
        if told[-len(unclosed) :] != unclosed:
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
        if unclosed[1:] != added or unclosed[0] in added[:1]:
            yield f"{where}: after an action without a stop token extend() must append one, and then the same as after one"
    if not stops:
        yield "stop_token_ids is empty: no turn would ever end"


def _other_actions(episode: Episode, message: Message, action: tuple[int, ...]) -> Iterator[tuple[str, Sequence[int]]]:
    if not functions(message):
        spelled = episode.spelled(message["content"])
        if spelled != action and is_same(episode.renderer.parse(spelled), message):
            yield "after the same text in other tokens", spelled
    body = sorted(episode.seen_ids - set(episode.renderer.stop_token_ids))
    yield "after random tokens", [*episode.rng().choices(body, k=30), action[-1]]
    yield "after a lone stop token", [action[-1]]


def _thoughts(episode: Episode) -> Iterator[str]:
    """A thought that is dropped leaves no trace, and one that is kept stays."""
    renderer, call = episode.renderer, ("look", {"n": 1})
    for calls in ((), (call,)) if episode.tools else ((),):
        message = says("" if calls else "Yes.", *calls) | {"reasoning_content": "Thought."}
        if not episode.can(message):
            continue
        user: Message = {"role": "user", "content": "Go on."}
        tool: Message = {"role": "tool", "name": "look", "tool_call_id": "call_0", "content": "a lamp"}
        before = Dialogue.begin(episode.opening, episode.tools, renderer)
        for reply in (user, tool) if calls else (user,):
            after = before.after(episode.encode(message), message, [reply], renderer)
            drops = renderer.thinking == "drop" or (renderer.thinking == "drop_at_user" and reply is user)
            if drops and after.extends:
                yield f"thinking is {renderer.thinking!r}, and a thought stays when the {reply['role']} has spoken"
            other = episode.start([*episode.opening, message | {"reasoning_content": "Another."}, reply], episode.tools)
            if drops and other != after.context_ids:
                yield f"thinking is {renderer.thinking!r}, and a thought leaves a trace when the {reply['role']} has spoken"


def _control_tokens(episode: Episode) -> Iterator[str]:
    """Words that spell a control token stay words."""
    renderer, tools = episode.renderer, episode.tools
    for stop in renderer.stop_token_ids:
        spelled = renderer.parse((stop, stop)).get("content") or ""
        if not spelled:
            continue
        words = f"Before {spelled} after"
        message = says("Yes.")
        ids = episode.encode(says(words))
        if stop in ids[:-1]:
            yield f"encode() makes a token of {spelled!r} in what the assistant says"
        for role in ("user", "tool") if tools else ("user",):
            said = says("", ("look", {"n": 1})) if role == "tool" else message
            harmless, hostile = (
                [{"role": role, "name": "look", "tool_call_id": "call_0", "content": content}]
                for content in ("Before", words)
            )
            action = episode.encode(said)
            pairs = [
                tuple(
                    (renderer.extend(episode.start(episode.opening, tools), action, replies) or ()).count(stop)
                    for replies in (harmless, hostile)
                ),
                tuple(
                    episode.start([*episode.opening, said, *replies], tools).count(stop)
                    for replies in (harmless, hostile)
                ),
            ]
            if any(one != other for one, other in pairs):
                yield f"{spelled!r} in what the {role} says becomes a token: it would end a turn"


_CHECKS = (
    _context,
    _stop_tokens,
    _extends_words,
    _extends_tools,
    _extends_both,
    _control_tokens,
    _thoughts,
    *READING,
)
