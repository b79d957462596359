"""Updates of the policy from credited groups, on a tiny model. `T` action tokens."""

import copy
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl import Credit, StopReason, Trajectory, TrajectoryGroup, Turn
from agentrl.errors import ConfigError, TrainingError
from agentrl.learn import learner as learner_module
from agentrl.learn.batch import mask_stale
from agentrl.learn.config import LossConfig, TrainConfig
from agentrl.learn.health import signs
from agentrl.learn.learner import CreditedMinibatch, Learner, TrainingPass
from agentrl.learn.line_search import KLLineSearch
from agentrl.learn.metrics import MinibatchStats, divergence, first_metrics, rollout_metrics, update_metrics
from agentrl.learn.micro_batch_loss import AnchorState
from agentrl.learn.plan import Planner
from agentrl.learn.policy_state import PolicyState
from agentrl.models import moe as routing
from agentrl.policy.config import Layout, LoraSettings
from agentrl.policy.model import Policy
from tests.support.each import each
from tests.support.interrupts import After, run_with
from tests.support.learners import make_learner, weights
from tests.support.played import contexts
from tests.support.tallies import make_tally
from tests.support.trajectories import batch_of, some_groups, with_parents, without_parents

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
GROUPS = some_groups([4, 4, 4])
RNG = np.random.default_rng(0)
CREDITS = [[Credit.from_tokens(t, RNG.normal(size=t.num_action_tokens)) for t in g.trajectories] for g in GROUPS]


@each("layout", LAYOUTS)
def test_an_update_equals_a_plain_loop_over_trajectories(layout: Layout) -> None:
    settings = LossConfig(trust="fixed", unit="turn", clip_low=0.1, clip_high=0.1)
    learner = make_learner(loss=settings, layout=layout, num_minibatches=1, max_tokens_per_micro_batch=300)
    model = copy.deepcopy(learner.state.policy.model)
    metrics = learner.update(GROUPS, CREDITS, version=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    low, high = settings.clip_range()
    loss = torch.zeros(())
    for trajectory, credit in zip((t for group in GROUPS for t in group.trajectories), chain(*CREDITS), strict=True):
        ids: list[int] = []
        advantages = iter(credit.advantages_T.tolist())
        for turn in trajectory.turns:
            ids = [*(ids if turn.extends else ()), *turn.observation_ids]
            start = len(ids)
            ids += turn.action_ids
            table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            logprobs = torch.stack([table[start + j - 1, token] for j, token in enumerate(turn.action_ids)])
            log_ratio = (logprobs - torch.tensor(turn.behavior_logprobs)).mean().detach()
            for logprob in logprobs:
                advantage = next(advantages)
                ratio = log_ratio.exp() * (logprob - logprob.detach()).exp()
                term = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
                loss = loss - term / (12 * trajectory.num_action_tokens)
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    expected = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    # Adam's first step is lr * sign(gradient) but for tiny gradients, so float32 noise shows where those cross zero.
    moved = (weights(learner) - expected).abs()
    assert 0 < metrics["clip/tokens"] < 1
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    assert metrics["grad_norm"] == pytest.approx(float(grad_norm), rel=1e-5)
    assert (moved < 1e-5).double().mean() > 0.999


@pytest.mark.parametrize("layout", get_args(Layout))
def test_lines_of_several_agents_are_trained_as_contexts_of_their_own_are(layout: Layout) -> None:
    played = [with_parents([None, None, 0, 1, 0, 2, 3, 4], seed=seed) for seed in (1, 2)]
    moved = []
    for trajectories in (played, [without_parents(t) for t in played]):
        rng = np.random.default_rng(0)
        credits = [[Credit.from_tokens(t, rng.normal(size=t.num_action_tokens)) for t in trajectories]]
        learner = make_learner(is_double=True, layout=layout)
        before = weights(learner)
        learner.update([TrajectoryGroup(group_id="g", trajectories=tuple(trajectories))], credits, version=1)
        moved.append(weights(learner) - before)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-6, atol=1e-12)
    assert moved[0].abs().max() > 1e-3


def test_layers_that_run_again_in_the_backward_pass_change_nothing() -> None:
    once, again = make_learner(), make_learner()
    again.state.policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert again.update(GROUPS, CREDITS, version=1) == pytest.approx(once.update(GROUPS, CREDITS, version=1), rel=1e-5)
    torch.testing.assert_close(weights(again), weights(once), rtol=1e-5, atol=1e-5)


