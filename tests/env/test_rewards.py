import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.rewards.text import contains, exact_match, matches, numeric, overlong
from agentrl.errors import UserError
from tests.support.each import each


@each(
    ("completion", "answer", "reward"),
    [
        (" Paris.\n", "paris", 1),
        ("Paris, France", "Paris France", 1),
        ("Paris or London", "Paris", 0),
        ("", "Paris", 0),
        ("½", "1\u20442", 1),  # one letter, and NFKC's form of it
        ("+", "+", 1),
        ("+", "-", 0),  # of which nothing is left
        ("42", 42, 1),
        ("5", -5, 0),
        ("-5.", -5, 1),
        ("35", 3.5, 0),
        ("12", "1/2", 0),
        ("x<3", "x>3", 0),
        ("**42**", 42, 1),
        ("The *12* apples", "the 12 apples", 1),
        ("+5", 5, 1),
        ("=5", 5, 1),
        ("...5", 5, 1),
        ("**-5**", -5, 1),
        ("(1,000)", "1000", 1),
        ("new  york", "New York", 1),
        ("newyork", "New York", 0),
        ("b", ["a", "b"], 1),
        ("-.5", ".5", 0),
        ("-$5", "5", 0),
        ("3,5", "35", 0),
        ("(1,2)", "12", 0),
        ("1, 2", "1 2", 1),
        ("12,34,567", "1234567", 1),
        ("\u22125", "-5", 1),
        ("C++.", "c++", 1),
        ("C++", "C", 0),
        ("A+", "A", 0),
        ("C++", "C+", 0),
        ("USD1,234", "USD1234", 1),
    ],
)
def test_exact_match(completion: str, answer: Any, reward: float) -> None:
    assert exact_match(completion, answer) == reward


def test_exact_match_may_read_past_articles() -> None:
    assert exact_match("the cat", "A cat.") == 0
    assert exact_match("the cat", "A cat.", ignore_articles=True) == 1


@each(
    ("completion", "answer", "reward"),
    [
        ("It is Paris, I think", "paris", 1),
        ("Parisian", "Paris", 0),
        ("f(x) = x+1", "(x)", 0),  # a word goes on before it
        ("a (x) b", "(x)", 1),
        ("12", "2", 0),
        ("one of them: b", ["a", "b"], 1),
        ("", " ", 0),
    ],
)
def test_contains(completion: str, answer: Any, reward: float) -> None:
    assert contains(completion, answer) == reward


def test_contains_may_mind_case() -> None:
    assert contains("paris", "Paris", ignore_case=False) == 0


@each(
    ("completion", "answer", "reward"),
    [
        ("So it is $1,234.50.", 1234.5, 1),
        ("18 - 3 = 15", "#### 15", 1),
        ("3-4", 4, 1),
        ("-4", -4, 1),
        ("1e3", 1000, 1),
        ("the pair is (3,4)", 4, 1),
        ("1,2345", 2345, 1),
        ("12,34,567", 1234567, 1),
        ("H2", 2, 0),
        ("none", 2, 0),
        ("2", 2.1, 0),
        ("9" * 500, 9, 0),
        ("\u22125", "5", 0),
        ("\u22125", "-5", 1),
        ("-$5", 5, 0),
        ("-$1,000.00", -1000, 1),
        ("$-5", -5, 1),
        ("7/2", "1/2", 0),
        ("2", "1/2", 0),
        ("0.5", "1/2", 1),
        ("It is 3/4.", 0.75, 1),
        ("on 5/6/2024", 2024, 1),
        ("5/0", 5, 0),
        ("1{,}234", "1234", 1),
        ("4", [3, "4"], 1),
    ],
)
def test_numeric(completion: str, answer: Any, reward: float) -> None:
    assert numeric(completion, answer) == reward


def test_numeric_needs_a_number_in_the_table() -> None:
    with pytest.raises(ValueError, match="the right answer str 'four' has no number"):
        numeric("4", "four")


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(alphabet="abc .,:$", max_size=10))
def test_numeric_reads_what_was_written(number: float, before: str) -> None:
    assert numeric(f"{before} {number!r}", number) == 1


def test_matches_the_whole_text() -> None:
    import re

    pattern = re.compile("<think>.*</think>.*<answer>.+</answer>")
    assert matches("<think>a\nb</think>\n<answer>4</answer>\n", pattern=pattern) == 1
    assert matches("<think>a</think><answer>4</answer> ok?", pattern=pattern) == 0


@each(("words", "reward"), [(0, 0), (12, 0), (13, -0.25), (14, -0.5), (16, -1), (1000, -1)])
def test_overlong_is_the_equation_of_the_paper(words: int, reward: float) -> None:
    # max_length 16, buffer 4: nothing up to 12, then (12 - length) / 4, and -1 beyond 16.
    assert overlong("word " * words, max_length=16, buffer=4) == reward
    assert overlong("w" * words, max_length=16, buffer=4, unit="characters") == reward


@given(st.integers(0, 50), st.integers(1, 30), st.integers(1, 30))
def test_overlong_never_rises_with_length(length: int, max_length: int, buffer: int) -> None:
    buffer = min(buffer, max_length)
    here, further = (
        overlong("w" * n, max_length=max_length, buffer=buffer, unit="characters") for n in (length, length + 1)
    )
    assert -1 <= further <= here <= 0
    assert math.isclose(overlong("w" * max_length, max_length=max_length, buffer=buffer, unit="characters"), -1)


def test_overlong_refuses_a_buffer_beyond_the_length() -> None:
    with pytest.raises(UserError, match="overlong: buffer: 5 is more than max_length: 4"):
        overlong("", max_length=4, buffer=5)
