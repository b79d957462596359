"""Data that flows between the parts: plain, frozen, without torch.

Tokens are tuples of Python ints exactly as they were sampled. Nothing here is ever decoded and tokenized again. Columns
have one number for each token; journals and checkpoints hold them exactly, as short text.
"""

import base64
import itertools
import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
)
from pydantic_core import PydanticCustomError


def to_array(column: Sequence[int]) -> "array[int]":
    """Return integers without an object for each."""
    try:
        return array("i", column)
    except OverflowError:
        return array("q", column)


def from_array(column: "array[int]") -> tuple[int, ...]:
    """Return the integers of `to_array`: equal ones, in the range of token ids, are one object in the whole process."""
    known = _integers()
    return tuple([known[value] if 0 <= value < _NUM_KNOWN else value for value in column])


_NUM_KNOWN = 2**18


@cache
def _integers() -> list[int]:
    return list(range(_NUM_KNOWN))


def pack_integers(column: Sequence[int]) -> str:
    """Return integers as text: the letter of a form of `struct`, and base64."""
    for form in "Hi":  # of 2 and 4 bytes
        with suppress(struct.error):  # out of range
            return _pack(form, column)
    return _pack("q", column)


def pack_floats(column: Sequence[float]) -> str:
    """Return numbers as text: in single precision where that is exact, as for log-probabilities that an engine computed so."""
    try:
        packed = struct.pack(f"<{len(column)}f", *column)
    except OverflowError:
        return _pack("d", column)
    is_exact = struct.unpack(f"<{len(column)}f", packed) == tuple(column)  # NaN is not equal to itself
    return _pack("f" if is_exact else "d", column)


def pack_runs(column: Sequence[int]) -> str:
    """Return runs of equal integers as text: `3x120 4x7`."""
    return " ".join(f"{value}x{len(list(run))}" for value, run in groupby(column))


def unpack(text: object) -> object:
    """Return the numbers of a packed column; what is no text is returned as it is.

    Raises:
        ValueError: for text that is no column.
    """
    if not isinstance(text, str):
        return text
    form, content = text[:1], text[1:]
    if form not in "Hiqfd" or not form:
        raise ValueError(f"not a column of numbers: {text[:20]!r}")
    data = base64.b64decode(content, validate=True)
    size = struct.calcsize(f"<{form}")
    if len(data) % size:
        raise ValueError(f"a column of {len(data)} bytes is none of numbers of {size} bytes")
    return struct.unpack(f"<{len(data) // size}{form}", data)


def unpack_runs(text: object) -> object:
    """Return the integers of `pack_runs`; what is no text is returned as it is.

    Raises:
        ValueError: for text that is no runs.
    """
    if not isinstance(text, str):
        return text
    found: list[int] = []
    for run in text.split():
        value, _, count = run.partition("x")
        if not 0 < int(count) < _MAX_RUN:
            raise ValueError(f"not a run of equal numbers: {run[:20]!r}")
        found += [int(value)] * int(count)
    return found


_MAX_RUN = 2**24
"""Longer than any context: a damaged number must not fill the memory."""


def _pack(form: str, column: Sequence[float]) -> str:
    return form + base64.b64encode(struct.pack(f"<{len(column)}{form}", *column)).decode()


def _token_ids(column: tuple[int, ...]) -> tuple[int, ...]:
    if column and not 0 <= min(column) <= max(column) < 2**31:
        raise ValueError(f"{min(column)} to {max(column)} are no token ids")
    return column


def _logprobs(column: tuple[float, ...]) -> tuple[float, ...]:
    if not all(-_MAX_NATS <= value <= _MAX_NATS for value in column):
        raise ValueError("these are no log-probabilities: some are not finite in single precision")
    return column


_MAX_NATS = 1e30

TokenIds = Annotated[
    tuple[int, ...],
    BeforeValidator(unpack),
    AfterValidator(_token_ids),
    PlainSerializer(pack_integers, when_used="json"),
]
Runs = Annotated[tuple[int, ...], BeforeValidator(unpack_runs), PlainSerializer(pack_runs, when_used="json")]
"""Integers that stay the same for long, such as policy versions."""
LogProbs = Annotated[
    tuple[float, ...],
    BeforeValidator(unpack),
    AfterValidator(_logprobs),
    PlainSerializer(pack_floats, when_used="json"),
]
InMemory = Annotated[bytes, Field(exclude=True), BeforeValidator(lambda _: b"")]
"""Bytes in memory alone: written to no file, and read from none."""


