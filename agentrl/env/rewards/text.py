"""Rewards that read the text of an answer, or its length."""

import math
import re
import string
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.data.plain import abbreviated
from agentrl.errors import UserError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITH_COMMAS = r"\d{1,3}(?:,\d{2,3}){0,12},\d{3}(?!\d)"
"""A number before its point; commas stand before three digits at its end: 1,234 and 12,34,567, but not 3,4."""
_UNSIGNED = rf"[$€£]?(?:(?:{_WITH_COMMAS}|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?"
_NUMBER = re.compile(rf"(?<![\w/])[-+]?{_UNSIGNED}/{_UNSIGNED}(?![\w/])|(?<!\w)[-+]?{_UNSIGNED}")
"""A number, or a fraction of two; a date (5/6/2024) is none."""
_COMMAS = re.compile(rf"(?<!\d)(?<!\d[.,]){_WITH_COMMAS}")
_PUNCTUATION = re.compile(
    rf"(?!-[$€£]?\.?\d|(?<!\.)\.\d|(?<=\w)[+/:^*<=>]\d|(?<=\d),\d|(?<=[^\W\d_])[+#]|(?<=[^\W\d_]\+)\+)[{re.escape(string.punctuation)}]"
)
"""Characters without meaning. A sign and a point before a digit have one, and so has what stands within a number or
behind a letter: -5, -$5, .5, 1/2, 3,5, 12:30, x<3, C++."""
_KEYBOARD = str.maketrans({"\N{MINUS SIGN}": "-"})


def exact_match(completion: str, answer: Any, *, ignore_articles: bool = False) -> float:
    """Return 1 if the answer is the right one, blind to case, punctuation, runs of spaces and Unicode's forms; else 0.

    What tells numbers apart is no punctuation: `-5` is not `5`, nor `3.5` `35`, nor `1/2` `12`, nor `1,2` `12`, but `1,234` is
    `1234`; nor is what follows a letter: `C++`. With `ignore_articles` the rest is the normalisation of SQuAD (arXiv
    1606.05250). Where it leaves nothing (`+`), only spaces around the answer are ignored.

    Args:
        completion: what was answered.
        answer: the right one, or a list of several.
        ignore_articles: reads past `a`, `an` and `the`.
    """
    return float(any(_is_match(completion, str(right), ignore_articles) for right in _answers(answer)))


def contains(completion: str, answer: Any, *, ignore_case: bool = True) -> float:
    """Return 1 if the right answer stands in the text, as words of its own; else 0.

    Args:
        completion: what was answered.
        answer: the right one, or a list of several of which one is enough.
        ignore_case: reads `Paris` and `paris` alike.
    """
    flags = re.IGNORECASE if ignore_case else re.NOFLAG
    texts = [re.escape(str(right).strip()) for right in _answers(answer) if str(right).strip()]
    return float(any(re.search(rf"(?<!\w){text}(?!\w)", completion, flags) for text in texts))


def numeric(completion: str, answer: Any, *, rel_tol: float = 1e-6, abs_tol: float = 1e-9) -> float:
    """Return 1 if the last number of the text is the right one; else 0.

    Args:
        completion: what was answered: `So it is $1,234.50.` says 1234.5, and `1/2` a half.
        answer: a number, or text whose last number is the right one: `#### 72` of GSM8K; or a list of several of which one is
            enough.
        rel_tol: difference that is none, as a share of the right answer.
        abs_tol: the same, as a number.

    Raises:
        ValueError: if the right answer has no number, which is a fault of the table.
    """
    given, rights = _last_number(completion), [_last_number(right) for right in _answers(answer)]
    if not all(right is not None for right in rights):
        raise ValueError(f"the right answer {abbreviated(answer)} has no number; use exact_match or math")
    if given is None:
        return 0.0
    return float(any(math.isclose(given, right or 0.0, rel_tol=rel_tol, abs_tol=abs_tol) for right in rights))


def matches(completion: str, *, pattern: re.Pattern[str]) -> float:
    """Return 1 if the whole text has a form, else 0: a reward of the format, whatever it says.

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
    text = unicodedata.normalize("NFKC", text).translate(_KEYBOARD).casefold()
    text = _PUNCTUATION.sub("", _COMMAS.sub(lambda found: found[0].replace(",", ""), text))
    return " ".join((_ARTICLES.sub(" ", text) if ignore_articles else text).split())


def _last_number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    found = _NUMBER.findall(str(value).translate(_KEYBOARD).replace("{,}", ","))
    if not found:
        return None
    above, _, below = re.sub("[$€£,]", "", found[-1]).partition("/")
    return float(above) / float(below or 1) if float(below or 1) else math.nan


Length = Annotated[int, Field(gt=0)]


def overlong(
    completion: str, *, max_length: Length, buffer: Length, unit: Literal["words", "characters"] = "words"
) -> float:
    """Return DAPO's soft punishment of long answers: 0 up to `max_length - buffer`, from there down to -1 at `max_length`.

        R(y) = 0                                       where |y| <= max_length - buffer
               (max_length - buffer - |y|) / buffer    where |y| <= max_length
               -1                                      beyond

    arXiv 2503.14476, equation 13. There |y| counts tokens; here words (what stands between spaces) or characters, because an
    environment never sees a token. And there an answer that the sampling limit cuts off is punished as any other; here nothing
    grades it, and it earns 0: leave `rollout.max_turn_tokens` well above `max_length`.

    Args:
        completion: what was answered.
        max_length: from which on an answer earns -1.
        buffer: length over which the punishment grows.
        unit: of both.
    """
    if buffer > max_length:
        raise UserError(f"overlong: buffer: {buffer} is more than max_length: {max_length}; lower it")
    length = len(completion) if unit == "characters" else len(completion.split())
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))
