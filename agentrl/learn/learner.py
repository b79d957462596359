"""Updates of the policy from credited trajectories, on one rank or several.

`Learner.update` goes over a step's trajectories, once or in several epochs: it draws minibatches and plans their passes
(prepare), makes at most one optimizer step for each (step), and returns the metrics (finish). An update on another thread can
be interrupted: long work calls `check_interrupt`.

`I` trajectories of a step, `T` trained tokens of a pass, `P` its slots, `Q` slots that are asked for, `J` routers of a
mixture of experts, `X` experts that each chooses at a slot.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.credit import Credit
from agentrl.distributed.processes import all_gather, from_rank_zero, num_processes, scatter
from agentrl.errors import ConfigError, TrainingError
from agentrl.learn.batch import LossColumns, add_terms, make_batch
from agentrl.learn.calibration import ClipStats, ClipTarget, clip_stats, merge_clip_stats, range_metrics
from agentrl.learn.config import LossConfig, TrainConfig
from agentrl.learn.interrupt import check_interrupt
from agentrl.learn.line_search import KeptVersions, KLLineSearch
from agentrl.learn.loss import nll_loss
from agentrl.learn.metrics import (
    Array,
    MinibatchStats,
    Observations,
    Sums,
    TokenDiagnostics,
    anchor_metrics,
    divergence,
    divergence_terms,
    effective_samples,
    first_metrics,
    update_metrics,
)
from agentrl.learn.micro_batch_loss import AnchorState, StaleTokens, micro_batch_loss, policy_change, trust_region
from agentrl.learn.plan import MicroBatch, PassTokens, Planner, draw_minibatches
from agentrl.learn.policy_state import PolicyState
from agentrl.learn.tokens import TokenBatch, aggregation_weights
from agentrl.learn.trust import TrustRegion
from agentrl.learn.warmup import demonstrated_tokens, draw_demonstrations
from agentrl.models.moe import UNKNOWN, changed_share, experts_of, recording, replaying, routers_of
from agentrl.policy.host_reads import read, reading_together
from agentrl.policy.layout import attending, lay_out
from agentrl.policy.model import Policy
from agentrl.rollout import derive_seed
from agentrl.rollout.demonstrations import Demonstration
from agentrl.types import Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

SAMPLED_SHARE = 1 / 8
"""Share of a step's computed tokens in passes that measure the divergence alone. A forward pass is about a third of an update,
so that such a share costs a twenty-fourth of it (benchmarks/train_step.py)."""


def is_routed(state: PolicyState, *, must_be: bool) -> bool:
    """Return whether the experts of the policy can be recorded; False for a model without experts.

    Raises:
        ConfigError: if they must be, and cannot.
    """
    policy = state.policy
    model, device = policy.model, state.device
    try:
        with torch.no_grad(), recording(model) as experts:
            if has_experts := bool(routers_of(model)):
                inputs, _ = lay_out([np.zeros(2, dtype=np.int64)], policy.layout, device=device)
                slot_1 = target_1 = torch.zeros(1, dtype=torch.long, device=device)
                policy(inputs, slot_1, target_1, 1.0)
                with replaying(model, experts[0]) if must_be else nullcontext():
                    pass
    except TrainingError as error:
        if must_be:
            raise ConfigError(f"loss.routing_replay: {error}") from error
        log.info("the experts of this model are not reported: %s", error)
        return False
    if must_be and not has_experts:
        raise ConfigError(f"loss.routing_replay: {type(model).__name__} is no mixture of experts; set it to none")
    return has_experts


def expert_metrics(micro: MicroBatch, before_JPX: Tensor, after_JPX: Tensor) -> dict[str, float]:
    """Return metrics of the experts at the trained tokens of one pass.

    Args:
        micro: the pass.
        before_JPX: experts that the policy chose before the first update.
        after_JPX: experts that it chose after it.
    """
    slots_Q = micro.slot_T
    metrics = {"moe/changed_experts": float(changed_share(before_JPX, after_JPX, slots_Q=slots_Q).mean())}
    if micro.experts_JPX is not None:
        engine_JPX = micro.experts_JPX.to(before_JPX)
        is_known_Q = (engine_JPX[:, slots_Q] != UNKNOWN).all(-1).all(0)
        metrics["moe/replayed"] = float(is_known_Q.double().mean())
        if is_known_Q.any():
            unlike_Q = changed_share(engine_JPX, before_JPX, slots_Q=slots_Q[is_known_Q])
            metrics["moe/unlike_engine"] = float(unlike_Q.mean())
    return metrics


class CreditedMinibatch(NamedTuple):
    """Trajectories of one optimizer step, and their credit."""

    pairs: list[tuple[Trajectory, Credit]]
    num_computed: int
    """Number of the first ones that are computed. The others have no gradient, and count in the denominators."""
    seed: int = 0
    """Seed of what the minibatch draws: tokens of `loss.covariance`, demonstrations of `loss.nll`."""

    def is_stale(self, version: int) -> bool:
        """Return whether an earlier version sampled any token of the computed trajectories."""
        computed = chain(*(trajectory.turns for trajectory, _ in self.pairs[: self.num_computed]))
        return any(min(turn.versions, default=version) < version for turn in computed)


class TrainingPass(NamedTuple):
    """One forward and backward pass of a rank."""

    micro: MicroBatch
    columns: LossColumns
    """Columns of the micro-batch's tokens."""


