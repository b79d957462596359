import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.cli import main
from agentrl.compare.runner import Failure, start
from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.report.terminal import Panel, note_panels
from tests.support.each import each
from tests.support.processes import Command

TINY = """
env: {id: key_door}
model: {local: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, intermediate_size: 32}}
rollout: {num_groups: 2, group_size: 2, max_turns: 1, max_turn_tokens: 4, max_context_tokens: 512}
train: {steps: 2, num_minibatches: 1, device: cpu}
evaluation: {num_tasks: 2}
report: {rollouts_every: 0}
"""


def under_way(folder: Path) -> list[psutil.Process]:
    """List the processes that train a run of a folder."""
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if any(str(folder) in part for part in p.info["cmdline"] or []) and "agentrl.cli.attached" in p.info["cmdline"]
    ]


@pytest.mark.slow
@pytest.mark.process
def test_a_comparison_that_is_killed_is_resumed_by_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = tmp_path / "doors.yaml", tmp_path / "runs"
    recipe.write_text(TINY)
    command = (
        "compare",
        recipe,
        "--vary",
        "train.learning_rate=1e-3,2e-3",
        "--seeds",
        2,
        "--jobs",
        1,
        "--folder",
        folder,
    )
    process = Command(*command)
    while len(list(folder.glob("doors-*/seed-*.log"))) < 2:
        process.check_runs()
        time.sleep(0.05)
    process.kill()
    psutil.wait_procs(under_way(folder), timeout=120)
    assert not under_way(folder), "runs end with the comparison"
    finished = [path for path in folder.glob("doors-*/seed-*/metrics.jsonl") if '"step": 2' in path.read_text()]
    assert 0 < len(finished) < 4
    written = [path.stat().st_mtime_ns for path in finished]
    again = Command(*command, "--json")
    again.finish()
    found = json.loads(again.out)
    [comparison] = found["comparisons"]
    assert [path.stat().st_mtime_ns for path in finished] == written, "what was there is not trained again"
    assert [arm["name"] for arm in comparison["arms"]] == ["1e-3", "2e-3"]
    assert [arm["seeds"] for arm in comparison["arms"]] == [[0, 1], [0, 1]]
    assert comparison["num_tasks"] == 2, "all runs share their evaluation tasks"
    assert comparison["panel"]
    assert comparison["steps"] == [0, 1, 2]
    assert 'id="data"' in Path(found["page"]).read_text(encoding="utf-8")
    runs = [run for arm in comparison["arms"] for run in arm["runs"]]
    main(["compare", *runs, "--json", "--html", str(tmp_path / "page.html")])
    [other] = json.loads(capsys.readouterr().out)["comparisons"]
    same = ("metric", "panel", "steps", "threshold")
    assert {name: other[name] for name in same} == {name: comparison[name] for name in same}
    assert [arm["curves"] for arm in other["arms"]] == [arm["curves"] for arm in comparison["arms"]]


@pytest.mark.slow
@pytest.mark.process
def test_a_run_ends_with_what_started_it_where_interrupts_are_ignored(tmp_path: Path) -> None:
    recipe, run, log = tmp_path / "doors.yaml", tmp_path / "run", tmp_path / "log"
    recipe.write_text(TINY)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a script's `agentrl compare ... &`
    try:
        with log.open("wb") as file:
            arguments = ["train", str(recipe), "--run_dir", str(run), "--train.steps", "1000000"]
            process = start(arguments, log=file, environment=dict(os.environ))
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        while not (run / "metrics.jsonl").is_file():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        process.stdin.close()
        assert process.wait(120) == 130
    finally:
        process.kill()
        process.wait()


def record(
    folder: Path,
    *,
    seed: int,
    success: list[float],
    rate: float = 1e-3,
    panel: tuple[str, ...] = ("a", "b"),
    steps: int = 2,
) -> str:
    """Write the folder of a run of `steps` steps, with an evaluation at each that it has come to."""
    recipe = Recipe.model_validate({"seed": seed, "train": {"steps": steps, "learning_rate": rate}})
    run = RunFolder.create(folder, recipe.model_dump(mode="json"))
    for step, value in enumerate(success):
        run.add_metrics({"step": step, "eval/episodes": 2, "eval/success": value})
    note_panels(run, {"eval/": Panel(tasks=panel, temperature=1.0, samples=1)})
    return str(folder)


def fails(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 2) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr().err.strip()
    assert ended.value.code == status, told
    assert len(told.splitlines()) == 1
    return told


