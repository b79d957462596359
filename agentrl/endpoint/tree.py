"""The calls of a session: which one a prompt continues, forks from or rewrites. Pure: no sockets, no tokens.

| the prompt is | the call |
|---|---|
| an earlier prompt + its answer + replies | continues that call; a second one forks from it, also without a later answer |
| an earlier prompt whose answer the client has changed or left out, or whose history it has changed | rewrites it |
| neither | is a root: another agent, a summary, a title |

A call that continues or forks is sampled after the tokens of its parent, as sampled. Any other begins with what the client
shows; the call that it rewrites keeps its own row. One request is one sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from agentrl.data.plain import printable
from agentrl.endpoint.call import Asked
from agentrl.endpoint.canonical import Item, Prompt, following, item_of, prompt_of, request_digest
from agentrl.types import Message

Thoughts = Literal["unsaid", "as_sent"]
"""`unsaid`: a thought that a client leaves out was not taken back: most dialects cannot say it. `as_sent`: a prompt holds
the thoughts that the client sends, and an answer without its thought is another one."""


class Kind(StrEnum):
    """Relation of a call to those before it."""

    ROOT = "root"
    CONTINUES = "continues"
    FORKS = "forks"
    REWRITES = "rewrites"

    @property
    def extends(self) -> bool:
        """Return whether the prompt holds a call's answer as it was sampled, and replies to it."""
        return self in (Kind.CONTINUES, Kind.FORKS)


@dataclass(frozen=True, slots=True)
class Difference:
    """First message in which a prompt differs from what was known."""

    index: int
    """Index of the message; neighbouring assistant messages count as one."""
    known: str
    """Text that stood there, from a little before the difference on. Empty: nothing."""
    asked: str
    """Text that the client sends. Empty: nothing."""

    def __str__(self) -> str:
        """Return a line for people."""
        return f"message {self.index}: {self.known or '(nothing)'} became {self.asked or '(nothing)'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a session, as it was asked."""

    number: int
    """Place among the calls of the session, in the order in which they were asked."""
    digest: str
    """Digest of the request: equal for equal requests, in every process."""
    kind: Kind
    parent: int | None
    """Number of the call that it continues, forks from or rewrites. None: it is a root."""
    root: int
    """Number of the call with which its line of work began."""
    sibling: int
    """Number of earlier calls with the same prompt."""
    history: tuple[Message, ...]
    """The whole dialogue that the policy is to see: its own messages as it said them, where the client shows them."""
    replies: tuple[Message, ...]
    """Messages that the client adds after the parent's answer; the whole history of a call that extends none."""
    tools: tuple[dict[str, Any], ...]
    is_unsaid: bool = False
    """The answer that it continues had a thought, which the client does not send."""
    difference: Difference | None = None
    """First difference from what was known: of a call that extends none, and of a fork without a later answer."""


@dataclass(slots=True)
class _Node:
    """A beginning of prompts."""

    newest: int
    """Newest call that came by."""
    asked: list[int] = field(default_factory=list)
    """Calls whose prompt it is."""
    answered: list[int] = field(default_factory=list)
    """Calls of which it is prompt and answer."""


@dataclass(frozen=True, slots=True)
class _Answer:
    message: Message
    wire: Message


