"""Gymnasium's FrozenLake in words: its maps, its ice, its holes."""
# Dimensions: S tiles, A directions.

from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from agentrl import Message, Prompt, ToolEnv, UserError, tool, tool_call
from agentrl_envs.options import in_split, opening, prompt_form, share, whole_number

Direction: TypeAlias = Literal["left", "down", "right", "up"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)  # in Gymnasium's order
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
_DISCOUNT = 0.99
_MAX_DRAWS = 100
_TILES = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}


class FrozenLake(ToolEnv):
    """Cross a frozen lake to the goal; a hole ends the task. Maps and dynamics are Gymnasium's.

    With `slip`, a move goes to either side of where it was meant to, each with half of that chance; Gymnasium's slippery
    lake is 2/3. `view: map` shows the lake after each move, `view: around` where the goal is and what the four neighbors
    are, which is all that a small policy can read. Reaching the goal earns 1; on the way, each step that shortens the
    shortest path earns its share of `progress_reward`, and one that lengthens it costs as much.
    """

    def __init__(
        self,
        *,
        size: int = 6,
        frozen: float = 0.75,
        slip: float = 0.0,
        view: Literal["map", "around"] = "map",
        progress_reward: float = 0.5,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
    ) -> None:
        """Set the difficulty.

        Args:
            size: tiles of a side.
            frozen: chance of a tile to be ice, .5 or more; the others are holes. There is always a way.
            slip: chance of a move to go to one of the two sides instead.
            view: `map`, or `around`.
            progress_reward: what all steps of a shortest path earn together.
            turn_rewards: False pays at the goal alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
        """
        super().__init__()
        self.size = whole_number("size", size, at_least=3, at_most=20)
        self.frozen = share("frozen", frozen, at_least=0.5)  # of less, a map with a way is long in coming
        self.slip = share("slip", slip)
        self.progress_reward = share("progress_reward", progress_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        if view not in {"map", "around"}:
            raise UserError(f"view: give 'map' or 'around', got {view!r}")
        self.view = view
        self.rows: tuple[str, ...] = ()
        self.at = 0

    def start(self, options: dict[str, Any]) -> str | list[Message]:
        """Draw a map of the split by the seed; how the ice slips differs within a group."""
        for _ in range(_MAX_DRAWS):  # until it is one of the split: of small lakes there are few
            self.rows = tuple(generate_random_map(self.size, self.frozen, seed=int(self.np_random.integers(2**31))))
            if in_split("".join(self.rows), options.get("split", "train")):
                break
        self.at = 0
        if self.slip:
            self.np_random = np.random.default_rng(
                [int(self.np_random.integers(2**31)), options.get("rollout_index", 0)]
            )
        goal = "Go from @ to G over ice (.), not into holes (O).\n" if self.view == "map" else ""
        shown = {
            "map": "You see the map: @ is you, G the goal, . ice, O a hole; up is the line above, right the next character.",
            "around": "You see how far down and to the right the goal is, and what the four tiles around you are.",
        }
        return opening(
            self.prompt,
            f"{goal}{self._look()}",
            f"You cross a frozen lake of {self.size} by {self.size} tiles to the goal. In each turn, call move once with left, "
            f"down, right or up: it takes you one tile further, and at the edge you stay. {shown[self.view]} Plan a way around "
            "the holes. Text without a call moves nothing.",
            self.slip > 0
            and f"The ice is slippery: with a chance of {self.slip:.0%} you slip to one of the two sides.",
            self.turn_rewards
            and f"Steps that shorten the way earn up to {self.progress_reward:g} together; those that lengthen it cost as "
            "much.",
            "Reaching the goal earns 1 and ends the task. A hole ends it too, and earns nothing.",
        )

    @tool
    def move(self, to: Direction) -> str:
        """Take a step.

        Args:
            to: where.
        """
        before, direction = self.at, DIRECTIONS.index(to)
        if self.slip and (chance := self.np_random.random()) < self.slip:
            direction += 1 if chance < self.slip / 2 else -1
        self.at = int(next_tiles(self.size)[before, direction % 4])
        tile = "".join(self.rows)[self.at]
        distances_S = lake(self.rows, self.slip).distances_S
        if self.turn_rewards and tile != "H":
            nearer = (distances_S[before] - distances_S[self.at]) / distances_S[0]
            self.reward(self.progress_reward * float(nearer), "progress")
        if tile == "G":
            self.reward(1.0, "goal")
            self.finish(success=True)
            return "The goal!"
        if tile == "H":
            self.finish(success=False)
            return "A hole!"
        return self._look()

    def answer(self, text: str) -> str:  # noqa: ARG002 - no text moves anything
        """Ask for a tool."""
        return f"Use move.\n{self._look()}"

    def state_key(self) -> str:
        """Return the map and the tile."""
        return f"{self.at}/{''.join(self.rows)}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Move as the optimal policy does, by value iteration; a wrong turn moves as it would not."""
        rng = np.random.default_rng() if rng is None else rng
        good = lake(self.rows, self.slip).best[self.at]
        wrong = [k for k in range(4) if k not in good]
        chosen = good[0] if rng.random() < skill or not wrong else wrong[int(rng.integers(len(wrong)))]
        return tool_call("move", to=DIRECTIONS[chosen])

    def _look(self) -> str:
        row, column = divmod(self.at, self.size)
        if self.view == "map":
            tiles = list("".join(self.rows).translate(str.maketrans("SFH", "..O")))
            tiles[self.at] = "@"
            return "\n".join("".join(tiles[k : k + self.size]) for k in range(0, len(tiles), self.size))
        places = [(row + down, column + right) for down, right in STEPS]
        inside = [0 <= r < self.size and 0 <= c < self.size for r, c in places]
        names = [_TILES[self.rows[r][c]] if is_in else "edge" for (r, c), is_in in zip(places, inside, strict=True)]
        around = ", ".join(f"{name} {tile}" for name, tile in zip(DIRECTIONS, names, strict=True))
        return f"Goal {self.size - 1 - row} down {self.size - 1 - column} right. {around}."


class Lake(NamedTuple):
    """Facts that follow from a map; shared by all environments, and never changed."""

    distances_S: npt.NDArray[np.float64]
    """Steps from each tile to the goal around all holes; infinite if there is no way."""
    best: list[list[int]]
    """Optimal directions of each tile."""


@lru_cache(maxsize=512)
def lake(rows: tuple[str, ...], slip: float) -> Lake:
    """Solve a map."""
    tiles_S, next_SA = np.array(list("".join(rows))), next_tiles(len(rows))
    is_end_S, goal_S = (tiles_S == "G") | (tiles_S == "H"), (tiles_S == "G").astype(np.float64)
    values_S, before_S = goal_S, np.zeros_like(goal_S)
    while np.any(values_S != before_S):  # value iteration: as many sweeps as the farthest tile has steps to go
        before_S = values_S
        values_S = np.where(is_end_S, goal_S, _DISCOUNT * values_S[next_SA].max(axis=1))
    with np.errstate(divide="ignore"):
        distances_S = np.round(np.log(values_S) / np.log(_DISCOUNT))
    worth_SA = values_S[next_SA]
    for _ in range(50 if slip else 0):  # policy iteration: some five rounds
        chances_SS = np.zeros((tiles_S.size, tiles_S.size))
        for turned, chance in ((0, 1 - slip), (1, slip / 2), (-1, slip / 2)):
            at_S = next_SA[np.arange(tiles_S.size), (worth_SA.argmax(axis=1) + turned) % 4]
            chances_SS[np.arange(tiles_S.size), at_S] += np.where(is_end_S, 0, chance)
        values_S = np.linalg.solve(np.eye(tiles_S.size) - _DISCOUNT * chances_SS, goal_S)
        straight_SA, before_SA = values_S[next_SA], worth_SA
        sides_SA = np.roll(straight_SA, 1, axis=1) + np.roll(straight_SA, -1, axis=1)
        worth_SA = (1 - slip) * straight_SA + slip / 2 * sides_SA
        if np.array_equal(worth_SA.argmax(axis=1), before_SA.argmax(axis=1)):
            break
    return Lake(distances_S, [np.flatnonzero(worth_A > worth_A.max() - 1e-9).tolist() for worth_A in worth_SA])


@cache
def next_tiles(size: int) -> npt.NDArray[np.int64]:
    """Return the tile that each direction leads to from each tile; at the edge, the tile itself."""
    row_S, column_S = np.divmod(np.arange(size * size), size)
    moved = [(np.clip(row_S + r, 0, size - 1), np.clip(column_S + c, 0, size - 1)) for r, c in STEPS]
    return np.stack([r * size + c for r, c in moved], axis=1)