class DemonstrationPass(NamedTuple):
    """One forward and backward pass of a rank over demonstrations."""

    micro: MicroBatch
    weight_T: Tensor
    """Weight of each demonstrated token in `loss.nll`."""


class PlannedMinibatch(NamedTuple):
    """A minibatch with this rank's passes over it, and the anchor of each pass."""

    minibatch: CreditedMinibatch
    passes: list[TrainingPass]
    """Passes over the minibatch. Empty: no token of it is trained."""
    anchors: list[AnchorState]
    demonstrations: list[DemonstrationPass]
    """Further passes, over demonstrations."""


def known_anchors(passes: Sequence[TrainingPass], token_N: Array, difference_N: Array) -> list[AnchorState]:
    """Return the anchor of each pass from those tokens of a minibatch that are known; nan for the others.

    Args:
        passes: passes over tokens of the minibatch.
        token_N: index of each known token in the minibatch.
        difference_N: its log-probability, less that of the behavior.
    """
    largest = [int(micro.token_T.max(initial=-1)) for micro, _ in passes]
    known = np.full(1 + max([int(token_N.max(initial=-1)), *largest]), np.nan)
    known[token_N.astype(np.int64)] = difference_N
    return [
        AnchorState(columns.behavior_T + micro.to_device(torch.from_numpy(known[micro.token_T])))
        for micro, columns in passes
    ]


class Gradient(NamedTuple):
    """Statistics and observations of a minibatch whose gradient was computed."""

    stats: MinibatchStats
    clip_stats: ClipStats
    """Empty without `trust: calibrated`."""
    observations: Observations
    """Observations of this rank."""


@dataclass(slots=True, kw_only=True)
class StepUpdate:
    """One step's update of the policy, from its minibatches to its metrics."""

    version: int
    """Version of the policy before the step."""
    minibatches: list[PlannedMinibatch]
    known_versions: frozenset[int]
    """Versions whose weights are kept, and the present one."""
    line_search: KLLineSearch
    first_experts: tuple[MicroBatch, Tensor] | None
    """First pass of the first minibatch, and its experts before the step; None if experts are not recorded."""
    stats: list[MinibatchStats] = field(default_factory=list)
    """Statistics of the minibatches that had trained tokens."""
    clip_stats: list[ClipStats] = field(default_factory=list)
    """Clip statistics of the same minibatches."""
    num_updates: int = 0
    sample: tuple[list[TrainingPass], list[AnchorState]] | None = None
    """Passes over a sample of the minibatch of the first update, and its log-probabilities before that: the last update is
    measured at tokens that it was not made for, if there are several. None: no bound, or no update."""
    expert_metrics: dict[str, float] = field(default_factory=dict)


