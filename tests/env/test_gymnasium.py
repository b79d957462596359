import json
import pickle
import subprocess
import sys
import warnings
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import agentrl_envs
from agentrl.env import ActionSpace, MessageEnv, MessagesSpace, tool_call
from agentrl.types import Message
from tests.support.each import each

IDS = ["agentrl/Calculator-v0", "agentrl/ServiceDesk-v0", "agentrl/KeyDoor-v0"]
KEY_DOOR = "agentrl/KeyDoor-v0"


def unwrapped(env: gym.Env[Any, Any]) -> MessageEnv:
    assert isinstance(env.unwrapped, MessageEnv)
    return env.unwrapped


@each("env_id", IDS)
def test_make_plays_an_episode_without_a_warning(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make(env_id)
        first, _ = env.reset(seed=5)
        assert first == gym.make(f"agentrl_envs:{env_id}").reset(seed=5)[0]
        done = False
        while not done:
            _, _, done, _, info = env.step(unwrapped(env).oracle())
        assert info["success"]


@each("env_id", IDS)
def test_gymnasiums_own_check_passes(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(env_id).unwrapped)


def test_options_reach_the_constructor() -> None:
    env = gym.make(KEY_DOOR, num_boxes=2, turn_rewards=False)
    assert unwrapped(env).turn_rewards is False


def test_registering_again_changes_nothing_and_warns_of_nothing() -> None:
    before = dict(gym.registry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agentrl_envs.register()
    assert gym.registry == before


@pytest.mark.slow
@pytest.mark.process
@each(
    "code",
    [
        "import agentrl_envs, gymnasium; gymnasium.make('agentrl/KeyDoor-v0').reset(seed=0)",
        "import gymnasium; gymnasium.make('agentrl_envs:agentrl/KeyDoor-v0').reset(seed=0)",
        "from agentrl.env import make_env; make_env('agentrl/KeyDoor-v0').reset(seed=0)",
    ],
)
def test_ids_are_found_in_a_fresh_process(code: str) -> None:
    run = [sys.executable, "-W", "error", "-c", f"{code}; import sys; assert 'torch' not in sys.modules"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_spec_survives_json() -> None:
    spec = gym.make(KEY_DOOR, num_boxes=7).spec
    assert spec is not None
    written = spec.to_json()
    assert json.loads(written)["entry_point"] == "agentrl_envs.key_door:KeyDoor"
    again = gym.make(gym.envs.registration.EnvSpec.from_json(written))
    assert vars(unwrapped(again))["num_boxes"] == 7


@each("env_id", IDS)
def test_a_pickled_environment_continues_as_the_original(env_id: str) -> None:
    env = gym.make(env_id)
    env.reset(seed=1)
    env.step(unwrapped(env).oracle())
    copy = pickle.loads(pickle.dumps(env))
    action = unwrapped(env).oracle()
    assert unwrapped(copy).state_key() == unwrapped(env).state_key()
    assert copy.step(action) == env.step(action)
    assert copy.unwrapped.np_random.integers(10**9) == env.unwrapped.np_random.integers(10**9)


def make() -> gym.Env[Any, Any]:
    return gym.make(KEY_DOOR)


@pytest.mark.process
def test_vector_environments_play_as_single_ones() -> None:
    # `iterate` of Gymnasium takes a batched action apart by its space; a tuple of actions is such a batch.
    single = [make() for _ in range(2)]
    expected_first = tuple(env.reset(seed=seed)[0] for seed, env in enumerate(single))
    actions: tuple[Message, ...] = tuple(unwrapped(env).oracle() for env in single)
    expected = [env.step(action) for env, action in zip(single, actions, strict=True)]
    for vector in (SyncVectorEnv([make, make]), AsyncVectorEnv([make, make], shared_memory=False)):
        first, _ = cast("Any", vector).reset(seed=0)
        assert first == expected_first
        observation, reward, terminated, truncated, _ = cast("Any", vector).step(actions)
        assert observation == tuple(result[0] for result in expected)
        np.testing.assert_array_equal(reward, [result[1] for result in expected])
        assert not terminated.any()
        assert not truncated.any()
        vector.close()


def test_spaces_know_messages() -> None:
    space, actions = MessagesSpace(seed=0), ActionSpace(seed=0)
    good: Message = {"role": "user", "content": "hi"}
    assert (good,) in space
    assert () in space
    for bad in (
        [good],
        ({"role": "robot", "content": "hi"},),
        ({"role": "user", "content": 3},),
        ({"role": "user"},),
        ("hi",),
    ):
        assert bad not in space
    assert "text" in actions
    assert tool_call("f") in actions
    assert {**tool_call("f"), "content": None} in actions
    assert good not in actions
    assert {"role": "assistant", "content": None} not in actions
    assert space.sample() in space
    assert actions.sample() in actions
    assert space == MessagesSpace() != actions
    assert len({MessagesSpace(), MessagesSpace(), ActionSpace()}) == 2
