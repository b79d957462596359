from typing import Any

import numpy as np
import pytest

from agentrl.env import tool_call
from agentrl.errors import UserError
from agentrl_envs.wordle import Wordle, _code, all_codes, all_words, feedback, split_words
from tests.support.each import each


def asking(word: str, **options: Any) -> Wordle:
    env = Wordle(**options)
    env.reset(seed=0)
    env.word = word
    return env


def guess(word: str) -> Any:
    return tool_call("guess", word=word)


@each(
    ("guessed", "word", "marks"),
    [
        ("crane", "crane", "+++++"),
        ("eerie", "siren", "~-+~-"),  # one e of the word: the first e of the guess has it
        ("level", "eagle", "~~-~-"),  # both e, and of two l the first
        ("allow", "llama", "~+~--"),
        ("lolly", "allow", "~~+--"),
    ],
)
def test_each_letter_of_the_word_marks_one_of_the_guess(guessed: str, word: str, marks: str) -> None:
    assert feedback(guessed, word) == marks


def test_the_table_of_feedback_is_that_of_the_rule() -> None:
    words, codes, rng = all_words()[:1000], all_codes(1000), np.random.default_rng(0)
    for i, j in rng.integers(1000, size=(2000, 2)):
        assert codes[i, j] == _code(feedback(words[i], words[j]))


def test_the_list_has_common_words_of_five_letters_once_each() -> None:
    words = all_words()
    assert len(words) == len(set(words)) == 1373
    assert all(len(word) == 5 and word.isascii() and word.islower() and word.isalpha() for word in words)


@each("num_words", [10, 20, 50, 1000, 1373])
def test_words_of_training_and_evaluation_never_meet(num_words: int) -> None:
    env = Wordle(num_words=num_words)
    seen = {}
    for split in ("train", "eval"):
        words = split_words(num_words, split)
        assert env.num_tasks(split) == len(words) > 0
        asked = []
        for index in range(len(words)):
            env.reset(seed=0, options={"split": split, "task_index": index})
            asked.append(env.gold_answer())
        assert asked == words
        for seed in range(50):
            env.reset(seed=seed, options={"split": split})
            assert env.gold_answer() in words
        seen[split] = set(words)
    assert not seen["train"] & seen["eval"]
    assert len(seen["train"] | seen["eval"]) == num_words


def test_each_place_pays_once_and_a_word_outside_the_list_is_not_counted() -> None:
    env = asking("crane", num_words=1373)
    expected: list[tuple[Any, str, float]] = [
        ("Hello.", "Use guess.", 0),
        (guess("zzzzz"), "Not in the list of words. Give another word of 5 letters.", 0),
        (guess("Crate "), "c+ r+ a+ t- e+. 5 left.", 0.4),
        (guess("trace"), "t- r+ a+ c~ e+. 4 left.", 0),
    ]
    for action, says, reward in expected:
        observation, got, terminated, _, _ = env.step(action)
        assert (observation[0]["content"], terminated) == (says, False)
        assert got == pytest.approx(reward)
    assert env.state_key() == "crane/crate,trace"
    observation, reward, terminated, _, info = env.step(guess("crane"))
    assert (observation[0]["content"], terminated, info["success"]) == ("c+ r+ a+ n+ e+. Right!", True, True)
    assert reward == pytest.approx(1.1)


def test_the_last_wrong_guess_ends_the_task() -> None:
    env = asking("crane", num_guesses=1)
    observation, reward, terminated, _, info = env.step(guess("drain"))
    assert observation[0]["content"] == "d- r+ a+ i- n~. It was crane."
    assert (reward, terminated, info["success"]) == (0.2, True, False)


def test_few_words_are_named() -> None:
    named = Wordle(num_words=10).reset(seed=0)[0][0]["content"]
    assert all(word in named for word in all_words()[:10])


@each("num_words", [30, 1373])
def test_the_oracle_finds_every_word(num_words: int) -> None:
    env = Wordle(num_words=num_words)
    for index, word in enumerate(split_words(num_words, "eval")):
        env.reset(seed=0, options={"split": "eval", "task_index": index})
        while not (end := env.step(env.oracle()))[2]:
            pass
        assert end[4]["success"], word


def test_too_few_words_are_refused() -> None:
    with pytest.raises(UserError, match="num_words: give a whole number from 10 to 1373, got 9"):
        Wordle(num_words=9)
