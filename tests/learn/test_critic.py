"""The critic learns returns, and leaves the policy alone. `T` action tokens of a batch, `K` turns."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.errors import TrainingError
from agentrl.learn.signals import CriticConfig
from agentrl.learn.signals.critic import Critic
from agentrl.learn.tokens import rows_of, with_ends_of_turns
from agentrl.policy.config import Layout, LocalModelConfig
from agentrl.policy.model import Policy
from agentrl.types import StopReason, Trajectory, Turn
from tests.support.each import each
from tests.support.interrupts import After, run_with
from tests.support.played import TINY, contexts, new_policy, play
from tests.support.signals import with_signals, without_signals

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
Kind = Literal["head", "separate"]
KINDS: tuple[Kind, ...] = ("head", "separate")


def new_critic(policy: Policy, *, gamma: float = 1.0, max_tokens: int = 1000, seed: int = 3, **config: Any) -> Critic:
    return Critic(policy, CriticConfig(**config), gamma=gamma, max_tokens=max_tokens, seed=seed)


@pytest.fixture(scope="module")
def played() -> list[Trajectory]:
    """Eight ragged trajectories, each of its own task, with turns that begin a new context."""
    return play(new_policy(), num=8)


def with_returns(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Pay at the end what the number in the prompt says: `The key is in box 2.`, say."""
    paid = []
    for trajectory in trajectories:
        box = int(trajectory.turns[0].observation[0]["content"].split()[-1][0])
        last = replace(trajectory.turns[-1], reward=float(box))
        paid.append(replace(trajectory, turns=(*trajectory.turns[:-1], last), truncated=False))
    return paid


def values_of(trajectory: Trajectory) -> list[float]:
    return [value for turn in trajectory.turns for value in turn.signals["values"]]


def plain_values(critic: Critic, trajectory: Trajectory) -> list[float]:
    """Return the value before each action token, and the one after the last, from one pass over one row for each turn."""
    values: list[float] = []
    for turn, context_ids in zip(trajectory.turns, contexts(trajectory), strict=True):
        with torch.no_grad():
            hidden_LD = critic._body(torch.tensor([[*context_ids, *turn.action_ids]])).last_hidden_state[0]
            values_L = critic._head(hidden_LD)[:, 0]
        values += values_L[len(context_ids) - 1 : -1].tolist()
    return [*values, float(values_L[-1])]


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_values_are_zero(kind: Kind, played: list[Trajectory]) -> None:
    measured = new_critic(new_policy(), model=kind).measure(played)
    for trajectory, original in zip(measured, played, strict=True):
        assert values_of(trajectory) == [0.0] * original.num_action_tokens
        assert trajectory.signals == {"values": 0.0}
        assert without_signals(trajectory) == original


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_read_before_each_token_and_the_final_one_after_the_last(
    kind: Kind, played: list[Trajectory]
) -> None:
    critic = new_critic(new_policy(), model=kind)
    critic.fit(critic.measure(with_returns(played)))
    assert any(not turn.extends for t in played for turn in t.turns)
    for trajectory in critic.measure(played):
        expected = plain_values(critic, trajectory)
        assert np.std(expected) > 1e-3
        found = [*values_of(trajectory), trajectory.signals["values"]]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_final_value_follows_a_turn_that_rewrote_history(played: list[Trajectory]) -> None:
    critic = new_critic(new_policy())
    critic.fit(critic.measure(with_returns(played)))
    cut = replace(played[0], turns=played[0].turns[:4])
    assert not cut.turns[3].extends
    (measured,) = critic.measure([cut])
    assert measured.signals["values"] == pytest.approx(plain_values(critic, cut)[-1], rel=1e-5)


def turn(num: int, reward: float) -> Turn:
    return Turn(
        observation_ids=(1, 2, 3),
        action_ids=tuple(range(10, 10 + num)),
        behavior_logprobs=(-1.0,) * num,
        versions=(0,) * num,
        reward=reward,
        signals={"values": (0.0,) * num},
    )


