"""A few cases of each category; `python -m benchmarks.reliability` tries all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reliability import CATEGORIES, HEADER, write

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.mark.timeout(600)
def test_a_sample_of_what_is_tried_fails_nowhere() -> None:
    command = [sys.executable, "-m", "benchmarks.reliability", "--quick"]
    # A process of its own: cases are forked from it, and it must have no threads.
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert list(figures) == list(CATEGORIES)
    assert all(figure["tried"] >= 5 for figure in figures.values())


def test_rows_of_other_categories_stay_in_the_table(tmp_path: Path) -> None:
    document = tmp_path / "reliability.md"
    document.write_text("Before.\n\n<!-- reliability -->\n<!-- end -->\n\nAfter.\n")
    write(document, {"folders": "| folders | 1 |"})
    write(document, {"recipes": "| recipes | 2 |"})
    write(document, {"folders": "| folders | 3 |"})
    table = f"{HEADER}| recipes | 2 |\n| folders | 3 |\n"
    assert document.read_text() == f"Before.\n\n<!-- reliability -->\n{table}<!-- end -->\n\nAfter.\n"
