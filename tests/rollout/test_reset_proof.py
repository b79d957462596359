"""What is proven of `reset`, and what an environment does that is not played twice in."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentrl import ToolEnv, tool
from agentrl.rollout import Tasks
from agentrl.rollout.env_driver import MakeEnv
from agentrl.rollout.reset_checks import prove_reset, reset_proof
from agentrl.types import NumTasks
from agentrl_envs.calculator import Calculator
from agentrl_envs.key_door import KeyDoor
from agentrl_envs.service_desk import ServiceDesk
from tests.support.each import each
from tests.support.threads import hang


class Counter(ToolEnv):
    """Counts to three."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.prepare()

    def prepare(self) -> None:
        self.total = 0

    def start(self, options: dict[str, Any]) -> str:
        self.total, self.goal = 0, 3
        return f"Task {int(self.np_random.integers(10**6))}"

    @tool
    def count(self) -> str:
        """Count one."""
        self.total += 1
        if self.total == self.goal:
            self.finish(success=True)
        return str(self.total)

    def answer(self, text: str) -> str:
        return "Use the tool."

    def state_key(self) -> str:
        return str(self.total)


class Remembers(Counter):
    def start(self, options: dict[str, Any]) -> str:
        self.goal = 3
        return f"Task {int(self.np_random.integers(10**6))}"


class RemembersNonsense(Counter):
    """Is never again what it was, once it was told something wrong."""

    def start(self, options: dict[str, Any]) -> str:
        said = super().start(options)
        return said if not getattr(self, "is_offended", False) else "Go away."

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self.is_offended = getattr(self, "is_offended", False) or result[4].get("tool_errors", 0) > 0
        return result


class RemembersTheEnd(Counter):
    """Changes its mind after an episode that has ended."""

    def start(self, options: dict[str, Any]) -> str:
        said = super().start(options)
        self.goal = 2 if self._was_over else 3
        return said

    _was_over = False

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self._was_over = self._was_over or result[2]
        return result


class OfTheSplit(Counter):
    """Keeps what the first split said."""

    def start(self, options: dict[str, Any]) -> str:
        self.split = getattr(self, "split", options["split"])
        super().start(options)
        return f"{self.split}"


class Chancy(Counter):
    def start(self, options: dict[str, Any]) -> str:
        super().start(options)
        return f"It is {time.monotonic_ns()}"


class Opens(Counter):
    """Opens a file at each start, and closes it at its end alone."""

    def prepare(self) -> None:
        super().prepare()
        self.files: list[Any] = []

    def start(self, options: dict[str, Any]) -> str:
        self.files.append(tempfile.TemporaryFile())  # noqa: SIM115
        return super().start(options)

    def close(self) -> None:
        for file in self.files:
            file.close()


class Once(Counter):
    can_reuse = False


class Raises(Counter):
    def start(self, options: dict[str, Any]) -> str:
        if self.total:
            raise KeyError("task")
        return super().start(options)


class Slow(Counter):
    def start(self, options: dict[str, Any]) -> str:
        time.sleep(1.5)
        return super().start(options)


@each("make", [Calculator, KeyDoor, ServiceDesk, Counter])
def test_an_environment_that_sets_everything_in_reset_is_proven(make: Callable[[], ToolEnv]) -> None:
    assert reset_proof(make, Tasks(seed=0)).flaw is None


@pytest.mark.slow
@each(
    ("make", "words"),
    [
        (Remembers, "after other tasks, it plays one otherwise (turn 0, state_key: str '0' became str '1')"),
        (RemembersNonsense, "after other tasks, it plays one otherwise (turn 0, messages: "),
        (RemembersTheEnd, "after other tasks, it plays one otherwise (turn "),
        (OfTheSplit, "after other tasks, it plays one otherwise (turn 0, messages: "),
        (Chancy, "after other tasks, it plays one otherwise (turn 0, messages: "),
        (Opens, "reset() leaves files or processes open that an earlier task began with"),
        (Once, "its can_reuse is False"),
        (Raises, "it failed when it was tried (KeyError: 'task' (test_reset_proof.py:"),
        (Slow, "it is too slow to prove that reset() forgets the episode before"),
    ],
)
def test_what_remembers_anything_is_not(make: MakeEnv, words: str) -> None:
    flaw = reset_proof(make, Tasks(seed=0)).flaw
    assert flaw is not None
    assert flaw.startswith(words)


def test_a_table_with_one_task_is_enough() -> None:
    assert reset_proof(Counter, Tasks(seed=0, num=NumTasks(train=1, eval=0))).flaw is None
    assert reset_proof(Counter, Tasks(seed=0, num=NumTasks(train=0, eval=1))).flaw is None


@pytest.mark.slow
def test_it_takes_few_constructions_and_little_time() -> None:
    Counter.made, begin = 0, time.monotonic()
    reset_proof(Counter, Tasks(seed=0))
    assert Counter.made <= 4
    reset_proof(Slow, Tasks(seed=0))
    assert time.monotonic() - begin < 10


@pytest.mark.slow
def test_one_that_hangs_is_left_behind() -> None:
    class Hangs(Counter):
        def start(self, options: dict[str, Any]) -> str:
            hang()
            return ""

    begin = time.monotonic()
    assert asyncio.run(prove_reset(Hangs, Tasks(seed=0), timeout_s=0.1)).flaw == "it did not return"
    assert time.monotonic() - begin < 10


def test_a_slow_construction_is_told_with_how_often_and_where_shared_data_belongs() -> None:
    class Loads(Counter):
        def prepare(self) -> None:
            super().prepare()
            time.sleep(0.06)

    class LoadsAndRemembers(Remembers):
        def prepare(self) -> None:
            super().prepare()
            time.sleep(0.06)

    advice = "module level, behind functools.cache"
    words = str(reset_proof(Loads, Tasks(seed=0)).warning(live=64))
    assert words.startswith("constructing the environment takes 0.06")
    assert "for each of 64 live episodes: " in words
    assert advice in words
    words = str(reset_proof(LoadsAndRemembers, Tasks(seed=0)).warning(live=64))
    assert "for every episode, because after other tasks, it plays one otherwise" in words
    assert advice in words
    assert reset_proof(Counter, Tasks(seed=0)).warning(live=64) is None
