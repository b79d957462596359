import asyncio
import time
from typing import Any

import pytest

from agentrl import ToolEnv
from agentrl.rollout import Tasks
from agentrl.rollout.reset_checks import Overlap, measure_overlap
from agentrl.types import NumTasks
from agentrl_envs.calculator import Calculator
from tests.support.each import each
from tests.support.threads import hang


class Rows(ToolEnv):
    """Draws one of a few rows by the seed: of those of its split, where it `is_split`."""

    num, is_split, seconds = 7, False, 0.0

    def start(self, options: dict[str, Any]) -> str:
        time.sleep(self.seconds)
        split = options["split"] if self.is_split else "all"
        self.row = int(self.np_random.integers(self.num))
        return f"row {self.row} of {split}"

    def answer(self, text: str) -> None:
        self.finish()


class Hidden(Rows):
    """Tells nothing of the row at first."""

    def start(self, options: dict[str, Any]) -> str:
        super().start(options)
        return "Guess."

    def gold_answer(self) -> str:
        return str(self.row)


def look(env: Any, tasks: Tasks | None = None) -> Overlap | None:
    return asyncio.run(measure_overlap(env, tasks or Tasks(seed=0), timeout_s=5))


def of(**attributes: Any) -> type[Rows]:
    return type("Some", (Rows,), attributes)


def test_rows_that_are_drawn_by_the_seed_alone_are_told() -> None:
    found = look(Rows)
    assert found == Overlap(num_shared=64, num_evaluation=64, num_training=256)
    assert str(found.warning()).startswith("64 of 64 evaluation tasks also occur among the first 256 training tasks (")
    assert look(of(is_split=True)) == Overlap(num_shared=0, num_evaluation=64, num_training=256)


def test_the_warning_mends_it_in_three_lines() -> None:
    found = look(Rows)
    assert found is not None
    body = str(found.warning()).partition("in start():\n")[2]
    assert len(body.splitlines()) == 3
    scope: dict[str, Any] = {}
    exec(f"def start(self, options):\n{body}", scope)
    assert look(of(start=scope["start"])) == Overlap(num_shared=0, num_evaluation=64, num_training=256)


def test_the_known_answer_tells_tasks_apart_that_begin_alike() -> None:
    class Many(Hidden):
        num = 10**9

    found = look(Many)
    assert found is not None
    assert (found.num_shared, found.warning()) == (0, None)
    few = look(Hidden)
    assert few is not None
    assert few.num_shared == 64


def test_a_few_that_are_alike_by_chance_are_not_told() -> None:
    found = look(Calculator)
    assert found is not None
    assert (found.num_shared, found.warning()) == (1, None)


def test_what_says_its_splits_itself_is_not_looked_at() -> None:
    assert look(Rows, Tasks(seed=0, num=NumTasks(train=7, eval=3))) is None


def test_it_takes_a_few_seconds_at_most() -> None:
    begin = time.monotonic()
    found = look(of(seconds=0.1))
    assert time.monotonic() - begin < 8
    assert found is not None
    assert found.num_evaluation <= 21
    assert found.num_training <= 21


@pytest.mark.slow
@each("where", ["start", "close", "__init__"])
def test_an_environment_that_fails_or_hangs_is_left_to_the_run(where: str) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise KeyError("lamp")

    assert look(of(**{where: breaks})) is None
    stuck = of(**{where: lambda *_, **__: hang()})
    assert asyncio.run(measure_overlap(stuck, Tasks(seed=0), timeout_s=0.1)) is None