Count = Annotated[int, Field(gt=0, le=1_000_000)]
"""Count of objects held at once, 1 to 1,000,000."""
AmountOrZero = Annotated[int, Field(ge=0, le=1_000_000_000)]
Amount = Annotated[int, Field(gt=0, le=1_000_000_000)]
"""Count of tokens, of steps, or of whatever else is only counted."""


def between(least: float, most: float) -> AfterValidator:
    """Return the check that a finite float of a recipe is in a range, in words that write it short."""

    def check(value: float) -> float:
        if math.isfinite(value) and not least <= value <= most:
            raise PydanticCustomError(
                "range", "Input should be from {least} to {most}", {"least": f"{least:g}", "most": f"{most:g}"}
            )
        return value

    return AfterValidator(check)


def check_address(field: str, url: str, *schemes: str) -> None:
    """Raise ValueError, with the name of a field, for a URL that lacks a scheme of these, a host or a port."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in schemes and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_whole = False
    if not is_whole:
        raise ValueError(f"{field}: expected {schemes[0]}://HOST:PORT, got {url!r}")


Positive = Annotated[float, Field(gt=0), between(1e-12, 1e12)]
"""Scale: float32 holds it, its inverse and its square."""
Rate = Annotated[float, Field(gt=0), between(1e-30, 10)]
"""Learning rate."""
Seconds = Annotated[float, Field(gt=0), between(1e-3, 1e9)]
"""Deadline in seconds."""
MAX_REWARD = 1e15
"""Largest reward of a turn, either way: advantages and gradients are float32, and gradients are squared."""
MAX_NUMBER = 1e100
"""In size, of what a run writes: sums and squares of such numbers, and squares of their sums, are finite."""
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER, allow_inf_nan=False)]
"""Finite number that a file of a run can hold, so that nothing that computes with it needs to look first."""
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
"""Token id that a file of a run can hold: tokenizers take no other."""

Message = dict[str, Any]
"""One chat message, OpenAI style: role, content, and where they apply tool_calls, tool_call_id, name."""


Split = Literal["train", "eval"]
"""Purpose of a task: to train on, or to evaluate with."""
Prompt = Literal["short", "full"]
"""Form of an environment's first messages: `short` for a model that learns the task from demonstrations, `full` with goal and
rules for one that can read. An environment whose constructor has `prompt: Prompt` gets `full` with a pretrained model."""


class NumTasks(NamedTuple):
    """Number of tasks of each split. None: they follow from the seed, without end."""

    train: int | None = None
    eval: int | None = None


ENDLESS = NumTasks()
"""Tasks of an environment that makes them from the seed."""


class TaskHashes(NamedTuple):
    """A hash of the tasks of each split. None: the environment gives none."""

    train: str | None = None
    eval: str | None = None


NO_HASHES = TaskHashes()


class TaskShard(NamedTuple):
    """Tasks that one rank samples: every `num_processes`-th, from number `process` on."""

    num_groups: int
    """Groups per step. 0: the rank only trains."""
    process: int = 0
    """Number of this rank among those that sample."""
    num_processes: int = 1
    """Number of ranks that sample."""


class StopReason(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"
    """The environment ended it (with `Trajectory.truncated` where a limit of its own did)."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The sampling budget of a turn or of the episode ran out."""
    CONTEXT_OVERFLOW = "context_overflow"
    UNSCORED = "unscored"
    """The environment ended it with the reward None: nothing could score it."""
    ENV_ERROR = "env_error"
    """The environment broke off, or the program that played in its place."""
    ENGINE_ERROR = "engine_error"
    AGENT_ERROR = "agent_error"
    """A program that calls the policy ended in the same error twice, on the same answers: a result of what they said."""

    @property
    def failed(self) -> bool:
        """True if the episode says nothing about the policy: it leaves the loss and every baseline."""
        return self.is_fault or self is StopReason.UNSCORED

    @property
    def is_fault(self) -> bool:
        """True if environment or engine broke off: the episode is played again."""
        return self in (StopReason.ENV_ERROR, StopReason.ENGINE_ERROR)


class FinishReason(StrEnum):
    """Why an engine stopped sampling."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the completion."""
    LENGTH = "length"
    ABORTED = "aborted"
    """The engine was paused; what was sampled so far is returned, and a later request can continue it."""


