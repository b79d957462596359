"""Games that TextWorld generates by seed."""

import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from agentrl import EnvironmentFailure, Message, UserError
from agentrl.data.files import absolute
from agentrl_envs.adapters.common import OwnRandom, ReplayedEnv
from agentrl_envs.options import whole_number

try:
    import textworld
except ModuleNotFoundError as error:
    raise UserError(f"TextWorld is not installed ({error}); pip install 'agentrl[textworld]' (Linux, macOS)") from error

_STATUS = re.compile(r"\s*>\s*(-= .*)?$", re.DOTALL)
_NOT_TYPED = re.compile(r"[^A-Za-z0-9 '\n-]")
"""Characters that no command has."""
_META = {
    "save",
    "restore",
    "quit",
    "q",
    "restart",
    "undo",
    "script",
    "unscript",
    "transcript",
    "verify",
    "pronouns",
    "version",
}
"""Commands to the interpreter, which is written in C: it writes files, ends the process, or crashes it."""
_MAX_TEXT, _MAX_COMMAND = 1_000, 80
"""Characters that are looked at, and those of a command: the interpreter's buffer is short."""


class TextWorld(ReplayedEnv):
    """The quest and the first room, then what each command does; the policy says commands (`take key`).

    Points are rewards as they are scored; winning is success. A game is made when it is first played, by Inform 7, which takes
    seconds; it stays in a folder.
    """

    def __init__(
        self,
        *,
        num_rooms: int = 3,
        num_objects: int = 5,
        quest_length: int = 3,
        num_games: int = 100,
        num_eval_games: int = 20,
        folder: str | None = None,
    ) -> None:
        """Set the difficulty.

        Args:
            num_rooms: rooms of a game.
            num_objects: objects in it, at most.
            quest_length: commands that the quest takes.
            num_games: games to train on.
            num_eval_games: other games, to evaluate on.
            folder: where games are kept. None: `agentrl/textworld` in the user's cache.
        """
        super().__init__()
        self.num_rooms = whole_number("num_rooms", num_rooms, at_least=1)
        self.num_objects = whole_number("num_objects", num_objects, at_least=1)
        self.quest_length = whole_number("quest_length", quest_length, at_least=1)
        self.num_games = whole_number("num_games", num_games, at_least=1)
        self.num_eval_games = whole_number("num_eval_games", num_eval_games, at_least=1)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = absolute(folder) if folder else cache / "agentrl" / "textworld"
        self.game = 0
        self.source: Any = None
        self.score = 0.0
        self.key = ""
        self.right = list[str]()
        self.possible = list[str]()

    def num_tasks(self, split: str) -> int:
        """Return how many games a split has."""
        return self.num_eval_games if split == "eval" else self.num_games

    def start(self, options: dict[str, Any]) -> str:
        """Choose a game: train has even seeds, eval odd ones."""
        split, index = options.get("split", "train"), options.get("task_index")
        index = int(self.np_random.integers(self.num_tasks(split))) if index is None else index
        self.game = 2 * index + (split == "eval")
        state = self.begin()
        self._note(state)
        return f"{state['objective']}\n\n{state['description'].strip()}"

    def answer(self, text: str) -> str:
        """Give a command: the first line of the text."""
        lines = _NOT_TYPED.sub(" ", text[:_MAX_TEXT]).splitlines()
        command = next((line.strip() for line in lines if line.strip()), "look")[:_MAX_COMMAND].strip()
        if _META & set(command.lower().split()):
            return "That is no command of the game."
        before = self.score
        state = self.act(command)
        self._note(state)
        self.reward(self.score - before, "score")
        if state["won"] or state["lost"]:
            self.finish(success=bool(state["won"]))
        return _STATUS.sub("", str(state.feedback)).strip()

    def state_key(self) -> str:
        """Return a hash of what is true in the game, and of the score."""
        return self.key

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Give the next command of a winning play; wrong turns give another one that the game allows."""
        rng = np.random.default_rng() if rng is None else rng
        others = [command for command in self.possible if command not in self.right[:1]]
        is_right = rng.random() < skill or not others
        command = self.right[0] if is_right and self.right else others[int(rng.integers(len(others)))]
        return {"role": "assistant", "content": command}

    def begin_source(self) -> Any:
        """Load the game."""
        wanted = {"objective", "description", "facts", "won", "lost", "policy_commands", "admissible_commands", "score"}
        self.source = None
        self.source = textworld.start(str(self._file()), textworld.EnvInfos(**dict.fromkeys(wanted, True)))
        return self.source.reset()

    def step_source(self, action: str) -> Any:
        """Give a command."""
        return self.source.step(action)[0]

    def close(self) -> None:
        """Unload the game: by dropping it, for one that is closed too is freed twice, and crashes the process."""
        self.source = None
        super().close()

    def _note(self, state: Any) -> None:
        self.score = float(state["score"] or 0)
        facts = sorted(map(str, state["facts"]))
        self.key = hashlib.sha256(repr((self.game, facts, self.score)).encode()).hexdigest()[:16]
        self.right, self.possible = list(state["policy_commands"] or ()), sorted(state["admissible_commands"])

    def _file(self) -> Path:
        size = f"{self.num_rooms}-{self.num_objects}-{self.quest_length}"
        file = self.folder / f"{textworld.__version__}-{size}-{self.game}.z8"
        if not file.exists():
            with OwnRandom(self.game).in_use(f"TextWorld's game {self.game}"):  # of one maker at a time
                if not file.exists():
                    self._make(file)
        return file

    def _make(self, file: Path) -> None:
        options = textworld.GameOptions()
        options.seeds = self.game
        options.nb_rooms = self.num_rooms
        options.nb_objects = self.num_objects
        options.quest_length = self.quest_length
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            options.path = str(Path(folder) / file.name)
            try:
                made = Path(textworld.generator.compile_game(textworld.generator.make_game(options), options))
            except Exception as error:  # of the generator, or Inform's compiler
                raise EnvironmentFailure(
                    f"TextWorld cannot make game {self.game}: {type(error).__name__}: {error}"
                ) from error
            for extra in made.parent.iterdir():  # the game's data lie beside it, and are read with it
                if extra != made:
                    extra.replace(file.with_suffix(extra.suffix))
            made.replace(file)
