from typing import Any

import pytest

from agentrl.errors import CheckError
from agentrl.testing import check_env
from agentrl_envs.key_door import KeyDoor
from tests.support.table import Table


class Remembers(KeyDoor):
    episodes = 0

    def start(self, options: dict[str, Any]) -> str | list[dict[str, Any]]:
        said = super().start(options)
        self.episodes += 1
        return said if self.episodes < 5 else "Tea?"  # later than the checks of right and wrong look


def test_it_says_what_was_proven(capsys: pytest.CaptureFixture[str]) -> None:
    found = check_env(KeyDoor, seeds=[0])
    assert found.name == "KeyDoor"
    assert "the oracle ends each task that was tried" in found.lines
    assert "reset() forgets the episodes before it, so an environment plays many of them" in found.lines
    assert any(line.startswith("64 of 64 evaluation tasks also occur among the first ") for line in found.lines)
    assert str(found) == "\n".join(["KeyDoor", *(f"- {line}" for line in found.lines)])
    assert capsys.readouterr().out == ""  # what is printed, others decide


def test_it_says_how_long_a_table_is() -> None:
    lines = check_env(Table, seeds=[0]).lines
    assert {"its train split has 7 tasks", "its eval split has 3 tasks"} <= {*lines}
    assert not any("evaluation tasks" in line for line in lines)


def test_it_says_why_an_episode_has_an_environment_of_its_own() -> None:
    lines = check_env(Remembers, seeds=[0]).lines
    (line,) = [line for line in lines if line.startswith("each episode has an environment of its own")]
    assert "after other tasks, it plays one otherwise (turn 0, messages: " in line


def test_a_task_of_a_table_that_cannot_be_begun_is_a_problem() -> None:
    class Short(Table):
        def num_tasks(self, split: str) -> int | None:
            return 5

        def start(self, options: dict[str, Any]) -> str:
            return str([1, 2, 3][options.get("task_index", 0)])

    with pytest.raises(CheckError, match=r"reset\(\) raised IndexError"):
        check_env(Short, seeds=[0])


def test_a_task_of_a_table_that_is_drawn_at_random_is_a_problem() -> None:
    class Drawn(Table):
        count = 0

        def start(self, options: dict[str, Any]) -> str:
            self.count += options.get("split") == "eval"
            return f"{self.count}"

    with pytest.raises(CheckError, match="task 0 of the eval split began otherwise the second time"):
        check_env(Drawn, seeds=[0])