class Learner:
    """Updates the policy by the credited groups of a step.

    Rank 0 has the groups and credits, and scatters every minibatch over the ranks; all end with the same weights, which are
    those of a single rank but for the order of sums.
    """

    def __init__(
        self, state: PolicyState, *, loss: LossConfig, config: TrainConfig, temperature: float, seed: int
    ) -> None:
        """Take the parts.

        Args:
            state: the policy to train.
            loss: ratio, clip and aggregation.
            config: minibatches and budgets.
            temperature: temperature of the rollouts.
            seed: seed from which minibatches are drawn.
        """
        self.state = state
        self.diagnostics = TokenDiagnostics()
        """Diagnostics of each token in the newest update."""
        self.kept = KeptVersions(state.policy.parameters(), most=loss.kept_versions if loss.anchor == "sampled" else 0)
        """Weights of earlier versions, for the anchors of stale tokens."""
        self.loss = loss
        self.demonstrations: Sequence[Demonstration] = ()
        """Demonstrations that `loss.nll` imitates; the same on all ranks."""
        self._accelerator, self._config = state.accelerator, config
        self._temperature, self._seed = temperature, seed
        policy = state.policy
        self._layout = policy.layout
        self._is_routed = is_routed(state, must_be=loss.routing_replay != "none")
        self._planner = Planner.for_policy(
            policy,
            max_tokens=config.max_tokens_per_micro_batch,
            device=state.device,
            dtype=torch.float64 if next(policy.parameters()).dtype == torch.float64 else torch.float32,
            pairs_per_token=6 * policy.model.config.get_text_config().hidden_size,
            experts=experts_of(policy.model) if loss.routing_replay == "engine" else None,
        )

    def logprobs(self, prompt_ids: Sequence[int], action_ids: Sequence[int]) -> Tensor:
        """Return the log-probability of each token of an action after a prompt, under the present weights: (T,)."""
        with self._accelerator.autocast():
            return self._score(self.state.wrapped, prompt_ids, action_ids)

    def rounding_error(self, prompt_ids: Sequence[int], action_ids: Sequence[int]) -> float:
        """Return the mean difference between `logprobs` and the same in float32, in nats.

        0 if there is no other precision: in float32, and for weights that are sharded or held in half precision.
        """
        policy = self.state.policy
        has_half = any(weight.dtype != torch.float32 for weight in policy.parameters())
        has_kernel = "flash" not in str(policy.model.config.get_text_config()._attn_implementation)
        if self._config.precision == "float32" or self.state.is_sharded or has_half or not has_kernel:
            return 0.0
        logprobs_T = self.logprobs(prompt_ids, action_ids)
        # The class's: the policy's own `forward` is accelerate's, under autocast.
        exact_T = self._score(partial(Policy.forward, policy), prompt_ids, action_ids)
        return float((logprobs_T - exact_T).abs().mean())

    def _score(self, forward: Callable[..., Any], prompt_ids: Sequence[int], action_ids: Sequence[int]) -> Tensor:
        row = np.array([*prompt_ids, *action_ids])
        inputs, index = lay_out([row[:-1]], self._layout, device=self.state.device)
        position_T = np.arange(len(prompt_ids) - 1, len(row) - 1)
        slot_T = torch.from_numpy(index(np.zeros_like(position_T), position_T)).to(self.state.device)
        target_T = torch.tensor(action_ids, device=self.state.device)
        with torch.no_grad():
            logprobs_T: Tensor = forward(inputs, slot_T, target_T, self._temperature)[0]
        return logprobs_T

    def update(
        self,
        groups: Sequence[TrajectoryGroup],
        credits: Sequence[Sequence[Credit]],
        *,
        version: int,
        check_agreement: Callable[[float], None] | None = None,
    ) -> dict[str, float]:
        """Go over a step's trajectories, in minibatches drawn at random in each epoch; return metrics.

        A minibatch without a gradient changes neither weights nor the optimizer's state, and is counted as skipped. If no
        token is computed, metrics are counts only.

        Args:
            groups: groups of the step, on rank 0; ignored on the others.
            credits: credit of each trajectory of each group.
            version: version of the policy before the step.
            check_agreement: called with the mean |policy - behavior| log-probability in nats of the first minibatch, if its
                tokens were sampled by these very weights.

        Raises:
            TrainingError: if the gradient is not finite, or the update was interrupted.
        """
        update = self._prepare(groups, credits, version=version)
        for index, planned in enumerate(update.minibatches):
            if planned.passes or planned.demonstrations:
                self._step(update, planned, check_agreement if index == 0 else None)
            if index == 0 and update.first_experts is not None:
                micro, before_JPX = update.first_experts
                update.expert_metrics = expert_metrics(micro, before_JPX, self._experts(micro))
            self.state.advance_schedule()
        return self._finish(update)

    def _prepare(
        self, groups: Sequence[TrajectoryGroup], credits: Sequence[Sequence[Credit]], *, version: int
    ) -> StepUpdate:
        """Draw and plan the minibatches of a step, and compute their anchors and the state before its updates."""
        epochs = range(self._config.epochs)
        drawn = [each for epoch in epochs for each in self.draw(groups, credits, version=version, epoch=epoch)]
        minibatches = [
            minibatch._replace(seed=derive_seed(self._seed, "minibatch", version, number))
            for number, minibatch in enumerate(drawn)
        ]
        plans = [self.plan(minibatch) for minibatch in minibatches]
        anchors = self._anchor_states(minibatches, plans, version=version)
        known_versions = frozenset({version, *self.kept.versions})
        self.kept.keep(version)
        self.state.wrapped.train()
        self.diagnostics = TokenDiagnostics()
        first_experts = self._first_experts(minibatches[0]) if self._is_routed and plans[0] else None
        demonstrations = [self.plan_demonstrations(minibatch) for minibatch in minibatches]
        parts = zip(minibatches, plans, anchors, demonstrations, strict=True)
        return StepUpdate(
            version=version,
            minibatches=[PlannedMinibatch(*of_minibatch) for of_minibatch in parts],
            known_versions=known_versions,
            line_search=KLLineSearch(self.state, target=self._config.target_kl),
            first_experts=first_experts,
        )

    def _step(
        self, update: StepUpdate, planned: PlannedMinibatch, check_agreement: Callable[[float], None] | None
    ) -> None:
        """Update the policy by one minibatch that has trained tokens, or demonstrations."""
        state = self.state
        gradient = self._bounded_gradient(update, planned)
        stats = gradient.stats
        self.diagnostics.add(planned.minibatch.pairs, gradient.observations)
        if check_agreement is not None and planned.passes and stats.versions.keys() <= {update.version}:
            check_agreement(stats["engine_distance_T"].mean)
        if not math.isfinite(stats.grad_norm):
            raise TrainingError(
                f"step {update.version + 1}: the gradient is not finite. The last checkpoint is whole: lower "
                "train.learning_rate and resume from it"
            )
        update.clip_stats.append(gradient.clip_stats)
        state.calibration = state.calibration.updated(gradient.clip_stats, ClipTarget.from_config(self.loss))
        if stats.grad_norm > 0:  # else AdamW would move by momentum alone, and forget how large gradients are
            if update.num_updates == 0 and update.line_search.target is not None:
                update.sample = self._sample(update, planned.minibatch, gradient.observations)
            share = effective_samples(stats) if self._config.ess_scaling else 1.0
            update.line_search.keep_weights()
            stats = replace(stats, learning_rate=state.update(rate_factor=math.sqrt(share)))
            update.num_updates += 1
        update.stats.append(stats)
        state.optimizer.zero_grad()

    def _sample(
        self, update: StepUpdate, minibatch: CreditedMinibatch, observations: Observations
    ) -> tuple[list[TrainingPass], list[AnchorState]]:
        """Return passes over a sample of a minibatch, and the log-probabilities that its gradient's passes observed."""
        passes = self.plan(minibatch, share=min(1.0, SAMPLED_SHARE * len(update.minibatches)))
        return passes, known_anchors(passes, observations.column("token_T"), observations.column("engine_difference_T"))

    def _bounded_gradient(self, update: StepUpdate, planned: PlannedMinibatch) -> Gradient:
        """Return the gradient of a minibatch, after the update before it was shortened to the bound on the divergence."""
        add_gradients = partial(
            self.add_gradients,
            planned.passes,
            planned.anchors,
            demonstrations=planned.demonstrations,
            version=update.version,
            is_updated=update.num_updates > 0,
        )
        gradient = add_gradients()
        if update.num_updates == 0:
            return gradient
        engine = divergence(update.stats[0])  # before the first update

        def measure() -> float:
            return self.measure(planned.passes, planned.anchors, version=update.version).mean - engine

        if update.line_search.backtrack(divergence(gradient.stats) - engine, measure):
            self.state.optimizer.zero_grad()
            gradient = add_gradients()
        return gradient

    def _finish(self, update: StepUpdate) -> dict[str, float]:
        """Bound the last update of a step; return the step's metrics."""
        if update.sample is not None:
            passes, anchors = update.sample

            def measure() -> float:
                return self.measure(passes, anchors, version=update.version).mean

            update.line_search.backtrack(measure(), measure)
        num_skipped = float(len(update.minibatches) - update.num_updates)
        counts = {
            "updates": float(update.num_updates),
            "skipped_minibatches": num_skipped,
            **update.line_search.metrics(),
        }
        stats = update.stats
        if not stats:  # no token was computed: there is nothing to average
            return counts
        metrics = update_metrics(stats, current_version=update.version) | first_metrics(stats[0]) | counts
        if self.loss.anchor == "sampled":
            metrics |= anchor_metrics(stats, known=update.known_versions)
        if self.loss.trust == "calibrated":
            metrics |= range_metrics(self.state.calibration, update.clip_stats)
        return metrics | update.expert_metrics

    def draw(
        self, groups: Sequence[TrajectoryGroup], credits: Sequence[Sequence[Credit]], *, version: int, epoch: int = 0
    ) -> list[CreditedMinibatch]:
        """Return the minibatches of an epoch, without failed trajectories and those of which credit keeps no token."""
        trained = [
            (number, trajectory, credit)
            for number, (group, of_group) in enumerate(zip(groups, credits, strict=True))
            for trajectory, credit in zip(group.trajectories, of_group, strict=True)
            if not trajectory.failed and credit.keep_T.any()
        ]
        is_imitated = self.loss.nll is not None and self.loss.nll.of == "successes"
        drawn = draw_minibatches(
            [number for number, _, _ in trained],
            has_gradient_I=[
                self.loss.is_dense
                or bool(credit.advantages_T[credit.keep_T].any())
                or (is_imitated and bool(trajectory.reported("success")))
                for _, trajectory, credit in trained
            ],
            num_minibatches=self._config.num_minibatches,
            rng=np.random.default_rng(derive_seed(self._seed, "minibatches", version, *[epoch] * (epoch > 0))),
        )
        return [
            CreditedMinibatch([trained[i][1:] for i in (*computed, *counted)], len(computed))
            for computed, counted in drawn
        ]

    def plan(self, minibatch: CreditedMinibatch, *, share: float | None = None) -> list[TrainingPass]:
        """Return this rank's passes over a minibatch; or over a sample of it, of a share of its computed tokens."""

        def shares() -> list[list[tuple[PassTokens, LossColumns]]]:
            tokens, columns = self._batch(minibatch)
            planner = self._planner
            assign = planner.assign if share is None else partial(planner.sample, share=share)
            of_all = assign(tokens, num_processes=num_processes(), trajectories=range(minibatch.num_computed))
            return [[(each, columns.select(each.token_T)) for each in share] for share in of_all]

        passes = [(self._planner.lay_out(tokens), columns) for tokens, columns in scatter(shares)]
        return [TrainingPass(micro, columns.map(micro.to_device)) for micro, columns in passes]

    def plan_demonstrations(self, minibatch: CreditedMinibatch) -> list[DemonstrationPass]:
        """Return this rank's passes over the demonstrations of a minibatch; none if `loss.nll` imitates none.

        Raises:
            ConfigError: if there are no demonstrations to imitate.
        """
        nll = self.loss.nll
        if nll is None or nll.of != "demonstrations":
            return []
        if not self.demonstrations:
            raise ConfigError("loss.nll: of: demonstrations, and Learner.demonstrations is empty; assign some to it")

        def shares() -> list[list[tuple[PassTokens, Tensor]]]:
            chosen = draw_demonstrations(self.demonstrations, num=nll.batch_size, seed=minibatch.seed)
            tokens = demonstrated_tokens(chosen)
            weight_T = aggregation_weights(
                self.loss.aggregation,
                trajectory_T=tokens.trajectory_T,
                turn_T=tokens.turn_T,
                constant_length=self.loss.constant_length,
            )
            of_all = self._planner.assign(tokens, num_processes=num_processes())
            return [[(each, torch.from_numpy(weight_T[each.token_T])) for each in share] for share in of_all]

        passes = [(self._planner.lay_out(tokens), weight_T) for tokens, weight_T in scatter(shares)]
        return [DemonstrationPass(micro, micro.to_device(weight_T)) for micro, weight_T in passes]

    def _batch(self, minibatch: CreditedMinibatch) -> tuple[TokenBatch, LossColumns]:
        trajectories = [trajectory for trajectory, _ in minibatch.pairs]
        credits = [credit for _, credit in minibatch.pairs]
        batch = make_batch(
            trajectories,
            credits,
            unit=self.loss.unit,
            aggregation=self.loss.aggregation,
            constant_length=self.loss.constant_length,
        )
        return add_terms(batch, trajectories, credits, config=self.loss, seed=minibatch.seed)

    def add_gradients(
        self,
        plan: Sequence[TrainingPass],
        anchors: Sequence[AnchorState],
        *,
        version: int,
        demonstrations: Sequence[DemonstrationPass] = (),
        is_updated: bool = True,
    ) -> Gradient:
        """Accumulate and clip a minibatch's gradient. `is_updated`: an update of the step came before (for calibration)."""
        observations = Observations()
        regions = [
            trust_region(self.loss, each.columns, calibration=self.state.calibration, version=version) for each in plan
        ]
        passes: list[tuple[MicroBatch, AnchorState, Callable[[], Tensor]]] = [
            (each.micro, before, partial(self._pass_loss, each, before, region, observations, version))
            for each, before, region in zip(plan, anchors, regions, strict=True)
        ]
        passes += [
            (each.micro, AnchorState(), partial(self._demonstration_loss, each, observations))
            for each in demonstrations
        ]
        norms = list[float]()
        with reading_together():  # after the last pass: a read before would leave a GPU without work
            with self.state.policy.rounding():
                for number, (micro, before, compute_loss) in enumerate(passes, 1):
                    check_interrupt()
                    with (
                        self._accumulating(is_last=number == len(passes)),
                        attending(self.state.policy.model, self._layout),
                        self._routing(micro, before),
                    ):
                        loss = compute_loss()
                        # Ranks average their gradients; the loss is a sum over all of them.
                        self._accelerator.backward(loss * self._accelerator.num_processes)
            norm = self._accelerator.clip_grad_norm_(self.state.wrapped.parameters(), self._config.max_grad_norm)
            read(norm.full_tensor() if isinstance(norm, DTensor) else norm, norms.append)
        is_calibrated = self.loss.trust == "calibrated"
        target = ClipTarget.from_config(self.loss)
        own = clip_stats(observations, target, version=version, is_updated=is_updated) if is_calibrated else {}
        stats, clips = zip(*all_gather([(MinibatchStats.from_observations(observations), own)]), strict=True)
        merged = replace(MinibatchStats.merge(stats), grad_norm=norms[0], learning_rate=self.state.learning_rate)
        return Gradient(merged, merge_clip_stats(clips), observations)

    def measure(self, plan: Sequence[TrainingPass], anchors: Sequence[AnchorState], *, version: int) -> Sums:
        """Return the divergence of the present weights from those before the step, over the tokens of all ranks' passes."""
        own = Sums()
        for (micro, columns), before in zip(plan, anchors, strict=True):
            check_interrupt()
            with torch.no_grad(), self._routing(micro, before):
                logprobs_T = self._forward(self.state.wrapped, micro)[0]
            difference_T, is_fresh_T = logprobs_T - columns.behavior_T, columns.version_T == version
            moved_T = policy_change(logprobs_T, before, difference_T, is_fresh_T)
            own = own.plus(Sums.from_values(divergence_terms(moved_T.double().cpu().numpy())))
        return reduce(Sums.plus, all_gather([own]))

    def _accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate on this rank, and at the last pass are averaged over ranks.

        Sharded gradients are reduced over ranks in every pass: a rank has no room for all gradients.
        """
        return nullcontext() if is_last or self.state.is_sharded else self._accelerator.no_sync(self.state.wrapped)

    def _anchor_states(
        self, minibatches: list[CreditedMinibatch], plans: list[list[TrainingPass]], *, version: int
    ) -> list[list[AnchorState]]:
        """Return the anchor of each pass before the first update, computed by the same plan and precision as in training.

        Nothing is computed for the first minibatch: there the policy itself is the anchor, exactly, whatever the noise of a
        second pass. With `anchor: behavior` nothing is computed at all, unless the step's divergence is bounded and tokens
        are stale: then a sample of the other minibatches is, at which the divergence is measured. If all tokens are fresh,
        the behavior log-probabilities measure it.
        """
        of_behavior = self.loss.anchor == "behavior"
        is_bounded = self._config.target_kl is not None
        is_stale = is_bounded and from_rank_zero(lambda: any(minibatch.is_stale(version) for minibatch in minibatches))
        if of_behavior and not is_stale:
            return [[AnchorState() for _ in plan] for plan in plans]
        self.state.wrapped.train()
        anchors = [[AnchorState(is_start=True) for _ in plans[0]]]
        if of_behavior:
            return anchors + [self._sampled_anchors(*each) for each in zip(minibatches[1:], plans[1:], strict=True)]
        anchors += map(self._current_anchors, plans[1:])
        return self._with_stale(plans, anchors, version=version) if self.loss.anchor == "sampled" else anchors

    def _sampled_anchors(self, minibatch: CreditedMinibatch, plan: list[TrainingPass]) -> list[AnchorState]:
        """Return the anchor of each pass under the present weights, known for a sample of the minibatch."""
        passes = self.plan(minibatch, share=SAMPLED_SHARE)
        differences = [
            (anchor.logprobs_T - columns.behavior_T).cpu().numpy()
            for (_, columns), anchor in zip(passes, self._current_anchors(passes), strict=True)
            if anchor.logprobs_T is not None
        ]
        token_T = np.concatenate([np.empty(0), *(micro.token_T for micro, _ in passes)])
        return known_anchors(plan, token_T, np.concatenate([np.empty(0), *differences]))

    def _current_anchors(self, plan: Sequence[TrainingPass]) -> list[AnchorState]:
        """Return the anchor of each pass under the present weights."""
        found = []
        with torch.no_grad(), reading_together():
            for micro, _ in plan:
                check_interrupt()
                with self._routing(micro, AnchorState()) as experts:
                    logprobs_T = self._forward(self.state.wrapped, micro)[0]
                is_replayed = self.loss.routing_replay == "trainer"
                found.append(AnchorState(logprobs_T, experts_JPX=experts[0].cpu() if is_replayed else None))
        return found

    def _with_stale(
        self, plans: list[list[TrainingPass]], anchors: list[list[AnchorState]], *, version: int
    ) -> list[list[AnchorState]]:
        """Add log-probabilities of stale tokens under the weights that sampled them.

        If those weights are not kept, they are the engine's.
        """
        passes = list(chain(*plans))
        logprobs = [columns.behavior_T.clone() for _, columns in passes]
        own = {int(earlier) for _, columns in passes for earlier in columns.version_T.unique()}
        for earlier in sorted(set(chain(*all_gather([own]))) & self.kept.versions - {version}):
            with self.kept.at(earlier), torch.no_grad():
                for (micro, columns), logprobs_T in zip(passes, logprobs, strict=True):
                    check_interrupt()
                    is_its_own_T = columns.version_T == earlier
                    if is_its_own_T.any() or self._accelerator.num_processes > 1:  # a pass takes all of them
                        with self._routing(micro, AnchorState()):
                            recomputed_T = self._forward(self.state.wrapped, micro)[0]
                        logprobs_T[is_its_own_T] = recomputed_T[is_its_own_T].to(logprobs_T.dtype)
        found = iter(zip(passes, logprobs, strict=True))
        return [
            [
                anchor._replace(stale=StaleTokens(columns.version_T != version, logprobs_T))
                for anchor, ((_, columns), logprobs_T) in zip(of_minibatch, found, strict=False)
            ]
            for of_minibatch in anchors
        ]

    def _routing(self, micro: MicroBatch, anchor: AnchorState) -> AbstractContextManager[list[Tensor]]:
        """Return a context that records the experts of a pass, and replays the engine's or the anchor's if known."""
        if not self._is_routed:
            return nullcontext([])
        experts_JPX = anchor.experts_JPX if micro.experts_JPX is None else micro.experts_JPX
        if experts_JPX is None:
            return recording(self.state.policy.model)
        return replaying(self.state.policy.model, experts_JPX)

    def _first_experts(self, minibatch: CreditedMinibatch) -> tuple[MicroBatch, Tensor]:
        """Return the first pass that a single rank would make over a minibatch, and its experts: the same on all ranks."""

        def first() -> PassTokens:
            tokens, _ = self._batch(minibatch)
            return self._planner.assign(tokens, trajectories=range(minibatch.num_computed))[0][0]

        micro = self._planner.lay_out(from_rank_zero(first))
        return micro, self._experts(micro)

    def _experts(self, micro: MicroBatch) -> Tensor:
        """Return the experts that the present weights choose in a pass: (J, P, X)."""
        with torch.no_grad(), recording(self.state.policy.model) as experts:
            self._forward(self.state.wrapped, micro)
        return experts[0]

    def _forward(self, policy: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        with self._accelerator.autocast():
            logprobs_T, entropy_T = policy(micro.inputs, micro.slot_T, micro.target_T, self._temperature)
        return logprobs_T, entropy_T

    def _pass_loss(
        self,
        training_pass: TrainingPass,
        anchor: AnchorState,
        trust: TrustRegion,
        observations: Observations,
        version: int,
    ) -> Tensor:
        micro, columns = training_pass
        logprobs_T, entropy_T = self._forward(self.state.wrapped, micro)
        observations.add(entropy_T=entropy_T, token_T=torch.from_numpy(micro.token_T))
        reference_T = None
        if self.state.reference is not None and self.loss.has_kl_loss:
            with torch.no_grad():
                reference_T, _ = self._forward(self.state.reference, micro)
        return micro_batch_loss(
            logprobs_T,
            columns,
            config=self.loss,
            observations=observations,
            trust=trust,
            anchor=anchor,
            version=version,
            reference_logprobs_T=reference_T,
            entropy_T=entropy_T if self.loss.entropy_coefficient else None,
        )

    def _demonstration_loss(self, demonstrated: DemonstrationPass, observations: Observations) -> Tensor:
        assert self.loss.nll is not None, "no demonstrations are planned without"
        logprobs_T, _ = self._forward(self.state.wrapped, demonstrated.micro)
        loss = nll_loss(logprobs_T, weight_T=demonstrated.weight_T, coefficient=self.loss.nll.coefficient)
        observations.add_demonstrated(logprobs_T)
        read(loss, observations.add_loss)
        return loss
