"""Running what is missing: each run a process of its own, as many at once as there are cores or GPUs."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import glob
from typing import IO, Any

from agentrl.compare.plan import PlannedRun, write_recipe
from agentrl.errors import ConfigError
from agentrl.launch import USER_MISTAKE
from agentrl.report.folder import RunFolder

_POLL_S = 0.2
_END_S = 60.0
"""How long a run that is interrupted may take to end, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A run that ended before its last step, or was left out."""

    run: PlannedRun
    words: str


def default_jobs(*, is_cpu: bool) -> int:
    """Return how many runs to do at once: one for each GPU, else one for each core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if is_cpu else len(_gpus()) or cores


def is_done(run: PlannedRun) -> bool:
    """Tell whether nothing of a run is missing."""
    recorded = run.recorded()
    return recorded is not None and recorded.is_finished


def run_missing(
    runs: Sequence[PlannedRun],
    *,
    jobs: int,
    on_progress: Callable[[int, int], object] = lambda *_: None,
    on_end: Callable[[PlannedRun, str | None], object] = lambda *_: None,
) -> list[Failure]:
    """Begin or resume each run that is not finished; one that fails is told, and the others go on.

    Where a mistake ends a run before it has begun, the recipe's waiting seeds are left out, and told too: they would meet it.
    What interrupts this interrupts the runs, which the next call resumes from their checkpoints.

    Args:
        runs: of the comparison, those of one seed beside one another.
        jobs: how many at once.
        on_progress: told the steps done, and those in all, now and then.
        on_end: told each run that ends or is left out, and of one that fails why.
    """
    waiting = [run for run in runs if not is_done(run)]
    for arm in {run.arm.folder: run.arm for run in waiting}.values():
        write_recipe(arm)
    total = sum(run.arm.recipe.train.steps for run in runs)
    failures: list[Failure] = []
    active: dict[int, _Process] = {}
    told = -1
    try:
        while waiting or active:
            for slot in range(jobs):
                if slot not in active and waiting:
                    active[slot] = _Process(waiting.pop(0), slot=slot, jobs=jobs)
            time.sleep(_POLL_S)
            if (done := sum(map(_steps_done, runs))) != told:
                on_progress(done, total)
                told = done
            for slot, process in list(active.items()):
                if (status := process.poll()) is None:
                    continue
                del active[slot]
                ended = process.run
                words = None if status == 0 and is_done(ended) else process.last_words(status)
                on_end(ended, words)
                if words is None:
                    continue
                failures.append(Failure(run=ended, words=words))
                if status == USER_MISTAKE and not ended.has_begun:
                    words = f"left out, as seed {ended.seed} could not begin"
                    for run in [run for run in waiting if run.arm is ended.arm]:
                        waiting.remove(run)
                        on_end(run, words)
                        failures.append(Failure(run=run, words=words))
    finally:
        for process in active.values():
            process.interrupt()
        for process in active.values():
            process.end()
    return failures


class _Process:
    """A run under way. It ends when its standard input does, that is, with this process, however that ends."""

    def __init__(self, run: PlannedRun, *, slot: int, jobs: int) -> None:
        self.run = run
        self._log = run.arm.folder / f"seed-{run.seed}.log"
        with self._log.open("ab") as log:
            self._log_began = log.tell()
            self._process = start(run.arguments(), log=log, environment=_environment(slot, jobs))

    def poll(self) -> int | None:
        """Return its exit status. None: it runs."""
        status: int | None = self._process.poll()
        return status

    def interrupt(self) -> None:
        """Let it end as Ctrl-C would."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """Wait for its end, and after a while end it."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_words(self, status: int) -> str:
        """Return why it failed."""
        lines = self._log.read_bytes()[self._log_began :].decode(errors="replace").strip().splitlines()
        told = [line for line in lines if line.startswith("agentrl: ")]
        words = (told or lines or [f"it ended with status {status}"])[-1].removeprefix("agentrl: ")
        return f"{words} (log: {self._log})"


def start(arguments: Sequence[str], *, log: IO[bytes], environment: dict[str, str]) -> Any:
    """Start `agentrl ...` as a process in a session of its own, which a Ctrl-C in the terminal does not reach twice."""
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli.attached", *arguments],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def _environment(slot: int, jobs: int) -> dict[str, str]:
    """Divide cores and GPUs among the runs at once."""
    threads = max(1, default_jobs(is_cpu=True) // jobs)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    if gpus := _gpus():
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return environment


def _gpus() -> list[str]:
    """List the GPUs that are ours, without the seconds that asking torch takes."""
    if (ours := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in ours.split(",") if name]
    return [str(number) for number in range(len(glob("/dev/nvidia[0-9]*")))]


def _steps_done(run: PlannedRun) -> int:
    try:
        return RunFolder(run.folder).last_step()
    except ConfigError:  # what is damaged is told by the run
        return 0
