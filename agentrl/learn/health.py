"""Signs of a run that learns nothing any more, read from the metrics of its steps."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import sqrt
from statistics import fmean
from typing import Literal, get_args

from agentrl.learn.tokens import rows_of
from agentrl.rollout import RolloutConfig
from agentrl.rollout.demonstrations import Demonstration

Row = Mapping[str, float]
Sign = Literal["zero_spread", "cut_off", "collapse", "runaway", "moved", "shortened", "gone"]
SIGNS: tuple[Sign, ...] = get_args(Sign)
_FOLLOWING: dict[frozenset[Sign], frozenset[Sign]] = {
    frozenset({"collapse", "moved", "shortened"}): frozenset({"zero_spread", "cut_off", "runaway", "gone"}),
    frozenset({"runaway", "gone"}): frozenset({"zero_spread", "cut_off"}),
}
"""Signs that follow from others: after one of those they are no news, and their advice would mislead."""

COLLAPSED_STEPS = 4
"""Steps that a policy which has collapsed has already sampled when the sign is first seen."""
COLLAPSE_ADVICE = (
    "lower train.learning_rate or raise rollout.num_groups, and begin again or export an earlier checkpoint"
)
_STEPS, _STEPS_ZERO_SPREAD = COLLAPSED_STEPS, 8
"""Consecutive steps for which a sign must hold; small batches of hard tasks earn alike now and then."""
_FALL, _LEFT = 0.25, 0.4
"""Reward or success has collapsed if its mean fell by this share of the largest spread, and this share of it is left."""
_ENTROPY_LEFT = 0.1
"""Share of the entropy of the first steps."""
_FEW_SAMPLES, _FAR = 0.5, 0.03
"""Effective samples, and nats a token to the policy that sampled: found on runs that collapsed (docs/evidence.md)."""
_MOVED = 0.3
"""Nats a token that no step should move the policy by (chosen with benchmarks/detectors.py); healthy: .001 to .05."""
_SHORTENED = 0.75
"""Share of the updates that a bound shortens in every step of a run whose rate is too high for it."""
_SUCCEEDED = 0.03
"""Share of episodes that succeeded in some steps, from which on their absence is no chance."""
_OF_REWARDS = {"reward/mean", "reward/spread", "credit/zero_advantage"}
_LIMITS = {
    "stop/max_turns": "rollout.max_turns",
    "stop/max_tokens": "rollout.max_turn_tokens or rollout.max_episode_tokens",
    "stop/context_overflow": "rollout.max_context_tokens",
}
_CUT_TURNS, _CUT_TOKENS = 1.0, 0.1
"""Shares of demonstrations from which on a warning is logged that a limit cuts them off: of turns, only if all are."""
_FAILED = ("stop/env_error", "stop/engine_error")


def signs(rows: Sequence[Row]) -> dict[Sign, str]:
    """Return the signs that the last step shows, each with a sentence for people.

    Args:
        rows: metrics of the steps from the first one on.
    """
    collapse = _collapse(rows)
    found: dict[Sign, str | None] = {
        "collapse": collapse and collapse[0],
        "runaway": _runaway(rows[-1]),
        "moved": _moved(rows[-1]),
        "shortened": _shortened(rows),
        "gone": _gone(rows),
        "zero_spread": _zero_spread(rows),
        "cut_off": _cut_off(rows),
    }
    return {sign: words for sign, words in found.items() if words is not None}


def collapsed_since(rows: Sequence[Row]) -> int:
    """Return the step from which on the policy had collapsed.

    Args:
        rows: metrics of steps of which the last one has the sign `collapse`.
    """
    found = _collapse(rows)
    assert found is not None
    return found[1]


def newly_detected(found: Mapping[Sign, str], rows: Sequence[Row]) -> dict[Sign, str]:
    """Return the signs to report: each once in a run, and none that follows from an earlier one.

    Args:
        found: signs of the last step.
        rows: metrics of the steps before it, with `health/SIGN`.
    """
    known = {sign for sign in SIGNS if any(row.get(f"health/{sign}") for row in rows)}
    seen = known | found.keys()
    for causes, following in _FOLLOWING.items():
        known |= following if seen & causes else frozenset()
    return {sign: words for sign, words in found.items() if sign not in known}


def _collapse(rows: Sequence[Row]) -> tuple[str, int] | None:
    """Return a sentence about a collapse, and its first step."""
    stage = _stage(rows[-1])  # another one earns less; steps in which two are mixed are compared with nothing
    # A file may have lost some.
    rows = [row for row in rows if row.keys() >= _OF_REWARDS and _stage(row) == stage]
    if len(rows) <= _STEPS:
        return None
    levels = {"reward": [(row["reward/mean"], row["reward/spread"]) for row in rows]}
    if any("episode/success" in row for row in rows):
        # Noise of rewards, which keeps their spread up, is not in it. Steps that cut off all of their episodes do not have it.
        shares = [row.get("episode/success", 0.0) for row in rows]
        levels["success"] = [(share, sqrt(max(0.0, share * (1 - share)))) for share in shares]
    for name, of_steps in levels.items():
        if fell := _fall(of_steps):
            best, now = fell
            words = f"the policy has collapsed: its mean {name} fell from {best:.3g} to {now:.3g} for {_STEPS} steps"
            return words, int(rows[-_STEPS].get("step", 0))
    # If every advantage is 0, the entropy is that of one episode at most; if no token is computed, there is none.
    measured = [row for row in rows if row["credit/zero_advantage"] < 1 and "entropy" in row]
    early, late = measured[:_STEPS], measured[_STEPS:][-_STEPS:]
    if len(late) < _STEPS or rows[-1] is not late[-1]:
        return None
    entropy, first = (fmean(row["entropy"] for row in part) for part in (late, early))
    gain = fmean(row["reward/mean"] for row in rows[-_STEPS:]) - fmean(row["reward/mean"] for row in early)
    widest = max(row["reward/spread"] for row in rows[:-_STEPS])
    if entropy <= _ENTROPY_LEFT * first and gain < _FALL * widest:
        words = f"its entropy fell from {first:.2g} to {entropy:.2g} nats a token, and its reward did not rise"
        return f"the policy has collapsed: {words}", int(late[0].get("step", 0))
    return None


def _stage(row: Row) -> tuple[float, float]:
    """Return the facts on which rewards depend beside the policy: the entry of `env.schedule`, and the recipe."""
    return row.get("episode/stage", 0.0), row.get("recipe_changes", 0.0)  # neither is written before the first


def _fall(levels: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the level before and after a lasting fall, by mean and spread in each step. None: there is none."""
    before, last = levels[:-_STEPS], levels[-_STEPS:]
    means = [mean for mean, _ in before]
    best = max(fmean(means[max(0, end - _STEPS) : end]) for end in range(1, len(means) + 1))
    widest = max(spread for _, spread in before)
    now, spread = (fmean(column) for column in zip(*last, strict=True))
    has_fallen = widest > 0 and now <= best - _FALL * widest and spread <= _LEFT * widest
    return (best, now) if has_fallen else None


