"""How often a run constructs its environment."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl_envs.key_door import KeyDoor
from tests.support.run_files import repeatable
from tests.support.runs import recipe, train

pytestmark = pytest.mark.process

made: Counter[str] = Counter()
closed: Counter[str] = Counter()


class Counted(KeyDoor):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        made[type(self).__name__] += 1

    def close(self) -> None:
        closed[type(self).__name__] += 1


class Once(Counted):
    can_reuse = False


class Heavy(Counted):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        time.sleep(0.06)


def settings(tmp_path: Path, env: str) -> Any:
    rollout = {"num_groups": 4, "group_size": 4, "max_live_episodes": 4}
    return recipe(tmp_path / env, env={"id": f"{__name__}:{env}"}, rollout=rollout, evaluation={"num_tasks": 8})


@pytest.mark.slow
def test_a_run_constructs_as_many_as_are_live_and_what_it_looks_at_before(tmp_path: Path) -> None:
    made.clear()
    closed.clear()
    found = {}
    for env in ("Counted", "Once"):
        (tmp_path / env).mkdir()
        _, rows = train(settings(tmp_path, env))
        found[env] = [repeatable(row) for row in rows]
    num_episodes = 2 * 16 + 2 * 8
    before = made["Once"] - num_episodes  # what is tried before, but for what a proof takes
    assert 0 < before <= 10
    assert made["Counted"] <= before + 4 + 4
    assert closed == made
    assert found["Counted"] == found["Once"]


def test_a_slow_construction_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "Heavy").mkdir()
    told: list[str] = []
    folder, _ = train(settings(tmp_path, "Heavy"), on_warning=told.append)
    (words,) = [words for words in told if words.startswith("constructing the environment takes")]
    assert "for each of 4 live episodes: hold what its instances share at module level" in words
    assert [w.words for w in folder.warnings() if w.name == "slow_construction"] == [words]
