"""An invented world, a document about everyone and everything in it, and questions that lead from one to the next."""

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl import UserError
from agentrl_envs.data import read_yaml
from agentrl_envs.names import names

_SEED = 20260101
"""Of the world, which is the same for everyone."""
_MAX_WORDS = 50
"""Words of a query that count."""


@dataclass(frozen=True, slots=True)
class Document:
    """What is written about one entity."""

    title: str
    """The entity's name; no two are alike."""
    text: str
    kind: str
    facts: dict[str, str]
    """What each relation leads to: a title or a value."""


@dataclass(frozen=True, slots=True)
class Question:
    """A chain of facts: each document on the way names the next, and the last one the answer."""

    text: str
    documents: tuple[int, ...]
    """Places in the corpus, in the order in which they lead to the answer."""
    answer: str


@functools.cache
def corpus() -> tuple[Document, ...]:
    """Write every document, in an order that tells nothing."""
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
    of, facts, sentences = read_yaml("search.yaml")[kind], {}, []
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