def _runaway(row: Row) -> str | None:
    """Detect a step that moved the policy very far; not if tokens are stale, for they are far from it anyway."""
    if row.get("staleness/max", 0.0) > 0 or "ratio/effective_samples" not in row:
        return None
    samples, far = row["ratio/effective_samples"], row["kl/behavior"]
    if samples >= _FEW_SAMPLES or far <= _FAR:
        return None
    return (
        f"one step moved the policy by {far:.2g} nats a token, so that few trajectories outweigh the rest (effective samples "
        f"{samples:.0%}): runs often collapse by this; lower train.learning_rate, or set train.target_kl"
    )


def _moved(row: Row) -> str | None:
    """Detect a step that moved the policy further than any clip range means to allow."""
    if (far := row.get("kl/step", 0.0)) <= _MOVED:
        return None
    return (
        f"one step moved the policy by {far:.2g} nats a token (healthy runs: below .05): lower train.learning_rate, now "
        f"{row.get('learning_rate', 0.0):.2g}, or set train.target_kl: 0.02"
    )


def _shortened(rows: Sequence[Row]) -> str | None:
    """Detect updates that `train.target_kl` always shortens; not if tokens are stale: there healthy runs are shortened."""
    if any(row.get("staleness/max", 0.0) > 0 for row in rows[-_STEPS:]):
        return None
    last = [(row.get("shortened_updates", 0.0), row.get("updates", 0.0)) for row in rows[-_STEPS:]]
    if len(last) < _STEPS or any(not shortened or shortened < _SHORTENED * updates for shortened, updates in last):
        return None
    num, of = (int(sum(column)) for column in zip(*last, strict=True))
    return (
        f"train.target_kl shortened {num} of {of} updates in {_STEPS} steps: each costs a further pass and goes a part "
        f"of the way; lower train.learning_rate, now {rows[-1].get('learning_rate', 0.0):.2g}"
    )


