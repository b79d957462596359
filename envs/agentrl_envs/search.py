"""Questions to a corpus, each answered by documents that lead to one another, in a world invented from a seed."""

import functools
import re
import string
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl import Message, Prompt, ToolEnv, UserError, tool, tool_call
from agentrl_envs.data import read_yaml
from agentrl_envs.options import names, opening, prompt_form, share, whole_number

_SEED = 20260101
"""Seed of the world, which is the same for everyone."""
_MAX_WORDS = 50
"""Words of a query that count."""


@dataclass(frozen=True, slots=True)
class Document:
    """Text about one entity."""

    title: str
    """The entity's name; no two are alike."""
    text: str
    kind: str
    facts: dict[str, str]
    """Target of each relation: a title or a value."""


@dataclass(frozen=True, slots=True)
class Question:
    """A chain of facts: each document on the way names the next, and the last one the answer."""

    text: str
    documents: tuple[int, ...]
    """Places in the corpus, in the order in which they lead to the answer."""
    answer: str


@functools.cache
def corpus() -> tuple[Document, ...]:
    """Write every document, in an order that means nothing."""
    kinds, rng = read_yaml("search.yaml"), np.random.default_rng(_SEED)
    titles: dict[str, list[str]] = {}
    for kind, of in kinds.items():
        pool = names(of["name"])
        titles[kind] = [pool[i] for i in rng.choice(len(pool), size=of["number"], replace=False).tolist()]
    documents = [
        _document(kind, place, title, titles, rng) for kind in kinds for place, title in enumerate(titles[kind])
    ]
    return tuple(documents[i] for i in rng.permutation(len(documents)).tolist())


def _document(kind: str, place: int, title: str, titles: dict[str, list[str]], rng: np.random.Generator) -> Document:
    of = read_yaml("search.yaml")[kind]
    facts = {}
    sentences = []
    for name, relation in of["relations"].items():
        to = relation["to"]
        if (kind, name) == ("country", "capital") or ((kind, name) == ("city", "country") and place < len(titles[to])):
            facts[name] = titles[to][place]  # the first cities are the capitals, and lie in their countries
        elif isinstance(to, str):
            facts[name] = titles[to][int(rng.integers(len(titles[to])))]
        elif isinstance(to[0], int):
            facts[name] = str(rng.integers(*to))
        else:
            facts[name] = to[int(rng.integers(len(to)))]
        sentences.append(relation["says"][int(rng.integers(len(relation["says"])))].format(facts[name]))
    opening = of["opening"][int(rng.integers(len(of["opening"])))].format(title)
    sentences = [sentences[i] for i in rng.permutation(len(sentences)).tolist()]
    return Document(title, " ".join([opening, *sentences]), kind, facts)


@functools.cache
def questions(min_hops: int, max_hops: int, split: str) -> tuple[Question, ...]:
    """List the questions of a split, as many of each number of hops, in an order that mixes everything.

    Every fifth document begins the questions of the eval split, and no other: no question of one split is in the other.
    """
    rng, listed = np.random.default_rng(_SEED), []
    for num_hops in range(min_hops, max_hops + 1):
        chains = [
            chain
            for place in range(len(corpus()))
            if (place % 5 == 0) == (split == "eval")
            for chain in _chains(place, num_hops)
        ]
        listed.append([chains[i] for i in rng.permutation(len(chains)).tolist()])
    return tuple(question for row in zip(*listed, strict=False) for question in row)


def _chains(place: int, num_hops: int) -> list[Question]:
    """List the questions that begin at a document and lead through as many documents as asked, none twice."""
    kinds, found = read_yaml("search.yaml"), []
    start = corpus()[place]
    ways: list[tuple[tuple[int, ...], str, str]] = [((place,), start.title, "")]  # documents, the phrase, the answer
    for hop in range(num_hops):
        longer = []
        for documents, phrase, _ in ways:
            here = corpus()[documents[-1]]
            for name, fact in here.facts.items():
                relation = kinds[here.kind]["relations"][name]
                described = f"the {relation['noun']} of {phrase}"
                is_last = hop == num_hops - 1
                if is_last and all(fact != corpus()[d].title for d in documents):
                    ask = "Who" if relation["to"] == "person" else "What"
                    found.append(Question(f"{ask} is {described}?", documents, fact))
                elif not is_last and isinstance(relation["to"], str) and _places()[fact] not in documents:
                    longer.append(((*documents, _places()[fact]), described, ""))
        ways = longer
    return found


@functools.cache
def _places() -> dict[str, int]:
    return {document.title: place for place, document in enumerate(corpus())}


def find(query: str, num_results: int) -> list[int]:
    """Return the places of the documents that fit a query best, by BM25; ties are in the corpus' order."""
    index = _index()
    words = _words(query)[:_MAX_WORDS]
    if not words:
        return []
    scores = index.get_scores(words)
    best = np.argsort(-scores, kind="stable")[:num_results]
    return [int(place) for place in best if scores[place] > 0]


@functools.cache
def _index() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise UserError("search needs bm25s: pip install 'agentrl[search]'") from error
    index = bm25s.BM25(backend="numpy")
    index.index([_words(f"{document.title} {document.text}") for document in corpus()], show_progress=False)
    return index


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


_SYSTEM = (
    "search(query) lists documents, open(document) reads one. Look the answer up, and then answer with the name or the "
    "number alone."
)


class Search(ToolEnv):
    """`What is the river of the birthplace of Mira Torland?`: search, open what leads on, and answer with a name or a number.

    Every document that leads to the answer earns its share of `evidence_reward` when it is first opened. The first turn
    without a call is the answer: it ends the task and earns 1 if it is right, but for case, articles and punctuation.
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
        prompt: Prompt = "short",
    ) -> None:
        """Set the difficulty.

        Args:
            min_hops: documents that lead to an answer, at least.
            max_hops: and at most.
            num_results: documents that a search lists.
            evidence_reward: reward of all documents that lead to the answer together.
            answer_reward: `exact` pays 1 for a right answer; `f1` pays the words it shares with the right one.
            turn_rewards: False pays for the answer alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.

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
        self.prompt = prompt_form(prompt)
        self.question = Question("", (), "")
        self.results: list[int] = []  # of the last search, for the oracle's mistakes
        self.listed: set[int] = set()
        self.opened: set[int] = set()
        self.is_answered = False

    def num_tasks(self, split: str) -> int:
        """Return the number of questions: no entity begins questions of both splits."""
        return len(questions(self.min_hops, self.max_hops, split))

    def start(self, options: dict[str, Any]) -> str | list[Message]:
        """Ask the question of `task_index`, or any of the split."""
        asked = questions(self.min_hops, self.max_hops, options.get("split", "train"))
        index = options.get("task_index")
        self.question = asked[int(self.np_random.integers(len(asked))) if index is None else index]
        self.results = []
        self.listed = set()
        self.opened = set()
        self.is_answered = False
        return opening(
            self.prompt,
            self.question.text,
            "You answer a question from a collection of documents about invented people, works and places: you cannot "
            "know the answer, so look it up. In each turn, call search with a name or a few words, which lists the "
            "numbers and titles of documents, or open with such a number, which shows the text. A question may lead "
            "through several documents: each names what to look up next. When you have found the answer, answer without "
            "a call: write the name or the number alone, not a sentence.",
            self.turn_rewards
            and f"Opening the documents that lead to the answer earns {self.evidence_reward:g} together.",
            f"The right answer earns 1{' (a part of its words a part of it)' if self.answer_reward == 'f1' else ''}. The first "
            "answer without a call ends the task.",
            short=_SYSTEM,
        )

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
