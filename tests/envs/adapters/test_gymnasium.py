from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from agentrl import Need, UserError
from agentrl.env import make_env
from agentrl.rollout.env_driver import copy_env
from agentrl.testing import check_env
from agentrl_envs.adapters.gymnasium import GymnasiumEnv
from tests.support.each import each

TABLES = ["Taxi-v4", "FrozenLake-v1", "CliffWalking-v1"]


class Parrot(gym.Env[str, str]):
    """Text in, text out."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = gym.spaces.Text(20)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = "".join(map(str, self.np_random.integers(10, size=4)))
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "thanks", float(action == self.word), True, False, {}


gym.register("tests/Parrot-v0", entry_point="tests.envs.adapters.test_gymnasium:Parrot")


def best_actions(table: Any, *, discount: float = 0.99, num_sweeps: int = 200) -> list[int]:
    """Return the best action of each state of Gymnasium's transition table."""
    values = np.zeros(len(table))

    def value(outcomes: Any) -> float:
        return float(sum(p * (r + discount * values[after] * (not end)) for p, after, r, end in outcomes))

    for _ in range(num_sweeps):
        values = np.array([max(map(value, table[s].values())) for s in range(len(table))])
    return [int(np.argmax([value(table[s][a]) for a in sorted(table[s])])) for s in range(len(table))]


@each("id", [*(pytest.param(id, marks=pytest.mark.slow) for id in TABLES), "Blackjack-v1", "tests/Parrot-v0"])
def test_environments_of_gymnasium_keep_the_contract(id: str) -> None:
    check_env(GymnasiumEnv, seeds=range(50), id=id)


@pytest.mark.slow
@each("id", TABLES)
def test_an_agent_that_knows_the_table_solves_it(id: str) -> None:
    env = GymnasiumEnv(id=id, kwargs={"is_slippery": False} if id == "FrozenLake-v1" else {})
    assert env.actions is not None
    best = best_actions(env.source.unwrapped.P)  # type: ignore[attr-defined]
    for seed in range(20):
        env.reset(seed=seed)
        rewards: list[float] = []
        is_over, info = False, dict[str, Any]()
        while not is_over:
            _, reward, is_over, _, info = env.step(f"I go {env.actions[best[int(env.state_key() or 0)]]}.")
            rewards.append(reward)
        assert info["success"], f"seed {seed}"
    assert {"FrozenLake-v1": sum(rewards) == 1, "CliffWalking-v1": sum(rewards) == -13}.get(id, sum(rewards) > 0)


def test_an_observation_is_a_picture_in_text() -> None:
    env = GymnasiumEnv(id="FrozenLake-v1", kwargs={"is_slippery": False})
    (first,), _ = env.reset(seed=0)
    assert first["content"] == (
        "Walk over the ice from S to G; H is a hole.\nActions: left, down, right, up.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    )
    assert env.step("not left but right")[0][0]["content"] == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    assert env.state_key() == "1"


def test_a_turn_without_an_action_is_answered_and_moves_nothing() -> None:
    env = GymnasiumEnv(id="FrozenLake-v1")
    env.reset(seed=0)
    observation, reward, terminated, truncated, _ = env.step("upright?")
    assert observation[0]["content"] == "Actions: left, down, right, up."
    assert (reward, terminated, truncated, env.state_key()) == (0.0, False, False, "0")


def test_the_limit_of_steps_truncates() -> None:
    env = GymnasiumEnv(id="FrozenLake-v1", kwargs={"max_episode_steps": 2})
    env.reset(seed=0)
    env.step("left")
    _, _, terminated, truncated, info = env.step("left")
    assert (terminated, truncated, info["success"]) == (False, True, False)


def test_train_and_eval_never_begin_in_the_same_place() -> None:
    env = GymnasiumEnv(id="Taxi-v4")
    begun = {}
    for split in ("train", "eval"):
        begun[split] = {env.reset(seed=seed, options={"split": split})[0][0]["content"] for seed in range(200)}
    assert not begun["train"] & begun["eval"]
    assert min(map(len, begun.values())) > 50


def test_text_goes_in_and_out_as_it_is() -> None:
    env = GymnasiumEnv(id="tests/Parrot-v0", prompt="Repeat.")
    (first,), _ = env.reset(seed=3)
    assert env.step(first["content"].removeprefix("Repeat.\n"))[1] == 1.0


@each(
    ("options", "words"),
    [
        ({"id": "NoSuch-v0"}, "id: 'NoSuch-v0' could not be made"),
        ({"id": "Pendulum-v1"}, "id: the actions of 'Pendulum-v1' are Box"),
        ({"id": "FrozenLake-v1", "actions": ["a"]}, "actions: 'FrozenLake-v1' has 4 actions, got 1 names"),
        ({"id": "FrozenLake-v1", "goal": "high"}, "goal: give a number, got 'high'"),
        ({"id": "FrozenLake-v1", "kwargs": {"sizes": 3}}, "id: 'FrozenLake-v1' could not be made"),
    ],
)
def test_what_cannot_be_adapted_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        GymnasiumEnv(**options)


def test_a_recipe_names_it() -> None:
    make_env("agentrl_envs.adapters.gymnasium:GymnasiumEnv", {"id": "FrozenLake-v1"}).reset(seed=0)


def test_a_fork_has_chance_of_its_own() -> None:
    env = GymnasiumEnv(id="FrozenLake-v1", kwargs={"is_slippery": True})
    env.reset(seed=0)
    ends = set()
    for seed in range(12):
        fork = copy_env(env, seed=seed)
        ends.add("".join(fork.step("right")[0][0]["content"] for _ in range(2)))
    assert len(ends) > 1
    assert len({"".join(copy_env(env, seed=3).step("right")[0][0]["content"]) for _ in range(4)}) == 1


def test_schemes_may_read_the_state_where_it_is_observed() -> None:
    assert Need.STATE_KEYS in GymnasiumEnv(id="FrozenLake-v1").provides()
    assert Need.STATE_KEYS not in GymnasiumEnv(id="Blackjack-v1").provides()