def _gone(rows: Sequence[Row]) -> str | None:
    """Detect success that was there, be it little, and is in no episode any more."""
    stage = _stage(rows[-1])
    shares = [row.get("episode/success", 0.0) for row in rows if _stage(row) == stage]
    before, last = shares[:-_STEPS_ZERO_SPREAD], shares[-_STEPS_ZERO_SPREAD:]
    if not before or any(last):
        return None
    best = max(fmean(before[max(0, end - _STEPS) : end]) for end in range(1, len(before) + 1))
    if best < _SUCCEEDED:
        return None
    return (
        f"success is gone: {best:.0%} of the episodes succeeded before, none in the last {_STEPS_ZERO_SPREAD} steps; lower "
        "train.learning_rate, and begin again or from an earlier checkpoint"
    )


def _zero_spread(rows: Sequence[Row]) -> str | None:
    last = rows[-_STEPS_ZERO_SPREAD:]
    if len(last) < _STEPS_ZERO_SPREAD or any(row.get("credit/zero_advantage", 0.0) < 1 for row in last):
        return None
    if last[-1].get("groups/zero_spread", 1.0) < 1:
        return (
            f"nothing was learned in {_STEPS_ZERO_SPREAD} steps: groups earned differently, but no token that is trained on "
            "has an advantage; look at rollout.stale and rollout.max_staleness, and at credit"
        )
    return (
        f"nothing was learned in {_STEPS_ZERO_SPREAD} steps: the episodes of every group earned alike (mean reward "
        f"{last[-1]['reward/mean']:.3g}); make tasks easier or harder (env.options), or raise rollout.group_size"
    )


def _cut_off(rows: Sequence[Row]) -> str | None:
    last = rows[-_STEPS:]
    if len(last) < _STEPS:
        return None
    for row in last:
        played = 1.0 - sum(row.get(name, 0.0) for name in _FAILED)
        if played <= 0 or sum(row.get(name, 0.0) for name in _LIMITS) < played - 1e-9:
            return None
    shares = {name: fmean(row.get(name, 0.0) for row in last) for name in _LIMITS}
    most = max(shares, key=shares.__getitem__)
    return f"every episode of the last {_STEPS} steps was cut off, {shares[most]:.0%} by {_LIMITS[most]}; raise it"


def cut_demonstrations(demonstrations: Sequence[Demonstration], config: RolloutConfig) -> tuple[float, str | None]:
    """Return the share of demonstrations that the limits of rollouts cut off, and a sentence if that matters.

    An oracle that plays badly (`warmup.skill`) runs out of turns often: half of the default recipe's demonstrations do.
    """
    found = [tuple(_exceeded(demonstration, config)) for demonstration in demonstrations]
    shares = {name: fmean(name in names for names in found) for name in dict.fromkeys(chain(*found))}
    share = fmean(bool(names) for names in found)
    reported = [
        name for name, part in shares.items() if part >= (_CUT_TURNS if name == "rollout.max_turns" else _CUT_TOKENS)
    ]
    if not reported:
        return share, None
    parts = ", ".join(f"{shares[name]:.0%} by {name}" for name in reported)
    return share, f"demonstrations are cut off, {parts}: the policy is shown what it cannot play; raise it"


def _exceeded(demonstration: Demonstration, config: RolloutConfig) -> Iterator[str]:
    """Yield the fields whose limits a demonstration does not keep."""
    action_lengths = [len(turn.action_ids) for turn in demonstration.turns]
    if not demonstration.is_over:
        yield "rollout.max_turns"
    if max(action_lengths) > config.max_turn_tokens:
        yield "rollout.max_turn_tokens"
    if sum(action_lengths) > config.max_episode_tokens:
        yield "rollout.max_episode_tokens"
    if max(len(row.ids_L) for row in rows_of(demonstration.turns)) > config.max_context_tokens:
        yield "rollout.max_context_tokens"
