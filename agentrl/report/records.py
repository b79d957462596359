"""Rollouts as lines of JSON: one trajectory a line, everything that training saw."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, model_validator

from agentrl.credit import Credit
from agentrl.data.files import parse, read_bytes
from agentrl.types import (
    Fault,
    FinishReason,
    Message,
    Need,
    Number,
    Split,
    StopReason,
    TokenId,
    Trajectory,
    TrajectoryGroup,
    Turn,
    parent_of,
)

Notes = Mapping[str, npt.NDArray[np.float64]]
"""Columns of what the update computed of each action token of a trajectory; NaN: nothing."""


class TurnRecord(BaseModel):
    """One turn; the fields are those of `agentrl.Turn`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    observation: list[Message]
    message: Message
    observation_ids: list[TokenId]
    extends: bool
    parent: NonNegativeInt | None = None
    agent: str = ""
    action_ids: list[TokenId]
    action_pieces: list[str]
    """Text of each action token by itself, for display."""
    behavior_logprobs: list[float]
    versions: list[int]
    advantages: list[Number]
    """Advantage of each action token."""
    keep: list[bool]
    """Loss mask of each action token."""
    reward: Number
    state_key: str | None
    next_state_key: str | None
    action_key: str | None
    finish_reason: FinishReason
    extras: dict[str, Any]
    trained: dict[Literal["ratio", "entropy", "clipped"], list[float | None]] = {}
    """Values that the update computed for each action token: the importance ratio of its unit, the policy's entropy,
    whether it was clipped (1). None: nothing, for it left the loss or had no gradient."""
    branch_rewards: list[list[Number]] | None = None
    """This and what follows stands only where the credit scheme read it."""
    signals: dict[Need, float | list[float]] = {}
    """One number for each action token, or one for the turn."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        per_token = ("action_pieces", "behavior_logprobs", "versions", "advantages", "keep")
        columns: dict[str, Any] = (
            {name: getattr(self, name) for name in per_token} | dict(self.signals) | dict(self.trained)
        )
        for name, column in columns.items():
            if isinstance(column, list) and len(column) != len(self.action_ids):
                raise ValueError(f"{name} has {len(column)} entries for {len(self.action_ids)} action tokens")
        return self


class TrajectoryRecord(BaseModel):
    """One trajectory; the fields are those of `agentrl.Trajectory`."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")  # JSON knows no NaN

    step: int
    group_id: str
    trajectory_id: str
    env_id: str
    seed: NonNegativeInt
    stop_reason: StopReason
    truncated: bool
    reward: Number
    metrics: dict[str, Number]
    error: str | None
    fault: Fault | None = None
    turns: list[TurnRecord]
    gold_answer: str | None = None
    split: Split = "train"
    task_index: NonNegativeInt | None = None
    stage: NonNegativeInt = 0
    signals: dict[Need, float] = {}
    """Signals of the trajectory as a whole."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for number, turn in enumerate(self.turns):
            parent_of(turn, number)
        return self


_RECORD = TypeAdapter(TrajectoryRecord)


def pieces_of(tokenizer: Any) -> Callable[[int], str]:
    """Return what gives the text of one token."""
    return cache(lambda token: str(tokenizer.decode([token])))


def records(
    groups: Sequence[TrajectoryGroup],
    credits: Sequence[Sequence[Credit]],
    *,
    step: int,
    piece: Callable[[int], str],
    notes_of: Callable[[Trajectory], Notes] = lambda _: {},
) -> Iterator[TrajectoryRecord]:
    """Yield the record of each trajectory; `piece` gives the text of one token, `notes_of` what the update computed."""
    for group, of_group in zip(groups, credits, strict=True):
        for trajectory, credit in zip(group.trajectories, of_group, strict=True):
            turns, notes = [], notes_of(trajectory)
            start = 0
            for turn in trajectory.turns:
                end = start + len(turn.action_ids)
                turns.append(
                    TurnRecord(
                        observation=list(turn.observation),
                        message=turn.message,
                        observation_ids=list(turn.observation_ids),
                        extends=turn.extends,
                        parent=turn.parent,
                        agent=turn.agent,
                        action_ids=list(turn.action_ids),
                        action_pieces=[piece(token) for token in turn.action_ids],
                        behavior_logprobs=list(turn.behavior_logprobs),
                        versions=list(turn.versions),
                        advantages=credit.advantages_T[start:end].tolist(),
                        keep=credit.keep_T[start:end].tolist(),
                        reward=turn.reward,
                        state_key=turn.state_key,
                        next_state_key=turn.next_state_key,
                        action_key=turn.action_key,
                        finish_reason=turn.finish_reason,
                        extras=dict(turn.extras),
                        trained=_trained({name: column_T[start:end] for name, column_T in notes.items()}),
                        branch_rewards=_listed(turn.branch_rewards),
                        signals={Need(name): _listed(value) for name, value in turn.signals.items()},
                    )
                )
                start = end
            yield TrajectoryRecord(
                step=step,
                group_id=trajectory.group_id,
                trajectory_id=trajectory.trajectory_id,
                env_id=trajectory.env_id,
                seed=trajectory.seed,
                stop_reason=trajectory.stop_reason,
                truncated=trajectory.truncated,
                reward=trajectory.reward,
                metrics=dict(trajectory.metrics),
                error=trajectory.error,
                fault=trajectory.fault,
                turns=turns,
                gold_answer=trajectory.gold_answer,
                split=trajectory.split,
                task_index=trajectory.task_index,
                stage=trajectory.stage,
                signals={Need(name): value for name, value in trajectory.signals.items()},
            )


def calls_of(message: Message) -> list[str]:
    """List a message's tool calls as `calc(a=3, op="*", b=8)`, values as JSON; others as they stand."""
    calls = message.get("tool_calls") or []
    return [_call(call) for call in (calls if isinstance(calls, list) else [calls])]


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if name == "" and isinstance(arguments, str):  # a malformed call, as the model wrote it
        return arguments
    if isinstance(name, str) and isinstance(arguments, dict):
        return f"{name}({', '.join(f'{key}={_as_json(value)}' for key, value in arguments.items())})"
    return _as_json(call)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def read_records(path: Path) -> Iterator[TrajectoryRecord]:
    """Yield the records of a file.

    Raises:
        UserError: naming the file and the line that is no record.
    """
    fix = "mend that line, or delete it"
    for number, line in enumerate(read_bytes(path, fix=fix).splitlines(), 1):
        yield parse(line, _RECORD, where=f"{path}, line {number}", fix=fix)


