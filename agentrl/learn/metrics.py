"""What a step reports.

Names are `what` or `theme/what`; those under `time/` and `process/` depend on the machine, all others repeat exactly in
lockstep.
`T` trained tokens of a minibatch, `U` ratio units.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from agentrl.credit import Credit
from agentrl.rollout.evaluation import component_means, reported_means
from agentrl.rollout.limits import num_open_files
from agentrl.types import FinishReason, StopReason, TrajectoryGroup, valid_trajectories

Array = npt.NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class Tally:
    """What one minibatch showed; grows by micro-batches."""

    columns: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    """Of each name an array for each micro-batch, no wider than what was observed: processes gather them. See `parts`."""
    loss: float = 0.0
    grad_norm: float = 0.0
    """Norm of the gradient before it was clipped."""
    learning_rate: float = 0.0

    def add(self, **tensors: Tensor) -> None:
        """Append observations to the columns of these names."""
        for name, tensor in tensors.items():
            self.columns.setdefault(name, []).append(_narrow(tensor.detach()).cpu().numpy())

    @classmethod
    def joined(cls, parts: "Sequence[Tally]") -> "Tally":
        """Return what parts of one minibatch showed together."""
        names = dict.fromkeys(name for part in parts for name in part.columns)
        columns = {name: [array for part in parts for array in part.columns.get(name, [])] for name in names}
        return cls(columns=columns, loss=sum(part.loss for part in parts))

    def parts(self, name: str) -> list[Array]:
        """Return the observations of a name, an array for each micro-batch."""
        return [array.astype(np.float64) for array in self.columns.get(name, [])]

    def column(self, name: str) -> Array:
        """Return all observations of a name."""
        return np.concatenate([np.empty(0), *self.parts(name)])


def first_metrics(tally: Tally) -> dict[str, float]:
    """Describe the first minibatch, whose weights are still those that sampled, where nothing was stale.

    `first/ratio_deviation` is the largest |ratio - 1|, and `first/engine_difference` the mean |policy - behavior|
    log-probability: with engine log-probabilities as anchors, the noise floor under the clipped share.
    """
    return {
        "first/ratio_deviation": _peak(np.abs(tally.column("ratio_U") - 1)),
        "first/clipped_tokens": _mean(tally.column("clipped_T")),
        "first/engine_difference": _mean(np.abs(tally.column("engine_difference_T"))),
    }


def effective_samples(tally: Tally) -> float:
    """Return the effective sample size of a minibatch, as a share of its trajectories.

        w_i = exp(sum over the tokens t of trajectory i of (policy_logprob_t - behavior_logprob_t))
        share = (sum_i w_i)^2 / (I sum_i w_i^2)

    1 where all trajectories weigh alike, 1 / I where one outweighs all others. Of the trajectories that were computed.

    Source: Kong 1992; as a sign of a run about to collapse: VCPO, arXiv 2602.17616.
    """
    index_T = tally.column("trajectory_T").astype(np.int64)
    sums_I = np.bincount(index_T, weights=tally.column("engine_difference_T"))[np.bincount(index_T) > 0]
    if not len(sums_I):
        return 1.0
    weight_I = np.exp(sums_I - sums_I.max())
    return float(weight_I.sum() ** 2 / (len(weight_I) * (weight_I**2).sum()))


def anchor_metrics(tallies: Sequence[Tally], *, known: Collection[int]) -> dict[str, float]:
    """Take the ratio to the engine apart, with `anchor: sampled`: the engine under the same weights, and staleness.

        policy - behavior  =  (policy - anchor)  +  (anchor - behavior)        log-probabilities
                               staleness            mismatch

    `staleness/difference` is the mean |policy - anchor| of the first minibatch, before the first update, and
    `mismatch/difference` the mean |anchor - behavior| of the tokens whose anchor the trainer recomputed, in nats.
    `staleness/unkept` is the share of the others: the weights of their versions are not `known` any more.
    """
    difference_T, log_ratio_T, version_T = (
        np.concatenate([tally.column(name) for tally in tallies])
        for name in ("engine_difference_T", "log_ratio_T", "version_T")
    )
    kept_T = np.isin(version_T, list(known))
    return {
        "staleness/difference": _mean(np.abs(tallies[0].column("log_ratio_T"))),
        "staleness/unkept": 1 - _mean(kept_T) if len(kept_T) else 0.0,
        "mismatch/difference": _mean(np.abs(difference_T - log_ratio_T)[kept_T]),
    }


def divergence(tally: Tally) -> float:
    """Estimate the KL divergence of the policy from its anchor, at the tokens of a minibatch, in nats a token.

        mean of r_t - 1 - log r_t,  r_t = exp(policy_logprob_t - anchor_logprob_t)

    Never below 0. Source: "Approximating KL divergence", J. Schulman, 2020 (k3).
    """
    log_ratio_T = tally.column("log_ratio_T")
    return _mean(np.expm1(log_ratio_T.clip(max=80)) - log_ratio_T)


def update_metrics(tallies: Sequence[Tally], *, current_version: int) -> dict[str, float]:
    """Describe all minibatches of a step.

    `staleness` is how many policy versions older the weights that sampled a token are than those the step began with. A
    step makes one version, by as many updates (optimizer steps) as it has minibatches with a gradient.
    """

    def column(name: str) -> Array:
        return np.concatenate([tally.column(name) for tally in tallies])

    ratio_U, clipped_T, advantage_T = column("ratio_U"), column("clipped_T"), column("advantage_T")
    log_ratio_T, staleness_T = column("log_ratio_T"), current_version - column("version_T")
    units = [_units(tally) for tally in tallies]
    clipped_U, mixed_U = (np.concatenate([unit[name] for unit in units]) for name in ("clipped", "mixed"))
    metrics = {
        "loss": _mean([tally.loss for tally in tallies]),
        "staleness/mean": _mean(staleness_T),
        "staleness/max": _peak(staleness_T),
        "ratio/mean": _mean(ratio_U),
        "ratio/spread": float(ratio_U.std()) if len(ratio_U) else 0.0,
        # Of the ratios that single tokens would have: what the unit averages out.
        "ratio/token_spread": float(np.exp(log_ratio_T).std()) if len(log_ratio_T) else 0.0,
        "ratio/effective_samples": _mean([effective_samples(tally) for tally in tallies]),
        "clip/tokens": _mean(clipped_T),
        "clip/tokens_positive": _mean(clipped_T * (advantage_T > 0)),
        "clip/tokens_negative": _mean(clipped_T * (advantage_T < 0)),
        "clip/units": _mean(clipped_U),
        # One ratio clips the tokens of one sign and lets those of the other continue: what the unit learns is lopsided.
        "clip/units_one_sided": _mean(clipped_U * mixed_U),
        "credit/mixed_sign_units": _mean(mixed_U),
        "entropy": _mean(column("entropy_T")),
        "kl/behavior": _mean(-column("engine_difference_T")),
        # How far the policy had moved within the step, before the last update: what `train.target_kl` bounds.
        "kl/step": max(map(divergence, tallies)) - divergence(tallies[0]),
        "grad_norm": _mean([tally.grad_norm for tally in tallies]),
        "learning_rate": tallies[-1].learning_rate,
    }
    if any("reference_kl_T" in tally.columns for tally in tallies):
        metrics["kl/reference"] = _mean(column("reference_kl_T"))
    if any("mismatch_U" in tally.columns for tally in tallies):
        mismatch_U = column("mismatch_U")
        metrics |= {"mismatch/mean": _mean(mismatch_U), "mismatch/max": _peak(mismatch_U)}
        metrics["mismatch/limited"] = _mean(column("limited_U"))
    if any("rejected_U" in tally.columns for tally in tallies):
        metrics["clip/units_rejected"] = _mean(column("rejected_U"))
    return metrics


def rollout_metrics(groups: Sequence[TrajectoryGroup], credits: Sequence[Sequence[Credit]]) -> dict[str, float]:
    """Describe what was played; means are over episodes that did not fail."""
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
                not credit.advantages_T.any()
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
    return metrics | {f"stop/{reason}": _mean([t.stop_reason is reason for t in everyone]) for reason in StopReason}


def process_metrics() -> dict[str, float]:
    """Describe this process: an environment that leaks shows here."""
    process = psutil.Process()
    with process.oneshot():
        return {
            "process/memory_bytes": float(process.memory_info().rss),
            "process/threads": float(process.num_threads()),
            "process/open_files": float(num_open_files(process)),
            "process/children": float(len(process.children(recursive=True))),
        }


def _units(tally: Tally) -> dict[str, Array]:
    """Tell of each ratio unit of a minibatch whether it has a clipped token, and whether its advantages differ in sign."""
    found: dict[str, list[Array]] = {"clipped": [], "mixed": []}
    columns = (tally.parts(name) for name in ("unit_T", "clipped_T", "advantage_T"))
    for unit_T, clipped_T, advantage_T in zip(*columns, strict=True):
        index_T = unit_T.astype(np.int64)
        clipped, up, down = (
            np.bincount(index_T, weights=what) > 0 for what in (clipped_T, advantage_T > 0, advantage_T < 0)
        )
        found["clipped"].append(clipped.astype(np.float64))
        found["mixed"].append((up & down).astype(np.float64))
    return {name: np.concatenate([np.empty(0), *arrays]) for name, arrays in found.items()}


def _narrow(tensor: Tensor) -> Tensor:
    """Return whole numbers, which are counts and places, in 32 bits, and others in 32 or 64."""
    if tensor.dtype == torch.bool or tensor.dtype == torch.float64:
        return tensor
    return tensor.float() if tensor.is_floating_point() else tensor.int()


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _peak(values: Array) -> float:
    return float(values.max()) if len(values) else 0.0
