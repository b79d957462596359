"""Whatever values stand in the files of a run, and whatever stands in their place: a command ends well, or in one line."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import train_tokenizer
from agentrl.data.files import read_bytes
from agentrl.errors import ConfigError
from agentrl.recipe.config import Recipe
from agentrl.report.card import write_card
from agentrl.report.folder import EvaluationNote, RunFolder, Told
from agentrl.report.log import RunLog
from agentrl.report.records import TrajectoryRecord
from agentrl.report.statistics import settings_of
from agentrl.report.terminal import Panel, note_panels
from tests.support.commands import run
from tests.support.each import each
from tests.support.records import turn
from tests.support.report_runs import member

STEPS = 2
NAN, INF = float("nan"), float("inf")
ODD: list[Any] = [NAN, INF, -INF, "NaN", "-Infinity", 1e308, -1e308, 1e101, 1e100, -1e100, 7, 7.0, -1, -5, 99]
ODD += [0.5, 2**31, 10**12, 10**30, 10**400, 0, None, "text", [], {}]
"""What may stand where a number was."""


def make_run(path: Path, scheme: str) -> RunFolder:
    """Write a run of which every command finds what it reads, but for its weights."""
    given = {"run_dir": path, "env": {"id": "key_door"}, "credit": {"scheme": scheme}, "train": {"steps": STEPS}}
    config = Recipe.model_validate(given).model_dump(mode="json")
    folder = RunFolder.create(path, config)
    for step in range(STEPS + 1):
        found = {"success": 0.25 * step, "reward": 0.5 * step, "episodes": 4.0, "failed": 0.0}
        folder.add_metrics({"step": step, "reward/mean": 0.5 * step} | {f"eval/{name}": n for name, n in found.items()})
    folder.add_rollouts(STEPS, members("train/000001"))
    folder.add_evaluation(members("eval/000000"), EvaluationNote(step=STEPS, settings=settings_of(config)))
    note_panels(folder, {"eval/": Panel(tasks=("a", "b"), temperature=1.0, samples=1)})
    folder.add_warning(Told(step=1, name="zero_spread", words="nothing was learned"))
    train_tokenizer([], vocab_size=261).save_pretrained(folder.tokenizer)
    return folder


def members(group: str) -> list[TrajectoryRecord]:
    """Return the rollouts of a group that meet in a situation, with several turns each."""
    said = turn([{"role": "user", "content": "?"}], ["left", "."], [0.5, -0.5])
    turns = [
        said.model_copy(update={"state_key": "door", "branch_rewards": [[1.0]], "trained": {"ratio": [1.0, None]}})
    ] * 3
    metrics = {"success": 1.0, "score": 0.5, "tool_errors": 0.0}
    return [
        member(n, reward=0.75, step=STEPS, group_id=group, trajectory_id=f"{group}/{n}", turns=turns, metrics=metrics)
        for n in range(3)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunFolder]:
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "one", "uniform"), make_run(folder / "two", "turn_return")


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List where numbers stand in data."""
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return [place for key, item in inner for place in places(item, (*at, key))]
    return [at] if isinstance(value, int | float) and not isinstance(value, bool) else []


@st.composite
def with_odd_values(draw: st.DrawFn, content: bytes, *, is_one: bool = False) -> bytes:
    """A file of JSON, with other values in the place of some of its numbers; in all lines alike, or in one."""
    rows = [json.loads(line) for line in ([content] if is_one else content.splitlines())]
    chosen = rows if draw(st.booleans()) else [draw(st.sampled_from(rows))]
    for *path, key in draw(st.lists(st.sampled_from(places(chosen[0])), min_size=1, max_size=3, unique=True)):
        odd, turns_sign = draw(st.sampled_from(ODD)), draw(st.booleans())
        for number, row in enumerate(chosen):
            at = row
            for part in path:
                at = at[part]
            is_turned = turns_sign and number % 2 and isinstance(odd, int | float)
            at[key] = -odd if is_turned else odd
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def check(arguments: list[str]) -> None:
    status, printed = run(arguments)
    assert status in (0, 2), printed
    if status == 2:
        assert printed.startswith("agentrl: ")
        assert printed.count("\n") == 1
        assert len(printed) < 1000