class Need(StrEnum):
    """Data that a credit scheme can ask for beyond the return of each trajectory."""

    TURN_REWARDS = "turn_rewards"
    """Rewards that tell the turns apart."""
    STATE_KEYS = "state_keys"
    ACTION_KEYS = "action_keys"
    BRANCHES = "branches"
    """Rollouts forked from the trajectory's turns."""
    VALUES = "values"
    """A critic's value of each token's context."""
    REFERENCE_LOGPROBS = "reference_logprobs"
    """Log-probabilities under the policy with which the run began."""
    TEACHER_LOGPROBS = "teacher_logprobs"
    """Log-probabilities under another model."""
    HINDSIGHT_LOGPROBS = "hindsight_logprobs"
    """Log-probabilities under the policy itself once it has seen how the episode ended."""
    ANSWER_LOGPROBS = "answer_logprobs"
    """Log-probability of the task's known answer before each turn."""
    TURN_SCORES = "turn_scores"
    """A judge's score of each turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling of one completion: always from the full support, so that log-probabilities are exact."""

    max_tokens: int
    """Largest number of tokens to sample, the stop token included."""
    stop_token_ids: tuple[int, ...]
    """Sampling ends after any of these; the stop token is kept."""
    temperature: float = 1.0
    """Divides the logits. 0 takes the most probable token (evaluation only: its log-probabilities are 0)."""
    seed: int = 0
    """Seed of this request's own random numbers: the same prompt, weights and seed give the same tokens."""
    drawn: int = 0
    """Number of tokens at the end of the prompt that an interrupted request with the same seed has sampled: this one continues
    with the random numbers that came next there."""
    experts_from: int = 0
    """First token of the prompt whose experts are wanted, by an engine that returns them (`EngineContext.returns_experts`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens that an engine sampled for one request."""

    token_ids: TokenIds
    """The sampled tokens, the stop token included."""
    logprobs: LogProbs
    """Natural-log probability of each token under the distribution that sampled it (temperature applied)."""
    versions: Runs
    """Policy version that sampled each token."""
    finish_reason: FinishReason
    num_cached_tokens: int = 0
    """Tokens of the prompt that the engine had computed before, for another request, and did not compute again."""
    experts: InMemory = b""
    """Experts that a mixture chose, as `agentrl.models.moe.Experts.pack` writes them: one entry for each token from
    `Sampling.experts_from` to the last but one, which is all that was computed. Empty: the engine does not report them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One action of the policy, with what the environment said before it and what it gave for it."""

    observation_ids: TokenIds
    """Tokens that the environment's messages added before the action, the generation prompt included."""
    extends: bool = True
    """False: the history was rewritten, and `observation_ids` is the whole new context."""
    parent: int | None = None
    """Number of the turn after whose action it stands, in an episode with several lines of calls. None: the turn before."""
    agent: str = ""
    """Name of the agent that acts, in an episode of several. Empty: it has no name."""
    call: str = ""
    """Call that it answers, in an episode that a program plays: `LiveEpisode.partials` has the same. Empty: none."""
    action_ids: TokenIds
    """Every sampled token, the stop token included."""
    behavior_logprobs: LogProbs
    """One natural-log probability for each action token, under the distribution that sampled it."""
    versions: Runs
    """Policy version that sampled each action token."""
    reward: float
    """Reward of this turn alone."""
    state_key: str | None = None
    """The environment's key of the situation before the action; equal keys mean equal situations. None: it has none."""
    next_state_key: str | None = None
    """The key after the action."""
    action_key: str | None = None
    """The environment's key of the action; equal keys mean equal actions. None: it was never carried out."""
    finish_reason: FinishReason = FinishReason.STOP
    observation: tuple[Message, ...] = ()
    """The environment's messages before the action."""
    message: Message = field(default_factory=dict)
    """The assistant message parsed from the action."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Entries of `info` that the environment reported about this turn, for records and metrics."""
    branch_rewards: tuple[tuple[float, ...], ...] | None = None
    """For each rollout that was forked before this turn's action: the rewards of its turns from here on. None:
    the credit scheme does not ask for them."""
    signals: Mapping[str, Any] = field(default_factory=dict)
    """Data that the credit scheme asks for beyond these fields, by the name of its `Need`: a tuple with one number for
    each action token, or one number for the turn. `agentrl/learn/signals/` has a file for each, with its meaning and
    unit."""
    experts: InMemory = b""
    """Experts like `Completion.experts`: from the token before the observation, if there is one, to the last but one
    of the action."""

    def __post_init__(self) -> None:
        """Check that what belongs to tokens is aligned with the action."""
        num = len(self.action_ids)
        columns = {"behavior_logprobs": self.behavior_logprobs, "versions": self.versions, **self.signals}
        for name, column in columns.items():
            if isinstance(column, Sized) and len(column) != num:
                raise ValueError(f"a turn of {num} action tokens needs as many {name}, got {len(column)}")

    def __repr__(self) -> str:
        """Return one line for people: the fields of a long turn fill a screen."""
        return f"<Turn: {len(self.observation_ids)} observed and {len(self.action_ids)} sampled tokens, reward {self.reward:g}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Be pickled so that on the process that reads it a token takes 8 bytes, and no object of its own."""
        columns = {name: to_array(getattr(self, name)) for name in _OF_INTEGERS}
        others = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in columns}
        return _unpickled_turn, (columns, others)


