import itertools
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from agentrl.env import tool_call
from agentrl.errors import UserError
from agentrl_envs.search import Question, Search, compare, corpus, find, questions
from tests.support.each import each


def asked(text: str, **options: Any) -> Search:
    """Ask for the river of a birthplace: a chain of two documents, named in the test."""
    env = Search(min_hops=2, max_hops=2, **options)
    tasks = questions(2, 2, "train")
    index = next(i for i, q in enumerate(tasks) if text in q.text)
    env.reset(seed=0, options={"split": "train", "task_index": index})
    return env


def test_the_corpus_has_a_document_for_each_entity_and_names_its_facts() -> None:
    assert len(corpus()) == len({document.title for document in corpus()}) == 1204
    for document in corpus():
        assert document.text.startswith(document.title)
        assert all(fact in document.text for fact in document.facts.values())
        assert len(document.text) < 400


@pytest.mark.process
def test_everyone_has_the_same_corpus() -> None:
    program = "from agentrl_envs.search import corpus, questions; print(corpus()[0], questions(1, 3, 'eval')[:5])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == f"{corpus()[0]} {questions(1, 3, 'eval')[:5]}\n"


@each("num_hops", [1, 2, 3, 4])
def test_a_question_is_answered_by_following_its_documents(num_hops: int) -> None:
    for question in questions(num_hops, num_hops, "eval")[:200]:
        documents = [corpus()[place] for place in question.documents]
        assert len({*question.documents}) == num_hops
        assert documents[0].title in question.text
        assert question.text.count(" of ") >= num_hops
        for here, there in itertools.pairwise(documents):
            assert there.title in here.facts.values()
        assert question.answer in documents[-1].facts.values()
        assert question.answer not in question.text


def test_no_entity_begins_questions_of_both_splits() -> None:
    starts = [{q.documents[0] for q in questions(1, 3, split)} for split in ("train", "eval")]
    assert not starts[0] & starts[1]
    texts = [{q.text for q in questions(1, 3, split)} for split in ("train", "eval")]
    assert not texts[0] & texts[1]
    assert Search().num_tasks("train") == len(texts[0]) == 11_493
    assert Search().num_tasks("eval") == len(texts[1]) == 2_883


def test_every_number_of_hops_is_asked_equally_often() -> None:
    counts = np.bincount([len(q.documents) for q in questions(1, 3, "train")])
    assert counts.tolist() == [0, 3831, 3831, 3831]


def test_a_task_is_the_one_that_is_named_and_without_a_name_one_of_the_split() -> None:
    env = Search()
    env.reset(seed=5, options={"split": "eval", "task_index": 7})
    assert env.question == questions(1, 3, "eval")[7]
    for split in ("train", "eval"):
        for seed in range(20):
            env.reset(seed=seed, options={"split": split})
            assert env.question in questions(1, 3, split)


def test_a_title_finds_its_document_first() -> None:
    assert all(find(document.title, 5)[0] == place for place, document in enumerate(corpus()))
    assert find("", 5) == find("!? ☃", 5) == find("qwertyuiop", 5) == []
    assert find("x " * 100_000 + corpus()[0].title, 5) == []  # words far behind do not count


def test_evidence_is_paid_once_for_each_document() -> None:
    env = asked("the river of the birthplace of")
    first, second = env.question.documents
    expected: list[tuple[Any, float, str]] = [
        (tool_call("open", document=second), 0.15, "02"),
        (tool_call("search", query=corpus()[first].title), 0.0, "12"),
        (tool_call("open", document=first), 0.15, "22"),
        (tool_call("open", document=first), 0.0, "22"),
        (tool_call("open", document=(first + 1) if second != first + 1 else first + 2), 0.0, "22"),
    ]
    for action, reward, seen in expected:
        assert env.step(action)[1] == reward
        assert env.state_key() == f"{seen}/{env.question.text}"
    observation, reward, terminated, _, info = env.step(env.question.answer)
    assert (observation, reward, terminated, info["success"], info["score"]) == ((), 1.0, True, True, 1.0)


def test_a_search_lists_numbers_and_titles_and_open_takes_a_number() -> None:
    env = asked("the river of the birthplace of", num_results=3)
    title = corpus()[env.question.documents[0]].title
    listed = env.step(tool_call("search", query=title))[0][0]["content"].splitlines()
    assert len(listed) == 3
    assert listed[0] == f"{env.question.documents[0]} {title}"
    number = int(re.match(r"\d+", listed[0])[0])  # type: ignore[index]
    assert env.step(tool_call("open", document=number))[0][0]["content"].startswith(title)
    for wrong in (-1, len(corpus()), 10**30):
        assert env.step(tool_call("open", document=wrong))[0][0]["content"] == f"There is no document {wrong}."
    assert env.step(tool_call("search", query="☃"))[0][0]["content"] == "Nothing found."


def test_without_turn_rewards_and_with_f1() -> None:
    env = asked("mayor", turn_rewards=False, answer_reward="f1")
    assert env.step(tool_call("open", document=env.question.documents[0]))[1] == 0
    env.question = Question(env.question.text, env.question.documents, "Mira Torland")
    _, reward, _, _, info = env.step("Torland, the mayor")
    assert (reward, info["success"], info["score"]) == (0.5, False, 0.5)


def test_wrong_turns_of_the_search_copy_the_wrong_thing_from_the_right_place() -> None:
    env, rng = asked("the river of the birthplace of"), np.random.default_rng(0)
    first, second = (corpus()[place] for place in env.question.documents)
    assert env.oracle(skill=0.0, rng=rng) == tool_call("search", query="river")
    env.step(tool_call("search", query=first.title))
    for _ in range(20):
        wrong = env.oracle(skill=0.0, rng=rng)["tool_calls"][0]["function"]["arguments"]["document"]
        assert wrong in env.results[1:]
    for place in env.question.documents:
        env.step(tool_call("open", document=place))
    for _ in range(20):
        wrong_answer = env.oracle(skill=0.0, rng=rng)["content"]
        assert wrong_answer in second.facts.values()
        assert wrong_answer != env.question.answer


@each(
    ("text", "is_right", "f1"),
    [
        ("Mira Torland", True, 1),
        ("  the mira torland.\n", True, 1),
        ("Torland", False, 2 / 3),
        ("It is Mira Torland", False, 2 / 3),
        ("Mira Mira Torland", False, 0.8),
        ("", False, 0),
        ("!" * 10**6, False, 0),
    ],
)
def test_answers_are_compared_without_case_articles_and_punctuation(text: str, is_right: bool, f1: float) -> None:
    got = compare(text, "Mira Torland")
    assert got[0] is is_right
    assert got[1] == pytest.approx(f1)


@each(
    ("options", "words"),
    [
        ({"min_hops": 0}, "min_hops: give a whole number from 1 to 4, got 0"),
        ({"min_hops": 3, "max_hops": 2}, "max_hops: give a whole number from 3 to 4, got 2"),
        ({"evidence_reward": -1}, "evidence_reward: give a number from 0 to 1, got -1"),
        ({"answer_reward": "bleu"}, "answer_reward: give exact or f1, got 'bleu'"),
    ],
)
def test_an_impossible_option_of_the_search_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        Search(**options)
    assert str(caught.value) == words


@pytest.mark.process
def test_what_is_not_installed_is_said_in_one_line() -> None:
    program = (
        "import sys; sys.modules['bm25s'] = None\n"
        "from agentrl_envs.search import find\nfrom agentrl import UserError\n"
        "try: find('x', 1)\nexcept UserError as error: print(error)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == "search needs bm25s: pip install 'agentrl[search]'\n"