def test_user_mistakes_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "doors.yaml"
    recipe.write_text(TINY)
    a = record(tmp_path / "a", seed=0, success=[0.0, 0.5, 0.5])
    assert "not the folder of a run" in fails(capsys, "compare", a, tmp_path)
    assert "all runs are of one recipe" in fails(capsys, "compare", a)
    unfinished = record(tmp_path / "b", seed=0, success=[0.0, 0.5], rate=2e-3)
    assert "is not finished" in fails(capsys, "compare", unfinished)
    other = record(tmp_path / "c", seed=0, success=[0.0, 0.5, 0.6], rate=2e-3, panel=("a", "x"))
    assert "were not evaluated alike" in fails(capsys, "compare", a, other)
    lone = record(tmp_path / "d", seed=5, success=[0.0, 0.5, 0.6], rate=2e-3)
    assert "no seed in common" in fails(capsys, "compare", a, lone)
    assert "name either runs or recipes" in fails(capsys, "compare", a, recipe)
    assert "--seeds: runs are compared as they are" in fails(capsys, "compare", a, other, "--seeds", 3)
    assert "one recipe is nothing to compare" in fails(capsys, "compare", recipe)
    assert "--vary: expected each field once" in fails(capsys, "compare", recipe, "--vary", "credit.scheme")
    assert "--seeds: expected at least 1" in fails(capsys, "compare", recipe, "--vary", "train.steps=1,2", "--seeds", 0)
    assert "give a field several values" in fails(capsys, "sweep", recipe, "--over", "train.steps=2")
    of_failures = ("sweep", recipe, "--over", "train.steps=1,2", "--metric", "failed")
    assert "--metric: a sweep chooses the highest, and 'failed' is not" in fails(capsys, *of_failures)
    assert "train.learning_rte" in fails(capsys, "sweep", recipe, "--over", "train.learning_rte=1,2")
    assert not (tmp_path / "runs").exists()


def test_unfinished_runs_and_single_seeds_are_told_beside_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        record(tmp_path / f"{rate}-{seed}", seed=seed, success=[0.0, 0.5, 0.5 + 10 * rate * (seed + 1)], rate=rate)
        for rate in (1e-3, 2e-3)
        for seed in (0, 1)
    ]
    cut_off = record(tmp_path / "cut", seed=2, success=[0.0, 0.4])
    main(["compare", *runs, cut_off, "--html", str(tmp_path / "page.html")])
    told = " ".join(capsys.readouterr().out.split())
    assert "cut is left out: it is not finished" in told.replace(f"{tmp_path}/", "")
    assert "2 seeds see a difference of" in told
    main(["compare", runs[0], runs[2], "--html", str(tmp_path / "page.html")])
    assert "one seed says nothing of others" in " ".join(capsys.readouterr().out.split())


ENV = """
from agentrl_envs.key_door import KeyDoor

class MyEnv(KeyDoor):
    pass
"""


@pytest.mark.slow
@pytest.mark.process
def test_runs_that_began_with_other_code_are_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env, recipe, folder = tmp_path / "my_env.py", tmp_path / "doors.yaml", tmp_path / "runs"
    env.write_text(ENV)
    recipe.write_text(TINY.replace("id: key_door", "id: 'my_env:MyEnv'"))
    command = ("compare", recipe, "--vary", "train.learning_rate=1e-3,2e-3", "--jobs", 1, "--folder", folder, "--json")
    again = Command(*command, "--seeds", 1)
    again.finish()
    runs = [run for arm in json.loads(again.out)["comparisons"][0]["arms"] for run in arm["runs"]]
    main([*map(str, command), "--seeds", "1"])
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["arms"][0]["seeds"] == [0]
    env.write_text(ENV + "# of today")
    for seeds in (1, 2):
        told = fails(capsys, *command, "--seeds", seeds)
        assert "the file of the module 'my_env' has changed since runs in " in told
        assert all(str(Path(run).parent.relative_to(tmp_path)) in told for run in runs)
    shutil.rmtree(Path(runs[0]).parent)
    assert str(Path(runs[0]).parent) not in fails(capsys, *command, "--seeds", 1)
    main(["compare", runs[1], other(runs[1], tmp_path), "--json", "--html", str(tmp_path / "page.html")])
    [found] = json.loads(capsys.readouterr().out)["comparisons"]
    assert any("'my_env' changed between these runs" in note for note in found["notes"])