class CallTree:
    """The calls of one session. It grows."""

    def __init__(self, *, thoughts: Thoughts = "unsaid") -> None:
        """Begin without calls."""
        self.calls: list[Call] = []
        self._thoughts = thoughts
        self._prompts: list[Prompt] = []
        self._ends: list[str] = []
        """Digest of each call's prompt."""
        self._answers: dict[int, _Answer] = {}
        self._nodes: dict[str, _Node] = {}
        self._alias: dict[str, str] = {}
        """Digests of answers as clients may show them, and the digests of the answers."""
        self._continued: set[int] = set()

    def ask(self, asked: Asked) -> Call:
        """Return the next call: one for each of `asked.n`."""
        with_thoughts = self._thoughts == "as_sent"
        prompt = prompt_of(asked, with_thoughts=with_thoughts)
        path = prompt.path(self._alias)
        number = len(self.calls)
        twins = self._asked(path[-1])
        call = self._placed(
            Call(
                number=number,
                digest=request_digest(asked, None if with_thoughts else prompt),
                kind=Kind.ROOT,
                parent=None,
                root=number,
                sibling=len(twins),
                history=prompt.messages,
                replies=prompt.messages,
                tools=asked.tools,
            ),
            prompt,
            path,
        )
        if call.kind.extends and call.parent is not None:
            self._continued.add(call.parent)
        for digest in path[1:]:
            self._nodes.setdefault(digest, _Node(number)).newest = number
        self._nodes.setdefault(path[-1], _Node(number)).asked.append(number)
        self.calls.append(call)
        self._prompts.append(prompt)
        self._ends.append(path[-1])
        return call

    def answer(self, number: int, message: Message, *, wire: Message, stopped_by: str = "") -> None:
        """Record the answer of a call.

        Args:
            number: of the call.
            message: as a renderer parsed it: it stands in the history of calls that continue.
            wire: as the client sees it (`wire_message`).
            stopped_by: stop string before which it was cut. Some clients add it again, and show the same answer.
        """
        item = item_of(wire, with_thoughts=self._thoughts == "as_sent")
        end = self._ends[number]
        digest = following(end, item)
        self._nodes.setdefault(digest, _Node(number)).answered.append(number)
        self._answers[number] = _Answer(message, wire)
        if stopped_by:
            uncut = ((wire.get("content") or "") + stopped_by).strip()
            self._alias.setdefault(following(end, replace(item, text=uncut)), digest)

    def _asked(self, digest: str) -> Sequence[int]:
        return self._nodes[digest].asked if digest in self._nodes else ()

    def _placed(self, call: Call, prompt: Prompt, path: Sequence[str]) -> Call:
        """Return a call in its place: related to those before it."""
        answered = [i for i, digest in enumerate(path) if digest in self._nodes and self._nodes[digest].answered]
        tail = answered[-1] if answered else 0
        if tail:
            call, base = self._after_answer(call, prompt, tail, self._nodes[path[tail]])
            if all(item.role != "assistant" for item in prompt.items[tail:]):
                kind = Kind.FORKS if base.number in self._continued else Kind.CONTINUES
                left_out = [i for i in range(tail + 1, len(path) - 1) if self._asked(path[i])]
                difference = self._difference(prompt, path, left_out[-1]) if left_out else None
                return replace(call, kind=kind, parent=base.number, root=base.root, difference=difference)
        call = replace(call, replies=call.history, is_unsaid=False)
        if twins := self._asked(path[-1]):
            twin = self.calls[twins[0]]
            root = call.root if twin.parent is None else twin.root
            return replace(call, kind=twin.kind, parent=twin.parent, root=root, difference=twin.difference)
        return self._apart(call, prompt, path)

    def _after_answer(self, call: Call, prompt: Prompt, tail: int, node: _Node) -> tuple[Call, Call]:
        """Return a call whose prompt begins with a call and its answer, and that call.

        Args:
            call: to be placed.
            prompt: its prompt.
            tail: index of the first message after the answer.
            node: where the answer ends.
        """
        shown = prompt.messages[tail - 1]
        ids = _call_ids(shown)
        same = [number for number in node.answered if ids and _call_ids(self._answers[number].wire) == ids]
        found = same or node.answered
        base = self.calls[next((number for number in found if number not in self._continued), found[-1])]
        message = self._answers[base.number].message
        own_ids = dict(zip(ids, _call_ids(message), strict=False))
        added = [_with_id(each, own_ids) for each in prompt.messages[tail:]]
        call = replace(
            call,
            history=(*base.history, message, *added),
            replies=tuple(added),
            tools=base.tools,
            is_unsaid=bool(message.get("reasoning_content")) and not shown.get("reasoning_content"),
        )
        return call, base

    def _apart(self, call: Call, prompt: Prompt, path: Sequence[str]) -> Call:
        """Return a call that extends none, with its first difference from what is known."""
        known = max((i for i, digest in enumerate(path) if digest in self._nodes), default=0)
        if not known:
            return replace(call, difference=self._new_root(prompt))
        call = replace(call, difference=self._difference(prompt, path, known))
        began = [self._nodes[digest] for digest in path[1 : known + 1]]
        if not any(each.asked or each.answered for each in began):
            return call
        other = self._other(path[known])
        return replace(call, kind=Kind.REWRITES, parent=other.number, root=other.root)

    def _other(self, digest: str) -> Call:
        """Return the newest call that was asked at a beginning of a prompt, or else that came by."""
        node = self._nodes[digest]
        return self.calls[node.asked[-1] if node.asked else node.newest]

    def _difference(self, prompt: Prompt, path: Sequence[str], index: int) -> Difference:
        """Return how a prompt goes on from a message on, beside the call that came there before."""
        other = self._other(path[index]).number
        items = [*self._prompts[other].items]
        if other in self._answers:
            items.append(item_of(self._answers[other].wire))
        return Difference(index, *_told(items[index : index + 1], prompt.items[index : index + 1]))

    def _new_root(self, prompt: Prompt) -> Difference | None:
        """Return how a prompt of which nothing is known differs from the newest with its tools, or else from the newest."""
        if not self._prompts:
            return None
        other = next((each for each in reversed(self._prompts) if each.tools_key == prompt.tools_key), None)
        if other is None:
            return Difference(0, f"tools {_names(self.calls[-1].tools)}", f"tools {_names(prompt.tools)}")
        return Difference(0, *_told(other.items[:1], prompt.items[:1]))


def _names(tools: Sequence[dict[str, Any]]) -> str:
    return printable(", ".join(tool["function"]["name"] for tool in tools))[:80] or "(none)"


def _call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls") or ()]


def _with_id(message: Message, own_ids: dict[str, str]) -> Message:
    """Return a reply that names the policy's call by the policy's own id."""
    call_id = message.get("tool_call_id")
    return {**message, "tool_call_id": own_ids[call_id]} if call_id in own_ids else message


def _told(known: Sequence[Item], asked: Sequence[Item]) -> tuple[str, str]:
    """Return how two messages differ, at most one of which is missing."""
    one, other = ("".join(map(_text, items)) for items in (known, asked))
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = same - 20 if same > 40 else 0
    first, second = (printable("..." * bool(begin and text) + text[begin : begin + 80]) for text in (one, other))
    return first, second


def _text(item: Item) -> str:
    calls = "".join(f" {name}({arguments})" for name, arguments in item.calls)
    return f"{item.role}: {item.text}{calls}"