def test_a_failed_episode_changes_neither_loss_nor_weights() -> None:
    with_failure, without = make_learner(), make_learner()
    lost = replace(GROUPS[0].trajectories[0], trajectory_id="lost", stop_reason=StopReason.ENV_ERROR)
    group = replace(GROUPS[0], trajectories=(*GROUPS[0].trajectories, lost))
    expected = without.update(GROUPS, CREDITS, version=1)
    credits = [[*CREDITS[0], Credit.uniform(lost, 1.0)], *CREDITS[1:]]
    got = with_failure.update([group, *GROUPS[1:]], credits, version=1)
    assert got == expected
    assert torch.equal(weights(with_failure), weights(without))


def failing(groups: Sequence[TrajectoryGroup], failed: set[int]) -> list[TrajectoryGroup]:
    """The groups, in which the trajectories of these numbers failed."""
    number, found = 0, []
    for group in groups:
        members = []
        for trajectory in group.trajectories:
            members.append(replace(trajectory, stop_reason=StopReason.ENV_ERROR) if number in failed else trajectory)
            number += 1
        found.append(replace(group, trajectories=tuple(members)))
    return found


@settings(max_examples=50)  # a model each
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    failed=st.sets(st.integers(0, 9)),
    zero=st.sets(st.integers(0, 9)),
    excluded=st.sets(st.integers(0, 9)),
    regularizer=st.sampled_from(
        [{}, {"kl_coefficient": 0.1}, {"entropy_coefficient": 0.1}, {"entropy_coefficient": -0.1}]
    ),
)
def test_minibatches_compute_what_has_a_gradient_and_count_what_else_is_kept(
    sizes: list[int], failed: set[int], zero: set[int], excluded: set[int], regularizer: dict[str, float]
) -> None:
    groups = failing(some_groups(sizes), failed)
    everyone = [t for group in groups for t in group.trajectories]
    credit_of = {t.trajectory_id: Credit.uniform(t, float(number not in zero)) for number, t in enumerate(everyone)}
    credit_of |= {t.trajectory_id: Credit.excluded(t) for number, t in enumerate(everyone) if number in excluded}
    credits = [[credit_of[t.trajectory_id] for t in group.trajectories] for group in groups]
    learner = make_learner(num_minibatches=3, loss=LossConfig.model_validate(regularizer))
    minibatches = learner.draw(groups, credits, version=0)
    drawn = [pair for minibatch in minibatches for pair in minibatch.pairs]
    assert all(credit is credit_of[t.trajectory_id] for t, credit in drawn)
    kept = {t.trajectory_id for number, t in enumerate(everyone) if number not in failed | excluded}
    assert sorted(t.trajectory_id for t, _ in drawn) == sorted(kept)
    computed = [t.trajectory_id for m in minibatches for t, _ in m.pairs[: m.num_computed]]
    with_gradient = {name for name in kept if regularizer or credit_of[name].advantages_T.any()}
    if with_gradient:
        assert sorted(computed) == sorted(with_gradient)
    else:
        assert len(computed) == min(1, len(kept))


def test_minibatches_are_drawn_again_for_every_version() -> None:
    learner = make_learner(num_minibatches=3)

    def order(version: int) -> list[str]:
        return [
            t.trajectory_id for minibatch in learner.draw(GROUPS, CREDITS, version=version) for t, _ in minibatch.pairs
        ]

    assert order(1) == order(1)
    assert len({tuple(order(version)) for version in range(5)}) == 5


class ComputesAll(Learner):
    """Lays out what has no advantage as well."""

    def plan(self, minibatch: CreditedMinibatch, *, share: float | None = None) -> list[TrainingPass]:
        return super().plan(minibatch._replace(num_computed=len(minibatch.pairs)), share=share)


@each("aggregation", ["trajectory-mean", "turn-mean", "token-mean"])
def test_trajectories_without_an_advantage_are_not_computed_and_change_no_loss(aggregation: Any) -> None:
    zero = {("g0", 1), ("g0", 3), ("g2", 0), ("g2", 1), ("g2", 2), ("g2", 3)}
    credits = [
        [
            Credit.uniform(t, 0.0) if (t.group_id, i) in zero else credit
            for i, (t, credit) in enumerate(zip(g, c, strict=True))
        ]
        for g, c in zip([group.trajectories for group in GROUPS], CREDITS, strict=True)
    ]
    settings: dict[str, Any] = {"loss": LossConfig(aggregation=aggregation), "is_double": True, "num_minibatches": 2}
    learners = [make_learner(**settings), make_learner(**settings, learner_class=ComputesAll)]
    few, all_of_them = (learner.update(GROUPS, credits, version=1) for learner in learners)
    for name in ("loss", "grad_norm"):
        assert few[name] == pytest.approx(all_of_them[name], rel=1e-9)
    torch.testing.assert_close(weights(learners[0]), weights(learners[1]), rtol=1e-9, atol=1e-9)
    for minibatch in learners[0].draw(GROUPS, credits, version=1):
        assert minibatch.num_computed < len(minibatch.pairs)
        laid_out = sum(len(micro.token_T) for micro, _ in learners[0].plan(minibatch))
        assert laid_out == sum(t.num_action_tokens for t, _ in minibatch.pairs[: minibatch.num_computed])


