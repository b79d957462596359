import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from agentrl import UserError
from agentrl.rollout.env_driver import copy_env
from agentrl.testing import check_env

pytest.importorskip("textarena", reason="needs TextArena: pip install 'agentrl[textarena]'")

from agentrl_envs.adapters.textarena import TextArena
from tests.support.each import each

OFFLINE = [
    "TowerOfHanoi",
    "GuessTheNumber",
    "Mastermind",
    "Minesweeper",
    "LightsOut",
    "FifteenPuzzle",
    "Bandit",
    "Blackjack",
]


@pytest.mark.slow
@pytest.mark.process
@each(
    ("game", "num_seeds"),
    [(game, 50 if game == "Mastermind" else 5) for game in OFFLINE],
)
def test_its_games_keep_the_contract(game: str, num_seeds: int) -> None:
    check_env(TextArena, seeds=range(num_seeds), game=f"{game}-v0")


def hanoi(env: TextArena) -> list[str]:
    return [f"[{move}]" for move in ("A C", "A B", "C B", "A C", "B A", "B C", "A C")]


def last_code(env: TextArena) -> list[str]:
    return ["[" + " ".join(map(str, env.game.state.game_state["secret_code"])) + "]"]


def the_number(env: TextArena) -> list[str]:
    return [f"[{env.game.game_number}]"]


@each(("game", "moves"), [("TowerOfHanoi", hanoi), ("Mastermind", last_code), ("GuessTheNumber", the_number)])
def test_a_game_that_is_played_right_is_won(game: str, moves: Callable[[TextArena], list[str]]) -> None:
    env = TextArena(game=f"{game}-v0")
    for seed in range(10):
        env.reset(seed=seed)
        for move in moves(env):
            _, reward, terminated, _, info = env.step(move)
        assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_a_move_that_the_game_does_not_understand_is_answered_and_a_second_one_loses() -> None:
    env = TextArena(game="TowerOfHanoi-v0")
    env.reset(seed=0)
    observation, _, terminated, _, _ = env.step("hello")
    assert "invalid move" in observation[0]["content"]
    assert not terminated
    _, reward, terminated, _, info = env.step("hello")
    assert (reward, terminated, info["success"]) == (0.0, True, False)


def test_a_move_at_which_the_game_raises_is_as_if_it_had_not_been_made(monkeypatch: pytest.MonkeyPatch) -> None:
    env = TextArena(game="Mastermind-v0")
    env.reset(seed=0)
    env.step("[1 2 3 4]")
    key, game = env.state_key(), type(env.game)
    step = game.step

    def raising(self: Any, action: str) -> Any:
        if "crash" in action:
            self.state.game_state.clear()
            raise KeyError("secret_code")
        return step(self, action)

    monkeypatch.setattr(game, "step", raising)
    observation, reward, terminated, _, _ = env.step("crash")
    assert observation[0]["content"] == "Error: KeyError: 'secret_code'"
    assert (reward, terminated, env.state_key()) == (0.0, False, key)


def test_a_seed_begins_the_same_game_whatever_others_draw() -> None:
    env, other = TextArena(game="Mastermind-v0"), TextArena(game="Minesweeper-v0")
    codes = []
    for _ in range(2):
        random.seed(random.SystemRandom().random())
        env.reset(seed=3)
        other.reset(seed=random.randrange(100))
        codes.append(env.game.state.game_state["secret_code"])
    assert codes[0] == codes[1]


def test_other_ways_to_one_position_have_one_key_and_other_secrets_have_another() -> None:
    env = TextArena(game="TowerOfHanoi-v0")
    keys = []
    for moves in (("A B", "B C"), ("A C", "C B"), ("A B", "B C")):
        env.reset(seed=0)
        for move in moves:
            env.step(f"[{move}]")
        keys.append(env.state_key())
    assert keys[0] == keys[2] != keys[1]
    secrets = TextArena(game="GuessTheNumber-v0")
    by_key: dict[str, set[int]] = {}
    for seed in range(30):
        secrets.reset(seed=seed)
        by_key.setdefault(secrets.state_key(), set()).add(secrets.game.game_number)
    assert all(len(numbers) == 1 for numbers in by_key.values())


def test_train_and_eval_never_hide_the_same_secret() -> None:
    env = TextArena(game="Mastermind-v0")
    codes: dict[str, set[tuple[int, ...]]] = {"train": set(), "eval": set()}
    for seed, split in itertools.product(range(60), codes):
        env.reset(seed=seed, options={"split": split})
        codes[split].add(tuple(env.game.state.game_state["secret_code"]))
    assert not codes["train"] & codes["eval"]


@each(("game", "words"), [("NoSuch-v0", "has no 'NoSuch-v0'"), ("Chess-v0", "cannot be played alone")])
def test_a_game_that_cannot_be_played_alone_is_refused(game: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        TextArena(game=game)


def test_a_fork_has_chance_of_its_own_which_a_move_that_fails_does_not_take_back() -> None:
    env = TextArena(game="Blackjack-v0")
    env.reset(seed=0)
    shown = set()
    for seed in range(8):
        fork = copy_env(env, seed=seed)
        shown.add(fork.step("[Hit]")[0][0]["content"])
    assert len(shown) > 1
    fork = copy_env(env, seed=1)
    said = [fork.step("[Hit]")[0][0]["content"]]
    again = copy_env(env, seed=1).unwrapped
    assert isinstance(again, TextArena)
    again._play_again()
    assert [again.step("[Hit]")[0][0]["content"]] == said
