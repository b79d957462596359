from pathlib import Path

import numpy as np
import pytest

from agentrl.testing import check_env

pytest.importorskip("textworld", reason="needs TextWorld: pip install 'agentrl[textworld]'")

from agentrl_envs.adapters.textworld import TextWorld

pytestmark = [pytest.mark.slow, pytest.mark.process]

SMALL = {"num_rooms": 1, "num_objects": 2, "quest_length": 1, "num_games": 2, "num_eval_games": 1}
"""A game takes seconds to make."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("games"))


def test_its_games_keep_the_contract(folder: str) -> None:
    check_env(TextWorld, seeds=range(3), timeout_s=120.0, folder=folder, **SMALL)


def test_the_oracle_wins_and_ways_back_lead_to_the_same_key(folder: str) -> None:
    env = TextWorld(folder=folder, **SMALL)
    for index in range(2):
        env.reset(seed=0, options={"split": "train", "task_index": index})
        key = env.state_key()
        env.step("look")
        assert env.state_key() == key
        fork = env.fork()
        terminated = False
        while not terminated:
            _, reward, terminated, _, info = env.step(env.oracle())
        assert (reward, info["success"]) == (1.0, True)
        assert fork.state_key() == key != env.state_key()
        assert fork.step("gibberish")[2] is False
        fork.close()
    env.close()


def test_games_are_made_once_and_those_of_the_splits_differ(folder: str) -> None:
    env = TextWorld(folder=folder, **SMALL)
    (train,), _ = env.reset(seed=0, options={"split": "train", "task_index": 0})
    made = {path: path.stat().st_mtime_ns for path in Path(folder).iterdir()}
    again = env.reset(seed=9, options={"split": "train", "task_index": 0})[0][0]
    assert again == train
    assert {path: path.stat().st_mtime_ns for path in Path(folder).iterdir()} == made
    (held_out,), _ = env.reset(seed=0, options={"split": "eval", "task_index": 0})
    assert held_out != train
    assert (env.num_tasks("train"), env.num_tasks("eval")) == (2, 1)
    env.close()


def test_whatever_is_said_the_interpreter_survives(folder: str) -> None:
    env, rng = TextWorld(folder=folder, **SMALL), np.random.default_rng(0)
    env.reset(seed=0)
    for text in (
        "\x00\x1b[A\u2603",
        "x" * 100_000,
        "",
        "\n\n",
        "save",
        "restore",
        "quit",
        "y",
        "restart",
        "undo",
        "script",
    ):
        if env.step(text)[2]:
            env.reset(seed=0)
    for _ in range(300):
        text = "".join(map(chr, rng.integers(1, 300, size=int(rng.integers(1, 150)))))
        if env.step(text)[2]:
            env.reset(seed=0)
    env.close()
