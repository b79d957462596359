"""The process that compares mathematics: a question a line, an answer a line, until nothing more is asked."""

import json
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

_MEMORY = 2 * 2**30


def main() -> None:
    """Answer `equal`, `different` or `no mathematics` to each question."""
    with suppress(ValueError, OSError):  # macOS has none
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    from math_verify import parse, verify

    def read(text: str) -> list[Any]:
        # math-verify's own deadline is a signal that Python must get to handle.
        return list(parse(text, fallback_mode="no_fallback", parsing_timeout=0))

    def compare(answer: str, completion: str) -> str:
        right = [] if "$" in answer or "\\boxed" in answer else read(f"${answer}$")
        right = right or read(answer)
        if not right:
            return "no mathematics"
        return "equal" if verify(right, read(completion), timeout_seconds=None) else "different"

    for line in sys.stdin.buffer:
        question = json.loads(line)
        # Nobody handles this signal, so that it ends the process, whatever that computes.
        signal.setitimer(signal.ITIMER_REAL, question["timeout_s"])
        result = compare(question["answer"], question["completion"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(result), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
