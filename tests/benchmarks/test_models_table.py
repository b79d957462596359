"""The table of results/models.md is what the script makes: a fifth of its rows, chosen by a hash, and all counts."""

import re
import zlib
from pathlib import Path

import pytest

from benchmarks.models_table import rows, table
from benchmarks.random_dialogues import CaseCounts, Row, play
from tests.support.families import template_names

pytestmark = pytest.mark.slow

DOCUMENT = (Path(__file__).parents[2] / "benchmarks" / "results" / "models.md").read_text(encoding="utf-8")
TABLE = DOCUMENT.partition("<!-- models -->\n")[2].partition("<!-- end -->")[0]
FIFTH = [name for name in template_names() if zlib.crc32(name.encode()) % 5 == 0]


def test_the_committed_rows_are_what_the_script_makes() -> None:
    assert len(FIFTH) > 10
    header, rule, *lines = table(rows(FIFTH)).splitlines()
    for line in (header, rule, *lines):
        assert line in TABLE.splitlines()


def test_nearly_all_templates_are_accepted_and_those_that_carry_tools_for_tools() -> None:
    names = re.findall(r"^\| (\w+) \|", TABLE.partition("| family of")[0], re.MULTILINE)
    assert tuple(names[1:]) == template_names()
    found = re.match(r"Of 72 templates, (\d+) are accepted for dialogue and (\d+) of these for tools\.", TABLE)
    assert found
    assert int(found[1]) >= 60
    assert int(found[2]) >= 40


def test_random_dialogues_are_what_the_family_renders() -> None:
    for name in FIFTH:
        row, tally = Row.of(name), CaseCounts()
        for number in range(5):
            play(row, number + zlib.crc32(name.encode()), tally)
        assert not tally.failures, tally.failures[:3]
        assert sum(count for what, count in tally.outcomes.items() if what.startswith("actions")) == 30
        assert tally.outcomes["actions"] > 15