def trajectory_of(*turns: Turn, truncated: bool = False, final_value: float = 0.0) -> Trajectory:
    return Trajectory(
        group_id="g",
        trajectory_id="g/0",
        env_id="e",
        seed=0,
        turns=turns,
        stop_reason=StopReason.MAX_TURNS if truncated else StopReason.TERMINATED,
        truncated=truncated,
        signals={"values": final_value},
    )


THREE = (turn(2, 1.0), turn(3, 0.0), turn(1, 2.0))


@each(
    ("gamma", "truncated", "final_value", "returns_K"),
    [
        (1.0, False, 0.0, (3.0, 2.0, 2.0)),
        (0.5, False, 0.0, (1.5, 1.0, 2.0)),  # 2, 0 + 0.5 * 2, 1 + 0.5 * 1: the same for all tokens of a turn
        (0.0, False, 0.0, (1.0, 0.0, 2.0)),
        (0.5, True, 4.0, (2.0, 2.0, 4.0)),  # 2 + 0.5 * 4, 0 + 0.5 * 4, 1 + 0.5 * 2
        (0.5, False, 4.0, (1.5, 1.0, 2.0)),  # the task ended: nothing follows
    ],
)
def test_the_target_of_each_token_is_its_turns_discounted_return(
    gamma: float, truncated: bool, final_value: float, returns_K: tuple[float, ...]
) -> None:
    critic = new_critic(new_policy(), gamma=gamma, epochs=1, num_minibatches=1)
    trajectory = trajectory_of(*THREE, truncated=truncated, final_value=final_value)
    np.testing.assert_allclose(critic._returns(trajectory)[:-1], returns_K, rtol=1e-15)
    first, second, third = returns_K
    targets_T = np.array(
        [first, first, second, second, second, second, third, third]
    )  # and of what follows two of them
    # Every value is 0 before the first update, so the loss is the mean square of the targets.
    metrics = critic.fit([trajectory])
    assert metrics["critic/loss"] == pytest.approx(np.mean(targets_T**2), rel=1e-6)
    assert metrics["critic/explained_variance"] == 0


@pytest.mark.process
@pytest.mark.parametrize("kind", ["head", pytest.param("separate", marks=pytest.mark.slow)])
def test_the_loss_is_a_mean_over_tokens_whatever_the_micro_batches(kind: Kind, played: list[Trajectory]) -> None:
    found = {}
    for max_tokens, layout in product((1, 700, 10**9), LAYOUTS):
        critic = new_critic(new_policy(layout=layout), model=kind, max_tokens=max_tokens, epochs=3, num_minibatches=1)
        metrics = critic.fit(critic.measure(with_returns(played)))
        found[max_tokens, layout] = [metrics["critic/loss"], *values_of(critic.measure(played)[0])]
    targets_T = np.concatenate(
        [np.full(t.num_action_tokens + len(t.turns) - 1, t.reward) for t in with_returns(played)]
    )
    alone = new_critic(new_policy(), epochs=1, num_minibatches=1)
    assert alone.fit(alone.measure(with_returns(played)))["critic/loss"] == pytest.approx(
        np.mean(targets_T**2), rel=1e-6
    )
    whole = found[10**9, "padded"]
    for split in found.values():
        # Three updates of Adam, whose steps are near the sign of a gradient, spread the rounding of float32.
        np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-5)


