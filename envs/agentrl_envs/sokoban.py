"""Sokoban as text, on levels that are made by playing backwards from the solution."""

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from agentrl import Message, Prompt, ToolEnv, tool, tool_call
from agentrl_envs.options import opening, prompt_form, share, whole_number

Direction: TypeAlias = Literal["up", "down", "left", "right"]
Cell: TypeAlias = tuple[int, int]
"""Row and column."""
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
STEPS: dict[Direction, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_MAX_STATES = 50_000
"""Positions that the oracle's search visits in a level at most."""
_MAX_DRAWS = 1000


class Position(NamedTuple):
    """State that moves change."""

    player: Cell
    boxes: frozenset[Cell]


class Level(NamedTuple):
    """Parts that moves leave as they are."""

    size: int
    floor: frozenset[Cell]
    """Cells on which one can stand, targets included."""
    targets: frozenset[Cell]


class Sokoban(ToolEnv):
    """Push every box ($) onto a target (.); boxes cannot be pulled. A box that is stuck in a corner ends the task.

    A level is made backwards: boxes start on targets, and are pulled away by random play, so that there is always a way.
    Each box that comes to a target earns its share of `box_reward`, one that leaves it costs as much; the last one earns 1.
    """

    def __init__(
        self,
        *,
        size: int = 6,
        num_boxes: int = 2,
        num_pushes: int = 6,
        walls: float = 0.1,
        box_reward: float = 0.5,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
    ) -> None:
        """Set the difficulty.

        Args:
            size: cells of a side, without the walls around.
            num_boxes: boxes, and targets.
            num_pushes: pushes from which the level is made; it may be solved with fewer.
            walls: share of the cells inside that are walls.
            box_reward: what all boxes earn together on their targets.
            turn_rewards: False pays for the solution alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
        """
        super().__init__()
        self.size = whole_number("size", size, at_least=3, at_most=12)
        self.num_boxes = whole_number("num_boxes", num_boxes, at_least=1, at_most=5)
        self.num_pushes = whole_number("num_pushes", num_pushes, at_least=num_boxes, at_most=100)
        self.walls = share("walls", walls)
        self.box_reward = share("box_reward", box_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        self.level = Level(0, frozenset(), frozenset())
        self.position = Position((0, 0), frozenset())
        self.way: dict[Position, Direction] = {}  # the backward play, forwards

    def start(self, options: dict[str, Any]) -> str | list[Message]:  # noqa: ARG002 - the task follows from the seed alone
        """Make a level."""
        self.level, self.position, self.way = self._draw()
        return opening(
            self.prompt,
            f"Push all boxes ($) onto targets (.). You are @; # is wall, * a box on a target.\n{self._look()}",
            "You play Sokoban on a map: @ is you (+ on a target), $ a box, . a target, * a box on a target, # a wall; up "
            "is the line above, right the next character. In each turn, call move once with up, down, left or right: you "
            "step there, and push a box that stands there one cell further. Boxes cannot be pulled, and you cannot push "
            "two at once or one into a wall. To push a box to the right you stand on its left. Text without a call moves "
            "nothing.",
            self.turn_rewards
            and f"Each box that comes to a target earns {self.box_reward / self.num_boxes:g}; one that leaves it costs as "
            "much.",
            "When all boxes are on targets, that earns 1 and ends the task. A box that is stuck in a corner off the "
            "targets ends it too, and earns nothing.",
        )

    @tool
    def move(self, to: Direction) -> str:
        """Take a step, and push what is there.

        Args:
            to: where.
        """
        after = moved(self.level, self.position, to)
        if after is None:
            return f"Blocked.\n{self._look()}"
        num_before, num_now = (len(p.boxes & self.level.targets) for p in (self.position, after))
        self.position = after
        if num_now != num_before and self.turn_rewards:
            self.reward(self.box_reward * (num_now - num_before) / self.num_boxes, "boxes")
        if num_now == self.num_boxes:
            self.reward(1.0, "solved")
            self.finish(success=True)
            return f"Solved!\n{self._look()}"
        if any(self._is_stuck(box) for box in after.boxes):
            self.finish(success=False)
            return f"A box is stuck.\n{self._look()}"
        return self._look()

    def answer(self, text: str) -> str:  # noqa: ARG002 - no text moves anything
        """Ask for a tool."""
        return f"Use move.\n{self._look()}"

    def state_key(self) -> str:
        """Return the map."""
        return self._look()

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Play the level's own solution, or from elsewhere the shortest one; a wrong turn is any other step that is free.

        Where nothing is known (the search is bounded, or the level is lost), it takes any free step.
        """
        rng = np.random.default_rng() if rng is None else rng
        free = [to for to in DIRECTIONS if moved(self.level, self.position, to)] or list(DIRECTIONS)
        right = self.way.get(self.position) or solutions(self.level).get(self.position)
        wrong = [to for to in free if to != right]
        if right is None or (wrong and rng.random() >= skill):
            right = wrong[int(rng.integers(len(wrong)))]
        return tool_call("move", to=right)

    def _draw(self) -> tuple[Level, Position, dict[Position, Direction]]:
        rng, inside = self.np_random, [(r, c) for r in range(self.size) for c in range(self.size)]
        for _ in range(_MAX_DRAWS):
            floor = [cell for cell in inside if rng.random() >= self.walls]
            targets = [floor[k] for k in rng.permutation(len(floor))[: self.num_boxes]]
            level = Level(self.size, frozenset(floor), frozenset(targets))
            free = [cell for cell in floor if cell not in level.targets]
            if len(targets) < self.num_boxes or not free:
                continue
            solved = Position(free[int(rng.integers(len(free)))], level.targets)
            way = _played_backwards(level, solved, self.num_pushes, rng)
            if way and not (start := next(reversed(way))).boxes & level.targets:
                return level, start, way
        raise RuntimeError(
            f"no level of {self.num_pushes} pushes within {_MAX_DRAWS} draws; ask for fewer walls or pushes"
        )

    def _is_stuck(self, box: Cell) -> bool:
        up, down, left, right = (_next(box, step) not in self.level.floor for step in STEPS.values())
        return box not in self.level.targets and (up or down) and (left or right)

    def _look(self) -> str:
        level, (player, boxes) = self.level, self.position

        def tile(cell: Cell) -> str:
            if cell not in level.floor:
                return "#"
            is_target = cell in level.targets
            if cell == player:
                return "+" if is_target else "@"
            return ("*" if is_target else "$") if cell in boxes else "." if is_target else " "

        around = range(-1, level.size + 1)
        return "\n".join("".join(tile((row, column)) for column in around) for row in around)


def moved(level: Level, position: Position, to: Direction) -> Position | None:
    """Return the position after a step, or None if a wall or a second box is in the way."""
    player = _next(position.player, STEPS[to])
    if player not in level.floor:
        return None
    if player not in position.boxes:
        return Position(player, position.boxes)
    beyond = _next(player, STEPS[to])
    if beyond not in level.floor or beyond in position.boxes:
        return None
    return Position(player, position.boxes - {player} | {beyond})


@lru_cache(maxsize=64)
def solutions(level: Level) -> dict[Position, Direction]:
    """Return the first step of a shortest solution from each position, by a search backwards from all solved ones.

    Positions beyond the first `_MAX_STATES` are left out. Shared by all environments, and never changed.
    """
    solved = [Position(cell, level.targets) for cell in sorted(level.floor - level.targets)]
    found: dict[Position, Direction] = {}
    seen, queue = set(solved), deque(solved)
    while queue and len(seen) < _MAX_STATES:
        position = queue.popleft()
        for to, before in _before(level, position):
            if before not in seen:
                seen.add(before)
                found[before] = to
                queue.append(before)
    return found


def _played_backwards(
    level: Level, solved: Position, num_pushes: int, rng: np.random.Generator
) -> dict[Position, Direction] | None:
    """Pull boxes at random to where they have not been; return the steps that undo it, the last first. None: stuck."""
    way: dict[Position, Direction] = {}
    position, seen = solved, {solved.boxes}
    for _ in range(num_pushes):
        # Every position that the player can walk to, with the position that it is walked to from.
        walks: dict[Position, tuple[Position, Direction] | None] = {position: None}
        queue, pulls = deque([position]), []
        while queue:
            at = queue.popleft()
            for to, before in _before(level, at):
                if before.boxes != at.boxes:
                    if before.boxes not in seen:
                        pulls.append((at, to, before))
                elif before not in walks:
                    walks[before] = (at, to)
                    queue.append(before)
        if not pulls:
            return None
        at, to, before = pulls[int(rng.integers(len(pulls)))]
        steps = [(before, to)]
        while (walked := walks[at]) is not None:
            steps.append((at, walked[1]))
            at = walked[0]
        way |= dict(reversed(steps))
        position = before
        seen.add(position.boxes)
    return way


def _before(level: Level, position: Position) -> Iterator[tuple[Direction, Position]]:
    """Yield each step that leads to a position, with where it leads from: a walk, or a push."""
    player, boxes = position
    for to, step in STEPS.items():
        behind, ahead = (player[0] - step[0], player[1] - step[1]), _next(player, step)
        if behind in level.floor and behind not in boxes:
            yield to, Position(behind, boxes)
            if ahead in boxes:
                yield to, Position(behind, boxes - {ahead} | {player})


def _next(cell: Cell, step: Cell) -> Cell:
    return cell[0] + step[0], cell[1] + step[1]
