"""Log of a run, with the time of each line; faults of environments: each kind logged once, a few episodes kept."""

import re
import shlex
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from agentrl.credit import Credit
from agentrl.data.files import write_whole
from agentrl.errors import AgentRLError
from agentrl.report.folder import RunFolder
from agentrl.report.records import records
from agentrl.report.terminal import heard_by
from agentrl.types import Fault, Trajectory, TrajectoryGroup

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


_KEPT, _MAX_KINDS = 5, 50
"""Episodes kept of a kind, and kinds; beyond them faults are counted alone."""


class FaultLog:
    """Keeps faults in `faults/KIND/EPISODE.jsonl`, so that what is known outlives this process and is known to the others."""

    def __init__(self, run_dir: Path | None, *, piece: Callable[[int], str]) -> None:
        """Take what gives the text of one token, and the run's folder. None, or no run there: faults are only logged."""
        self._folder, self._piece = None if run_dir is None else RunFolder(run_dir), piece
        self._told: set[str] = set()
        """Kinds of those that were only logged."""

    def add(self, trajectory: Trajectory, *, step: int) -> str | None:
        """Keep an episode whose environment failed in a step; return its warning, if it is the first of its kind."""
        fault = trajectory.fault or Fault(kind="unknown")
        if self._folder is None or not self._folder.config_file.is_file():  # no run has begun there
            if fault.kind in self._told:
                return None
            self._told.add(fault.kind)
            return "\n".join(filter(None, [f"{trajectory.error}; task seed {trajectory.seed}", fault.traceback]))
        return self._keep(self._folder, trajectory, fault, step=step)

    def _keep(self, run: RunFolder, trajectory: Trajectory, fault: Fault, *, step: int) -> str | None:
        folder = run.faults / re.sub(r"[^\w.]+", "-", fault.kind, flags=re.ASCII).strip("-.")[:100]
        is_known = folder.is_dir()
        if not is_known and len(run.fault_kinds()) >= _MAX_KINDS:
            return None
        run.faults.mkdir(exist_ok=True)
        try:
            folder.mkdir()  # by one process alone
        except FileExistsError:
            is_known = True
        path = folder / f"{trajectory.trajectory_id.replace('/', '-')}.jsonl"
        if len(list(folder.glob("*.jsonl"))) < _KEPT:
            group = TrajectoryGroup(group_id=trajectory.group_id, trajectories=(trajectory,))
            rows = records([group], [[Credit.excluded(trajectory)]], step=step, piece=self._piece)
            write_whole(path, "".join(row.model_dump_json(exclude_defaults=True) + "\n" for row in rows))
        return None if is_known else _words(run, trajectory, fault)


def _words(run: RunFolder, trajectory: Trajectory, fault: Fault) -> str:
    path = shlex.quote(str(run.path))
    return "\n".join(
        filter(
            None,
            [
                f"{trajectory.error}; episode {trajectory.trajectory_id}, task seed {trajectory.seed}",
                fault.traceback,
                f"Play it again: agentrl envs replay {path} {trajectory.trajectory_id}",
                f"Others of this kind are counted (faults), and up to {_KEPT} kept: agentrl show {path} --faults",
            ],
        )
    )
