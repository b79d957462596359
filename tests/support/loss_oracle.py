"""What a training step's loss is, and what it shows, as the documents write it: one loop over ratio units, one over tokens.

Nothing but the recipe's fields is shared with what it checks. A batch holds what tells the settings of `loss` apart: units of 1
to 40 tokens, of staleness 0 to 5, that moved by themselves, far up, far down, or not at all.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import exp, expm1, log, log1p, sqrt
from typing import NamedTuple

import numpy as np

from agentrl.credit import Credit
from agentrl.learn.calibration import Band, Calibration
from agentrl.learn.config import CalibratedConfig, GateConfig, KernelConfig, LossConfig
from agentrl.types import Trajectory
from tests.support.trajectories import some_ids, trajectory, turn

VERSION = 9
"""Of the policy that is updated."""
_SAMPLED_BY = (4, 6, 8, 9)
"""One version in each of the ranges of staleness: 4 to 7, 2 and 3, 1, 0."""
_PAPERS = {"trajectory": (3e-4, 4e-4), "turn": (3e-3, 4e-3), "version": (3e-3, 4e-3), "token": (0.2, 0.27)}
_OTHERS = {
    "token": (0.2, 0.27),
    "geometric": (1 - exp(-0.4), exp(0.4) - 1),
    "cap": (1.0, 4.0),
    "tv": (0.15, 0.15),
    "kl": (0.05, 0.05),
}
_TOKEN_WIDTHS = (-log1p(-0.2), log1p(0.27))

Measured = Mapping[int, Mapping[int, tuple[float, tuple[float, float]]]]
"""Spread, and gains below and above, by place among the lengths and among the stalenesses that have a range in common."""
BY_STALENESS: Measured = {
    0: {0: (0.004, (0.5, 1.2)), 1: (0.02, (-0.2, 0.6)), 2: (0.05, (0.3, -1.0)), 3: (1.0, (0.0, 0.0))}
}
BY_LENGTH: Measured = {
    1: {0: (0.006, (0.5, 1.2)), 3: (0.03, (-0.2, 0.6))},
    2: {3: (0.01, (0.3, 0.9))},
    3: {1: (1e-7, (0.0, 0.0))},
}


def filled(measured: Measured) -> Calibration:
    """Return the state of ranges in which this was measured."""
    return Calibration(
        bands={
            f"{size}/{age}": Band(num_minibatches=9, spread=spread, gains=gains)
            for size, ages in measured.items()
            for age, (spread, gains) in ages.items()
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token that credit keeps, and its log-probabilities."""

    trajectory: int
    turn: int
    version: int
    advantage: float
    policy: float
    behavior: float
    start: float
    """Before the first update of the step."""
    sampled: float
    """Under the weights that sampled it."""
    reference: float
    entropy: float
    """Of the distribution that it was drawn from."""

    def anchor(self, config: LossConfig) -> float:
        if config.anchor == "behavior":
            return self.behavior
        return self.sampled if config.anchor == "sampled" and self.version != VERSION else self.start


def stale_batch(num: int = 18, seed: int = 0) -> tuple[list[Trajectory], list[Credit], list[Token]]:
    """Draw trajectories, their credit and the tokens that it keeps, in their order."""
    rng, entropies = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    trajectories, credits, tokens = [], [], []
    for number in range(num):
        # Policy versions follow one another as an episode goes on: two of them, from one range of staleness into the next.
        versions = _SAMPLED_BY[number % 4 : number % 4 + 2]
        lengths = rng.integers(1, (2, 5, 16)[number % 3], size=rng.integers(1, 6))
        version_T = np.sort(rng.choice(versions, size=lengths.sum()))
        behavior_T = -1 - rng.exponential(size=lengths.sum())
        engine_T = {3: 0.4, 4: -0.4}.get(number, 0.0) + 0.05 * rng.normal(size=lengths.sum())
        moved_T = {0: 0.5, 1: -0.5}.get(number, 0.0) + 0.1 * rng.normal(size=lengths.sum())
        policy_T = behavior_T if number == 2 else behavior_T + engine_T + moved_T
        advantage_T, keep_T = rng.normal(size=lengths.sum()), rng.random(lengths.sum()) < 0.9
        advantage_T[rng.random(lengths.sum()) < 0.1] = 0
        turns, k_T = [], np.repeat(np.arange(len(lengths)), lengths)
        for k in range(len(lengths)):
            ids, logprobs = some_ids(rng, 1, 2) * int(lengths[k]), behavior_T[k_T == k].tolist()
            acted = turn(some_ids(rng, 1, 6), ids, logprobs=logprobs)
            turns.append(replace(acted, versions=tuple(version_T[k_T == k].tolist())))
        trajectories.append(trajectory(number, *turns))
        credits.append(Credit.from_tokens(trajectories[-1], advantage_T, keep_T=keep_T))
        tokens += [
            Token(
                trajectory=number,
                turn=int(k_T[t]),
                version=int(version_T[t]),
                advantage=float(credits[-1].advantages_T[t]),
                policy=float(policy_T[t]),
                behavior=float(behavior_T[t]),
                start=float(behavior_T[t] + engine_T[t]),
                sampled=float(behavior_T[t] + engine_T[t] + 0.02 * rng.normal()),
                reference=float(behavior_T[t] + 0.1 * rng.normal()),
                entropy=entropies.exponential(),
            )
            for t in np.flatnonzero(keep_T)
        ]
    return trajectories, credits, tokens


