import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from agentrl.env import MessageEnv, make_env
from agentrl.errors import ConfigError
from agentrl_envs.key_door import KeyDoor
from tests.support.each import each


class NotAnEnvironment:
    pass


class Explodes(KeyDoor):
    def __init__(self, *, fuse: int = 1) -> None:
        raise ValueError(f"fuse of {fuse} s is too short")


def make_small(**kwargs: Any) -> KeyDoor:
    return KeyDoor(num_boxes=2, **kwargs)


HERE = __name__


def message(spec: str, options: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        make_env(spec, options)
    return str(caught.value)


def test_a_name_or_a_class_gives_the_bare_environment() -> None:
    for spec in ("key_door", "agentrl_envs.key_door:KeyDoor"):
        env = make_env(spec, {"num_boxes": 5})
        assert type(env) is KeyDoor
        assert env.num_boxes == 5


def test_a_gymnasium_id_gives_the_registered_environment() -> None:
    for spec in ("agentrl/KeyDoor-v0", "agentrl_envs:agentrl/KeyDoor-v0"):
        env = make_env(spec, {"num_boxes": 5})
        assert isinstance(env.unwrapped, KeyDoor)
        assert env.unwrapped.num_boxes == 5
        assert env.spec is not None
        assert env.spec.id == "agentrl/KeyDoor-v0"


def test_a_gymnasium_id_takes_a_time_limit() -> None:
    env = make_env("agentrl/KeyDoor-v0", {"max_episode_steps": 2})
    env.reset(seed=0)
    assert [env.step("hi")[3] for _ in range(2)] == [False, True]


def test_a_function_that_makes_environments_will_do() -> None:
    env = make_env(f"{HERE}:make_small", {"num_distractors": 1})
    assert isinstance(env, MessageEnv)
    assert vars(env)["num_boxes"] == 2


def make_unsaid(**kwargs: Any):  # type: ignore[no-untyped-def]
    return KeyDoor(**kwargs)


def make_later() -> "no_such_name":  # type: ignore[name-defined]  # noqa: F821
    return KeyDoor()


@each(
    ("spec", "options"),
    [
        ("os:system", {"command": "touch {}"}),
        ("subprocess:run", {"args": ["touch", "{}"]}),
        ("subprocess:Popen", {"args": ["touch", "{}"]}),
        ("pathlib:Path.touch", {}),
        ("builtins:exec", {"source": "open('{}', 'w')"}),
        (f"{HERE}:make_unsaid", {}),
        (f"{HERE}:make_later", {}),
        (f"{HERE}:pytest", {}),
    ],
)
def test_what_does_not_say_that_it_is_an_environment_is_never_called(
    spec: str, options: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "made"
    filled = {
        name: [word.format(file) for word in value] if isinstance(value, list) else value.format(file)
        for name, value in options.items()
    }
    assert message(spec, filled).startswith("env.id: ")
    assert not file.exists()


def test_a_function_is_told_what_it_must_say() -> None:
    assert message(f"{HERE}:make_unsaid").endswith("write `def make_unsaid(...) -> gymnasium.Env`")


class Quits(KeyDoor):
    def __init__(self) -> None:
        sys.exit("no licence")


def test_a_constructor_that_exits_is_named() -> None:
    assert message(f"{HERE}:Quits") == f"env.options: '{HERE}:Quits' could not be made: SystemExit: no licence"


@each("spec", ["key_door", "agentrl_envs.key_door:KeyDoor", "agentrl/KeyDoor-v0"])
def test_an_unknown_option_names_the_nearest(spec: str) -> None:
    said = message(spec, {"num_boxs": 5})
    assert said == f"env.options.num_boxs: {spec!r} has no such option. Did you mean 'num_boxes'?"


@each("spec", ["key_door", "agentrl/KeyDoor-v0"])
def test_an_impossible_option_is_named_with_what_it_takes(spec: str) -> None:
    said = message(spec, {"num_boxes": 1})
    assert said.startswith(
        f"env.options: {spec!r} could not be made: num_boxes: give a whole number of 2 or more, got 1"
    )


def test_what_a_constructor_raises_is_passed_on() -> None:
    assert message(f"{HERE}:Explodes").endswith("could not be made: fuse of 1 s is too short")


def test_an_unknown_name_gives_the_nearest() -> None:
    assert message("calculater") == (
        "env.id: no 'calculater' is installed. Did you mean 'calculator'? Or give it as 'module:Class'."
    )
    assert message("agentrl_envs.key_door:KeyDor").startswith("env.id: module 'agentrl_envs.key_door' has no 'KeyDor'.")
    assert message("no_such_module:Env").startswith("env.id: cannot import 'no_such_module'")


@each("spec", ["agentrl/KeyDor-v0", "no_such_module:agentrl/KeyDoor-v0", "KeyDoor-v0"])
def test_an_unknown_gymnasium_id_says_how_to_write_one(spec: str) -> None:
    said = message(spec)
    assert said.startswith(f"env.id: Gymnasium cannot find {spec!r}")
    assert "Write 'module:id' with the module that registers it" in said


@each(
    ("spec", "got"),
    [
        (f"{HERE}:NotAnEnvironment", "NotAnEnvironment"),
        ("gymnasium:Env", "Env"),
        ("CartPole-v1", "CartPoleEnv"),
        (f"{HERE}:HERE", "str"),
    ],
)
def test_what_is_no_message_environment_is_refused(spec: str, got: str) -> None:
    assert message(spec) == (
        f"env.id: {spec!r} gives {got}, which is no agentrl.MessageEnv. "
        "Subclass agentrl.ToolEnv (tools, start, answer) or agentrl.MessageEnv (reset, step)."
    )


def test_gymnasium_knows_our_ids_once() -> None:
    assert [env_id for env_id in gym.registry if "KeyDoor" in env_id] == ["agentrl/KeyDoor-v0"]
