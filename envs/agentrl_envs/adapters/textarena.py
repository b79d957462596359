"""Games of TextArena for one player."""

import hashlib
from collections.abc import Mapping
from typing import Any

from agentrl import ToolEnv, UserError
from agentrl_envs.adapters.common import OwnRandom, draw

try:
    import textarena
except ModuleNotFoundError as error:
    raise UserError(f"TextArena is not installed ({error}); pip install 'agentrl[textarena]'") from error

_MAX_DEPTH = 12


class TextArena(ToolEnv):
    """The game's prompt, then its messages; what the policy says is its move, as the prompt asks for it (`[3]`).

    The game's reward, from -1 to 1, comes with its end; 1 is success. A game draws from Python's global random numbers: each
    environment has its own in their place. A move at which a game raises is answered, and is as if it had not been made.
    """

    turn_rewards = False

    def __init__(self, *, game: str, options: Mapping[str, Any] | None = None) -> None:
        """Choose a game.

        Args:
            game: its id in TextArena, such as `Mastermind-v0`. Wrappers are left out: history is the dialogue's.
            options: of the game, such as {code_length: 3}.

        Raises:
            UserError: for a game that there is none of, or that is not for one player, or that needs data that is not there.
        """
        super().__init__()
        self.id, self.options = game if game.endswith("-raw") else f"{game}-raw", dict(options or {})
        if self.id not in textarena.envs.registration.ENV_REGISTRY:
            raise UserError(f"game: TextArena has no {game!r}")
        try:
            self._begin(0)
        except Exception as error:  # a game may raise anything
            raise UserError(
                f"game: {game!r} cannot be played alone, and offline: {type(error).__name__}: {error}"
            ) from error
        self.seed = 0
        self.moves: list[str] = []
        self.new_seeds: dict[int, int] = {}
        """From which move on chance was another."""

    def start(self, options: dict[str, Any]) -> str:
        """Begin a game, in a new environment: some keep things when they are reset."""

        def begin(seed: int) -> tuple[str, int]:
            self._begin(seed)
            return self._held(), seed  # whatever it will draw later: one secret is one task

        self.seed, self.moves = draw(self.np_random, options, begin), []
        self.new_seeds = {}
        return self._begin(self.seed)

    def answer(self, text: str) -> str | None:
        """Make a move."""
        try:
            said, is_over = self._move(text)
        except Exception as error:  # noqa: BLE001 - a game may raise anything at a move that it does not understand
            words = f"{type(error).__name__}: {error}"
            self._play_again()
            return f"Error: {' '.join(words.split())[:200]}"
        self.moves.append(text)
        if is_over:
            rewards, info = self.game.close()
            reward = float(rewards[0])
            self.reward(reward, "game")
            self.finish(success=reward >= 1.0, score=min(max(reward, 0.0), 1.0))
            said = "\n".join(filter(None, (said, str(info[0].get("reason") or ""))))
        return said

    def reseed(self, seed: int) -> None:
        """Let the game draw from a new generator too."""
        super().reseed(seed)
        self.new_seeds[len(self.moves)] = seed
        self._random = OwnRandom(seed)

    def _play_again(self) -> None:
        self._begin(self.seed)
        for number, move in enumerate([*self.moves, None]):
            if number in self.new_seeds:
                self._random = OwnRandom(self.new_seeds[number])
            if move is not None:
                self._move(move)

    def state_key(self) -> str:
        """Return a hash of the game: all that it holds but the messages that it sent, and its random numbers."""
        return hashlib.sha256((self._held() + _plain(vars(self._random))).encode()).hexdigest()[:16]

    def _held(self) -> str:
        state = vars(self.game.state) | {"observations": None, "logs": None, "step_info": None}
        return _plain((vars(self.game) | {"state": None}, state))

    def _begin(self, seed: int) -> str:
        self._random = OwnRandom(seed)
        with self._random.in_use(f"TextArena's {self.id}"):
            self.game: Any = textarena.make(self.id, **self.options)
            self.game.reset(num_players=1, seed=seed)
            return self._said()

    def _move(self, text: str) -> tuple[str, bool]:
        with self._random.in_use(f"TextArena's {self.id}"):
            is_over, _ = self.game.step(action=text)
            return self._said(), bool(is_over)

    def _said(self) -> str:
        _, messages = self.game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(message for _, message, kind in messages if kind is not own).strip()


def _plain(value: Any, depth: int = 0) -> str:
    """Return a text that is the same for equal data, in whichever object and process."""
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{_plain(k, depth + 1)}:{_plain(v, depth + 1)}" for k, v in value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_plain(v, depth + 1) for v in value) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(_plain(v, depth + 1) for v in value)) + "}"
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), depth + 1)
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    if hasattr(value, "__dict__"):
        return type(value).__qualname__ + _plain(vars(value), depth + 1)
    return repr(value)
