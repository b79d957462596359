"""Calls of an agent's session: how each relates to those before it, and a summary for people."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from agentrl.types import HasParent, Trajectory, parent_of


class HasCall(HasParent, Protocol):
    """A turn, or its record."""

    @property
    def extras(self) -> Mapping[str, Any]:
        """See `Turn.extras`: `call`, `dialect`, `difference` and `ignored` are of an agent's calls."""


_RELATIONS = {"forks": "forks from", "rewrites": "rewrites"}


def kind_of(turn: HasCall) -> str:
    """Return `root`, `forks` or `rewrites`; empty for a turn that continues another."""
    kind = turn.extras.get("call")
    return kind if kind in ("root", *_RELATIONS) else ""


def difference_of(turn: HasCall) -> str:
    """Return the first difference of a call from what was known before it; empty if there is none."""
    return _text_of(turn, "difference")


def dialect_of(turn: HasCall) -> str:
    """Return the dialect of a call, such as `chat, streamed`; empty for a turn that is none."""
    return _text_of(turn, "dialect")


def _text_of(turn: HasCall, name: str) -> str:
    found = turn.extras.get(name)
    return found if isinstance(found, str) else ""


def ignored_by(turn: HasCall) -> dict[str, str]:
    """Return the parameters that a call gave and that were not taken over, with the client's values."""
    found = turn.extras.get("ignored")
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, Mapping) else {}


def relation(turn: HasCall, number: int) -> str:
    """Return how turn `number`, counted from 0, relates to an earlier one, which is counted from 1."""
    kind = kind_of(turn)
    if number == 0 or kind == "root":
        return "begins a line"
    return f"{_RELATIONS.get(kind, 'continues')} turn {parent_of(turn, number) + 1}"


def lanes(turns: Sequence[HasCall]) -> list[int]:
    """Return the number of each turn's line of calls: one that begins with a call of which nothing was known."""
    found: list[int] = []
    for number, turn in enumerate(turns):
        is_root = number == 0 or kind_of(turn) == "root"
        found.append(max(found, default=-1) + 1 if is_root else found[parent_of(turn, number)])
    return found


def summary(trajectory: Trajectory) -> Iterator[str]:
    """Yield lines about an agent's session: each call, what was ignored, and how it ended."""
    turns = trajectory.turns
    kinds = Counter(kind_of(turn) for turn in turns[1:])
    ignored: dict[str, list[int]] = {}
    dialects: Counter[str] = Counter()
    for number, turn in enumerate(turns):
        parts = [relation(turn, number), f"{len(turn.observation_ids)} tokens read, {len(turn.action_ids)} sampled"]
        parts += [f"agent {turn.agent}"] if turn.agent else []
        parts += [f"reward {turn.reward:g}"] if turn.reward else []
        yield f"call {number + 1}: {', '.join(parts)}"
        if difference := difference_of(turn):
            yield f"  first difference: {difference}"
        for name, value in ignored_by(turn).items():
            ignored.setdefault(f"{name}: {value}", []).append(number + 1)
        if dialect := dialect_of(turn):
            dialects[dialect] += 1
    for name, num in dialects.items():
        yield f"dialect: {name} ({num} call{'s' * (num != 1)})"
    for name, calls in ignored.items():
        yield f"not taken over: {name} ({_calls(calls)})"
    read, sampled = (sum(len(getattr(turn, name)) for turn in turns) for name in ("observation_ids", "action_ids"))
    yield (
        f"{len(turns)} calls: {kinds['']} continued, {kinds['forks']} forked, {kinds['rewrites']} rewritten, "
        f"{kinds['root'] + bool(turns)} lines; {read} tokens read, {sampled} sampled"
    )
    counted = {name: value for name, value in trajectory.metrics.items() if value}
    numbers = "".join(f", {name} {value:g}" for name, value in counted.items())
    yield f"{trajectory.stop_reason}: " + (trajectory.error or f"reward {trajectory.reward:g}{numbers}")


def _calls(numbers: Sequence[int]) -> str:
    return f"call{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
