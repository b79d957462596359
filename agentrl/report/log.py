"""A run's log.txt: what it printed and warned, with the time."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from agentrl.errors import AgentRLError
from agentrl.report.terminal import heard_by

MAX_BYTES = 5_000_000
"""From there on the log is `log.1.txt`, in place of the one before, and a new one begins."""


class RunLog:
    """Appends lines to the log of a run, from the moment that its folder is one; no fault of the disk ends the run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log.txt"
        self._waiting: list[str] = []

    def write(self, text: str) -> None:
        """Note a text, its first line with the time."""
        now = datetime.now().isoformat(sep=" ", timespec="seconds")  # local time: for a person
        self._waiting.append(f"{now}  " + text.rstrip("\n").replace("\n", "\n    ") + "\n")
        with suppress(OSError):
            if not (self.path.parent / "config.yaml").is_file():  # a run begins in a folder that is empty
                return
            text, self._waiting = "".join(self._waiting), []
            if self.path.exists() and not self.path.is_file():  # a pipe would be waited for
                return
            if self.path.is_file() and self.path.stat().st_size > MAX_BYTES:
                self.path.replace(self.path.with_name("log.1.txt"))
            with self.path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Keep what is printed meanwhile in the log of the run in this folder, and what ends it."""
    log = RunLog(folder)
    with heard_by(log.write):
        try:
            yield
        except AgentRLError as error:
            log.write(f"ended: {error}")
            raise
        except KeyboardInterrupt:
            log.write("ended: interrupted")
            raise
        except BaseException:
            log.write(f"ended:\n{traceback.format_exc()}")
            raise
