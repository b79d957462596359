"""What environments did wrong: each kind told once, a few episodes of each kept in the run's folder."""

import re
import shlex
from collections.abc import Callable

from agentrl.credit import Credit
from agentrl.files import write_whole
from agentrl.report.folder import RunFolder
from agentrl.report.records import records
from agentrl.types import Fault, Trajectory, TrajectoryGroup

_KEPT, _MAX_KINDS = 5, 50
"""Episodes kept of a kind, and kinds; beyond them faults are counted alone."""


class FaultLog:
    """Keeps faults in `faults/KIND/EPISODE.jsonl`, so that what is known outlives this process and is known to the others."""

    def __init__(self, folder: RunFolder, *, piece: Callable[[int], str]) -> None:
        """Take the run's folder, and what gives the text of one token."""
        self._folder, self._piece = folder, piece

    def add(self, trajectory: Trajectory, *, step: int) -> str | None:
        """Keep an episode whose environment failed in a step; return what to tell of it, if it is the first of its kind."""
        fault = trajectory.fault or Fault(kind="unknown")
        folder = self._folder.faults / re.sub(r"[^\w.]+", "-", fault.kind, flags=re.ASCII).strip("-.")[:100]
        is_known = folder.is_dir()
        if not is_known and len(self._folder.fault_kinds()) >= _MAX_KINDS:
            return None
        self._folder.faults.mkdir(exist_ok=True)
        try:
            folder.mkdir()  # by one process alone
        except FileExistsError:
            is_known = True
        path = folder / f"{trajectory.trajectory_id.replace('/', '-')}.jsonl"
        if len(list(folder.glob("*.jsonl"))) < _KEPT:
            group = TrajectoryGroup(group_id=trajectory.group_id, trajectories=(trajectory,))
            rows = records([group], [[Credit.excluded(trajectory)]], step=step, piece=self._piece)
            write_whole(path, "".join(row.model_dump_json(exclude_defaults=True) + "\n" for row in rows))
        return None if is_known else self._words(trajectory, fault)

    def _words(self, trajectory: Trajectory, fault: Fault) -> str:
        run = shlex.quote(str(self._folder.path))
        return "\n".join(
            filter(
                None,
                [
                    f"{trajectory.error}; episode {trajectory.trajectory_id}, task seed {trajectory.seed}",
                    fault.traceback,
                    f"Play it again: agentrl envs replay {run} {trajectory.trajectory_id}",
                    f"Others of this kind are counted (faults), and up to {_KEPT} kept: agentrl show {run} --faults",
                ],
            )
        )


class ToldFaults:
    """Tells each kind once, where nothing is kept."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def add(self, trajectory: Trajectory, *, step: int) -> str | None:  # noqa: ARG002 - as of `FaultLog`
        """Return what to tell of an episode whose environment failed, if it is the first of its kind."""
        fault = trajectory.fault
        if fault is None or fault.kind in self._kinds:
            return None
        self._kinds.add(fault.kind)
        return "\n".join(filter(None, [f"{trajectory.error}; task seed {trajectory.seed}", fault.traceback]))
