"""The process that compares mathematics: a question a line, an answer a line, until nothing more is asked."""

import json
import re
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

_MEMORY = 2 * 2**30
_MINUS = "\N{MINUS SIGN}"
_SAYS_MORE = re.compile(r"[^\W\d_]{2}|\d[eE][-+]?\d|[:;]|=.*=|,.*=|^[-*] |\*\*|^[^(\[{]*\d[ ,]\d|\d \(")
"""Words, numbers as computers write them (1e3, 1 000, 2,5), labels, chains of equations, items of lists, and remarks."""


def plain(text: str) -> str:
    """Return a text without signs of money, and with the minus of keyboards."""
    return text.replace("\\$", "").replace(_MINUS, "-")


def bare(text: str) -> str | None:
    """Return a text in dollars where all of it is mathematics, one line without words and steps. None: it may say more."""
    text = text.strip().removesuffix(".")
    is_marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\[", "\n"))
    without_commands = re.sub(r"\\[a-zA-Z]+", " ", text)
    says_more = _SAYS_MORE.search(without_commands)
    return None if is_marked or says_more else f"${text}$"


def main() -> None:
    """Answer `equal`, `different` or `no mathematics` to each question."""
    with suppress(ValueError, OSError):  # macOS has none
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    from math_verify import parse, verify

    def read(text: str) -> list[Any]:
        # math-verify's own deadline is a signal that Python must get to handle.
        return list(parse(text, fallback_mode="no_fallback", parsing_timeout=0))

    def compare(answer: str, completion: str) -> str:
        answer, completion = plain(answer), plain(completion)
        right = [] if "$" in answer or "\\boxed" in answer else read(f"${answer}$")
        right = right or read(answer)
        if not right:
            return "no mathematics"
        given = [] if (mathematics := bare(completion)) is None else read(mathematics)
        return "equal" if verify(right, given or read(completion), timeout_seconds=None) else "different"

    for line in sys.stdin.buffer:
        question = json.loads(line)
        # Nobody handles this signal, so that it ends the process, whatever that computes.
        signal.setitimer(signal.ITIMER_REAL, question["timeout_s"])
        result = compare(question["answer"], question["completion"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(result), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
