"""What a step reports.

Names are `what` or `theme/what`; those under `time/` and `process/` depend on the machine, all others repeat exactly in
lockstep.
`I` trajectories of a minibatch, `T` its trained tokens, `U` its ratio units.
"""

from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any

import numpy as np
import psutil

from agentrl.credit import Credit
from agentrl.learn.tally import Sums, Tally, together
from agentrl.rollout.evaluation import component_means, reported_means
from agentrl.rollout.limits import num_open_files
from agentrl.types import FinishReason, StopReason, TrajectoryGroup, valid_trajectories


def first_metrics(tally: Tally) -> dict[str, float]:
    """Describe the first minibatch, whose weights are still those that sampled, where nothing was stale.

    `first/ratio_deviation` is the largest |ratio - 1|, and `first/engine_difference` the mean |policy - behavior|
    log-probability: with engine log-probabilities as anchors, the noise floor under the clipped share.
    """
    return {
        "first/ratio_deviation": tally["ratio_deviation_U"].peak,
        "first/clipped_tokens": tally["clipped_T"].mean,
        "first/engine_difference": tally["engine_distance_T"].mean,
    }


def effective_samples(tally: Tally) -> float:
    """Return the effective sample size of a minibatch, as a share of its trajectories.

        w_i = exp(sum over the tokens t of trajectory i of (policy_logprob_t - behavior_logprob_t))
        share = (sum_i w_i)^2 / (I sum_i w_i^2)

    1 where all trajectories weigh alike, 1 / I where one outweighs all others. Of the trajectories that were computed.

    Source: Kong 1992; as a sign of a run about to collapse: VCPO, arXiv 2602.17616.
    """
    if not tally.trajectories:
        return 1.0
    sums_I = np.array([tally.trajectories[number] for number in sorted(tally.trajectories)])
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
    versions = together(tally.versions for tally in tallies)
    kept = reduce(Sums.plus, (sums for version, sums in versions.items() if version in known), Sums())
    num = sum(sums.num for sums in versions.values())
    return {
        "staleness/difference": tallies[0]["anchor_distance_T"].mean,
        "staleness/unkept": 1 - kept.num / num if num else 0.0,
        "mismatch/difference": kept.mean,
    }


def divergence(tally: Tally) -> float:
    """Estimate the KL divergence of the policy from that before the step, at the tokens of a minibatch, in nats a token.

        mean of r_t - 1 - log r_t,  r_t = exp(policy_logprob_t - logprob_t before the step)

    Where that was not computed, over the tokens that it sampled, with what the loss compares them with.

    Never below 0. Source: "Approximating KL divergence", J. Schulman, 2020 (k3).
    """
    return tally["divergence_T"].mean


def update_metrics(tallies: Sequence[Tally], *, current_version: int) -> dict[str, float]:
    """Describe all minibatches of a step.

    `staleness` is how many policy versions older the weights that sampled a token are than those the step began with. A
    step makes one version, by as many updates (optimizer steps) as it has minibatches with a gradient.
    """
    found = Tally(
        sums=together(tally.sums for tally in tallies), versions=together(tally.versions for tally in tallies)
    )
    staleness = {current_version - version: sums.num for version, sums in found.versions.items()}
    metrics = {
        "loss": _mean([tally.loss for tally in tallies]),
        "staleness/mean": sum(age * num for age, num in staleness.items()) / max(1, sum(staleness.values())),
        "staleness/max": float(max(staleness, default=0)),
        "ratio/mean": found["ratio_U"].mean,
        "ratio/spread": found["ratio_U"].spread,
        # Of the ratios that single tokens would have: what the unit averages out.
        "ratio/token_spread": found["token_ratio_T"].spread,
        "ratio/effective_samples": _mean([effective_samples(tally) for tally in tallies]),
        "clip/tokens": found["clipped_T"].mean,
        "clip/tokens_positive": found["clipped_up_T"].mean,
        "clip/tokens_negative": found["clipped_down_T"].mean,
        "clip/units": found["clipped_U"].mean,
        # One ratio clips the tokens of one sign and lets those of the other continue: what the unit learns is lopsided.
        "clip/units_one_sided": found["one_sided_U"].mean,
        "credit/mixed_sign_units": found["mixed_U"].mean,
        "entropy": found["entropy_T"].mean,
        "kl/behavior": -found["engine_difference_T"].mean,
        # The furthest that the policy had moved within the step where a minibatch began: the last update is in none.
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


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0
