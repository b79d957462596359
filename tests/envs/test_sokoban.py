from collections import deque
from typing import Any

import numpy as np
import pytest

from agentrl.env import tool_call
from agentrl.errors import UserError
from agentrl_envs import sokoban
from agentrl_envs.sokoban import DIRECTIONS, Level, Position, Sokoban, moved, solutions
from tests.support.each import each


def at(picture: str, **options: Any) -> Sokoban:
    """Return an environment at a position that is drawn without the walls around."""
    rows = picture.split("|")
    cells = {(r, c): tile for r, row in enumerate(rows) for c, tile in enumerate(row)}
    boxes = frozenset(cell for cell, tile in cells.items() if tile in "$*")
    env = Sokoban(size=len(rows), num_boxes=len(boxes), num_pushes=len(boxes), **options)
    env.reset(seed=0)
    floor = frozenset(cell for cell, tile in cells.items() if tile != "#")
    env.level = Level(len(rows), floor, frozenset(cell for cell, tile in cells.items() if tile in ".*+"))
    env.position = Position(next(cell for cell, tile in cells.items() if tile in "@+"), boxes)
    env.way = {}
    return env


def move(to: str) -> Any:
    return tool_call("move", to=to)


def test_boxes_are_pushed_one_at_a_time_and_pay_on_their_targets() -> None:
    env = at("@$. |  $ | .  |    ")
    expected: list[tuple[Any, str, float]] = [
        ("Hello.", "######\n#@$. #\n#  $ #\n# .  #\n#    #\n######", 0),
        (move("up"), "######\n#@$. #\n#  $ #\n# .  #\n#    #\n######", 0),
        (move("right"), "######\n# @* #\n#  $ #\n# .  #\n#    #\n######", 0.25),
        (move("down"), "######\n#  * #\n# @$ #\n# .  #\n#    #\n######", 0),
        (move("down"), "######\n#  * #\n#  $ #\n# +  #\n#    #\n######", 0),
        (move("right"), "######\n#  * #\n#  $ #\n# .@ #\n#    #\n######", 0),
        (move("up"), "######\n#  * #\n#  $ #\n# .@ #\n#    #\n######", 0),  # two boxes in a row
    ]
    for action, looks, reward in expected:
        observation, got, terminated, _, _ = env.step(action)
        assert (observation[0]["content"][-len(looks) :], got, terminated) == (looks, reward, False)
    assert observation[0]["content"].startswith("Blocked.")


def test_a_box_that_leaves_its_target_pays_back_and_one_in_a_corner_ends_the_task() -> None:
    env = at("@* |   |  .")
    env.level = env.level._replace(targets=frozenset({(0, 1), (2, 2)}))
    observation, reward, terminated, _, info = env.step(move("right"))
    assert (reward, terminated, info["success"]) == (-0.5, True, False)
    assert observation[0]["content"].startswith("A box is stuck.")


def test_the_last_box_solves_it() -> None:
    for turn_rewards, expected in ((True, 1.5), (False, 1.0)):
        env = at("@$.|   |   ", turn_rewards=turn_rewards)
        _, reward, terminated, _, info = env.step(move("right"))
        assert (reward, terminated, info["success"]) == (expected, True, True)


def shortest(level: Level, position: Position) -> int:
    """Return the length of a shortest solution, by a search forwards."""
    queue, seen = deque([(position, 0)]), {position}
    while queue:
        here, length = queue.popleft()
        if here.boxes == level.targets:
            return length
        for to in DIRECTIONS:
            after = moved(level, here, to)
            if after and after not in seen:
                seen.add(after)
                queue.append((after, length + 1))
    raise AssertionError("no solution")


def test_every_level_is_solved_by_its_own_play_and_by_the_search() -> None:
    env = Sokoban(size=4, num_boxes=2, num_pushes=5, walls=0.2)
    for seed in range(25):
        env.reset(seed=seed)
        level, start, way = env.level, env.position, env.way
        assert not start.boxes & level.targets
        lengths = []
        for steps in (way, solutions(level)):
            position, length = start, 0
            while position.boxes != level.targets:
                following = moved(level, position, steps[position])
                assert following is not None
                position, length = following, length + 1
            lengths.append(length)
        assert lengths[1] == shortest(level, start) <= lengths[0]


def test_the_oracle_finds_back_after_a_mistake_and_the_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    env = at("@   | $ .|    |    ")
    env.step(env.oracle(skill=0.0, rng=np.random.default_rng(0)))
    length = shortest(env.level, env.position)
    for _ in range(length):
        end = env.step(env.oracle())
    assert end[4]["success"]
    monkeypatch.setattr(sokoban, "_MAX_STATES", 10)
    solutions.cache_clear()
    assert len(solutions(env.level)) < 20
    lost = at("@   | $ .|    |    ")
    assert lost.oracle()["tool_calls"][0]["function"]["arguments"]["to"] in {"right", "down"}
    solutions.cache_clear()


@each(
    ("options", "words"),
    [
        ({"size": 2}, "size: give a whole number from 3 to 12, got 2"),
        ({"num_boxes": 3, "num_pushes": 2}, "num_pushes: give a whole number from 3 to 100, got 2"),
        ({"walls": -1}, "walls: give a number from 0 to 1, got -1"),
    ],
)
def test_an_impossible_option_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Sokoban(**options)
