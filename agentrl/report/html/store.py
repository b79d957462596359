"""The rollouts of a page, read from the folders of its runs: each file once, the newest first."""

import re
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from agentrl.errors import ConfigError
from agentrl.report.html.rollouts import Block, block_of, other_credit
from agentrl.report.html.runs import Run
from agentrl.report.records import TrajectoryRecord, read_records
from agentrl.report.terminal import decoder

MAX_ROLLOUTS, MAX_CREDITED = 10_000, 1_000
"""Rollouts of a page, and those of them that other credit schemes are applied to: the newest."""


class _File(NamedTuple):
    path: Path
    step: int
    run: Run
    is_fault: bool


class RolloutStore:
    """Blocks of rollouts, by number; grows while a run writes more."""

    def __init__(self, *, max_rollouts: int = MAX_ROLLOUTS) -> None:
        self.blocks: dict[int, Block] = {}
        self.left_out = 0
        """Files of which nothing is shown, because there are newer rollouts enough."""
        self._max_rollouts = max_rollouts
        self._read: dict[Path, tuple[int, list[int]]] = {}
        """When each file was last written, and its blocks."""
        self._damage: dict[Path, str] = {}
        self._next = 0

    @property
    def notices(self) -> list[str]:
        """List what is damaged, and shown without the damaged part."""
        return list(self._damage.values())

    def read(self, runs: Sequence[Run], *, seconds: float = float("inf")) -> bool:
        """Read what is not read yet, for so long, and forget what is gone or too old; return whether all is read."""
        deadline = time.monotonic() + seconds
        files = [file for run in runs for file in _files(run)]
        for path in self._read.keys() - {file.path for file in files}:
            self._forget(path)
        self.left_out = num_newer = num_credited = 0
        for file in sorted(files, key=lambda file: (not file.is_fault, -file.step)):
            if num_newer >= self._max_rollouts:
                self._forget(file.path)
                self.left_out += 1
                continue
            if self._is_new(file.path):
                if time.monotonic() > deadline:
                    return False
                self._forget(file.path)
                self._add(file, max_credited=0 if file.is_fault else MAX_CREDITED - num_credited)
            size = sum(len(self.blocks[number].entries) for number in self._read[file.path][1])
            num_newer += size
            num_credited += 0 if file.is_fault else size
        return True

    def entries(self) -> list[dict[str, object]]:
        """List the rollouts, with the number of the block in which each is."""
        return [entry | {"block": number} for number, block in self.blocks.items() for entry in block.entries]

    def _add(self, file: _File, *, max_credited: int) -> None:
        numbers: list[int] = []
        self._read[file.path] = _written(file.path), numbers
        records: list[TrajectoryRecord] = []
        try:
            for record in read_records(file.path):
                records.append(record)  # noqa: PERF402  # those before the damage are kept
        except ConfigError as error:
            self._damage[file.path] = f"{error}. It is shown without that line and what follows"
        others = other_credit(records) if len(records) <= max_credited else {}
        decode = decoder(file.run.folder.path)
        for _, group in groupby(sorted(records, key=lambda record: record.group_id), lambda record: record.group_id):
            self.blocks[self._next] = block_of(list(group), run=file.run.number, others=others, decode=decode)
            numbers.append(self._next)
            self._next += 1

    def _is_new(self, path: Path) -> bool:
        written, _ = self._read.get(path, (None, []))
        return written != _written(path)

    def _forget(self, path: Path) -> None:
        """Drop what a file held: it is gone, too old, or written again, as by a run that was resumed and has gone back."""
        _, numbers = self._read.pop(path, (0, []))
        self._damage.pop(path, None)
        for number in numbers:
            del self.blocks[number]


def _written(path: Path) -> int:
    """Return when a file was written; 0 if it is gone by now."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _files(run: Run) -> list[_File]:
    files = [_File(path, int(re.sub(r"\D", "", path.stem)), run, False) for path in run.folder.rollouts()]
    try:
        evaluations = run.folder.played_evaluations()
    except ConfigError:  # for a note that is damaged
        evaluations = [(path, None) for path in sorted(run.folder.evaluations.glob("*.jsonl"))]
    files += [_File(path, note.step if note is not None else 0, run, False) for path, note in evaluations]
    return files + [_File(path, 0, run, True) for path in run.folder.kept_faults()]