LOSSES = [
    LossConfig(),
    LossConfig(anchor="recomputed", mismatch="truncate"),
    LossConfig(anchor="recomputed", mismatch="mask"),
    LossConfig(kl_coefficient=0.1),
]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_a_pass_without_a_trajectory_adds_nothing_to_loss_gradient_or_metrics(loss: LossConfig) -> None:
    learner = make_learner(loss=loss, has_reference=True)
    trajectories = GROUPS[0].trajectories[:1]
    tokens, columns = batch_of(trajectories, [Credit.uniform(t, 1.0) for t in trajectories])
    planner = Planner(max_tokens=1000, layout="tree")
    full, empty = (
        [
            TrainingPass(micro, columns.select(micro.token_T).map(micro.to_device))
            for micro in map(planner.lay_out, share)
        ]
        for share in planner.assign(tokens, num_processes=2)
    )
    tallies = [learner.add_gradients(full, [AnchorState()], version=0)[0]]
    learner.state.wrapped.zero_grad()
    for proximal_T in (None, torch.empty(0)):
        tallies.append(learner.add_gradients(empty, [AnchorState(proximal_T)], version=0)[0])
        assert tallies[-1].loss == 0
    for parameter in learner.state.policy.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    alone, joined = (
        {**update_metrics([tally], current_version=1), **first_metrics(tally)}
        for tally in (MinibatchStats.merge(tallies[:1]), MinibatchStats.merge(tallies))
    )
    assert joined == alone


def test_the_learning_rate_rises_over_its_warm_up_whatever_the_schedule() -> None:
    learner = make_learner(warmup_minibatches=8, num_minibatches=4)
    rates = [learner.update(GROUPS, CREDITS, version=version)["learning_rate"] for version in range(3)]
    assert rates == pytest.approx([3 / 8e2, 7 / 8e2, 1e-2])


def test_resuming_takes_the_recipes_rates_and_not_the_checkpoints(tmp_path: Path) -> None:
    early = make_learner()
    early.update(GROUPS, CREDITS, version=0)
    early.state.save(tmp_path)
    late = make_learner(learning_rate=1e-3, betas=(0.5, 0.6), weight_decay=0.25)
    late.state.load(tmp_path)
    assert torch.equal(weights(late), weights(early))
    (group,) = late.state.optimizer.param_groups
    for version in (1, 2):
        assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.5, 0.6), 0.25)
        assert late.update(GROUPS, CREDITS, version=version)["learning_rate"] == 1e-3


@each("now", [1, 2, 4, 8])
def test_a_schedule_stands_at_the_same_step_where_a_run_is_resumed_with_other_minibatches(
    now: int, tmp_path: Path
) -> None:
    early = make_learner(num_minibatches=4, warmup_minibatches=48)
    for version in (0, 1):
        early.update(GROUPS, CREDITS, version=version)
    early.state.save(tmp_path)
    late = make_learner(num_minibatches=now, warmup_minibatches=48)
    late.state.load(tmp_path)
    assert late.state.learning_rate == pytest.approx(1e-2 * (2 * now) / 48)


def test_a_run_is_not_resumed_with_an_optimizer_that_cannot_take_over_the_moments(tmp_path: Path) -> None:
    learner = make_learner()
    learner.state.save(tmp_path)
    file = tmp_path / "learner-0.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**state, "optimizer": "adamw_8bit"}), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"train\.optimizer: .* has the moments of adamw_8bit, which adamw cannot take"
    ):
        make_learner().state.load(tmp_path)


