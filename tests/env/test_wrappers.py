"""What a recipe puts around its environment."""

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from agentrl.env import base_env, tool_call
from agentrl.env.make import EnvConfig
from agentrl.errors import ConfigError
from agentrl.rollout.env_driver import copy_env
from agentrl.testing import check_env
from tests.support.each import each

LIMIT = "agentrl.env.wrappers:LimitObservation"
RECORD = "agentrl.env.wrappers:Record"
TIME = "agentrl.env.wrappers:TimeLimit"


def made(*wrappers: dict[str, Any], env: str = "key_door") -> Any:
    return EnvConfig(id=env, wrappers=wrappers).make()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_first_is_innermost_and_the_environment_is_found_within() -> None:
    env = made({"id": LIMIT, "max_chars": 7}, {"id": TIME, "max_turns": 2})
    assert [type(env).__name__, type(env.env).__name__] == ["TimeLimit", "LimitObservation"]
    assert type(base_env(env)).__name__ == "KeyDoor"


def test_long_messages_are_cut_and_say_by_how_much() -> None:
    plain, env = made(), made({"id": LIMIT, "max_chars": 10})
    ((whole,), _), ((cut,), _) = plain.reset(seed=3), env.reset(seed=3)
    assert cut == {
        **whole,
        "content": f"{whole['content'][:10]}\n({len(whole['content']) - 10} more characters are left out)",
    }
    action = tool_call("open_box", box=0)
    assert env.step(action)[0][0]["content"].startswith(plain.step(action)[0][0]["content"][:10] + "\n(")
    same = made({"id": LIMIT, "max_chars": len(whole["content"])})
    assert same.reset(seed=3)[0] == (whole,)


def test_a_time_limit_truncates_after_its_last_turn_is_answered() -> None:
    env = made({"id": TIME, "max_turns": 2})
    for _ in range(2):  # `reset` forgets the turns before
        env.reset(seed=0)
        ends = [env.step("Hm.")[2:4] for _ in range(2)]
        assert ends == [(False, False), (False, True)]


def test_each_episode_is_a_line_however_many_environments_write(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "episodes.jsonl"

    def play(first: int) -> None:
        env = made({"id": TIME, "max_turns": 2}, {"id": RECORD, "path": str(path)})
        for seed in range(first, first + 5):
            env.reset(seed=seed, options={"split": "train"})
            env.step("One. \ud800")
            env.step("Two.")
        env.reset(seed=99)
        env.step("Cut off.")
        env.close()

    threads = [threading.Thread(target=play, args=(first,)) for first in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = lines(path)
    assert sorted(one["seed"] for one in found) == sorted([*range(5), *range(10, 15), *range(20, 25), 99, 99, 99])
    one = next(line for line in found if line["seed"] == 12)
    assert (one["env"], one["options"], one["rewards"]) == ("KeyDoor", {"split": "train"}, [0.0, 0.0])
    assert [message["role"] for message in one["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert (one["terminated"], one["truncated"]) == (False, True)
    assert {line["truncated"] for line in found if line["seed"] == 99} == {False}


def test_a_full_file_grows_no_further_and_a_warning_says_so(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    env = made({"id": TIME, "max_turns": 1}, {"id": RECORD, "path": str(path), "max_bytes": 1500})

    def play() -> None:
        for seed in range(9):
            env.reset(seed=seed)
            env.step("Hm.")

    with pytest.warns(UserWarning, match=r"episodes.jsonl is full \(max_bytes: 1500\)"):
        play()
    assert 1 <= len(lines(path)) < 9
    assert path.stat().st_size <= 1500


def test_copies_and_pickles_go_on_as_the_wrapped_environment_does(tmp_path: Path) -> None:
    wrappers = (
        {"id": LIMIT, "max_chars": 5},
        {"id": TIME, "max_turns": 3},
        {"id": RECORD, "path": str(tmp_path / "e")},
    )
    env = made(*wrappers)
    env.reset(seed=1)
    env.step("Hm.")
    copied, pickled = copy_env(env), pickle.loads(pickle.dumps(env))
    for one in (copied, pickled, env):
        assert base_env(one).state_key() == base_env(env).state_key()
        assert [one.step("Hm.")[2:4] for _ in range(2)] == [(False, False), (False, True)]
        one.close()
    # What the fork played did not begin with it, and is no episode: it is not recorded.
    assert [len(line["rewards"]) for line in lines(tmp_path / "e")] == [3, 3]
    copied.reset(seed=2)
    copied.close()
    assert [line["seed"] for line in lines(tmp_path / "e")] == [1, 1, 2]


def test_the_conformance_suite_passes_with_all_of_them(tmp_path: Path) -> None:
    wrappers = (
        {"id": LIMIT, "max_chars": 40},
        {"id": TIME, "max_turns": 6},
        {"id": RECORD, "path": str(tmp_path / "e")},
    )
    check_env(EnvConfig(id="key_door", wrappers=wrappers).make, seeds=[0, 1])


class NotMade(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any, depth: int) -> None:
        super().__init__(env)
        raise RuntimeError(f"no wood for depth {depth}")


@each(
    ("wrapper", "words"),
    [
        ({"max_chars": 3}, "env.wrappers.0.id: name a wrapper ("),
        ({"id": "recrod"}, "env.wrappers.0.id: no 'recrod' is installed."),
        ({"id": "agentrl.env:ToolEnv"}, "env.wrappers.0.id: 'agentrl.env:ToolEnv' is no class of gymnasium.Wrapper"),
        ({"id": LIMIT, "max_char": 3}, "has no such option. Did you mean 'max_chars'?"),
        ({"id": LIMIT, "env": 3}, f"env.wrappers.0.env: {LIMIT!r} has no such option."),
        ({"id": LIMIT}, "could not be made: "),
        ({"id": LIMIT, "max_chars": 0}, f"env.wrappers.0: {LIMIT!r} could not be made: max_chars: 0 is no positive"),
        ({"id": TIME, "max_turns": "x"}, "max_turns: 'x' is no positive whole number"),
        ({"id": RECORD, "path": 3}, "path: 3 names no file"),
        ({"id": f"{__name__}:NotMade", "depth": 4}, "could not be made: RuntimeError: no wood for depth 4"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_with_its_place(wrapper: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(wrapper)
    assert words in str(caught.value)