def _units(tokens: Sequence[Token], config: LossConfig) -> list[list[int]]:
    keys = {
        "trajectory": lambda t: tokens[t].trajectory,
        "turn": lambda t: (tokens[t].trajectory, tokens[t].turn),
        "version": lambda t: (tokens[t].trajectory, tokens[t].turn, tokens[t].version),
        "token": lambda t: t,
    }
    return [list(unit) for _, unit in groupby(range(len(tokens)), key=keys[config.unit])]


def _weights(tokens: Sequence[Token], config: LossConfig) -> list[float]:
    of_trajectory = Counter(token.trajectory for token in tokens)
    of_turn = Counter((token.trajectory, token.turn) for token in tokens)
    if config.aggregation == "trajectory-mean":
        return [1 / (len(of_trajectory) * of_trajectory[token.trajectory]) for token in tokens]
    if config.aggregation == "turn-mean":
        return [1 / (len(of_turn) * of_turn[token.trajectory, token.turn]) for token in tokens]
    if config.aggregation == "token-mean":
        return [1 / len(tokens)] * len(tokens)
    assert config.constant_length is not None
    return [1 / (len(of_trajectory) * config.constant_length)] * len(tokens)


def _band(staleness: float, length: int, config: LossConfig) -> tuple[int, int]:
    """Places of a unit: staleness 0, 1, 2-3, 4-7; where a recipe asks for it, 1, 2-7, 8-31, 32-127 tokens."""
    by_length = (config.calibrated or CalibratedConfig()).by_length
    size = next(place for place, last in enumerate((1, 7, 31, 127)) if length <= last) if by_length else 0
    return size, next(place for place, last in enumerate((0, 1, 3, 7)) if round(staleness) <= last)


def _widths(staleness: float, length: int, config: LossConfig, measured: Measured) -> list[float]:
    """How far log s_u may fall and rise: by the nearest length that was measured, and of that the nearest staleness."""
    bounds = [width * min(1, 4 / sqrt(length)) for width in _TOKEN_WIDTHS]
    if not measured:
        low, high = _PAPERS[config.unit]
        return [min(-log1p(-low), bounds[0]), min(log1p(high), bounds[1])]
    size, age = _band(staleness, length, config)
    ages = measured[min(measured, key=lambda known: abs(known - size))]
    spread, gains = ages[min(ages, key=lambda known: abs(known - age))]
    return [min(max(spread * exp(gain), 1e-5), bound) for gain, bound in zip(gains, bounds, strict=True)]


class Decision(NamedTuple):
    """What the trust region makes of a token, before `reject`."""

    value: float
    factor: float
    """Of the gradient of its log-probability."""
    has_left: bool