def test_a_checkpoint_of_adapters_leaves_out_what_is_frozen_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = LossConfig(kl_coefficient=0.1)
    whole, late, evaluated = (
        make_learner(loss=settings, has_reference=True, lora=LoraSettings(rank=2)) for _ in range(3)
    )
    before = weights(whole)
    whole.update(GROUPS, CREDITS, version=0)
    whole.state.keep_reference()
    (tmp_path / "reference").mkdir()
    whole.state.save_reference(tmp_path / "reference")
    whole.update(GROUPS, CREDITS, version=1)
    whole.state.save(tmp_path / "checkpoint")
    assert not torch.equal(weights(whole), before)
    saved = {name for file in tmp_path.rglob("*.safetensors") for name in load_file(file)}
    assert saved
    assert all(".lora_" in name for name in saved)
    evaluated.state.load_weights(tmp_path / "checkpoint")
    assert torch.equal(weights(evaluated), weights(whole))
    late.state.load_reference(tmp_path / "reference")
    late.state.load(tmp_path / "checkpoint")
    assert late.update(GROUPS, CREDITS, version=2) == whole.update(GROUPS, CREDITS, version=2)
    assert torch.equal(weights(late), weights(whole))


@each("loads", [PolicyState.load, PolicyState.load_weights, PolicyState.load_reference])
def test_a_run_is_not_resumed_with_adapters_where_it_had_none_or_the_other_way_round(
    loads: Callable[[PolicyState, Path], None], tmp_path: Path
) -> None:
    plain, adapted = make_learner(has_reference=True), make_learner(has_reference=True, lora=LoraSettings())
    plain.state.save(tmp_path / "plain")
    adapted.state.save(tmp_path / "adapted")
    for learner, name, how in ((adapted, "plain", "without"), (plain, "adapted", "with")):
        with pytest.raises(ConfigError) as caught:
            loads(learner.state, tmp_path / name)
        assert str(caught.value) == f"model.lora: {tmp_path / name} was trained {how} adapters; resume as the run began"


