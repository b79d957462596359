"""What is asked of every built-in environment, with each setting that its page names."""

import copy
import inspect
import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import agentrl_envs  # noqa: F401 - registers them with Gymnasium
from agentrl.env import MessageEnv, ask_oracle
from agentrl.errors import CheckError
from agentrl.recipe.registry import import_attribute
from agentrl.testing import check_env
from agentrl_envs.sandboxes import bubblewrap
from agentrl_envs.sandboxes.bubblewrap import BubblewrapConfig
from tests.support.baselines import oracle, play, random_action
from tests.support.built_in import (
    PAGES,
    Setting,
    built_in,
    constant_success,
    make,
    sample_episode,
    settings,
    success,
)
from tests.support.each import each

NAMES = list(built_in())
WHY_NO_SHELL = bubblewrap._problem(BubblewrapConfig())
IN_BUBBLEWRAP = ("shell", "repository")
ALL = [(name, k, setting) for name in NAMES for k, setting in enumerate(settings(name))]


def skip_if_its_sandbox_is_missing(name: str) -> None:
    if name in IN_BUBBLEWRAP and WHY_NO_SHELL:
        pytest.skip(f"bubblewrap: {WHY_NO_SHELL}")


def marks(name: str, *, is_default: bool) -> list[pytest.MarkDecorator]:
    """Return the marks of a setting: default settings are in the default tier."""
    return [pytest.mark.process] * (name in IN_BUBBLEWRAP) + [pytest.mark.slow] * (not is_default)


SETTINGS = [
    pytest.param(name, setting, id=f"{name}-{k}", marks=marks(name, is_default=not k)) for name, k, setting in ALL
]
RELIABLE = [
    pytest.param(
        name,
        setting,
        seeds,
        id=f"{name}-{k}",
        marks=marks(name, is_default=not k and seeds == 4 and name not in IN_BUBBLEWRAP),
    )
    for name, k, setting in ALL
    if setting.oracle >= 0.95
    for seeds in ([10] if k else [4, 50])
]
"""Those whose oracle solves what it plays; with the others, a task may be lost by chance alone."""


def test_the_page_of_every_environment_ends_in_the_episode_that_the_script_makes() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == set(NAMES)
    for name in NAMES:
        if name in IN_BUBBLEWRAP and WHY_NO_SHELL:
            continue
        page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        assert sample_episode(name) in page, f"python -m benchmarks.environments --page {name}"


def test_the_list_of_environments_names_all_of_them() -> None:
    listed = re.findall(
        r"^\| \[(\w+)\]\(environments/", (PAGES.parent / "environments.md").read_text("utf-8"), re.MULTILINE
    )
    assert listed == sorted(NAMES)


def test_every_environment_has_a_gymnasium_id() -> None:
    classes = {spec.entry_point for spec in gym.registry.values() if spec.namespace == "agentrl"}
    assert set(built_in().values()) <= classes


@each(("name", "setting", "num_seeds"), RELIABLE)
def test_it_keeps_the_contract_over_many_seeds(name: str, setting: Setting, num_seeds: int) -> None:
    skip_if_its_sandbox_is_missing(name)
    check_env(built_in()[name], seeds=range(min(num_seeds, setting.episodes)), **setting.options)


@pytest.mark.slow
@each(("name", "setting"), SETTINGS)
def test_the_oracle_solves_its_share(name: str, setting: Setting) -> None:
    skip_if_its_sandbox_is_missing(name)
    env = make(name, setting.options)
    assert success(env, oracle, episodes=setting.episodes, max_turns=setting.max_turns) >= setting.oracle
    env.close()


@pytest.mark.slow
@pytest.mark.process
@each(("name", "setting"), SETTINGS)
def test_neither_chance_nor_one_action_solves_a_tenth(name: str, setting: Setting) -> None:
    skip_if_its_sandbox_is_missing(name)
    env, episodes = make(name, setting.options), min(setting.episodes, 100)
    assert success(env, random_action, episodes=episodes, max_turns=setting.max_turns) < 0.1
    assert constant_success(env, episodes=episodes, max_turns=setting.max_turns) < 0.1
    env.close()


@pytest.mark.slow
@each(("name", "setting"), SETTINGS)
def test_without_turn_rewards_the_last_turn_alone_pays(name: str, setting: Setting) -> None:
    skip_if_its_sandbox_is_missing(name)
    env = make(name, setting.options | {"turn_rewards": False})
    assert not env.turn_rewards
    rng = np.random.default_rng(0)
    for seed in range(min(20, setting.episodes)):
        for policy in (oracle, random_action):
            played = play(env, policy, seed=seed, max_turns=setting.max_turns, rng=rng)
            assert not any(played.rewards[:-1] if played.is_over else played.rewards)
    env.close()


@pytest.mark.slow
@pytest.mark.process
@each(("name", "setting"), SETTINGS)
def test_moments_with_equal_state_keys_go_alike(name: str, setting: Setting) -> None:
    """Whatever led to a moment of some key, in one task: the same actions and chances then earn and end the same."""
    skip_if_its_sandbox_is_missing(name)
    env, rng = make(name, setting.options), np.random.default_rng(0)
    env.reset(seed=0)
    if not env.can_fork or env.state_key() is None:
        pytest.skip(f"{name} has no forks or no state keys")
    num_met = 0
    for seed in range(3):
        moments: dict[str, list[MessageEnv]] = {}
        for _ in range(10):
            env.reset(seed=seed)
            for _ in range(12):
                moments.setdefault(str(env.state_key()), []).append(env.fork())
                if env.step(ask_oracle(env, skill=0.5, rng=rng))[2]:
                    break
        for alike in moments.values():
            actions, expected = _future(alike[0], plan=None)
            num_met += len(alike) > 1
            for other in alike[1:4]:
                assert _future(other, plan=actions)[1] == expected
    assert num_met >= 3


def _future(env: MessageEnv, plan: list[Any] | None) -> tuple[list[Any], list[Any]]:
    """Play a copy on by a plan, or by a poor oracle, with the same chances each time; return actions and what came of them."""
    env, rng = env.fork(), np.random.default_rng(1)
    env.np_random = np.random.default_rng(2)
    actions: list[Any] = []
    seen: list[Any] = []
    while len(actions) < (12 if plan is None else len(plan)):
        actions.append(copy.deepcopy(ask_oracle(env, skill=0.6, rng=rng)) if plan is None else plan[len(actions)])
        _, reward, terminated, truncated, _ = env.step(actions[-1])
        seen.append((round(float(reward), 9), terminated, truncated, env.state_key()))
        if terminated or truncated:
            break
    return actions, seen


@each("name", NAMES)
def test_every_option_has_a_default_and_a_line_on_the_page(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    parameters = inspect.signature(import_attribute(built_in()[name], field="env.id")).parameters
    assert "turn_rewards" in parameters
    for option, of in parameters.items():
        assert of.default is not inspect.Parameter.empty
        assert f"`{option}`" in page


def test_a_setting_that_breaks_the_contract_would_be_noticed() -> None:
    with pytest.raises(CheckError):
        check_env("tests.envs.test_built_in:Sloppy", seeds=[0])


class Sloppy(MessageEnv):
    """Answers nothing."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return (), {}

    def step(self, action: Any) -> Any:
        return (), 0.0, False, False, {}
