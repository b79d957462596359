"""What processes tell one another is held once by each of them, whatever their number."""

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
