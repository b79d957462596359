"""Metrics of a step, and the statistics of minibatches and tokens that they are computed from.

Each rank observes its tokens (`Observations`); statistics of a minibatch are sums over all ranks (`MinibatchStats`), and
`TokenDiagnostics` keeps ratio, entropy and clipping of each token for people who read the rollouts.

Metrics are called `name` or `theme/name`; those under `time/` and `process/` depend on the machine, all others repeat
exactly in lockstep.

`I` trajectories of a minibatch; `T` trained tokens of a pass, `U` its ratio units, `P` trained tokens of a minibatch.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import sqrt
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from agentrl.credit import Credit
from agentrl.distributed.processes import is_main, to_rank_zero
from agentrl.rollout.evaluation import component_means, reported_means, stop_shares
from agentrl.rollout.limits import num_open_files
from agentrl.types import FinishReason, Trajectory, TrajectoryGroup, valid_trajectories

Array = npt.NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Observations:
    """Observations of this rank's passes over a minibatch; grows by micro-batches.

    Copies from a GPU are complete once the host has read anything after them, such as the loss (`policy/host_reads.py`).
    """

    columns: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    """Arrays of each name, one per micro-batch, in the narrowest dtype. See `passes`."""
    loss: float = 0.0
    demonstrated: list[npt.NDArray[Any]] = field(default_factory=list)
    """Log-probabilities of demonstrated tokens, one array per micro-batch, of which nothing else is observed."""

    def add(self, **tensors: Tensor) -> None:
        """Append observations to the columns of these names."""
        for name, tensor in tensors.items():
            self.columns.setdefault(name, []).append(_to_host(tensor))

    def add_demonstrated(self, logprobs_T: Tensor) -> None:
        """Append log-probabilities of demonstrated tokens."""
        self.demonstrated.append(_to_host(logprobs_T))

    def add_loss(self, loss: float) -> None:
        """Add the loss of a micro-batch."""
        self.loss += loss

    def passes(self) -> Iterator[dict[str, Array]]:
        """Yield the observations of each micro-batch, by name."""
        for columns in zip(*self.columns.values(), strict=True):
            yield {name: array.astype(np.float64) for name, array in zip(self.columns, columns, strict=True)}

    def column(self, name: str) -> Array:
        """Return all observations of a name."""
        return np.concatenate([np.empty(0), *self.columns.get(name, [])])


class Sums(NamedTuple):
    """Moments of any number of values. All are 0 if there are none."""

    num: int = 0
    total: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""
    peak: float = 0.0
    """The largest."""

    @classmethod
    def from_values(cls, values: npt.NDArray[Any]) -> "Sums":
        """Add up."""
        if not len(values):
            return cls()
        total = float(np.sum(values, dtype=np.float64))
        squares = float(np.sum((values - total / len(values)) ** 2))
        return cls(len(values), total, squares, float(values.max()))

    def plus(self, other: "Sums") -> "Sums":
        """Return the moments of both together.

        Source: "Updating formulae and a pairwise algorithm for computing sample variances", Chan, Golub and LeVeque, 1979.
        """
        if not (self.num and other.num):
            return self if self.num else other
        num, gap = self.num + other.num, other.mean - self.mean
        squares = self.squares + other.squares + gap * gap * self.num * other.num / num  # gap**2 would raise for 1e200
        return Sums(num, self.total + other.total, squares, max(self.peak, other.peak))

    @property
    def mean(self) -> float:
        """Mean."""
        return self.total / self.num if self.num else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation."""
        return sqrt(self.squares / self.num) if self.num else 0.0


