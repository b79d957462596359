"""What processes tell one another is held once by each of them, whatever their number; and its bytes are counted."""

import subprocess
import sys

import pytest

from benchmarks import gathering

pytestmark = [pytest.mark.slow, pytest.mark.process]


def test_a_process_holds_one_others_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gathering", "--processes", "3", "--megabytes", "64"])
    gathering.main()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["3", "the first"], ["3", "all"]]
    assert max(float(row[2]) for row in rows) < 1.6 * 64  # both were 320 and more where each held the bytes of all


def test_with_replicas_gradients_alone_leave_a_group_of_shards() -> None:
    command = [sys.executable, "-m", "benchmarks.gathering", "--collectives", "8", "--replicas", "2"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    found = {kind.rpartition(" ")[2]: (ranks, float(size)) for kind, ranks, size in rows[:-1]}
    assert found == {
        "allgather_base": ("4", 32.76),  # 8.19 billion weights in bfloat16, for the pass and its backward one
        "reduce_scatter_base": ("4", 32.76),  # gradients in float32
        "allreduce": ("2", 8.19),  # those of a quarter of the weights
    }
