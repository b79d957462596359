"""A corridor of rooms and locked doors: 10 to 40 turns to the end."""

from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from agentrl import Message, Prompt, ToolEnv, UserError, tool, tool_call
from agentrl_envs.options import in_split, opening, prompt_form, share, whole_number

Color: TypeAlias = Literal["red", "blue", "green", "gold", "black", "white", "pink", "gray"]
COLORS: tuple[Color, ...] = get_args(Color)
_MAX_DRAWS = 100


class Corridor(ToolEnv):
    """`Room 1 of 7. A red key. Holding nothing.`: walk to the last room, and open the doors between with their keys.

    A door opens from the left, with the key of its color; the key stays in the lock. One key can be held: whoever takes
    another puts it down. Keys lie to the left of their doors, up to `detour` rooms before the door that comes first, so
    that whoever has opened that one must know which way to go back. Reaching the last room ends the task and earns 1.
    Each needed key, taken for the first time, and each door earn `turn_reward`.
    """

    def __init__(
        self,
        *,
        num_rooms: int = 10,
        num_doors: int = 4,
        detour: int = 3,
        turn_reward: float = 0.1,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
    ) -> None:
        """Set the difficulty.

        Args:
            num_rooms: rooms in a row.
            num_doors: locked doors, each of another color; at most one between two rooms.
            detour: largest number of rooms to walk back for a key behind an open door; 0: every key lies on the way.
            turn_reward: reward of a key's first taking and of a door's opening.
            turn_rewards: False pays in the last room alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
        """
        super().__init__()
        self.num_rooms = whole_number("num_rooms", num_rooms, at_least=2, at_most=50)
        self.num_doors = whole_number("num_doors", num_doors, at_least=0, at_most=len(COLORS))
        self.detour = whole_number("detour", detour, at_least=0, at_most=50)
        self.turn_reward = share("turn_reward", turn_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        if num_doors >= num_rooms:
            raise UserError(f"num_doors: {num_rooms} rooms have {num_rooms - 1} walls between them, got {num_doors}")
        self.room = 1
        self.holding: Color | None = None
        self.doors: dict[int, Color] = {}  # locked ones, by the room to the left
        self.keys: dict[Color, int] = {}  # rooms of those that lie there
        self.unpaid: set[Color] = set()  # keys that were never taken

    def start(self, options: dict[str, Any]) -> str | list[Message]:
        """Draw doors and keys of the split."""
        self.room, self.holding = 1, None
        for _ in range(_MAX_DRAWS):  # of short corridors there are few
            self._draw()
            if in_split(self.state_key(), options.get("split", "train")):
                break
        return opening(
            self.prompt,
            f"Reach room {self.num_rooms}. {self._look()}",
            f"You walk through a row of rooms, from room 1 to room {self.num_rooms}. In each turn, call one tool: left and "
            "right walk one room, take picks up a key that lies in your room, unlock opens a door of your room. A door blocks "
            "the way to the right until it is unlocked, from your side, with the key of its color; the key then stays in the "
            "lock. You hold one key at most: taking another puts it down. The key of a door always lies in a room to the left "
            "of it, so sometimes you must walk back. Text without a call moves nothing.",
            self.turn_rewards
            and f"The first taking of each key and the opening of each door earn {self.turn_reward:g}.",
            f"Reaching room {self.num_rooms} earns 1 and ends the task.",
        )

    @tool
    def left(self) -> str:
        """Walk one room to the left."""
        self.room = max(self.room - 1, 1)
        return self._look()

    @tool
    def right(self) -> str:
        """Walk one room to the right."""
        if self.room in self.doors:
            return f"Locked. {self._look()}"
        self.room += 1
        if self.room == self.num_rooms:
            self.reward(1.0, "end")
            self.finish(success=True)
        return self._look()

    @tool
    def take(self, key: Color) -> str:
        """Take a key.

        Args:
            key: its color.
        """
        if self.keys.get(key) != self.room:
            return f"No {key} key here. {self._look()}"
        del self.keys[key]
        if self.holding:
            self.keys[self.holding] = self.room
        self.holding = key
        self._pay(key in self.unpaid, "key")
        self.unpaid.discard(key)
        return self._look()

    @tool
    def unlock(self, door: Color) -> str:
        """Open the door to the right.

        Args:
            door: its color.
        """
        if self.doors.get(self.room) != door:
            return f"No {door} door here. {self._look()}"
        if self.holding != door:
            return f"No {door} key. {self._look()}"
        del self.doors[self.room]
        self.holding = None
        self._pay(True, "door")
        return self._look()

    def answer(self, text: str) -> str:  # noqa: ARG002 - no text moves anything
        """Ask for a tool."""
        return f"Use a tool. {self._look()}"

    def state_key(self) -> str:
        """Return where everything is, and which keys still pay."""
        parts = [
            str(self.room),
            self.holding or "",
            ",".join(f"{room}{color}" for room, color in self.doors.items()),
            ",".join(f"{room}{color}" for color, room in sorted(self.keys.items())),
            ",".join(sorted(self.unpaid)),
        ]
        return "/".join(parts)

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Fetch the key of the next door, open it, and walk on; a wrong turn is another tool or another color."""
        rng = np.random.default_rng() if rng is None else rng
        name, color = self._best()
        if rng.random() >= skill:
            others = [
                (n, c) for n in ("left", "right", "take", "unlock") for c in self._colors(n) if (n, c) != (name, color)
            ]
            name, color = others[int(rng.integers(len(others)))]
        argument = {"take": "key", "unlock": "door"}.get(name)
        return tool_call(name, **({argument: color} if argument else {}))

    def _draw(self) -> None:
        rooms = sorted((self.np_random.permutation(self.num_rooms - 1)[: self.num_doors] + 1).tolist())
        colors = [COLORS[k] for k in self.np_random.permutation(len(COLORS))[: self.num_doors]]
        self.doors = dict(zip(rooms, colors, strict=True))
        self.keys, before = {}, 0
        for room, color in self.doors.items():
            first = max(1, before + 1 - self.detour)  # the door before leads to room before + 1
            self.keys[color] = int(self.np_random.integers(first, room, endpoint=True))
            before = room
        self.unpaid = set(self.keys)

    def _best(self) -> tuple[str, str]:
        if not self.doors:
            return "right", ""
        at, color = next(iter(self.doors.items()))
        if self.holding == color:
            return ("unlock", color) if self.room == at else ("right" if self.room < at else "left", "")
        where = self.keys[color]
        return ("take", color) if self.room == where else ("right" if self.room < where else "left", "")

    def _colors(self, tool_name: str) -> list[str]:
        """List the colors that a mistake would name: those that are seen or held."""
        if tool_name in {"left", "right"}:
            return [""]
        here = [color for color, room in self.keys.items() if room == self.room]
        seen = [*here, self.doors.get(self.room), self.holding]
        return sorted({color for color in seen if color})

    def _pay(self, is_due: bool, part: str) -> None:
        if is_due and self.turn_rewards:
            self.reward(self.turn_reward, part)

    def _look(self) -> str:
        here = [f"A {color} key." for color, room in sorted(self.keys.items()) if room == self.room]
        door = [f"A {self.doors[self.room]} door." for _ in range(self.room in self.doors)]
        return " ".join([f"Room {self.room}.", *here, *door, f"Holding {self.holding or 'nothing'}."])
