"""Wordle on a list of common words."""
# Dimensions: W words, L positions (letters).

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl import Message, Prompt, ToolEnv, tool, tool_call
from agentrl_envs.data import read_text
from agentrl_envs.options import in_split, opening, prompt_form, share, task_hash, whole_number

LENGTH = 5
_MARKS = "-~+"  # absent, elsewhere, in place


class Wordle(ToolEnv):
    """`c- r~ a- n- e+`: guess a word of five letters from the marks that each guess gives its letters.

    A letter is marked `+` in its place, `~` where it stands elsewhere in the word, `-` where it does not (a letter that
    is guessed more often than the word has it counts as often as the word has it). A guess must be in the list; another
    one is refused and not counted. The right word earns 1; each place that is found earns its fifth of `clue_reward`.
    Words are split by a hash: those that are asked in training and in evaluation never meet, but all may be guessed.
    """

    def __init__(
        self,
        *,
        num_guesses: int = 6,
        num_words: int = 1000,
        clue_reward: float = 0.5,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
    ) -> None:
        """Set the difficulty.

        Args:
            num_guesses: guesses allowed.
            num_words: words of the list, in an order of its own; up to 50 are named in the first message.
            clue_reward: what the five places earn together.
            turn_rewards: False pays for the word alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
        """
        super().__init__()
        self.num_guesses = whole_number("num_guesses", num_guesses, at_least=1, at_most=100)
        self.num_words = whole_number("num_words", num_words, at_least=10, at_most=len(all_words()))
        self.clue_reward = share("clue_reward", clue_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        self.word = ""
        self.guesses: list[str] = []
        self.found: set[int] = set()  # places that were paid

    def num_tasks(self, split: str) -> int:
        """Count the words of a split."""
        return len(split_words(self.num_words, split))

    def start(self, options: dict[str, Any]) -> str | list[Message]:
        """Choose a word of the split: that of the task's number, or one by the seed."""
        words = split_words(self.num_words, options.get("split", "train"))
        index = options.get("task_index")
        self.word = words[int(self.np_random.integers(len(words))) if index is None else index]
        self.guesses, self.found = [], set()
        listed = f" It is one of: {', '.join(sorted(all_words()[: self.num_words]))}." if self.num_words <= 50 else ""
        return opening(
            self.prompt,
            f"Guess the word of {LENGTH} letters in {self.num_guesses} guesses. After a letter, + means right place, "
            f"~ another place, - not in the word.{listed}",
            f"You play Wordle: find a secret English word of {LENGTH} letters. In each turn, call guess with one common "
            f"word of {LENGTH} letters. The reply marks each letter of it: + stands in its right place, ~ is in the word "
            "but in another place, - is not in the word. Make each guess fit all marks so far, and guess no word twice. "
            "A guess that is no known word does not count. Text without a call does nothing.",
            self.turn_rewards and f"Each place found first earns {self.clue_reward / LENGTH:g}.",
            f"The right word earns 1 and ends the task. It also ends after {self.num_guesses} guesses.",
        )

    @tool
    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: five letters.
        """
        word = word.strip().lower()
        if word not in all_words()[: self.num_words]:
            return f"Not in the list of words. Give another word of {LENGTH} letters."
        self.guesses.append(word)
        marks = feedback(word, self.word)
        new = {place for place, mark in enumerate(marks) if mark == "+"} - self.found
        self.found |= new
        if new and self.turn_rewards:
            self.reward(self.clue_reward * len(new) / LENGTH, "clue")
        told = " ".join(letter + mark for letter, mark in zip(word, marks, strict=True))
        left = self.num_guesses - len(self.guesses)
        if word == self.word:
            self.reward(1.0, "word")
            self.finish(success=True)
            return f"{told}. Right!"
        if left == 0:
            self.finish(success=False)
            return f"{told}. It was {self.word}."
        return f"{told}. {left} left."

    def answer(self, text: str) -> str:  # noqa: ARG002 - words are guessed by the tool
        """Ask for a tool."""
        return "Use guess."

    def gold_answer(self) -> str:
        """Return the word."""
        return self.word

    def state_key(self) -> str:
        """Return the word and the guesses, whatever their order: what is known follows from them."""
        return f"{self.word}/{','.join(sorted(self.guesses))}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Guess what leaves the fewest words on average, a possible one where it can; a wrong turn is any other word."""
        rng = np.random.default_rng() if rng is None else rng
        words = all_words()[: self.num_words]
        if rng.random() >= skill:
            others = [word for word in words if word != self.word]
            return tool_call("guess", word=others[int(rng.integers(len(others)))])
        return tool_call("guess", word=words[self._best(words)])

    def _best(self, words: tuple[str, ...]) -> int:
        codes_WW = all_codes(self.num_words)
        possible = np.arange(len(words))
        for guess in self.guesses:
            code = _code(feedback(guess, self.word))
            possible = possible[codes_WW[words.index(guess), possible] == code]
        if len(possible) == len(words):
            return _opening(self.num_words)
        return int(possible[0]) if len(possible) <= 2 else _splitting(codes_WW, possible)


def feedback(guess: str, word: str) -> str:
    """Return the five marks that a guess gets."""
    left = [letter for letter, other in zip(word, guess, strict=True) if letter != other]
    marks = []
    for letter, other in zip(guess, word, strict=True):
        if letter == other:
            marks.append("+")
        elif letter in left:
            left.remove(letter)
            marks.append("~")
        else:
            marks.append("-")
    return "".join(marks)


@cache
def all_words() -> tuple[str, ...]:
    """Return the list, in an order that follows from a hash."""
    return tuple(sorted(read_text("words.txt").split(), key=task_hash))


@cache
def split_words(num_words: int, split: str) -> list[str]:
    """Return the words that are asked in a split: one of five is for evaluation."""
    return [word for word in all_words()[:num_words] if in_split(word, split, one_in=5)]


@cache
def all_codes(num_words: int) -> npt.NDArray[np.uint8]:
    """Return the feedback of every guess for every word, as a number below 3^5."""
    letters_WL = np.array([[ord(letter) for letter in word] for word in all_words()[:num_words]], dtype=np.uint8)
    places = range(LENGTH)
    is_in_place = [letters_WL[:, None, k] == letters_WL[None, :, k] for k in places]
    codes_WW = np.zeros((num_words, num_words), dtype=np.uint8)
    for k in places:
        # Of the letters of the word that are not found, those like this one; of the guess's, those like it and before it.
        like = sum((letters_WL[:, None, k] == letters_WL[None, :, m]) & ~is_in_place[m] for m in places)
        before = sum((letters_WL[:, m] == letters_WL[:, k])[:, None] & ~is_in_place[m] for m in range(k))
        codes_WW = 3 * codes_WW + np.where(is_in_place[k], 2, like > before).astype(np.uint8)
    return codes_WW


@cache
def _opening(num_words: int) -> int:
    return _splitting(all_codes(num_words), np.arange(num_words))


def _splitting(codes_WW: npt.NDArray[np.uint8], possible: npt.NDArray[np.int64]) -> int:
    """Return the guess after which the fewest words are possible on average."""
    num, num_codes = len(codes_WW), 3**LENGTH
    cells = codes_WW[:, possible].astype(np.int64) + num_codes * np.arange(num)[:, None]
    sizes = np.bincount(cells.ravel(), minlength=num * num_codes).reshape(num, num_codes)
    left = (sizes**2).sum(axis=1) / len(possible)
    left[possible] -= 0.5  # it may be the word
    return int(left.argmin())


def _code(marks: str) -> int:
    return int(marks.translate(str.maketrans(_MARKS, "012")), 3)
