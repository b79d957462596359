import json
from pathlib import Path

import pytest

from benchmarks import learn_environments
from benchmarks.learn_environments import Result, fingerprint, read_results, table

pytestmark = pytest.mark.slow


def result(seed: int, **changes: object) -> Result:
    of = {"recipe": "corridor", "seed": seed, "of": fingerprint("corridor"), "parameters": 10, "tasks": 64}
    return of | {"steps": [0, 8], "success": [0.25, 0.75], "turns": [18.0, 11.5], "minutes": 1.25} | changes


def test_only_runs_of_todays_recipe_count(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    assert read_results(out) == {}
    lines = [result(0), result(1, of="another text")]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert read_results(out) == {("corridor", 0): result(0)}


def test_a_row_tells_where_a_run_began_and_ended() -> None:
    row = "| [corridor](../../examples/corridor.yaml) | 0 | 25.0% | 75.0% | 11.5 | 8 | 1.2 |"
    assert table([result(0)]).splitlines()[-1] == row


def test_every_recipe_that_is_named_is_there() -> None:
    assert all(learn_environments.path_of(recipe).is_file() for recipe in learn_environments.RECIPES)
