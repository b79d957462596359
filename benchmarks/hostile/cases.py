"""A case: something done for real in a process of its own, and what came of it.

The parent imports torch and agentrl once and forks a child for each case: a case then costs what it does, a hang ends at its
deadline, and a wrong exit is seen as it is.
"""

import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

DEADLINE_S = 600.0
"""After which a case counts as a hang: cases take seconds, and minutes where others leave them no processor."""
_LEFT_BEHIND = ("never retrieved", "was never awaited", "Task was destroyed", "Exception ignored")
"""What Python says of errors that a program lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended."""

    status: int | None
    """Exit status; negative: killed by a signal; None: it hung."""
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """What a user is told on the error stream."""
        return [line for line in self.err.splitlines() if line.strip() and not line.startswith("Loading weights:")]

    def refusal(self, *, num_lines: int = 1) -> str | None:
        """Return what is wrong with this end as a refusal: status 2, one line a mistake, no traceback; None: nothing."""
        if wrong := self.harm():
            return wrong
        if self.status != 2:
            return f"status {self.status}, not 2"
        if len(self.lines) != num_lines:
            return f"{len(self.lines)} lines, not {num_lines}: {' / '.join(self.lines)[:400]}"
        if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in self.lines[0]):
            return f"control characters: {self.lines[0]!r:.300}"
        return None

    def harm(self) -> str | None:
        """Return what no end may be, whatever was tried: a hang, a traceback, a crash; None: none of these."""
        if self.status is None:
            return f"hung for {DEADLINE_S:g} s: {self.err[-300:]}"
        if self.status != 0 and "Traceback" in self.err + self.out:  # a run that continues may show an environment's
            return f"traceback: {(self.lines or ['?'])[-1][:300]}"
        if self.status not in (0, 2):
            return f"status {self.status}: {' / '.join(self.lines)[-300:]}"
        left = next((words for words in _LEFT_BEHIND if words in self.err), None)
        return f"left behind: {self.err[self.err.find(left) :][:300]}" if left else None


@dataclass(slots=True)
class CaseCounts:
    """What was tried of one category, and what came of it."""

    what: str
    """One line, for the table."""
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, outcome: str, *, wrong: str | None = None) -> None:
        """Count a case; `wrong` says what ought not to have come of it."""
        self.outcomes["failed" if wrong else outcome] += 1
        if wrong:
            self.failures.append(f"{name}: {wrong}")
            print(f"  FAILED {name}: {wrong}", flush=True)

    @property
    def tried(self) -> int:
        """Number of cases."""
        return self.outcomes.total()


def attempt(
    function: Callable[[], object], *, folder: Path, deadline_s: float | None = None, kill_after_s: float | None = None
) -> Ended:
    """Call a function in a forked child whose working directory is `folder`.

    Args:
        function: what to do there; SystemExit and what it raises end the child as they would end Python.
        folder: to work in.
        deadline_s: after which the child and its children are killed, and counted as hanging.
        kill_after_s: kill it with SIGKILL then, as a case of its own.
    """
    out, err = folder.with_name(f"{folder.name}.out"), folder.with_name(f"{folder.name}.err")
    folder.mkdir(parents=True, exist_ok=True)
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(function, folder, out, err))
    child.start()
    has_ended = bool(wait([child.sentinel], kill_after_s or deadline_s or DEADLINE_S))
    assert child.pid is not None
    try:
        os.killpg(
            child.pid, signal.SIGKILL
        )  # and what it has begun itself; until it is joined, nobody else has its number
    except ProcessLookupError:  # it has no group of its own yet
        child.kill()
    child.join()
    has_hung = not has_ended and kill_after_s is None
    return Ended(status=None if has_hung else child.exitcode, out=_text(out), err=_text(err))


def agentrl(*arguments: object) -> Callable[[], object]:
    """Return the call of a command, as a shell would make it."""

    def command() -> None:
        from agentrl.cli import main

        main([str(argument) for argument in arguments])

    return command


def _in_child(function: Callable[[], object], folder: Path, out: Path, err: Path) -> None:
    os.setsid()
    sys.stdout.flush()
    sys.stderr.flush()
    for stream, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
    os.chdir(folder)
    function()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def warm_up(modules: Sequence[str]) -> None:
    """Import what every child needs."""
    import importlib

    for name in modules:
        importlib.import_module(name)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder by their names, without those that any process leaves that ran there.

    Nor `log.txt`, which says what commands did, and which no command reads.
    """
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"(no file)"
        for path in sorted(folder.rglob("*"))
        if path.name not in (".lock", "log.txt")
        and "__pycache__" not in path.parts
        and (path.is_file() or path.is_symlink())
    }