def merge_sums(parts: Iterable[Mapping[Key, Sums]]) -> dict[Key, Sums]:
    """Return the sums of parts, by key."""
    found: dict[Key, Sums] = {}
    for part in parts:
        for key, sums in part.items():
            found[key] = found[key].plus(sums) if key in found else sums
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchStats:
    """Statistics of one minibatch. Their size does not depend on the number of tokens: ranks gather them."""

    sums: Mapping[str, Sums] = field(default_factory=dict)
    """Sums by name, over tokens (`_T`) or ratio units (`_U`)."""
    trajectories: Mapping[int, float] = field(default_factory=dict)
    """Sum over the tokens of policy - behavior log-probabilities, by number in the minibatch."""
    versions: Mapping[int, Sums] = field(default_factory=dict)
    """Sums of |anchor - behavior| log-probabilities, by the policy version that sampled the token."""
    loss: float = 0.0
    grad_norm: float = 0.0
    """Norm of the gradient before it was clipped."""
    learning_rate: float = 0.0

    @classmethod
    def from_observations(cls, observations: Observations) -> "MinibatchStats":
        """Return the statistics of this rank's observations."""
        tally = cls.merge([_of_pass(part) for part in observations.passes()])
        if observations.demonstrated:
            nats = [Sums.from_values(-logprobs_T.astype(np.float64)) for logprobs_T in observations.demonstrated]
            tally = replace(tally, sums={**tally.sums, "nll_T": reduce(Sums.plus, nats, Sums())})
        return replace(tally, loss=observations.loss)

    @classmethod
    def merge(cls, parts: "Sequence[MinibatchStats]") -> "MinibatchStats":
        """Merge the statistics of parts of a minibatch."""
        trajectories: dict[int, float] = {}
        for part in parts:
            for number, total in part.trajectories.items():
                trajectories[number] = trajectories.get(number, 0.0) + total
        return cls(
            sums=merge_sums(part.sums for part in parts),
            trajectories=trajectories,
            versions=merge_sums(part.versions for part in parts),
            loss=sum(part.loss for part in parts),
        )

    def __getitem__(self, name: str) -> Sums:
        """Return the sums of a name; empty if it was not observed."""
        return self.sums.get(name, Sums())


def _of_pass(part: Mapping[str, Array]) -> MinibatchStats:
    index_T = part["unit_T"].astype(np.int64)
    ratio_U = part["ratio_U"]
    log_ratio_T = part["log_ratio_T"]
    engine_T = part["engine_difference_T"]
    version_T = part["version_T"].astype(np.int64)
    trajectory_T = part["trajectory_T"].astype(np.int64)
    clipped_T = part["clipped_T"]
    is_up_T = part["advantage_T"] > 0
    is_down_T = part["advantage_T"] < 0
    clipped_U, has_up_U, has_down_U = (
        np.bincount(index_T, weights=what_T) > 0 for what_T in (clipped_T, is_up_T, is_down_T)
    )
    alone = (
        "entropy_T",
        "engine_difference_T",
        "reference_kl_T",
        "mismatch_U",
        "limited_U",
        "rejected_U",
        "off_policy_T",
        "selected_T",
        "teacher_kl_T",
    )
    columns = {name: part[name] for name in alone if name in part} | {
        "ratio_U": ratio_U,
        "ratio_deviation_U": np.abs(ratio_U - 1),
        "token_ratio_T": np.exp(log_ratio_T),
        "anchor_distance_T": np.abs(log_ratio_T),
        "engine_distance_T": np.abs(engine_T),
        "divergence_T": divergence_terms(part["moved_T"]),
        "clipped_T": clipped_T,
        "clipped_up_T": clipped_T * is_up_T,
        "clipped_down_T": clipped_T * is_down_T,
        "clipped_U": clipped_U,
        "mixed_U": has_up_U & has_down_U,
        "one_sided_U": clipped_U & has_up_U & has_down_U,
    }
    if (nll_T := part.get("nll_T")) is not None:  # nan: not imitated
        columns["nll_T"] = nll_T[~np.isnan(nll_T)]
    distance_T, total_I = np.abs(engine_T - log_ratio_T), np.bincount(trajectory_T, weights=engine_T)
    return MinibatchStats(
        sums={name: Sums.from_values(column) for name, column in columns.items()},
        trajectories={int(number): float(total_I[number]) for number in np.unique(trajectory_T)},
        versions={int(version): Sums.from_values(distance_T[version_T == version]) for version in np.unique(version_T)},
    )