def commands(path: Path, one: RunFolder, two: RunFolder, out: Path) -> dict[str, list[str]]:
    return {
        "report": ["report", str(one.path), "-o", str(out)],
        "compare": ["compare", str(one.path), str(two.path), "--html", str(out)],
        "show": ["show", str(path), "-n", "9"],
        "explain": ["credit", "explain", "turn_return", str(path), "-n", "9"],
        "advise": ["credit", "advise", str(path)],
        "replay": ["envs", "replay", str(one.path), "train/000001/1"],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("report", name) for name in ("metrics.jsonl", "warnings.jsonl", "rollouts/step-000002.jsonl")),
        *(("compare", name) for name in ("metrics.jsonl", "panel.json")),
        *((command, "rollouts/step-000002.jsonl") for command in ("show", "explain", "advise", "replay")),
    ],
)
@given(data=st.data())
@settings(max_examples=settings().max_examples // 2)
def test_odd_values_in_a_file_are_used_or_refused_in_one_line(
    data: st.DataObject, command: str, name: str, runs: tuple[RunFolder, RunFolder], tmp_path_factory: Any
) -> None:
    path = runs[0].path / name
    whole = path.read_bytes()
    path.write_bytes(data.draw(with_odd_values(whole, is_one=path.suffix == ".json")))
    try:
        check(commands(path, *runs, tmp_path_factory.getbasetemp() / "out.html")[command])
    finally:
        path.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations/evaluation-000001.jsonl"])
@given(data=st.data())
@settings(max_examples=settings().max_examples // 4)
def test_a_card_is_written_of_odd_values_or_they_are_refused(
    data: st.DataObject, name: str, runs: tuple[RunFolder, RunFolder], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = runs[0]
    path, note = folder.path / name, folder.evaluations / "evaluation-000001.json"
    whole, noted = path.read_bytes(), note.read_bytes()
    path.write_bytes(data.draw(with_odd_values(whole)))
    if name == "metrics.jsonl":  # the run's own evaluation is told where there is no other
        note.unlink()
    out = tmp_path_factory.mktemp("card")
    try:
        write_card(out, folder, folder.config(), name="ann/agent", step=STEPS, adapter=False)
    except ConfigError:
        assert not (out / "README.md").exists()
    else:
        text = (out / "README.md").read_text(encoding="utf-8")
        assert "nan" not in text
        assert " inf" not in text
    finally:
        path.write_bytes(whole)
        note.write_bytes(noted)
        shutil.rmtree(out)


def test_a_metric_that_is_no_finite_number_is_not_written(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.add_metrics({"step": 1, "mismatch/max": INF, "kl/reference": NAN, "big": 1e300, "loss": -1e100})
    assert folder.metrics() == [{"step": 1, "loss": -1e100}]


def test_a_run_whose_metrics_an_earlier_version_wrote_with_infinities_is_read(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    (folder.path / "metrics.jsonl").write_text(
        '{"step": 1, "mismatch/max": Infinity, "kl/reference": NaN, "loss": 0.5}\n'
    )
    folder.check()
    assert folder.metrics() == [{"step": 1, "loss": 0.5}]


@each("name", ["config.yaml", "config.begun.yaml"])
@each("text", ["[]", "", "text", "1: 2", "~: 2", "2020-01-01: 2", "env: {1: 2, id: x}", "a: 2020-01-01"])
def test_a_recipe_of_a_run_that_no_run_writes_is_refused(
    name: str, text: str, runs: tuple[RunFolder, RunFolder], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs[0].path, folder)
    (folder / name).write_text(text)
    status, printed = run(["report", str(folder), "-o", str(tmp_path / "report.html")])
    assert (status, printed.count("\n")) == (2, 1)
    assert printed.startswith(f"agentrl: {folder / name}: ")
    assert printed.endswith("; put it back, or begin a new run\n")


def a_file(path: Path) -> None:
    path.write_text("text", encoding="utf-8")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


FOLDERS = ["rollouts", "journal", "evaluations", "faults", "checkpoints"]


@each("put", [a_file, a_link_to_nothing])
@each("name", FOLDERS)
def test_what_stands_in_the_place_of_a_folder_is_named_before_a_run_is_resumed(
    name: str, put: Callable[[Path], None], runs: tuple[RunFolder, RunFolder], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs[0].path, folder)
    shutil.rmtree(folder / name, ignore_errors=True)
    put(folder / name)
    words = f"{folder / name}: it is no folder; move it away"
    with pytest.raises(ConfigError, match=words):
        RunFolder(folder).check()
    if name == "rollouts":
        for command in ("show", "report"):
            assert run([command, str(folder)]) == (2, f"agentrl: {words}\n")


def test_a_folder_that_cannot_be_made_for_a_file_is_told(
    runs: tuple[RunFolder, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    arguments = ["compare", *(str(each.path) for each in runs), "--html", "file/page.html"]
    assert run(arguments) == (2, "agentrl: cannot make file: something else stands there; move it away\n")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes with a path")
@each(
    ("command", "name"),
    [
        ("report", "metrics.jsonl"),
        ("report", "warnings.jsonl"),
        ("report", "rollouts/step-000002.jsonl"),
        ("compare", "panel.json"),
        ("compare", "sources.json"),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    command: str, name: str, runs: tuple[RunFolder, RunFolder], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(runs[0].path, folder.path)
    path = folder.path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="it is no regular file; do something"):
        read_bytes(path, fix="do something")
    check(commands(path, folder, runs[1], tmp_path / "out.html")[command])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes with a path")
def test_a_pipe_in_the_place_of_a_file_that_is_written_is_not_waited_for(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    os.mkfifo(folder.path / ".config.yaml.partial")
    os.mkfifo(folder.path / "log.txt")
    folder.write_config({"seed": 3})
    assert folder.config() == {"seed": 3}
    RunLog(folder.path).write("hello")


def test_an_episode_of_an_entry_that_the_schedule_lacks_is_not_replayed(
    runs: tuple[RunFolder, RunFolder], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(runs[0].path, folder.path)
    folder.add_rollouts(STEPS, [each.model_copy(update={"stage": 99}) for each in members("train/000001")])
    told = run(["envs", "replay", str(folder.path), "train/000001/1"])
    assert told == (2, "agentrl: env.schedule has no entry 99; it has 0\n")


@each(
    ("command", "option", "values", "words"),
    [
        ("compare", "--effect", ["nan", "inf", "0", "1e400"], "--effect: expected a finite number above 0, got "),
        ("compare", "--threshold", ["nan", "inf"], "--threshold: expected a finite number, got "),
        ("sweep", "--effect", ["nan", "inf", "0"], "--effect: expected a finite number above 0, got "),
        (
            "plan",
            "--memory",
            ["nan", "inf", "1e300", "0"],
            "--gpus and --memory: expected positive numbers, and at most ",
        ),
        ("serve", "--server", ["-1", "1"], "--server: expected 0 to 0, the numbers of engine.server.url, got "),
        ("serve", "--start-timeout-s", ["nan", "inf", "0"], "--start-timeout-s: expected seconds above 0, got "),
        ("envs check", "--seeds", ["0", "-3"], "--seeds: expected at least 1, got "),
    ],
)
def test_a_number_of_a_command_line_that_is_out_of_range_is_refused(
    command: str, option: str, values: list[str], words: str, runs: tuple[RunFolder, RunFolder]
) -> None:
    folders = [str(each.path) for each in runs]
    targets = {"compare": folders, "envs check": ["key_door"]}.get(command, folders[:1])
    for value in values:
        status, printed = run([*command.split(), *targets, option, value])
        assert (status, printed.count("\n")) == (2, 1), printed
        assert printed.startswith(f"agentrl: {words}")


LINKED = [".lock", "log.txt", "config.yaml", "metrics.jsonl", "rollouts/step-000002.jsonl", "tokenizer/tokenizer.json"]


@pytest.mark.slow
@each("name", [*LINKED, "checkpoints", "journal", "rollouts", ".reference.partial"])
def test_an_entry_that_links_out_of_a_run_is_followed_by_no_command(
    name: str, runs: tuple[RunFolder, RunFolder], tmp_path: Path
) -> None:
    folder, outside = RunFolder(tmp_path / "run"), tmp_path / "outside"
    shutil.copytree(runs[0].path, folder.path)
    rollouts = folder.rollouts()[0]
    outside.mkdir()
    entry, target = folder.path / name, outside / Path(name).name
    if entry.exists():
        entry.rename(target)
    entry.symlink_to(target)
    before = {path: path.is_file() and path.read_bytes() for path in outside.rglob("*")}
    reading = commands(rollouts, folder, runs[1], tmp_path / "out.html")
    writing = [[name, str(folder.path)] for name in ("train", "launch", "eval", "doctor", "serve", "chat", "plan")]
    for arguments in [*reading.values(), *writing, ["export", str(folder.path), str(tmp_path / "model")]]:
        arguments += ["--processes", "2"] if arguments[0] == "launch" else []
        words = f"agentrl: {entry}: a symbolic link out of the run's folder; put what it leads to in its place\n"
        assert run(arguments) == (2, words), arguments
    assert {path: path.is_file() and path.read_bytes() for path in outside.rglob("*")} == before


def test_a_run_behind_a_link_and_links_within_it_are_as_good_as_others(
    runs: tuple[RunFolder, RunFolder], tmp_path: Path
) -> None:
    (tmp_path / "run").symlink_to(shutil.copytree(runs[0].path, tmp_path / "elsewhere"))
    (tmp_path / "elsewhere" / "newest.jsonl").symlink_to(Path("rollouts", "step-000002.jsonl"))
    (tmp_path / "elsewhere" / "wandb").mkdir()
    (tmp_path / "elsewhere" / "wandb" / "debug.log").symlink_to(tmp_path)  # as wandb links to its logs
    assert RunFolder.open(tmp_path / "run").last_step() == STEPS
