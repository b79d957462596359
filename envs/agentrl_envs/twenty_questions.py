"""Twenty questions about a bundled table of things."""
# Dimensions: W things, Z attributes.

import re
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl import Message, Prompt, ToolEnv, tool, tool_call
from agentrl_envs.data import read_text
from agentrl_envs.options import in_split, opening, prompt_form, share, task_hash, whole_number


class TwentyQuestions(ToolEnv):
    """Find the thing that is thought of: ask about its attributes, and guess it, in twenty questions together.

    With `text`, there are no tools, and a question is any sentence that names a thing (a guess) or an attribute (the last
    one counts). A right guess earns 1; each question earns its share of `clue_reward`, by how much it leaves fewer things
    possible: to halve them is worth the same at any time. Things are split by a hash: those that are thought of in
    training and in evaluation never meet.
    """

    def __init__(
        self,
        *,
        num_questions: int = 20,
        num_things: int = 248,
        text: bool = False,
        clue_reward: float = 0.5,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
    ) -> None:
        """Set the difficulty.

        Args:
            num_questions: questions and guesses allowed.
            num_things: things of the table, in an order of its own; up to 40 are named in the first message.
            text: True asks in sentences, without tools.
            clue_reward: what all questions earn together.
            turn_rewards: False pays for the right guess alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
        """
        super().__init__()
        self.num_questions = whole_number("num_questions", num_questions, at_least=1, at_most=1000)
        self.num_things = whole_number("num_things", num_things, at_least=10, at_most=len(all_things().names))
        self.text = text
        self.clue_reward = share("clue_reward", clue_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        if text:
            self.tools = []
        self.thing = 0
        self.asked: list[str] = []
        self.possible = np.ones(self.num_things, dtype=bool)

    def num_tasks(self, split: str) -> int:
        """Count the things of a split."""
        return len(_split(self.num_things, split))

    def start(self, options: dict[str, Any]) -> str | list[Message]:
        """Think of a thing of the split: that of the task's number, or one by the seed."""
        things = _split(self.num_things, options.get("split", "train"))
        index = options.get("task_index")
        self.thing = things[int(self.np_random.integers(len(things))) if index is None else index]
        self.asked, self.possible = [], np.ones(self.num_things, dtype=bool)
        names, attributes = all_things().names[: self.num_things], ", ".join(all_things().attributes)
        listed = f" It is one of: {', '.join(sorted(names))}." if self.num_things <= 40 else ""
        how = (
            "Ask one short question in each turn, in words: whether it is one of the attributes that the user names (Is it "
            "alive?), or whether it is a thing (Is it a dog?), which is a guess."
            if self.text
            else "In each turn, call ask with one of the attributes that the user names, or guess with the name of a "
            "thing. Text without a call does nothing."
        )
        return opening(
            self.prompt,
            f"I think of a thing. Find it with {self.num_questions} questions about: {attributes}.{listed}",
            f"You play twenty questions: find the thing that the user thinks of. {how} The reply is Yes or No, and how "
            "many are left. Choose attributes that split what is still possible in halves, ask nothing twice, and guess "
            "once you know.",
            self.turn_rewards and f"Questions earn up to {self.clue_reward:g} together, by how much they rule out.",
            f"The right guess earns 1 and ends the task. It also ends after {self.num_questions} questions and guesses.",
        )

    @tool
    def ask(self, attribute: str) -> str:
        """Ask whether an attribute holds.

        Args:
            attribute: one of those named.
        """
        attribute = attribute.strip().lower()
        if attribute not in all_things().attributes:
            return "Ask about one of the attributes that I named."
        holds_W = all_things().holds_WZ[: self.num_things, all_things().attributes.index(attribute)]
        return self._count(attribute, holds_W, "Yes." if holds_W[self.thing] else "No.")

    @tool
    def guess(self, thing: str) -> str:
        """Guess the thing.

        Args:
            thing: its name.
        """
        thing = thing.strip().lower()
        if thing not in all_things().names[: self.num_things]:
            return "I do not know this thing."
        is_it_W = np.arange(self.num_things) == all_things().names.index(thing)
        if is_it_W[self.thing]:
            self.reward(1.0, "thing")
            self.finish(success=True)
        return self._count(thing, is_it_W, "Yes, that is it!" if is_it_W[self.thing] else "No.")

    def answer(self, text: str) -> str:
        """Answer a question in words, if there are no tools."""
        if not self.text:
            return "Use ask or guess."
        said = f" {' '.join(re.findall('[a-z]+', text.lower()))} "
        named = [name for name in all_things().names[: self.num_things] if f" {name} " in said]
        if named:
            return self.guess(max(named, key=len))
        asked = [attribute for attribute in all_things().attributes if f" {attribute} " in said]
        last = max(asked, key=lambda attribute: said.rindex(f" {attribute} "), default=None)
        return self.ask(last) if last else "Ask about one of the attributes that I named, or guess a thing."

    def gold_answer(self) -> str:
        """Return the name of the thing."""
        return all_things().names[self.thing]

    def state_key(self) -> str:
        """Return the thing and what was asked, in whatever order: what is known follows from it."""
        return f"{self.gold_answer()}/{','.join(sorted(self.asked))}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Ask what splits the possible things most evenly, and guess the last one.

        A wrong turn asks for the attribute that splits them least, or guesses a wrong thing, half each.
        """
        rng = np.random.default_rng() if rng is None else rng
        possible = np.flatnonzero(self.possible)
        names, attributes, holds_WZ = all_things()
        evenness_Z = -np.abs(holds_WZ[possible].mean(axis=0) - 0.5)
        is_right = rng.random() < skill
        if is_right and len(possible) == 1:
            return self._say("guess", names[possible[0]])
        if is_right or rng.random() < 0.5:
            return self._say("ask", attributes[int(evenness_Z.argmax() if is_right else evenness_Z.argmin())])
        other = int(rng.integers(self.num_things - 1))
        return self._say("guess", names[other + (other >= self.thing)])

    def _say(self, what: str, name: str) -> Message:
        if self.text:
            return {"role": "assistant", "content": f"Is it a {name}?" if what == "guess" else f"Is it {name}?"}
        return tool_call("guess", thing=name) if what == "guess" else tool_call("ask", attribute=name)

    def _count(self, question: str, holds_W: npt.NDArray[np.bool_], reply: str) -> str:
        """Count a question, and return the reply to it with what is left."""
        self.asked.append(question)
        num_before = self.possible.sum()
        self.possible = self.possible & (holds_W == holds_W[self.thing])
        num_halvings = float(np.log2(num_before / self.possible.sum()) / np.log2(self.num_things))
        if num_halvings and self.turn_rewards:
            self.reward(self.clue_reward * num_halvings, "clue")
        left = self.num_questions - len(self.asked)
        if self._is_over:
            return reply
        if left == 0:
            self.finish(success=False)
            return f"{reply} It was: {self.gold_answer()}."
        return f"{reply} {left} left."


class Things(NamedTuple):
    """The table; shared by all environments, and never changed."""

    names: tuple[str, ...]
    """In an order that follows from a hash."""
    attributes: tuple[str, ...]
    """From the most common to the rarest."""
    holds_WZ: npt.NDArray[np.bool_]
    """Whether each attribute holds of each thing."""


@cache
def all_things() -> Things:
    """Read the table."""
    common: list[str] = []
    of_thing: dict[str, set[str]] = {}
    for line in read_text("things.txt").splitlines():
        if line.startswith("@"):
            common = line[1:].split()
        elif line and not line.startswith("#"):
            name, _, own = line.partition(":")
            of_thing[name] = {*common, *own.split()}
    names = tuple(sorted(of_thing, key=task_hash))
    count = Counter(attribute for attributes in of_thing.values() for attribute in attributes)
    attributes = tuple(sorted(count, key=lambda attribute: (-count[attribute], attribute)))
    return Things(names, attributes, np.array([[a in of_thing[name] for a in attributes] for name in names]))


@cache
def _split(num_things: int, split: str) -> list[int]:
    """Return the things that are thought of in a split: one of four is for evaluation."""
    return [k for k, name in enumerate(all_things().names[:num_things]) if in_split(name, split)]