def excluded_all(groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
    return [[Credit.excluded(t) for t in group.trajectories] for group in groups]


def uniform_all(groups: Sequence[TrajectoryGroup], advantage: float) -> list[list[Credit]]:
    return [[Credit.uniform(t, advantage) for t in group.trajectories] for group in groups]


def lowered(turn: Turn) -> Turn:
    return replace(turn, behavior_logprobs=(-20.0,) * len(turn.action_ids))


def current(turn: Turn) -> Turn:
    return replace(turn, versions=(1,) * len(turn.action_ids))


LIKELIER = [
    replace(g, trajectories=tuple(replace(t, turns=tuple(map(lowered, t.turns))) for t in g.trajectories))
    for g in GROUPS
]
"""So much likelier by now than when they were sampled that an advantage above 0 pushes no token."""


@each(
    ("groups", "credits"),
    [
        pytest.param(GROUPS, uniform_all(GROUPS, 0.0), id="no advantage"),
        pytest.param(GROUPS, excluded_all(GROUPS), id="no token kept"),
        pytest.param(LIKELIER, uniform_all(GROUPS, 1.0), id="all clipped"),
        pytest.param([], [], id="no trajectory"),
    ],
)
def test_a_minibatch_without_a_gradient_moves_neither_weights_nor_the_optimizers_state(
    groups: list[TrajectoryGroup], credits: list[list[Credit]]
) -> None:
    learner = make_learner(num_minibatches=3, weight_decay=0.1)
    assert learner.update(GROUPS, CREDITS, version=0)["skipped_minibatches"] == 0
    before = copy.deepcopy((weights(learner), learner.state.optimizer.state_dict()["state"]))
    metrics = learner.update(groups, credits, version=1)
    assert (metrics["skipped_minibatches"], metrics.get("grad_norm", 0)) == (3, 0)
    assert torch.equal(weights(learner), before[0])
    torch.testing.assert_close(learner.state.optimizer.state_dict()["state"], before[1], rtol=0, atol=0)
    learner.update(GROUPS, CREDITS, version=2)
    assert not torch.equal(weights(learner), before[0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "loss", [LossConfig(), LossConfig(trust="calibrated"), LossConfig(anchor="sampled", mismatch="truncate")], ids=str
)
def test_a_step_in_which_no_token_is_computed_reports_counts_alone(loss: LossConfig) -> None:
    learner = make_learner(loss=loss, num_minibatches=3, target_kl=0.02)
    stale = mask_stale(GROUPS, CREDITS, oldest=9)
    assert learner.update(GROUPS, stale, version=9) == {"updates": 0, "skipped_minibatches": 3, "shortened_updates": 0}
    assert learner.update([], [], version=10) == {"updates": 0, "skipped_minibatches": 3, "shortened_updates": 0}


def test_steps_in_which_no_token_is_computed_are_no_collapse() -> None:
    learner = make_learner(num_minibatches=1)
    stale = mask_stale(GROUPS, CREDITS, oldest=9)
    rows = []
    for version in range(10):
        credits = CREDITS if version < 5 else stale
        earned = rollout_metrics(GROUPS, credits) | {"reward/spread": 0.3}
        rows.append(learner.update(GROUPS, credits, version=version) | earned)
    assert rows[-1]["credit/zero_advantage"] == 1  # of what is trained on
    assert "entropy" not in rows[-1]
    assert "collapse" not in signs(rows)


@pytest.mark.filterwarnings("error")
def test_skipped_minibatches_count_in_the_schedule() -> None:
    learner = make_learner(warmup_minibatches=9, num_minibatches=3)
    assert learner.update(GROUPS, excluded_all(GROUPS), version=0)["skipped_minibatches"] == 3
    assert learner.update(GROUPS, uniform_all(GROUPS, 0.0), version=1)["skipped_minibatches"] == 3
    metrics = learner.update(GROUPS, [CREDITS[0], *excluded_all(GROUPS[1:])], version=2)
    assert metrics["skipped_minibatches"] == 0
    assert metrics["learning_rate"] == pytest.approx(8 / 9e2)


def test_one_trajectory_is_compared_with_the_engine_where_none_has_an_advantage() -> None:
    told: list[float] = []
    groups = [
        replace(g, trajectories=tuple(replace(t, turns=tuple(map(current, t.turns))) for t in g.trajectories))
        for g in GROUPS
    ]
    metrics = make_learner(num_minibatches=3).update(
        groups, uniform_all(groups, 0.0), version=1, check_agreement=told.append
    )
    assert told == [metrics["first/engine_difference"]]
    assert told[0] > 1e-3
    assert metrics["entropy"] > 0


def test_a_gradient_that_is_not_finite_is_never_applied() -> None:
    learner = make_learner(loss=LossConfig(aggregation="constant", constant_length=1))
    before = weights(learner)
    huge = [[Credit.uniform(t, 1e38) for t in group.trajectories] for group in GROUPS]  # its square is not finite
    with pytest.raises(TrainingError, match=r"step 1: the gradient is not finite.*train\.learning_rate"):
        learner.update(GROUPS, huge, version=0)
    assert torch.equal(weights(learner), before)


@pytest.mark.slow
@pytest.mark.process
def test_an_update_that_is_interrupted_ends_before_the_next_pass() -> None:
    def update(event: After) -> int:
        """Return how many passes it made."""
        learner = make_learner(loss=LossConfig(anchor="sampled"), num_minibatches=3, target_kl=1e-6)
        passes = 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        learner.state.policy.register_forward_hook(count)
        before = weights(learner)
        with suppress(TrainingError):
            run_with(event, partial(learner.update, GROUPS, CREDITS, version=0))
        assert torch.equal(weights(learner), before) or passes > num_befores
        return passes

    num_befores = 2
    whole = update(After(1000))
    assert [update(After(num)) for num in range(whole)] == list(range(whole))


def make_moe_learner(**loss: Any) -> Learner:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=261,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.2,
    )
    train = TrainConfig(target_kl=None, device="cpu", learning_rate=1e-2, num_minibatches=3)
    policy = Policy(Qwen3MoeForCausalLM(config), layout="tree")
    return Learner(
        PolicyState(policy, accelerator=Accelerator(cpu=True), config=train),
        loss=LossConfig(**{"clip_low": 0.5, "clip_high": 0.5, "anchor": "recomputed", **loss}),
        config=train,
        temperature=1.0,
        seed=1,
    )


@pytest.mark.parametrize("anchor", ["behavior", "recomputed"])
def test_a_mixture_of_experts_is_trained_and_tells_how_many_experts_an_update_changes(anchor: str) -> None:
    learner = make_moe_learner(anchor=anchor)
    metrics = learner.update(GROUPS, CREDITS, version=1)
    assert 0.01 < metrics["moe/changed_experts"] < 0.9
    assert metrics["ratio/token_spread"] > 1.5 * metrics["ratio/spread"] > 0
    assert "moe/changed_experts" not in make_learner().update(GROUPS, CREDITS, version=1)


def test_routing_replay_takes_the_experts_of_the_weights_before_the_first_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[torch.Tensor] = []

    def replaying(model: Any, experts_JPX: torch.Tensor) -> Any:
        given.append(experts_JPX)
        return routing.replaying(model, experts_JPX)

    learner = make_moe_learner(unit="token", routing_replay="trainer")
    plans = [learner.plan(minibatch) for minibatch in learner.draw(GROUPS, CREDITS, version=1)]
    expected = []
    for plan in plans[1:]:  # the first is computed with those weights themselves
        for micro, _ in plan:
            with torch.no_grad(), routing.recording(learner.state.policy.model) as experts:
                learner.state.policy(micro.inputs, micro.slot_T, micro.target_T, 1.0)
            expected.append(experts[0])
    monkeypatch.setattr(learner_module, "replaying", replaying)
    metrics = learner.update(GROUPS, CREDITS, version=1)
    assert metrics["first/ratio_deviation"] == 0
    assert len(given) == len(expected) > 1
    assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))


