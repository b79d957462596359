"""Another training loop, written from the parts of agentrl, fits a screen and trains."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_options import SMALL_OPTIONS

ROOT = Path(__file__).parents[1]
LOOP = ROOT / "examples" / "own_loop.py"


def test_it_takes_at_most_forty_lines() -> None:
    assert len(LOOP.read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.process
def test_it_trains() -> None:
    options = [*SMALL_OPTIONS, "--train.steps", "2"]
    done = subprocess.run(
        [sys.executable, LOOP, ROOT / "examples" / "calculator.yaml", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["1", "reward"], ["2", "reward"]]
