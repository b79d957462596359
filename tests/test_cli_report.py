"""`agentrl report`: what it writes, and how mistakes are told."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from tests.support.report_runs import make_run

Told = Callable[[], tuple[str, str]]


def ends(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a mistake is told in."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_the_report_of_a_run_stands_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    main(["report", str(folder.path)])
    assert (folder.path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f"report: {folder.path / 'report.html'}" in capsys.readouterr().out


def test_that_of_several_stands_here_or_where_it_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(make_run(tmp_path / name, seed=seed).path) for seed, name in enumerate("ab")]
    monkeypatch.chdir(tmp_path)
    main(["report", *runs])
    main(["report", *runs, "-o", "mine.html"])
    here, mine = ((tmp_path / name).read_text(encoding="utf-8") for name in ("report.html", "mine.html"))
    assert re.sub('"written":"[^"]*"', "", here) == re.sub('"written":"[^"]*"', "", mine)
    assert "<title>desk: 2 runs</title>" in here


def test_mistakes_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    fresh = make_run(tmp_path / "fresh", rewards=(), rollouts=[])
    (fresh.path / "rollouts").rename(tmp_path / "gone")
    assert "there is none" in ends(["report", tmp_path / "none"], capsys)
    assert "no config.yaml" in ends(["report", tmp_path], capsys)
    assert "no metrics and no rollouts yet" in ends(["report", fresh.path], capsys)
    assert "name a file" in ends(["report", folder.path, "-o", tmp_path], capsys)
    assert "No such file" in ends(["report", folder.path, "-o", tmp_path / "a" / "b.html"], capsys)
    assert "there is none" in ends(["view", tmp_path / "none"], capsys)
    assert "--port: 99999" in ends(["view", folder.path, "--port", "99999"], capsys)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    assert "metrics.jsonl, line 4: it has no step" in ends(["report", folder.path], capsys)
    folder.config_file.write_text("[]")
    assert "expected a recipe" in ends(["report", folder.path], capsys)