def test_routing_replay_takes_a_mixture_of_experts_and_the_trainers_own_anchor() -> None:
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM is no mixture of experts; set it to none"):
        make_learner(loss=LossConfig(anchor="recomputed", routing_replay="trainer"))
    with pytest.raises(ValueError, match="routing_replay: trainer takes the trainer's experts, and anchor: behavior"):
        LossConfig(routing_replay="trainer")


def test_staleness_is_that_of_all_minibatches() -> None:
    old, new = make_tally(version_T=[2.0, 4.0]), make_tally(version_T=[5.0])
    for tallies in ([old, new], [new, old]):
        metrics = update_metrics(tallies, current_version=5)
        assert (metrics["staleness/mean"], metrics["staleness/max"]) == (4 / 3, 3)


def test_the_rate_follows_the_root_of_the_effective_sample_size_and_comes_back() -> None:
    plain, scaled = (make_learner(num_minibatches=1, ess_scaling=is_scaled) for is_scaled in (False, True))
    before = weights(plain)
    first, second = (learner.update(GROUPS, CREDITS, version=1) for learner in (plain, scaled))
    share = first["ratio/effective_samples"]
    assert 1 / 12 <= share < 0.9
    assert second["learning_rate"] == pytest.approx(1e-2 * share**0.5)
    assert first["learning_rate"] == scaled.state.learning_rate == scaled.state.optimizer.param_groups[0]["lr"] == 1e-2
    torch.testing.assert_close(weights(scaled) - before, (weights(plain) - before) * share**0.5, rtol=1e-3, atol=1e-6)


def test_a_step_moves_the_policy_no_further_than_its_target() -> None:
    recomputed = LossConfig(anchor="recomputed")
    plain, generous = (make_learner(num_minibatches=3, target_kl=target) for target in (None, 1e3))
    expected, same = (learner.update(GROUPS, CREDITS, version=1) for learner in (plain, generous))
    # Without the bound nothing computes how far stale tokens were from the policy before.
    assert same == expected | {"shortened_updates": 0.0, "kl/step": same["kl/step"]}
    assert torch.equal(weights(generous), weights(plain))
    far, near = (
        make_learner(loss=recomputed, num_minibatches=3, schedule="cosine", steps=9, target_kl=target)
        for target in (None, 1e-3)
    )
    free, bounded = (learner.update(GROUPS, CREDITS, version=1) for learner in (far, near))
    assert free["kl/step"] > 1e-2
    assert 0 < bounded["kl/step"] <= 1e-3
    assert bounded["shortened_updates"] == 3
    assert bounded["skipped_minibatches"] == 0
    assert near.state.learning_rate == far.state.learning_rate < 1e-2  # the schedule goes on as it would
    alone = make_learner(loss=recomputed, num_minibatches=1, target_kl=1e-3)
    shown = alone.update(GROUPS, CREDITS, version=1)
    assert (shown["shortened_updates"], shown["kl/step"]) == (1, 0)  # no minibatch shows the last update
    start = weights(make_learner())
    assert 0 < (weights(near) - start).norm() < (weights(far) - start).norm() / 2


def sampled_by(
    learner: Learner, trajectory: Trajectory, *, noise: float = 0.0, version: int | None = None
) -> Trajectory:
    """The same tokens as the policy would sample them; with noise, as another one of the version before would."""
    rng, turns = np.random.default_rng(0), []
    for turn, context_ids in zip(trajectory.turns, contexts(trajectory), strict=True):
        own_T = learner.logprobs(context_ids, turn.action_ids).numpy()
        behavior_T = own_T + noise * rng.normal(size=len(own_T))
        its_own = version if version is not None else 0 if noise else 1
        turns.append(replace(turn, behavior_logprobs=tuple(behavior_T.tolist()), versions=(its_own,) * len(own_T)))
    return replace(trajectory, turns=tuple(turns))