def groups_of(records: Iterable[TrajectoryRecord]) -> list[TrajectoryGroup]:
    """Return recorded rollouts as they were credited, group by group."""
    found: dict[str, list[Trajectory]] = {}
    for record in records:
        found.setdefault(record.group_id, []).append(_trajectory(record))
    return [TrajectoryGroup(group_id=group_id, trajectories=tuple(row)) for group_id, row in found.items()]


def _trajectory(record: TrajectoryRecord) -> Trajectory:
    own = {f.name for f in fields(Trajectory)} - {"turns", "fault", "signals"}
    turns = tuple(_turn(turn) for turn in record.turns)
    signals = {name.value: value for name, value in record.signals.items()}
    return Trajectory(**record.model_dump(include=own), fault=record.fault, turns=turns, signals=signals)


def _turn(record: TurnRecord) -> Turn:
    own = {f.name for f in fields(Turn)} - {"observation"}
    columns: dict[str, Any] = {name: _frozen(value) for name, value in record.model_dump(include=own).items()}
    columns["signals"] = {name.value: _frozen(value) for name, value in record.signals.items()}
    return Turn(**columns, observation=tuple(record.observation))


def _trained(notes: Notes) -> dict[Any, list[float | None]]:
    """Return a turn's columns, short; none if nothing was computed."""
    if all(np.isnan(column_T).all() for column_T in notes.values()):
        return {}
    return {
        name: [None if math.isnan(value) else value for value in column_T.round(6).tolist()]
        for name, column_T in notes.items()
    }


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _listed(value: Any) -> Any:
    return list(map(_listed, value)) if isinstance(value, tuple) else value
