"""Recorded rollouts for a page: a list of them, blocks of dialogues, one for each group, and other schemes' advantages."""

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.credit import CreditScheme, installed_credit, load_credit
from agentrl.data.plain import is_number
from agentrl.errors import CreditError
from agentrl.report.advise import credits_of
from agentrl.report.calls import dialect_of, difference_of, ignored_by, kind_of, lanes, relation
from agentrl.report.records import TrajectoryRecord, TurnRecord, calls_of, groups_of
from agentrl.report.terminal import Decode
from agentrl.types import Message, Need

OtherCredit = Mapping[str, Mapping[tuple[str, str], Sequence[float]]]
"""By the name of a credit scheme, and the ids of group and trajectory: the advantage of each sampled token."""

_DIGITS = {"ratio": 6, "logprob": 3, "entropy": 3}
"""Digits of the numbers of tokens, if they are not four: a clip range differs from 1 in the fourth."""

_MAX_TEXT, _MAX_PREVIEW = 20_000, 160
"""Characters of a message that are shown, and of what the list shows of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The rollouts of one group."""

    entries: list[dict[str, Any]]
    """Entry of each in the list."""
    data: bytes
    """Dialogues as JSON, compressed."""


def block_of(
    records: Sequence[TrajectoryRecord], *, run: int, others: OtherCredit, decode: Decode | None = None
) -> Block:
    """Return the block of a group's records.

    Args:
        records: of one group of one step.
        run: number of the run.
        others: what other credit schemes give.
        decode: turns tokens into text. None: what the template made of messages is left out.
    """
    rollouts = [_rollout(record, others, decode) for record in records]
    data = json.dumps(rollouts, separators=(",", ":")).encode()
    entries = [_entry(record) | {"run": run, "at": at} for at, record in enumerate(records)]
    return Block(entries=entries, data=gzip.compress(data, 6, mtime=0))


def _entry(record: TrajectoryRecord) -> dict[str, Any]:
    turns = record.turns
    calls = [name for turn in turns for name in _tools(turn.message)]
    errors = sum(_is_tool_error(message) for turn in turns for message in turn.observation)
    success = record.metrics.get("success")
    return {
        "step": record.step,
        "group": record.group_id,
        "id": record.trajectory_id,
        "split": record.split,
        "reward": _short(record.reward),
        "success": None if success is None else success > 0,
        "stop": record.stop_reason.value,
        "failed": record.stop_reason.failed,
        "turns": len(turns),
        "tokens": sum(len(turn.action_ids) for turn in turns),
        "tools": sorted(set(calls)),
        "toolErrors": int(max(errors, _finite(record.metrics.get("tool_errors")))),
        "error": _bounded(record.error or "", _MAX_PREVIEW),
        "task": _preview(
            message for turn in turns[:1] for message in turn.observation if message.get("role") != "system"
        ),
        "last": _preview([turns[-1].message] if turns else []),
    }


def _rollout(record: TrajectoryRecord, others: OtherCredit, decode: Decode | None) -> dict[str, Any]:
    is_trained = any(any(turn.keep) for turn in record.turns)  # else the whole is marked, not each token
    turns: list[dict[str, Any]] = []
    start = 0
    for number, turn in enumerate(record.turns):
        end = start + len(turn.action_ids)
        credited = {
            name: _column(given[start:end])
            for name, of_scheme in others.items()
            if (given := of_scheme.get((record.group_id, record.trajectory_id))) is not None
        }
        begins = not turns or not turn.extends
        context = decode(turn.observation_ids) if decode and begins else ""
        told = _turn(turn, number, credited) | {"context": _bounded(context, _MAX_TEXT)}
        if not is_trained:
            del told["columns"]["keep"], told["columns"]["advantage"]
        turns.append(told)
        start = end
    if any(kind_of(turn) for turn in record.turns):
        for told, lane in zip(turns, lanes(record.turns), strict=True):
            told["lane"] = lane
    return {
        "turns": turns,
        "env": record.env_id,
        "seed": record.seed,
        "error": record.error,
        "traceback": _bounded(record.fault.traceback, _MAX_TEXT) if record.fault else None,
        "gold": record.gold_answer,
        "metrics": {name: _short(value) for name, value in record.metrics.items()},
    }