def _decision(place: int, unit: list[Token], widths: list[float], config: LossConfig) -> Decision:
    token = unit[place]
    log_ratios = [other.policy - other.anchor(config) for other in unit]
    own, ratio, advantage = exp(log_ratios[place]), exp(sum(log_ratios) / len(unit)), token.advantage
    lower, upper = _ends(unit, widths, config)

    def weighted(factor: float, has_left: bool = False) -> Decision:
        return Decision(0, 0, True) if has_left else Decision(factor * token.policy, factor, False)

    def is_beyond(looked_at: float) -> bool:
        return (advantage > 0 and looked_at > upper) or (advantage < 0 and looked_at < lower)

    match config.trust:
        case "none":
            return weighted(1.0)
        case "cap":
            return weighted(min(max(ratio, lower), upper))
        case "gate":
            gate = config.gate or GateConfig()
            tau = gate.positive if advantage > 0 else gate.negative
            opened = 1 / (1 + exp(-tau * (ratio - 1)))
            return Decision(4 / tau * opened, 4 * opened * (1 - opened) * ratio, False)
        case "kernel":
            weight, kernel = exp(sum(log_ratios)), config.kernel or KernelConfig()
            power, rate = kernel.negative if advantage < 0 else kernel.positive
            return weighted(weight**power * exp(rate * (1 - weight)))
        case "tv" | "kl":
            pi, mu = exp(token.policy), exp(token.anchor(config))
            moved = mu * log(mu / pi) + (1 - mu) * log((1 - mu) / (1 - pi)) if config.trust == "kl" else abs(pi - mu)
            is_far = (advantage > 0 and pi > mu and moved > upper - 1) or (
                advantage < 0 and pi < mu and moved > 1 - lower
            )
            return weighted(min(ratio, 20.0), is_far)
        case "geometric":
            ends = [
                min(one, log(upper)) if other.advantage > 0 else max(one, log(lower)) if other.advantage < 0 else one
                for one, other in zip(log_ratios, unit, strict=True)
            ]
            mean = exp(sum(ends) / len(unit))
            return Decision(mean, 0 if is_beyond(own) else mean, is_beyond(own))
        case "token":
            return Decision(ratio, 0 if is_beyond(own) else ratio, is_beyond(own))
    if is_beyond(ratio):
        return Decision(upper if advantage > 0 else lower, 0, True)
    return Decision(ratio, ratio, False)


def _ends(unit: list[Token], widths: list[float], config: LossConfig) -> tuple[float, float]:
    """Lower and upper end of the range of ratios."""
    if config.trust == "calibrated":
        return exp(-widths[0]), exp(widths[1])
    low, high = _OTHERS.get(config.trust, _PAPERS[config.unit])
    low, high = (low if config.clip_low is None else config.clip_low), config.clip_high or high
    wider = sqrt((config.clip_by_length or len(unit)) / len(unit))
    return max(0.0, 1 - low * wider), 1 + high * wider


def _mismatch(tokens: Sequence[Token], config: LossConfig) -> list[list[tuple[float, bool]]]:
    """For tokens that are corrected together: factors of their weights, and whether a limit changed them."""
    if config.mismatch_level == "product":
        sets = [list(of_one) for _, of_one in groupby(tokens, key=lambda token: token.trajectory)]
    else:
        sets = [[tokens[t] for t in unit] for unit in _units(tokens, config)]
    return [_corrections(of_one, config) for of_one in sets]


def _corrections(together: list[Token], config: LossConfig) -> list[tuple[float, bool]]:
    if config.mismatch == "off":
        return [(1.0, False)] * len(together)
    apart = [token.anchor(config) - token.behavior for token in together]
    of_all = sum(apart) / (1 if config.mismatch_level == "product" else len(together))
    found = []
    for own in apart:
        factor = exp(own if config.mismatch_level == "token" else of_all)
        is_far = factor > config.mismatch_limit
        if config.mismatch == "mask":
            is_far |= factor < 1 / config.mismatch_limit
        left = 0.0 if config.mismatch == "mask" else config.mismatch_limit
        found.append((left if is_far else factor, is_far))
    return found


def _divergence(token: Token, config: LossConfig) -> tuple[float, float]:
    """Estimate of the divergence from the reference, and its gradient."""
    apart = token.policy - token.reference
    k3, ratio = exp(-apart) - 1 + apart, exp(token.policy - token.anchor(config))
    return {
        "k2": (apart**2 / 2, apart),
        "k3": (k3, 1 - exp(-apart)),
        "unbiased": (ratio * k3, ratio * apart),
    }[config.kl_estimator]


def _off_policy(tokens: Sequence[Token], config: LossConfig) -> list[bool]:
    """Whether each token leaves the loss as one that failed, in a trajectory far from the policy."""
    if config.off_policy_limit is None:
        return [False] * len(tokens)
    apart: dict[int, list[float]] = {}
    for token in tokens:
        apart.setdefault(token.trajectory, []).append(token.behavior - token.policy)
    far = {number for number, moves in apart.items() if sum(moves) / len(moves) > config.off_policy_limit}
    return [token.trajectory in far and token.advantage < 0 for token in tokens]


@dataclass(slots=True, kw_only=True)
class Expected:
    """What a step is to give; grows by units."""

    loss: float = 0.0
    gradient: list[float]
    """Of the loss, with respect to each token's log-probability."""
    entropy_gradient: list[float]
    """Of the loss, with respect to each token's entropy."""
    clipped: list[bool]
    metrics: dict[str, float] = field(default_factory=dict)
    shown: dict[str, list[float]] = field(default_factory=dict)
    """What calibration is told of units alike: distances, lengths, tokens pushed down and up, those of them that left."""