@each(
    ("values", "explained"),
    [
        ((1.5, 1.5, 1.0, 1.0, 1.0, 2.0), 1.0),
        ((2.5, 2.5, 2.0, 2.0, 2.0, 3.0), 1.0),  # off by a constant: the variance is explained all the same
        ((7.0,) * 6, 0.0),
        ((-1.5, -1.5, -1.0, -1.0, -1.0, -2.0), -3.0),  # var(G - V) = var(2 G) = 4 var(G)
        ((0.75, 0.75, 0.5, 0.5, 0.5, 1.0), 0.75),  # var(G / 2) = var(G) / 4
    ],
)
def test_the_explained_variance_is_that_of_the_values_before_the_update(
    values: tuple[float, ...], explained: float
) -> None:
    turns = (
        with_signals(THREE[0], values=values[:2]),
        with_signals(THREE[1], values=values[2:5]),
        with_signals(THREE[2], values=values[5:]),
    )
    metrics = new_critic(new_policy(), gamma=0.5).fit([trajectory_of(*turns)])
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-9, abs=1e-9)


def test_returns_that_differ_by_rounding_alone_have_no_variance_to_explain() -> None:
    alike = [trajectory_of(with_signals(turn(1, reward), values=(5.0 * reward,))) for reward in (0.1 + 0.2, 0.3)]
    assert new_critic(new_policy(), gamma=1.0).fit(alike)["critic/explained_variance"] == 0


# A head reads what random weights made of the prompt: it takes a wide model to find the box there.
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "sizes", "learning_rate"), [("head", LocalModelConfig(), 3e-3), ("separate", TINY, 3e-3)]
)
def test_values_come_to_explain_returns_that_depend_on_the_prompt(
    kind: Kind, sizes: LocalModelConfig, learning_rate: float
) -> None:
    policy = new_policy(sizes=sizes)
    trajectories = with_returns(play(policy, num=8, max_turns=2))
    assert len({t.reward for t in trajectories}) == 3
    critic = new_critic(policy, model=kind, learning_rate=learning_rate, epochs=4, max_tokens=10**6)
    history = [critic.fit(critic.measure(trajectories)) for _ in range(20)]
    explained = [metrics["critic/explained_variance"] for metrics in history]
    assert explained[0] == 0
    assert explained[4] < explained[-1]
    assert explained[-1] > 0.9
    assert history[-1]["critic/loss"] < 0.1 * history[0]["critic/loss"]


@pytest.mark.slow
@pytest.mark.process
def test_the_value_after_a_cut_is_what_was_still_ahead() -> None:
    policy = new_policy(sizes=TINY)
    whole = [
        replace(t, turns=tuple(replace(turn, reward=1.0) for turn in t.turns), truncated=False)
        for t in play(policy, num=8, max_turns=3)
    ]
    assert {len(t.turns) for t in whole} == {3}
    cut = [replace(t, trajectory_id=f"{t.trajectory_id}, cut", turns=t.turns[:2], truncated=True) for t in whole[:2]]
    critic = new_critic(policy, model="separate", learning_rate=3e-3, epochs=4, max_tokens=10**6)
    for _ in range(20):
        critic.fit(critic.measure([*whole, *cut]))
    after = [t.signals["values"] for t in critic.measure(cut)]
    assert after == pytest.approx([1.0, 1.0], abs=0.25)  # the third turn's, and not the second's once more


def test_what_follows_each_turn_but_the_last_is_asked_for(played: list[Trajectory]) -> None:
    for trajectory in played:
        rows = with_ends_of_turns(rows_of(trajectory.turns))
        places = [(k, position) for row in rows for k, position in zip(row.turn_T, row.positions_T, strict=True)]
        ends = [max(position for number, position in places if number == k) for k in range(len(trajectory.turns))]
        contexts_of = zip(contexts(trajectory), trajectory.turns, strict=True)
        lengths = [len(context_ids) + len(turn.action_ids) for context_ids, turn in contexts_of]
        assert ends == [*lengths[:-1], lengths[-1] - 1]
        assert len(places) == trajectory.num_action_tokens + len(trajectory.turns) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_is_neither_changed_nor_given_gradients(kind: Kind, played: list[Trajectory]) -> None:
    policy = new_policy()
    before = weights(policy)
    critic = new_critic(policy, model=kind)
    critic.begin()
    body = weights(critic._body)
    for _ in range(2):
        critic.fit(critic.measure(with_returns(played)))
    assert same(weights(policy), before)
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(parameter.requires_grad for parameter in policy.parameters())
    assert same(weights(critic._body), body) == (kind == "head")  # a model of its own is trained as a whole


