"""Questions to a corpus, each answered by documents that lead to one another."""

import re
import string
from collections import Counter
from typing import Any

import numpy as np

from agentrl import Message, ToolEnv, UserError, tool, tool_call
from agentrl_envs.options import share, whole_number
from agentrl_envs.search_world import Question, corpus, find, questions

_SYSTEM = (
    "search(query) lists documents, open(document) reads one. Look the answer up, and then answer with the name or the "
    "number alone."
)


class Search(ToolEnv):
    """`What is the river of the birthplace of Mira Torland?`: search, open what leads on, and answer with a name or a number.

    Every document that leads to the answer earns its share of `evidence_reward` when it is first opened. The first turn
    without a call is the answer: it ends the task and earns 1 where it is right, but for case, articles and punctuation.
    """

    def __init__(
        self,
        *,
        min_hops: int = 1,
        max_hops: int = 3,
        num_results: int = 5,
        evidence_reward: float = 0.3,
        answer_reward: str = "exact",
        turn_rewards: bool = True,
    ) -> None:
        """Set the difficulty.

        Args:
            min_hops: documents that lead to an answer, at least.
            max_hops: and at most.
            num_results: documents that a search lists.
            evidence_reward: reward of all documents that lead to the answer together.
            answer_reward: `exact` pays 1 for a right answer; `f1` pays the words it shares with the right one.
            turn_rewards: False pays for the answer alone.

        Raises:
            UserError: for an option outside its range.
        """
        super().__init__()
        self.min_hops = whole_number("min_hops", min_hops, at_least=1, at_most=4)
        self.max_hops = whole_number("max_hops", max_hops, at_least=min_hops, at_most=4)
        self.num_results = whole_number("num_results", num_results, at_least=1, at_most=20)
        self.evidence_reward = share("evidence_reward", evidence_reward)
        if answer_reward not in ("exact", "f1"):
            raise UserError(f"answer_reward: give exact or f1, got {answer_reward!r}")
        self.answer_reward = answer_reward
        self.turn_rewards = turn_rewards
        self.question = Question("", (), "")
        self.results: list[int] = []  # of the last search, for the oracle's mistakes
        self.listed: set[int] = set()
        self.opened: set[int] = set()
        self.is_answered = False

    def num_tasks(self, split: str) -> int:
        """Return the number of questions: no entity begins questions of both splits."""
        return len(questions(self.min_hops, self.max_hops, split))

    def start(self, options: dict[str, Any]) -> list[Message]:
        """Ask the question of `task_index`, or any of the split."""
        asked = questions(self.min_hops, self.max_hops, options.get("split", "train"))
        index = options.get("task_index")
        self.question = asked[int(self.np_random.integers(len(asked))) if index is None else index]
        self.results, self.listed, self.opened, self.is_answered = [], set(), set(), False
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": self.question.text}]

    @tool
    def search(self, query: str) -> str:
        """List the documents that fit a query best.

        Args:
            query: words to look for.
        """
        found = find(query, self.num_results)
        self.listed.update(set(found) & set(self.question.documents))
        self.results = found
        return "\n".join(f"{place} {corpus()[place].title}" for place in found) or "Nothing found."

    @tool
    def open(self, document: int) -> str:
        """Read a document.

        Args:
            document: its number.
        """
        if not 0 <= document < len(corpus()):
            return f"There is no document {document}."
        if document in self.question.documents and document not in self.opened:
            self.opened.add(document)
            if self.turn_rewards:
                self.reward(self.evidence_reward / len(self.question.documents), "evidence")
        return corpus()[document].text

    def answer(self, text: str) -> None:
        """Compare the answer with the right one."""
        is_right, overlap = compare(text, self.question.answer)
        self.is_answered = True
        self.reward(overlap if self.answer_reward == "f1" else float(is_right), "answer")
        self.finish(success=is_right, score=overlap)

    def gold_answer(self) -> str:
        """Return the name or the number that was asked for."""
        return self.question.answer

    def state_key(self) -> str:
        """Return the question, and of each document that leads to the answer whether it was listed or opened."""
        if self.is_answered:
            return f"answered/{self.question.text}"
        seen = "".join("2" if d in self.opened else "1" if d in self.listed else "0" for d in self.question.documents)
        return f"{seen}/{self.question.text}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Search for the next document that leads on, open it, and answer after the last.

        Wrong turns copy the wrong thing from the right place: they search for what is asked about it, open another document
        that was listed, and answer with another fact of the last one.
        """
        rng = np.random.default_rng() if rng is None else rng
        is_right = rng.random() < skill
        unread = [place for place in self.question.documents if place not in self.opened]
        if not unread:
            facts = corpus()[self.question.documents[-1]].facts.values()
            others = [fact for fact in facts if fact != self.question.answer]
            answer = self.question.answer if is_right else others[int(rng.integers(len(others)))]
            return {"role": "assistant", "content": answer}
        if unread[0] in self.listed:
            listed = [place for place in self.results if place != unread[0]] or [int(rng.integers(len(corpus())))]
            return tool_call("open", document=unread[0] if is_right else listed[int(rng.integers(len(listed)))])
        asked = self.question.text.partition(" the ")[2].partition(" of ")[0]
        return tool_call("search", query=corpus()[unread[0]].title if is_right else asked)


def compare(text: str, answer: str) -> tuple[bool, float]:
    """Return whether two answers are equal, and the F1 of their words, both without case, articles and punctuation."""
    got, expected = _normal(text), _normal(answer)
    num_shared = sum((Counter(got) & Counter(expected)).values())
    return got == expected, 2 * num_shared / max(len(got) + len(expected), 1)


def _normal(text: str) -> list[str]:
    plain = text[:1_000].lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in re.split(r"\s+", plain) if word and word not in ("a", "an", "the")]