def other(run: str, folder: Path) -> str:
    """Copy a run, as one of another rate whose code was another."""
    copy = RunFolder(shutil.copytree(run, folder / "other"))
    copy.config_file.write_text(copy.config_file.read_text().replace("learning_rate: 0.002", "learning_rate: 0.003"))
    copy.sources.write_text('{"my_env": "of before"}')
    return str(copy.path)


def test_a_sweep_reports_the_best_on_fresh_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "doors.yaml"
    recipe.write_text(TINY)

    def trained(runs: Any, **_: Any) -> list[Any]:
        for run in runs:
            rate = run.arm.recipe.train.learning_rate
            luck = 0.1 if run.seed < 2 and rate == 2e-3 else 0.01 * run.seed * 1000 * rate
            if not run.has_begun:
                record(run.folder, seed=run.seed, rate=rate, success=[0.0, 0.3, 0.5 + luck])
        return []

    monkeypatch.setattr("agentrl.compare.runner.run_missing", trained)
    command = [
        "sweep",
        str(recipe),
        "--over",
        "train.learning_rate=1e-3,2e-3,3e-3",
        "--seeds",
        "2",
        "--folder",
        str(tmp_path / "r"),
    ]
    main([*command, "--json"])
    found = json.loads(capsys.readouterr().out)
    chosen, fresh = found["comparisons"]
    assert [arm["seeds"] for arm in chosen["arms"]] == [[0, 1]] * 3
    assert [arm["name"] for arm in fresh["arms"]] == ["3e-3", "2e-3"], "the second, and the best"
    assert [arm["seeds"] for arm in fresh["arms"]] == [[2, 3]] * 2
    # on the seeds that chose it .6; on fresh ones .5 + .02 * (2 + 3) / 2
    assert found["words"].startswith("best: 2e-3, 0.600 on the seeds that chose it and 0.550 on fresh ones")
    main([*command, "--fresh", "0"])
    assert "the winner's curse" in " ".join(capsys.readouterr().out.split())


def test_where_the_first_recipe_fails_the_others_are_compared_and_this_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "doors.yaml"
    recipe.write_text(TINY)

    def trained(runs: Any, **_: Any) -> list[Failure]:
        for run in runs:
            rate = run.arm.recipe.train.learning_rate
            if rate != 1e-3:
                record(run.folder, seed=run.seed, rate=rate, success=[0.0, 0.3, 100 * rate + 0.01 * run.seed])
        return [Failure(run=run, words="no memory") for run in runs if run.arm.recipe.train.learning_rate == 1e-3]

    monkeypatch.setattr("agentrl.compare.runner.run_missing", trained)
    command = ["compare", str(recipe), "--vary", "train.learning_rate=1e-3,2e-3,3e-3", "--folder", str(tmp_path / "r")]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--json"])
    assert ended.value.code == 1
    [found] = json.loads(capsys.readouterr().out)["comparisons"]
    assert [(each["name"], each["against"]) for each in found["differences"]] == [("3e-3", "2e-3")]
    assert (
        "1e-3, with which the others are compared, has no finished run: the next one takes its place" in found["notes"]
    )


@each("failing", [(1e-3,), (2e-3,), (1e-3, 2e-3)])
def test_a_sweep_whose_fresh_seeds_fail_shows_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failing: tuple[float, ...]
) -> None:
    recipe = tmp_path / "doors.yaml"
    recipe.write_text(TINY)

    def trained(runs: Any, **_: Any) -> list[Failure]:
        failures = []
        for run in runs:
            rate = run.arm.recipe.train.learning_rate
            if run.seed >= 2 and rate in failing:
                failures.append(Failure(run=run, words="the disk is full"))
            else:
                record(run.folder, seed=run.seed, rate=rate, success=[0.0, 0.3, 100 * rate])
        return failures

    monkeypatch.setattr("agentrl.compare.runner.run_missing", trained)
    command = ["sweep", str(recipe), "--over", "train.learning_rate=1e-3,2e-3", "--seeds", "2", "--json"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--folder", str(tmp_path / "r")])
    told = capsys.readouterr()
    assert (ended.value.code, f"{2 * len(failing)} runs failed" in told.err) == (1, True)
    found = json.loads(told.out)
    assert [[arm["seeds"] for arm in each["arms"]] for each in found["comparisons"]] == [[[0, 1]] * 2]
    assert found["words"] == (
        "best: 2e-3, 0.200 on the seeds that chose it; too few fresh seeds have finished to say what to expect"
    )
    told_of = [note for note in found["comparisons"][0]["notes"] if note.endswith(" failed: the disk is full")]
    assert len(told_of) == 2 * len(failing)
    assert Path(found["page"]).is_file()