def expected_step(
    tokens: Sequence[Token], config: LossConfig, measured: Measured, *, is_updated: bool = True
) -> Expected:
    """Compute all of it from the equations of DESIGN 8, `agentrl.learn.loss`, `trust` and `calibration`."""
    weights = _weights(tokens, config)
    zeros = [0.0] * len(tokens)
    found = Expected(gradient=[*zeros], entropy_gradient=[*zeros], clipped=[False] * len(tokens))
    units = [[tokens[t] for t in unit] for unit in _units(tokens, config)]
    off_policy, mismatch = _off_policy(tokens, config), _mismatch(tokens, config)
    corrections = [factor for of_one in mismatch for factor, _ in of_one]
    rejected = one_sided = mixed = touched = t = 0
    for unit in units:
        log_ratios = [token.policy - token.anchor(config) for token in unit]
        mean = sum(log_ratios) / len(unit)
        staleness = sum(VERSION - token.version for token in unit) / len(unit)
        widths = _widths(staleness, len(unit), config, measured)
        is_rejected = config.reject is not None and not 1 / config.reject <= exp(mean) <= config.reject
        first = t
        for place, token in enumerate(unit):
            value, factor, has_left = _decision(place, unit, widths, config)
            if is_rejected:
                value, factor, has_left = 0.0, 0.0, token.advantage != 0
            weight = 0.0 if off_policy[t] else weights[t] * corrections[t]
            estimate, slope = _divergence(token, config)
            found.loss += config.kl_coefficient * weights[t] * estimate - weight * value * token.advantage
            found.loss -= config.entropy_coefficient * weights[t] * token.entropy
            found.gradient[t] = config.kl_coefficient * weights[t] * slope - weight * factor * token.advantage
            found.entropy_gradient[t] = -config.entropy_coefficient * weights[t]
            found.clipped[t] = has_left
            t += 1
        has_up, has_down = (any(sign * token.advantage > 0 for token in unit) for sign in (1, -1))
        rejected += is_rejected
        touched, mixed = touched + any(found.clipped[first:t]), mixed + (has_up and has_down)
        one_sided += has_up and has_down and any(found.clipped[first:t])
        if not is_rejected and mean != 0 and (staleness > 0 or is_updated):
            bound = max(_TOKEN_WIDTHS) * min(1, 4 / sqrt(len(unit))) / 2
            pushed = [sum(sign * token.advantage > 0 for token in unit) for sign in (-1, 1)]
            left = [
                sum(sign * token.advantage > 0 and found.clipped[first + i] for i, token in enumerate(unit))
                for sign in (-1, 1)
            ]
            name = "/".join(map(str, _band(staleness, len(unit), config)))
            row = [1.0, min(abs(mean), bound), len(unit), *pushed, *left]
            found.shown[name] = [a + b for a, b in zip(found.shown.get(name, [0.0] * 7), row, strict=True)]
    ups, downs = ([sign * token.advantage > 0 for token in tokens] for sign in (1, -1))
    # What moved in this step: tokens of earlier versions too, where they were looked at before it.
    moves = [
        token.policy - (token.behavior if config.anchor == "behavior" else token.start)
        for token in tokens
        if config.anchor != "behavior" or token.version == VERSION
    ]
    found.metrics = {
        "loss": found.loss,
        "staleness/mean": sum(VERSION - token.version for token in tokens) / len(tokens),
        "staleness/max": max(VERSION - token.version for token in tokens),
        "clip/tokens": sum(found.clipped) / len(tokens),
        "clip/tokens_positive": sum(a and b for a, b in zip(found.clipped, ups, strict=True)) / len(tokens),
        "clip/tokens_negative": sum(a and b for a, b in zip(found.clipped, downs, strict=True)) / len(tokens),
        "clip/units": touched / len(units),
        "clip/units_one_sided": one_sided / len(units),
        "credit/mixed_sign_units": mixed / len(units),
        "kl/behavior": sum(token.behavior - token.policy for token in tokens) / len(tokens),
        "divergence": sum(expm1(move) - move for move in moves) / len(moves),
    }
    if config.reject is not None:
        found.metrics["clip/units_rejected"] = rejected / len(units)
    if config.mismatch != "off":
        limits = [
            is_limited
            for of_one in mismatch
            for _, is_limited in (of_one if config.mismatch_level == "token" else of_one[:1])
        ]
        found.metrics["mismatch/limited"] = sum(limits) / len(limits)
    if config.off_policy_limit is not None:
        found.metrics["clip/off_policy_tokens"] = sum(off_policy) / len(tokens)
    if config.kl_coefficient:
        found.metrics["kl/reference"] = sum(token.policy - token.reference for token in tokens) / len(tokens)
    return found
