"""Updates that take the experts which an engine told (`loss.routing_replay: engine`), in every layout.

`L` positions of a row, `J` routers, `P` slots of a pass, `X` experts chosen at a slot, `N` tokens, `T` trained tokens.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl import Credit, Trajectory, TrajectoryGroup
from agentrl.errors import ConfigError
from agentrl.learn.config import LossConfig
from agentrl.learn.learner import Learner
from agentrl.learn.tokens import rows_of
from agentrl.models.moe import UNKNOWN, experts_of, recording, replaying
from agentrl.policy.config import Layout
from agentrl.policy.layout import attending
from tests.support.each import each
from tests.support.learners import make_learner, weights
from tests.support.trajectories import VOCABULARY, some_groups

each_layout = pytest.mark.parametrize("layout", get_args(Layout))
GROUPS = some_groups([4, 3, 4])
RNG = np.random.default_rng(0)
CREDITS = [[Credit.from_tokens(t, RNG.normal(size=t.num_action_tokens)) for t in g.trajectories] for g in GROUPS]


def mixture(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.2,
        experts_implementation="eager",  # type: ignore[call-arg]  # the other takes no float64
    )
    return Qwen3MoeForCausalLM(config).double()


def chosen_of(model: Any, ids_L: Any) -> Tensor:
    """The experts of each token of a row, by a plain pass: (J, L, X)."""
    with torch.no_grad(), recording(model) as passes:
        model(torch.from_numpy(np.asarray(ids_L))[None])
    return passes[0]


def told_by(model: Any, groups: Sequence[TrajectoryGroup], *, unknown: Sequence[int] = ()) -> list[TrajectoryGroup]:
    """The groups as an engine with this model would have sampled them; of turns with these numbers it told nothing."""
    experts = experts_of(model)
    assert experts is not None

    def told(trajectory: Trajectory) -> Trajectory:
        turns, number = [], 0
        for segment, row in zip(trajectory.segments(), rows_of(trajectory.turns), strict=True):
            chosen_LJX, end = chosen_of(model, row.ids_L).transpose(0, 1).numpy(), 0
            for turn in segment:
                begin, end = max(0, end - 1), end + len(turn.observation_ids) + len(turn.action_ids)
                packed = b"" if number in unknown else experts.pack(chosen_LJX[begin : end - 1])
                turns.append(replace(turn, experts=packed))
                number += 1
        return replace(trajectory, turns=tuple(turns))

    return [replace(group, trajectories=tuple(map(told, group.trajectories))) for group in groups]


def learner_of(model: Any, layout: Layout = "tree", **loss: Any) -> Learner:
    settings = LossConfig(trust="fixed", routing_replay="engine", **loss)
    return make_learner(
        model=copy.deepcopy(model), loss=settings, layout=layout, num_minibatches=2, max_tokens_per_micro_batch=150
    )


@each_layout
def test_each_slot_of_a_pass_has_the_experts_of_its_token(layout: Layout) -> None:
    model, learner = mixture(), learner_of(mixture(), layout)
    passes = list(chain(*map(learner.plan, learner.draw(told_by(model, GROUPS), CREDITS, version=1))))
    assert len(passes) > 2
    for micro, _ in passes:
        assert micro.experts_JPX is not None
        own_JPX = learner._experts(micro)
        is_told_P = (micro.experts_JPX != UNKNOWN).all(-1).all(0)
        assert is_told_P[micro.slot_T].all()
        told_JPX, own_JPX = (each[:, is_told_P].sort(-1)[0] for each in (micro.experts_JPX, own_JPX))
        assert torch.equal(told_JPX, own_JPX)


@each_layout
def test_log_probabilities_are_those_of_the_told_experts_under_the_present_weights(layout: Layout) -> None:
    engine, present = mixture(0), mixture(1)
    learner, groups = learner_of(present, layout), told_by(engine, GROUPS)
    found: dict[tuple[int, ...], float] = {}
    for minibatch in learner.draw(groups, CREDITS, version=1):
        plan = learner.plan(minibatch)
        tokens, _ = learner._batch(minibatch)
        for (micro, _), before in zip(plan, learner._current_anchors(plan), strict=True):
            assert before.logprobs_T is not None
            for token, logprob in zip(micro.token_T.tolist(), before.logprobs_T.tolist(), strict=True):
                context = tokens.rows[tokens.row_T[token]][: tokens.position_T[token] + 2]
                found[tuple(context.tolist())] = logprob
    free = 0.0
    for row in (row for g in groups for t in g.trajectories for row in rows_of(t.turns)):
        ids_1L = torch.from_numpy(row.ids_L)[None]
        with torch.no_grad():
            plain_LV = present(ids_1L).logits[0].log_softmax(-1)
            with replaying(present, chosen_of(engine, row.ids_L)):
                expected_LV = present(ids_1L).logits[0].log_softmax(-1)
        for position in row.positions_T.tolist():
            token, logprob = row.ids_L[position], found.pop(tuple(row.ids_L[: position + 1].tolist()), None)
            if logprob is not None:
                assert logprob == pytest.approx(float(expected_LV[position - 1, token]), abs=1e-9)
                free = max(free, abs(logprob - float(plain_LV[position - 1, token])))
    assert not found
    assert free > 0.01  # its own experts would have given others


def test_gradients_are_those_of_the_told_experts() -> None:
    """By every layout the same, also where layers run again; other experts give others."""
    engine, present = mixture(0), mixture(1)
    groups, moved = told_by(engine, GROUPS), []
    for layout in get_args(Layout):
        for runs_again in (False, True):
            learner = learner_of(present, layout)
            if runs_again:
                learner.state.policy.model.gradient_checkpointing_enable({"use_reentrant": False})
            (plan, *_) = [learner.plan(m) for m in learner.draw(groups, CREDITS, version=1)]
            learner.add_gradients(plan, learner._current_anchors(plan), version=1)
            moved.append(torch.cat([p.grad.flatten() for p in learner.state.policy.parameters() if p.grad is not None]))
    for other in moved[1:]:
        torch.testing.assert_close(other, moved[0], rtol=1e-6, atol=1e-8)
    learner = learner_of(present)
    (plan, *_) = [learner.plan(m) for m in learner.draw(GROUPS, CREDITS, version=1)]
    with attending(learner.state.policy.model, "tree"):
        learner.add_gradients(plan, learner._current_anchors(plan), version=1)
    own = torch.cat([p.grad.flatten() for p in learner.state.policy.parameters() if p.grad is not None])
    assert (own - moved[0]).abs().max() > 1e-3 * moved[0].abs().max()


@pytest.mark.slow
@each("anchor", ["behavior", "recomputed", "sampled"])
def test_where_nothing_is_told_routers_choose_themselves(anchor: str) -> None:
    replayed, free = learner_of(mixture(), anchor=anchor), learner_of(mixture(), anchor=anchor)
    told, silent = told_by(mixture(), GROUPS), told_by(mixture(), GROUPS, unknown=range(9))
    # The first minibatch is computed with the engine's own weights: experts that are told are those chosen anyway.
    first, second = (
        learner.update(groups, CREDITS, version=1) for learner, groups in ((replayed, told), (free, silent))
    )
    assert (first["moe/replayed"], first["moe/unlike_engine"]) == (1, 0)
    assert second["moe/replayed"] == 0
    assert "moe/unlike_engine" not in second
    assert first["first/engine_difference"] == pytest.approx(second["first/engine_difference"], rel=1e-9)
    assert not torch.equal(weights(replayed), weights(free))  # in the second one they are not


def test_a_step_tells_how_far_engine_and_trainer_are_apart() -> None:
    groups = told_by(mixture(1), GROUPS, unknown=[1])
    metrics = learner_of(mixture(0)).update(groups, CREDITS, version=1)
    assert 0.3 < metrics["moe/replayed"] < 0.95
    assert 0.3 < metrics["moe/unlike_engine"] < 1


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^loss\.routing_replay: Qwen3ForCausalLM is no mixture of experts; set it to none"
    ):
        make_learner(loss=LossConfig(routing_replay="engine"))