@pytest.mark.slow
@each("anchor", ["behavior", "recomputed", "sampled"])
def test_what_is_stale_is_no_movement_of_the_step(
    anchor: Literal["behavior", "recomputed", "sampled"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.learn.learner.SAMPLED_SHARE", 1.0)

    def updated(noise: float, *, num_minibatches: int = 3) -> dict[str, float]:
        """Update on groups of which one trajectory each is stale."""
        loss = LossConfig(trust="token", anchor=anchor)
        learner = make_learner(loss=loss, num_minibatches=num_minibatches, target_kl=0.02, learning_rate=3e-4)
        groups = [
            replace(
                group,
                trajectories=tuple(
                    sampled_by(learner, trajectory, noise=0.0 if number else noise)
                    for number, trajectory in enumerate(group.trajectories)
                ),
            )
            for group in GROUPS
        ]
        return learner.update(groups, CREDITS, version=1)

    fresh, stale = updated(0.0), updated(0.8)
    assert 0 < fresh["kl/step"] < 1e-2
    assert stale["kl/step"] == pytest.approx(fresh["kl/step"], rel=0.5)
    assert fresh["shortened_updates"] == stale["shortened_updates"] == 0
    assert updated(0.8, num_minibatches=1)["shortened_updates"] == 0


def test_an_update_is_halved_until_the_policy_is_within_reach_or_taken_back() -> None:
    learner = make_learner()
    before = weights(learner)

    for needed, left in ((0, 1.0), (2, 0.25), (99, 0.0)):
        reach = KLLineSearch(learner.state, target=1e-3)
        assert not reach.backtrack(9.0, lambda: 9.0)  # before the first update there is nothing to shorten
        reach.keep_weights()
        with torch.no_grad():
            for parameter in learner.state.policy.parameters():
                parameter.add_(1.0)
        shown = iter([*[1.0] * (needed - 1), *[0.0] * 9] if needed < 99 else [1.0] * 99)
        assert reach.backtrack(1.0 if needed else 0.0, partial(next, shown)) == (needed > 0)
        torch.testing.assert_close(weights(learner), before + left)
        assert reach.metrics() == {"shortened_updates": float(needed > 0)}
        with torch.no_grad():
            for parameter in learner.state.policy.parameters():
                parameter.sub_(left)


def test_an_update_that_two_minibatches_look_at_is_counted_once() -> None:
    learner = make_learner()
    reach = KLLineSearch(learner.state, target=1e-3)
    for num_shortened in (1, 2):
        reach.keep_weights()
        assert reach.backtrack(1.0, lambda: 0.0)
        assert reach.backtrack(1.0, lambda: 0.0)  # of a minibatch that follows one without an update
        assert reach.metrics() == {"shortened_updates": num_shortened}


def test_the_rate_that_is_told_is_that_of_the_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = some_groups([1] * 4, seed=1)
    credits = [[Credit.uniform(t, 1.0) for t in group.trajectories] for group in groups]
    learner = make_learner(
        loss=LossConfig(trust="fixed", anchor="recomputed"),
        num_minibatches=4,
        schedule="linear",
        steps=1,
        learning_rate=1e-2,
    )
    rates, update = list[float](), learner.state.update

    def watched(**settings: Any) -> float:
        rates.append(update(**settings))
        return rates[-1]

    monkeypatch.setattr(learner.state, "update", watched)
    metrics = learner.update(groups, credits, version=1)
    assert metrics["skipped_minibatches"] == 4 - len(rates) > 0, "the last ones are clipped whole"
    assert metrics["learning_rate"] == rates[-1]


def test_weights_before_an_update_take_the_place_of_those_before_the_last_one() -> None:
    learner = make_learner()
    reach = KLLineSearch(learner.state, target=1e-3)
    reach.keep_weights()
    first = [kept.data_ptr() for kept in reach._before or ()]
    with torch.no_grad():
        for parameter in learner.state.policy.parameters():
            parameter.add_(1.0)
    reach.keep_weights()
    second = reach._before or []
    assert [kept.data_ptr() for kept in second] == first
    for kept, parameter in zip(second, learner.state.policy.parameters(), strict=True):
        assert kept.device.type == "cpu"
        assert torch.equal(kept, parameter)


@pytest.mark.slow
@each("version", [0, 1])
def test_each_update_is_measured_at_tokens_whose_log_probabilities_before_the_step_are_known(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all tokens fresh, or all of them stale."""
    learner = make_learner(is_double=True, num_minibatches=2, target_kl=1e3, max_tokens_per_micro_batch=60)
    groups = [replace(g, trajectories=tuple(sampled_by(learner, t, version=0) for t in g.trajectories)) for g in GROUPS]
    monkeypatch.setattr(learner_module, "SAMPLED_SHARE", 1.0)
    first, second = ([t for t, _ in each.pairs] for each in learner.draw(groups, CREDITS, version=version))
    model = learner.state.policy.model
    with torch.no_grad():
        before = {t.trajectory_id: action_logprobs(model, t) for t in first + second}
    found, expected = list[float](), list[float]()

    def compare(self: KLLineSearch, divergence: float, measure: Callable[[], float]) -> bool:
        with torch.no_grad():
            moved = [action_logprobs(model, t) - before[t.trajectory_id] for t in (first if found else second)]
        expected.append(float((torch.cat(moved).expm1() - torch.cat(moved)).mean()))
        found.extend([divergence])
        assert measure() == pytest.approx(divergence, rel=1e-9)
        return False

    monkeypatch.setattr(KLLineSearch, "backtrack", compare)
    learner.update(groups, CREDITS, version=version)
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(found) == 2
    assert min(found) > 1e-6


def test_the_last_update_is_measured_at_an_eighth_of_the_tokens_and_without_a_pass_before_it() -> None:
    groups = some_groups([16])
    credits = [[Credit.uniform(t, 1.0 if n % 2 else -1.0) for n, t in enumerate(groups[0].trajectories)]]
    passes: dict[bool, list[int]] = {}
    for is_bounded in (False, True):
        learner = make_learner(num_minibatches=1, layout="packed", target_kl=1e3 if is_bounded else None)
        seen = passes.setdefault(is_bounded, [])
        learner.state.policy.register_forward_hook(lambda _, args, __, seen=seen: seen.append(args[0].ids_BL.numel()))
        learner.update(groups, credits, version=1)
    assert passes[True][:-1] == passes[False]
    assert 0 < passes[True][-1] <= sum(passes[False]) / 8


def test_the_divergence_of_a_minibatch_is_that_of_schulman() -> None:
    tally = make_tally(moved_T=[0.5, -1.0, math.nan, 0.0])
    expected = ((math.exp(0.5) - 1 - 0.5) + (math.exp(-1.0) - 1 + 1.0)) / 3
    assert divergence(tally) == pytest.approx(expected, rel=1e-12)
    assert divergence(MinibatchStats()) == 0


def action_logprobs(model: Any, trajectory: Trajectory) -> torch.Tensor:
    """Return the log-probabilities of all action tokens: (T,)."""
    found = []
    for turn, context_ids in zip(trajectory.turns, contexts(trajectory), strict=True):
        logits = model(torch.tensor([[*context_ids, *turn.action_ids]])).logits[0, len(context_ids) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(turn.action_ids)[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.slow
@each("anchor", ["behavior", "recomputed"])
def test_two_epochs_equal_a_plain_loop_over_their_minibatches(anchor: Literal["behavior", "recomputed"]) -> None:
    loss = LossConfig(unit="token", trust="fixed", clip_low=0.2, clip_high=0.3, anchor=anchor)
    learner = make_learner(
        loss=loss, is_double=True, num_minibatches=2, epochs=2, learning_rate=1e-3, schedule="linear", steps=2
    )
    model = copy.deepcopy(learner.state.policy.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    everyone = [t for group in GROUPS for t in group.trajectories]
    with torch.no_grad():  # before the first of all updates
        before = {t.trajectory_id: action_logprobs(model, t) for t in everyone}
    drawn = [learner.draw(GROUPS, CREDITS, version=1, epoch=epoch) for epoch in (0, 1)]
    members = [[{t.trajectory_id for t, _ in minibatch.pairs} for minibatch in of_epoch] for of_epoch in drawn]
    assert members[0] not in (members[1], members[1][::-1])
    assert [len(first | second) for first, second in members] == [12, 12]
    losses = []
    for number, minibatch in enumerate(chain(*drawn)):
        total = torch.zeros((), dtype=torch.float64)
        for t, credit in minibatch.pairs:
            behavior_T = torch.tensor([p for turn in t.turns for p in turn.behavior_logprobs], dtype=torch.float64)
            anchor_T = behavior_T if anchor == "behavior" else before[t.trajectory_id]
            ratio_T, advantage_T = (action_logprobs(model, t) - anchor_T).exp(), torch.tensor(credit.advantages_T)
            term_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(0.8, 1.3) * advantage_T)
            total = total - term_T.mean() / len(minibatch.pairs)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - number / 8)  # eight minibatches in the run's two steps
        optimizer.step()
        losses.append(total.item())
    metrics = learner.update(GROUPS, CREDITS, version=1)
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert metrics["skipped_minibatches"] == 0
    assert learner.state.schedule.last_epoch == 4
    expected = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    # Adam moves by the gradient's sign in its first step, also where the gradient is a rounding error.
    assert ((weights(learner) - expected).abs() < 1e-8).double().mean() > 0.999