def _turn(turn: TurnRecord, number: int, credited: dict[str, Any]) -> dict[str, Any]:
    components = turn.extras.get("reward_components")
    columns = {
        "advantage": _column(turn.advantages),
        "logprob": _column(turn.behavior_logprobs, _DIGITS["logprob"]),
        "version": _column(turn.versions),
        "keep": _column([int(keep) for keep in turn.keep]),
    }
    signals = {need.value: values for need, values in turn.signals.items() if isinstance(values, list)}
    for name, values in (*turn.trained.items(), *signals.items()):
        columns[name] = _column(values, _DIGITS.get(name, 4))
    return {
        "read": [_said(message) for message in turn.observation],
        "rewrites": not turn.extends,
        "parent": turn.parent,
        "agent": _bounded(turn.agent, _MAX_PREVIEW),
        "kind": kind_of(turn),
        "relation": relation(turn, number),
        "dialect": _bounded(dialect_of(turn), _MAX_PREVIEW),
        "difference": _bounded(difference_of(turn), _MAX_TEXT),
        "ignored": [_bounded(f"{name}: {value}", _MAX_PREVIEW) for name, value in ignored_by(turn).items()],
        "observationTokens": len(turn.observation_ids),
        "said": _said(turn.message) if _tools(turn.message) else None,
        "pieces": turn.action_pieces,
        "columns": columns,
        "others": credited,
        "reward": _short(turn.reward),
        "components": {
            str(name): _short(amount)
            for name, amount in (components.items() if isinstance(components, dict) else ())
            if is_number(amount)
        },
        "signals": {need.value: _short(value) for need, value in turn.signals.items() if not isinstance(value, list)},
        "state": turn.state_key,
        "action": turn.action_key,
        "finish": turn.finish_reason.value,
        "branches": turn.branch_rewards,
    }


def _said(message: Message) -> dict[str, Any]:
    """Return a message as text: whatever stands in it, for others may have written it."""
    said: dict[str, Any] = {
        "role": str(message.get("role")),
        "text": _bounded(_text(message.get("content")), _MAX_TEXT),
    }
    if name := message.get("name"):
        said["name"] = _bounded(_text(name), _MAX_PREVIEW)
    if thought := message.get("reasoning_content"):
        said["thought"] = _bounded(_text(thought), _MAX_TEXT)
    if calls := calls_of(message):
        said["calls"] = _bounded("\n".join(calls), _MAX_TEXT)
    return said


def _text(value: Any) -> str:
    """Return a message's content, which may be a list of parts."""
    if isinstance(value, str) or value is None:
        return value or ""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _tools(message: Message) -> list[str]:
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in (calls if isinstance(calls, list) else ()) if isinstance(call, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return [_bounded(name, 80) for name in names if isinstance(name, str) and name]


def _is_tool_error(message: Message) -> bool:
    content = message.get("content")
    return message.get("role") == "tool" and isinstance(content, str) and content.startswith("Error:")


def _preview(messages: Iterable[Message]) -> str:
    texts = [_text(message.get("content")) or " ".join(calls_of(message)) for message in messages]
    return _bounded(" ".join(" ".join(texts).split()), _MAX_PREVIEW)


def _bounded(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def _column(values: Any, digits: int = 4) -> Any:
    """Return a number where all are alike, else all of them, with a few digits."""
    first = values[0] if len(values) else 0
    if all(value == first for value in values):
        return _short(first, digits)
    return [_short(value, digits) for value in values]


def _short(value: float | None, digits: int = 4) -> float | None:
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def other_credit(records: Sequence[TrajectoryRecord]) -> OtherCredit:
    """Credit the rollouts of a step by every installed scheme, with its defaults, that needs no more than was recorded."""
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    groups = groups_of(records)
    for name, scheme in _schemes(_recorded(records)):
        try:
            credits = credits_of(scheme, groups)
        except CreditError:  # it wants what these lack, such as siblings
            continue
        found[name] = {ids: credit.advantages_T.tolist() for ids, credit in credits.items()}
    return found


def _schemes(recorded: frozenset[Need]) -> Iterator[tuple[str, CreditScheme]]:
    for name, needs in installed_credit().items():
        if needs is not None and needs <= recorded:
            yield name, load_credit({"scheme": name})


def _recorded(records: Sequence[TrajectoryRecord]) -> frozenset[Need]:
    """Return what a scheme finds in every turn."""
    turns = [turn for record in records if not record.stop_reason.failed for turn in record.turns]
    if not turns:
        return frozenset()
    found = {Need.TURN_REWARDS} | frozenset.intersection(*(frozenset(turn.signals) for turn in turns))
    found |= {Need.STATE_KEYS} if all(turn.state_key is not None for turn in turns) else set()
    found |= {Need.ACTION_KEYS} if any(turn.action_key is not None for turn in turns) else set()
    found |= {Need.BRANCHES} if all(turn.branch_rewards is not None for turn in turns) else set()
    return frozenset(found)
