"""Rewards that read the text of an answer."""

import math
import re
import string
import unicodedata
from typing import Any

from agentrl.plain_data import abbreviated

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WHOLE = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)"
"""A number before its point; commas stand before three digits at its end: 1,234 and 12,34,567, but not 3,4."""
_NUMBER = re.compile(rf"(?<!\w)[-+]?(?:{_WHOLE}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?")
_PUNCTUATION = re.compile(rf"(?!-\d|(?<!\.)\.\d|(?<=\w)[+/:^*<=>]\d)[{re.escape(string.punctuation)}]")
"""What says nothing. A sign and a point before a digit do, and what stands within a number: -5, .5, 1/2, 12:30, x<3."""


def exact_match(completion: str, answer: Any, *, ignore_articles: bool = False) -> float:
    """Return 1 where the answer is the right one, blind to case, punctuation, runs of spaces and Unicode's forms; else 0.

    What tells numbers apart is no punctuation: `-5` is not `5`, nor `3.5` `35`, nor `1/2` `12`. With `ignore_articles` the rest
    is the normalisation of SQuAD (arXiv 1606.05250). Where it leaves nothing (`+`), only spaces around the answer are ignored.

    Args:
        completion: what was answered.
        answer: the right one, or a list of several.
        ignore_articles: reads past `a`, `an` and `the`.
    """
    return float(any(_is_match(completion, str(right), ignore_articles) for right in _answers(answer)))


def contains(completion: str, answer: Any, *, ignore_case: bool = True) -> float:
    """Return 1 where the right answer stands in the text, as words of its own; else 0.

    Args:
        completion: what was answered.
        answer: the right one, or a list of several of which one is enough.
        ignore_case: reads `Paris` and `paris` alike.
    """
    flags = re.IGNORECASE if ignore_case else re.NOFLAG
    texts = [re.escape(str(right).strip()) for right in _answers(answer) if str(right).strip()]
    return float(any(re.search(rf"(?<!\w){text}(?!\w)", completion, flags) for text in texts))


def numeric(completion: str, answer: Any, *, rel_tol: float = 1e-6, abs_tol: float = 1e-9) -> float:
    """Return 1 where the last number of the text is the right one; else 0.

    Args:
        completion: what was answered: `So it is $1,234.50.` says 1234.5.
        answer: a number, or text whose last number is the right one: `#### 72` of GSM8K.
        rel_tol: difference that is none, as a share of the right answer.
        abs_tol: the same, as a number.

    Raises:
        ValueError: where the right answer has no number, which is a fault of the table.
    """
    right, given = _last_number(answer), _last_number(completion)
    if right is None:
        raise ValueError(f"the right answer {abbreviated(answer)} has no number; use exact_match or math")
    return float(given is not None and math.isclose(given, right, rel_tol=rel_tol, abs_tol=abs_tol))


def matches(completion: str, *, pattern: re.Pattern[str]) -> float:
    """Return 1 where the whole text has a form, else 0: a reward of the format, whatever it says.

    Args:
        completion: what was answered.
        pattern: a regular expression, in which `.` is also the end of a line: `.*<answer>.+</answer>`.
    """
    return float(re.fullmatch(pattern.pattern, completion.strip(), pattern.flags | re.DOTALL) is not None)


def _answers(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def _is_match(completion: str, right: str, ignore_articles: bool) -> bool:
    if completion.strip() == right.strip():
        return True
    normal = _normalized(right, ignore_articles)
    return bool(normal) and _normalized(completion, ignore_articles) == normal


def _normalized(text: str, ignore_articles: bool) -> str:
    text = _PUNCTUATION.sub("", unicodedata.normalize("NFKC", text).casefold())
    return " ".join((_ARTICLES.sub(" ", text) if ignore_articles else text).split())


def _last_number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    found = _NUMBER.findall(str(value))
    return float(found[-1].replace(",", "")) if found else None