_OF_INTEGERS = ("observation_ids", "action_ids", "versions")


def _unpickled_turn(columns: Mapping[str, "array[int]"], others: Mapping[str, Any]) -> Turn:
    unpacked: dict[str, Any] = {name: from_array(column) for name, column in columns.items()}
    return Turn(**unpacked, **others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Place at which an environment failed."""

    kind: str
    """Type of the exception and the line that raised it, `KeyError at desk.py:40`: faults of one kind have one cause."""
    traceback: str = ""
    """The environment's own frames, bounded in length; empty if it raised nothing."""
    is_resumable: bool = False
    """True if the episode continues elsewhere from what was recorded: its server was lost, and nothing in it failed."""


class HasParent(Protocol):
    """Part of a turn that places it among the turns before it."""

    @property
    def extends(self) -> bool:
        """See `Turn.extends`."""

    @property
    def parent(self) -> int | None:
        """See `Turn.parent`."""


def parent_of(turn: HasParent, number: int) -> int:
    """Return the number of the turn after whose action turn `number` stands; -1 for the first.

    Raises:
        ValueError: if that is no earlier turn.
    """
    if turn.parent is None:
        return number - 1
    if not 0 <= turn.parent < number:
        raise ValueError(f"turn {number} has the parent {turn.parent}; a parent is an earlier turn")
    return turn.parent


def path_to(turns: Sequence[HasParent], number: int) -> list[int]:
    """Return the numbers of the turns that make up the context of turn `number`, itself the last.

    Raises:
        ValueError: see `parent_of`.
    """
    path = []
    while number >= 0:
        path.append(number)
        number = parent_of(turns[number], number) if turns[number].extends else -1
    return path[::-1]


def chains_of(turns: Sequence[HasParent]) -> list[list[int]]:
    """Return the numbers of all turns as chains, each of which extends one growing context.

    A turn continues the chain of its parent, unless it rewrote the history or another turn continues that chain already.

    Raises:
        ValueError: see `parent_of`.
    """
    chains: list[list[int]] = []
    ends: dict[int, list[int]] = {}
    for number, turn in enumerate(turns):
        parent = parent_of(turn, number)
        chain = ends.pop(parent, None) if turn.extends else None
        if chain is None:
            chains.append(chain := [])
        chain.append(number)
        ends[number] = chain
    return chains


def context_of(turns: Sequence[Turn], number: int) -> tuple[int, ...]:
    """Return the context in which the action of turn `number` was sampled."""
    *before, last = (turns[k] for k in path_to(turns, number))
    parts = (ids for turn in before for ids in (turn.observation_ids, turn.action_ids))
    return (*itertools.chain.from_iterable(parts), *last.observation_ids)


def shorten(turn: Turn, before: Sequence[Turn]) -> tuple[Turn, int]:
    """Return a turn without the tokens with which its context repeats that after its parent, and how many they are.

    Only one that rewrote history repeats any: all but the end of a long dialogue.
    """
    if turn.extends:
        return turn, 0
    context, ids = _context_after(turn, before), turn.observation_ids
    # One token stays: a journal writes what is left of an episode as a trajectory, which begins with a context.
    most = min(len(context), max(len(ids) - 1, 0))
    shared = next(
        (start for start in range(0, most, 1024) if context[start : start + 1024] != ids[start : start + 1024]), most
    )
    while shared < most and context[shared] == ids[shared]:
        shared += 1
    return replace(turn, observation_ids=ids[shared:]), shared


def lengthen(turn: Turn, before: Sequence[Turn], shared: int) -> Turn:
    """Return the turn of which `shorten` made this one.

    Raises:
        ValueError: if the turns before it have no such context, or its parent is none of them.
    """
    parent_of(turn, len(before))
    if not shared:
        return turn
    context = _context_after(turn, before)
    if turn.extends or not 0 < shared <= len(context):
        raise ValueError(f"a turn repeats {shared} tokens of a context of {len(context)}")
    return replace(turn, observation_ids=context[:shared] + turn.observation_ids)


def _context_after(turn: Turn, before: Sequence[Turn]) -> tuple[int, ...]:
    """Return the context after the parent of a turn, its action included."""
    parent = parent_of(turn, len(before))
    return (*context_of(before, parent), *before[parent].action_ids) if parent >= 0 else ()


def _dump_turns(turns: tuple[Turn, ...], dump: SerializerFunctionWrapHandler) -> Any:
    short = [shorten(turn, turns[:index]) for index, turn in enumerate(turns)]
    rows = dump(tuple(turn for turn, _ in short))
    return [row | ({"shared": shared} if shared else {}) for row, (_, shared) in zip(rows, short, strict=True)]


def _load_turns(rows: Any, load: ValidatorFunctionWrapHandler) -> tuple[Turn, ...]:
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        found: tuple[Turn, ...] = load(rows)
        return found
    turns: list[Turn] = []
    for turn, row in zip(load([{k: v for k, v in row.items() if k != "shared"} for row in rows]), rows, strict=True):
        shared = row.get("shared", 0)
        if not isinstance(shared, int):
            raise ValueError(f"shared: {shared!r} is no number")
        turns.append(lengthen(turn, turns, shared))
    if turns and not turns[0].observation_ids:
        raise ValueError("the first turn has no context")
    return tuple(turns)


Turns = Annotated[tuple[Turn, ...], WrapSerializer(_dump_turns, when_used="json"), WrapValidator(_load_turns)]
"""Turns one after the other; in a file, those that rewrote history leave out what they repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode."""

    group_id: str
    trajectory_id: str
    env_id: str
    seed: int
    """Seed of the task, shared by the group."""
    turns: Turns
    stop_reason: StopReason
    truncated: bool = False
    """A limit ended the episode, not the task: what would have followed is unknown (value-based schemes bootstrap)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the whole episode: `success` where the environment reports it, counts of errors, seconds."""
    error: str | None = None
    """Error, if it `failed`."""
    fault: Fault | None = None
    """Place of the failure, if the environment failed. The action that it failed at is the last turn's."""
    gold_answer: str | None = None
    """The task's known answer, if the environment gives one."""
    split: Split = "train"
    task_index: int | None = None
    """Number of the task within its split. None: not known."""
    stage: int = 0
    """Entry of `env.schedule` that its environment was made with, from 1. 0: none."""
    signals: Mapping[str, float] = field(default_factory=dict)
    """Signals like `Turn.signals`, of the trajectory as a whole: `values` is that of the context after the last action
    token."""

    def __repr__(self) -> str:
        """Return one line for people: the fields of a long episode fill screens."""
        end = f"failed: {self.error}" if self.failed else f"reward {self.reward:g}, {self.stop_reason}"
        size = f"{len(self.turns)} turns, {self.num_action_tokens} sampled tokens"
        return f"<Trajectory {self.trajectory_id} of {self.env_id}: {size}, {end}>"

    @property
    def failed(self) -> bool:
        """True if the episode must leave the loss and every baseline.

        It broke off, nothing could score it, or the policy never had a turn.
        """
        return self.stop_reason.failed or not self.turns

    @property
    def reward(self) -> float:
        """Undiscounted return: the sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    def reported(self, name: str) -> float | None:
        """Return a number that environments report at the end, such as `success`; 0 if the episode was cut off before.

        None: the environment ended it, and reported None because nothing could tell.
        """
        is_over = self.stop_reason is StopReason.TERMINATED and not self.truncated and bool(self.turns)
        is_unknown = is_over and self.turns[-1].extras.get(name, 0.0) is None
        return None if is_unknown else self.metrics.get(name, 0.0)

    @property
    def num_action_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.action_ids) for turn in self.turns)

    def segments(self) -> Iterator[tuple[Turn, ...]]:
        """Yield the turns that extend one growing context each; a turn that rewrote history, or forked, begins the next."""
        for chain in chains_of(self.turns):
            yield tuple(self.turns[number] for number in chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The trajectories that started from the same task."""

    group_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        """The trajectories that did not fail: the only ones that enter a statistic or the loss."""
        return tuple(t for t in self.trajectories if not t.failed)

    @property
    def zero_spread(self) -> bool:
        """Whether all that did not fail have the same return, but for rounding."""
        returns = [t.reward for t in self.valid]
        return not returns or max(returns) - min(returns) <= 1e-12 * max(map(abs, returns))


def valid_trajectories(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    """List the trajectories of all groups that did not fail."""
    return [trajectory for group in groups for trajectory in group.valid]