def test_a_separate_critic_begins_as_the_policy_is_by_then(played: list[Trajectory]) -> None:
    policy = new_policy()
    critic = new_critic(policy, model="separate")
    policy.load_state_dict(new_policy(seed=5).state_dict())  # warmed up in the meantime
    assert not same(weights(critic._body), weights(policy.model.base_model))
    critic.begin()
    assert same(weights(critic._body), weights(policy.model.base_model))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(2)  # what the policy learns afterwards is its own
    assert same(weights(critic._body), weights(new_policy(seed=5).model.base_model))


def test_a_head_reads_the_policy_as_it_is(played: list[Trajectory]) -> None:
    policy = new_policy()
    critic = new_critic(policy)
    critic.fit(critic.measure(with_returns(played)))
    before = values_of(critic.measure(played)[0])
    policy.load_state_dict(new_policy(seed=5).state_dict())
    (after, *_) = critic.measure(played)
    np.testing.assert_allclose(values_of(after), plain_values(critic, after)[:-1], rtol=1e-5, atol=1e-6)
    assert np.abs(np.subtract(values_of(after), before)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_resumes_bit_for_bit(kind: Kind, played: list[Trajectory], tmp_path: Path) -> None:
    policy, trajectories = new_policy(), with_returns(played)
    critic = new_critic(policy, model=kind)
    for _ in range(2):
        critic.fit(critic.measure(trajectories))
    torch.save(critic.state_dict(), tmp_path / "critic.pt")
    loaded = new_critic(policy, model=kind)
    loaded.load_state_dict(torch.load(tmp_path / "critic.pt", weights_only=True))
    for _ in range(2):
        one, other = critic.measure(trajectories), loaded.measure(trajectories)
        assert one == other
        assert critic.fit(one) == loaded.fit(other)
    assert same(weights(critic._head), weights(loaded._head))
    assert same(weights(critic._body), weights(loaded._body))


def test_resuming_takes_the_recipes_learning_rate(played: list[Trajectory]) -> None:
    policy = new_policy()
    critic = new_critic(policy)
    critic.fit(critic.measure(with_returns(played)))
    state = copy.deepcopy(critic.state_dict())
    slow = new_critic(policy, learning_rate=1e-30)
    slow.load_state_dict(state)
    before = weights(slow._head)
    slow.fit(slow.measure(with_returns(played)))
    assert same(weights(slow._head), before)


def test_the_seed_decides_the_first_weights_and_no_other_random_number(played: list[Trajectory]) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    policy = new_policy()
    torch.manual_seed(0)
    one = new_critic(policy, seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert same(weights(one._head), weights(new_critic(policy, seed=1)._head))
    assert not same(weights(one._head), weights(new_critic(policy, seed=2)._head))


@each(("epochs", "num_minibatches", "updates"), [(1, 1, 1), (3, 2, 6), (2, 4, 8), (1, 100, 8)])
def test_each_epoch_goes_once_over_the_trajectories(
    epochs: int, num_minibatches: int, updates: int, played: list[Trajectory]
) -> None:
    critic = new_critic(new_policy(), epochs=epochs, num_minibatches=num_minibatches)
    critic.fit(critic.measure(with_returns(played)))
    assert critic.state_dict()["num_updates"] == updates  # no more than one for each of the 8 trajectories


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_critic_ends_before_its_next_pass(kind: Kind, played: list[Trajectory]) -> None:
    critic = new_critic(new_policy(), model=kind, num_minibatches=2)
    measured, before = critic.measure(played), weights(critic._head)
    for work in (critic.measure, critic.fit):
        with pytest.raises(TrainingError, match="the update was interrupted"):
            run_with(After(0), lambda work=work: work(measured))  # type: ignore[misc]
    assert same(weights(critic._head), before)
