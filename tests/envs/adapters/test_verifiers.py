import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl import EnvironmentFailure, Message, UserError
from agentrl.testing import check_env
from agentrl_envs.adapters import verifiers as process
from agentrl_envs.adapters.verifiers import Verifiers
from tests.support.each import each

pytestmark = pytest.mark.process

SUPPORT = Path(__file__).parents[2] / "support"
PYTHON = os.environ.get("AGENTRL_VERIFIERS_PYTHON")
"""Of a virtual environment with verifiers, which is hundreds of megabytes: not part of `make test`."""


@pytest.fixture(params=["stand-in", "verifiers"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "stand-in":
        monkeypatch.setattr(process, "_SCRIPT", SUPPORT / "verifiers_stand_in.py")
        return sys.executable
    if PYTHON is None:
        pytest.skip("needs a Python with verifiers 0.4, named by AGENTRL_VERIFIERS_PYTHON")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT / "verifiers_taskset"))
    return PYTHON


@pytest.fixture
def make(python: str) -> Iterator[Callable[..., Verifiers]]:
    made: list[Verifiers] = []

    def make(**options: Any) -> Verifiers:
        given: dict[str, Any] = {"taskset": "verifiers-sums", "python": python, "start_timeout_s": 300.0}
        made.append(Verifiers(**given | options))
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_its_tasksets_keep_the_contract(make: Callable[..., Verifiers], python: str) -> None:
    make()  # keeps the worker while environments come and go
    check_env(Verifiers, seeds=range(50), taskset="verifiers-sums", python=python, start_timeout_s=300.0)


def test_every_task_is_on_one_side_and_is_scored_by_the_tasksets_rewards(make: Callable[..., Verifiers]) -> None:
    env = make()
    prompts = []
    for split in ("train", "eval"):
        for index in range(env.num_tasks(split)):
            messages, _ = env.reset(seed=0, options={"split": split, "task_index": index})
            prompts.append(messages[-1]["content"])
            _, reward, terminated, _, info = env.step(str(env.gold_answer()))
            assert (reward, terminated, info["success"]) == (1.1, True, True)
            assert info["reward_components"] == {"right": 1.0, "short": 0.1}
    assert sorted(prompts) == sorted(f"{n} + {n}?" for n in range(40))
    assert min(map(env.num_tasks, ("train", "eval"))) > 3
    env.reset(seed=0)
    _, reward, _, _, info = env.step("a hundred, I would say")
    assert (reward, info["success"]) == (0.0, False)


def test_an_answer_that_the_scorer_cannot_read_is_wrong_and_counted(make: Callable[..., Verifiers]) -> None:
    env = make()
    env.reset(seed=0)
    _, reward, _, _, info = env.step("raise")
    assert (reward, info["success"], info["scorer_errors"]) == (0.0, False, 1)


@pytest.mark.slow
def test_a_worker_that_dies_or_hangs_fails_the_episode_and_the_next_one_has_another(
    make: Callable[..., Verifiers],
) -> None:
    env = make(timeout_s=5.0)
    for said, words in (("die", "out of cheese"), ("hang", "no answer within 5 s")):
        env.reset(seed=0)
        with pytest.raises(EnvironmentFailure, match=words):
            env.step(said)
        env.timeout_s = 300.0  # the next one has to start
        env.reset(seed=0)
        assert env.step(str(env.gold_answer()))[1] == 1.1
        env.timeout_s = 5.0


def test_one_worker_serves_all_environments_and_nothing_is_left(make: Callable[..., Verifiers]) -> None:
    def left() -> tuple[int, int]:
        return psutil.Process().num_fds(), len(psutil.Process().children(recursive=True))

    before = left()
    envs = [make() for _ in range(5)]
    envs.append(envs[0].fork())
    for seed, env in enumerate(envs * 3):
        env.reset(seed=seed)
        env.step("1")
    assert left()[1] == before[1] + 1
    for env in envs:
        env.close()
        env.close()
    assert left() == before


@each(
    ("options", "words"),
    [
        ({"taskset": "no-such"}, "'no-such' not found"),
        ({"python": "/no/python"}, "taskset: .* cannot be loaded by /no/python"),
    ],
)
def test_what_cannot_be_loaded_is_told(make: Callable[..., Verifiers], options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(**options)


def test_messages_are_copies(make: Callable[..., Verifiers]) -> None:
    env = make()
    messages: tuple[Message, ...] = env.reset(seed=0)[0]
    messages[0]["content"] = "changed"
    assert env.reset(seed=0)[0][0]["content"] == "Add."