def divergence_terms(moved_T: Array) -> Array:
    """Return r - 1 - log r of changes log r of log-probabilities: without those that are nan, which are not known.

    Source: "Approximating KL divergence", J. Schulman, 2020 (k3).
    """
    known_T = moved_T[~np.isnan(moved_T)]
    terms_T: Array = np.expm1(known_T.clip(max=80)) - known_T
    return terms_T


def _to_host(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the values of a tensor, which a GPU still has to copy (into pinned memory: nothing waits)."""
    return _narrow(tensor.detach()).to("cpu", non_blocking=True).numpy()


def _narrow(tensor: Tensor) -> Tensor:
    """Return whole numbers, which are counts and places, in 32 bits, and others in 32 or 64."""
    if tensor.dtype == torch.bool or tensor.dtype == torch.float64:
        return tensor
    return tensor.float() if tensor.is_floating_point() else tensor.int()


Notes = Mapping[str, npt.NDArray[np.float64]]
"""`ratio`, `entropy` and `clipped` of each token, `(T,)`; NaN for tokens that were not computed."""


class _PassStats(NamedTuple):
    """Diagnostics of the tokens of one pass."""

    token_T: npt.NDArray[np.int32]
    """Number of each token among the minibatch's."""
    ratio_T: npt.NDArray[np.generic]
    entropy_T: npt.NDArray[np.generic]
    clipped_T: npt.NDArray[np.bool_]


class TokenDiagnostics:
    """Grows by the minibatches of a step: each token is in one of every epoch, of which the last counts.

    Each rank records the tokens that it computes.
    """

    def __init__(self) -> None:
        self._minibatches: list[tuple[list[tuple[Trajectory, Credit]], list[_PassStats]]] = []

    def add(self, pairs: Sequence[tuple[Trajectory, Credit]], observations: Observations) -> None:
        """Record the diagnostics of this rank's passes over a minibatch."""
        columns = [
            observations.columns.get(name, []) for name in ("token_T", "unit_T", "ratio_U", "entropy_T", "clipped_T")
        ]
        seen = [
            _PassStats(token_T, ratio_U[unit_T], entropy_T, clipped_T)
            for token_T, unit_T, ratio_U, entropy_T, clipped_T in zip(*columns, strict=True)
        ]
        self._minibatches.append((list(pairs), seen))

    def gather(self) -> Callable[[Trajectory], Notes]:
        """Return a function from a trajectory to its diagnostics; empty if it was in no minibatch.

        All ranks must call it; only rank 0 gets diagnostics.
        """
        found: dict[tuple[str, str], Notes] = {}
        for pairs, own in self._minibatches:
            seen = to_rank_zero(own)
            if not is_main():
                continue
            start, columns = 0, _by_token(seen, num=sum(int(credit.keep_T.sum()) for _, credit in pairs))
            for trajectory, credit in pairs:
                end = start + int(credit.keep_T.sum())
                notes = {name: np.full(credit.keep_T.shape, np.nan) for name in columns}
                for name, column_P in columns.items():
                    notes[name][credit.keep_T] = column_P[start:end]
                found[trajectory.group_id, trajectory.trajectory_id] = notes
                start = end
        return lambda trajectory: found.get((trajectory.group_id, trajectory.trajectory_id), {})


def _by_token(seen: Sequence[_PassStats], *, num: int) -> dict[str, npt.NDArray[np.float64]]:
    columns = {name: np.full(num, np.nan) for name in ("ratio", "entropy", "clipped")}
    for token_T, *values in seen:
        for column_P, value_T in zip(columns.values(), values, strict=True):
            column_P[token_T] = value_T
    return columns


def first_metrics(tally: MinibatchStats) -> dict[str, float]:
    """Return metrics of the first minibatch, whose weights are still those that sampled, if nothing was stale.

    `first/ratio_deviation` is the largest |ratio - 1|, and `first/engine_difference` the mean |policy - behavior|
    log-probability: with engine log-probabilities as anchors, the noise floor under the clipped share.
    """
    return {
        "first/ratio_deviation": tally["ratio_deviation_U"].peak,
        "first/clipped_tokens": tally["clipped_T"].mean,
        "first/engine_difference": tally["engine_distance_T"].mean,
    }


def effective_samples(tally: MinibatchStats) -> float:
    """Return the effective sample size of a minibatch, as a share of its trajectories.

        w_i = exp(sum over the tokens t of trajectory i of (policy_logprob_t - behavior_logprob_t))
        share = (sum_i w_i)^2 / (I sum_i w_i^2)

    1 if all trajectories weigh alike, 1 / I if one outweighs all others. Only computed trajectories count.

    Source: Kong 1992; as a sign of a run about to collapse: VCPO, arXiv 2602.17616.
    """
    if not tally.trajectories:
        return 1.0
    sums_I = np.array([tally.trajectories[number] for number in sorted(tally.trajectories)])
    weight_I = np.exp(sums_I - sums_I.max())
    return float(weight_I.sum() ** 2 / (len(weight_I) * (weight_I**2).sum()))


def anchor_metrics(tallies: Sequence[MinibatchStats], *, known: Collection[int]) -> dict[str, float]:
    """Decompose the ratio to the engine, with `anchor: sampled`: the engine under the same weights, and staleness.

        policy - behavior  =  (policy - anchor)  +  (anchor - behavior)        log-probabilities
                               staleness            mismatch

    `staleness/difference` is the mean |policy - anchor| of the first minibatch, before the first update, and
    `mismatch/difference` the mean |anchor - behavior| of the tokens whose anchor the trainer recomputed, in nats.
    `staleness/unkept` is the share of the others: the weights of their versions are not `known` any more.
    """
    versions = merge_sums(tally.versions for tally in tallies)
    kept = reduce(Sums.plus, (sums for version, sums in versions.items() if version in known), Sums())
    num = sum(sums.num for sums in versions.values())
    return {
        "staleness/difference": tallies[0]["anchor_distance_T"].mean,
        "staleness/unkept": 1 - kept.num / num if num else 0.0,
        "mismatch/difference": kept.mean,
    }


def divergence(tally: MinibatchStats) -> float:
    """Estimate the KL divergence of the policy from that before the step, at the tokens of a minibatch, in nats a token.

        mean of r_t - 1 - log r_t,  r_t = exp(policy_logprob_t - logprob_t before the step)

    If that was not computed, it is over the tokens that this version sampled, with the anchor's log-probabilities.

    Never below 0. Source: "Approximating KL divergence", J. Schulman, 2020 (k3).
    """
    return tally["divergence_T"].mean


def update_metrics(tallies: Sequence[MinibatchStats], *, current_version: int) -> dict[str, float]:
    """Describe all minibatches of a step.

    `staleness` is how many policy versions older the weights that sampled a token are than those the step began with. A
    step makes one version, by as many updates (optimizer steps) as it has minibatches with a gradient.
    """
    found = MinibatchStats(
        sums=merge_sums(tally.sums for tally in tallies), versions=merge_sums(tally.versions for tally in tallies)
    )
    staleness = {current_version - version: sums.num for version, sums in found.versions.items()}
    metrics = {
        "loss": _mean([tally.loss for tally in tallies]),
        "staleness/mean": sum(age * num for age, num in staleness.items()) / max(1, sum(staleness.values())),
        "staleness/max": float(max(staleness, default=0)),
        "ratio/mean": found["ratio_U"].mean,
        "ratio/spread": found["ratio_U"].spread,
        # Spread of the ratios of single tokens, which the unit averages out.
        "ratio/token_spread": found["token_ratio_T"].spread,
        "ratio/effective_samples": _mean([effective_samples(tally) for tally in tallies]),
        "clip/tokens": found["clipped_T"].mean,
        "clip/tokens_positive": found["clipped_up_T"].mean,
        "clip/tokens_negative": found["clipped_down_T"].mean,
        "clip/units": found["clipped_U"].mean,
        # One ratio clips the tokens of one sign and lets those of the other continue: the unit's update is lopsided.
        "clip/units_one_sided": found["one_sided_U"].mean,
        "credit/mixed_sign_units": found["mixed_U"].mean,
        "entropy": found["entropy_T"].mean,
        "kl/behavior": -found["engine_difference_T"].mean,
        # The largest divergence at the start of a minibatch: the last update is not in it.
        "kl/step": max(map(divergence, tallies)) - divergence(tallies[0]),
        "grad_norm": _mean([tally.grad_norm for tally in tallies]),
        "learning_rate": next((tally for tally in reversed(tallies) if tally.grad_norm > 0), tallies[-1]).learning_rate,
    }
    if "reference_kl_T" in found.sums:
        metrics["kl/reference"] = found["reference_kl_T"].mean
    if "mismatch_U" in found.sums:
        metrics |= {"mismatch/mean": found["mismatch_U"].mean, "mismatch/max": found["mismatch_U"].peak}
        metrics["mismatch/limited"] = found["limited_U"].mean
    if "rejected_U" in found.sums:
        metrics["clip/units_rejected"] = found["rejected_U"].mean
    further = {
        "off_policy_T": "clip/off_policy_tokens",
        "selected_T": "clip/covariance_tokens",
        "nll_T": "nll",
        "teacher_kl_T": "kl/teacher",
    }
    return metrics | {metric: found[name].mean for name, metric in further.items() if name in found.sums}


def rollout_metrics(groups: Sequence[TrajectoryGroup], credits: Sequence[Sequence[Credit]]) -> dict[str, float]:
    """Return metrics of the rollouts; means are over episodes that did not fail."""
    trajectories = valid_trajectories(groups)
    everyone = [t for group in groups for t in group.trajectories]
    returns = [t.reward for t in trajectories]
    thoughts = [turn.message.get("reasoning_content") or "" for t in trajectories for turn in t.turns]
    metrics = {
        "reward/mean": _mean(returns),
        "reward/spread": float(np.std(returns)),
        "episode/turns": _mean([len(t.turns) for t in trajectories]),
        "episode/turns_max": float(max((len(t.turns) for t in trajectories), default=0)),
        "episode/action_tokens": _mean([t.num_action_tokens for t in trajectories]),
        "episode/action_tokens_max": float(max((t.num_action_tokens for t in trajectories), default=0)),
        "episode/observation_tokens": _mean([sum(len(turn.observation_ids) for turn in t.turns) for t in trajectories]),
        "episode/truncated": _mean([t.truncated for t in trajectories]),
        "turn/action_tokens": _mean([len(turn.action_ids) for t in trajectories for turn in t.turns]),
        "turn/cut_off": _mean([turn.finish_reason is FinishReason.LENGTH for t in trajectories for turn in t.turns]),
        "turn/thinks": _mean([bool(thought) for thought in thoughts]),
        "turn/thought_characters": _mean([len(thought) for thought in thoughts]),
        "groups/zero_spread": _mean([g.zero_spread for g in groups]),
        "credit/zero_advantage": _mean(
            [
                not credit.advantages_T[credit.keep_T].any()
                for group, of_group in zip(groups, credits, strict=True)
                for trajectory, credit in zip(group.trajectories, of_group, strict=True)
                if not trajectory.failed
            ]
        ),
    }
    if any(t.stage for t in everyone):
        metrics["episode/stage"] = _mean([t.stage for t in everyone])
    metrics = {f"episode/{name}": value for name, value in reported_means(trajectories).items()} | metrics
    metrics = {f"reward/{name}": value for name, value in component_means(trajectories).items()} | metrics
    return metrics | stop_shares(everyone)


def process_metrics() -> dict[str, float]:
    """Return metrics of this process, in which an environment that leaks shows."""
    process = psutil.Process()
    with process.oneshot():
        return {
            "process/memory_bytes": float(process.memory_info().rss),
            "process/threads": float(process.num_threads()),
            "process/open_files": float(num_open_files(process)),
            "process/children": float(len(process.children(recursive=True))),
        }


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0
