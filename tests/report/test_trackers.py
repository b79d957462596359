"""Trackers as they are installed, read back by their own readers where they have one."""

import importlib
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import yaml
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from agentrl.data.plain import printable
from agentrl.env import MessageEnv
from agentrl.errors import ConfigError
from agentrl.report.folder import ReportConfig, RunFolder
from agentrl.report.records import read_records
from agentrl.report.trackers import COLUMNS, Trackers, check_trackers, dialogue
from agentrl.types import Message
from tests.support.each import each
from tests.support.processes import Command
from tests.support.runs import SIZES, recipe, train
from tests.support.trajectories import trajectory, turn

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
STEPS = [0, 1, 2, 3]
Tracked = tuple[Path, list[dict[str, float]]]
"""A run's folder, and the metrics of its steps."""


class Yes(MessageEnv):
    """Asks for a word, and takes any."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        super().reset(seed=seed)
        return ({"role": "user", "content": "Say yes."},), {}

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        return (), 1.0, True, False, {"success": 1.0}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """A run of two steps in all four trackers that is resumed to a third."""
    home = tmp_path_factory.mktemp("home")
    sections = {
        "env": {"id": "tests.report.test_trackers:Yes"},
        "model": {"local": SIZES},
        "rollout": {
            "num_groups": 2,
            "group_size": 3,
            "max_turns": 2,
            "max_turn_tokens": 300,
            "max_context_tokens": 512,
        },
        "train": {"num_minibatches": 2, "device": "cpu", "checkpoint_every": 1},
        "evaluation": {"num_tasks": 4},
        "report": {"rollouts_every": 2, "trackers": ["tensorboard", "trackio", "wandb", "mlflow"], "project": "tried"},
    }
    (home / "recipe.yaml").write_text(yaml.safe_dump(sections))
    folder = home / "first"
    for target, steps in ([home / "recipe.yaml", "--run_dir", folder], 2), ([folder], 3):
        with patch.dict(os.environ, places(home)):
            Command("train", *target, "--train.steps", steps).finish()
    return folder, RunFolder(folder).metrics()


def places(home: Path) -> dict[str, str]:
    """Variables that keep what trackers write in one folder."""
    names = {"HOME": "", "TRACKIO_DIR": "trackio"}
    return {name: str(home / place) for name, place in names.items()} | {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": (home / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }


def test_tensorboard_has_metrics_recipe_and_rollouts(tracked: Tracked) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, rows = tracked
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert [event.step for event in found.Scalars("eval/reward")] == [0, 2, 3]
    entropies = found.Scalars("entropy")
    assert [event.step for event in entropies] == STEPS[1:]
    assert [event.value for event in entropies] == pytest.approx([row["entropy"] for row in rows[1:]], rel=1e-6)
    texts = found.Tensors("rollouts/text_summary")
    assert [event.step for event in texts] == [1, 2]
    text = texts[0].tensor_proto.string_val[0].decode()
    assert text.count("\n    user: Say yes.\n") == 4
    assert "**train/000000, reward 1, terminated**\n\n    user: Say yes.\n    \n    assistant: " in text
    assert b"train.learning_rate" in found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content


def test_trackio_has_metrics_recipe_and_rollouts(tracked: Tracked) -> None:
    folder, rows = tracked
    with sqlite3.connect(folder.parent / "trackio" / "tried.db") as database:
        logged = [(step, json.loads(text)) for step, text in database.execute("select step, metrics from metrics")]
        names = {name for (name,) in database.execute("select run_name from metrics")}
        (config,) = (json.loads(text) for (text,) in database.execute("select config from configs"))
    assert names == {json.loads((folder / "trackers.json").read_text())["trackio"]}
    entropies = [(step, metrics["entropy"]) for step, metrics in logged if "entropy" in metrics]
    assert entropies == [(row["step"], row["entropy"]) for row in rows[1:]]
    tables = {step: metrics["rollouts"]["_value"] for step, metrics in logged if "rollouts" in metrics}
    assert list(tables) == [1, 2]
    check_table(folder, [list(row.values()) for row in tables[1]], list(tables[1][0]))
    assert config["train.steps"] == 3  # it keeps the newest


def test_wandb_has_metrics_recipe_and_rollouts(tracked: Tracked) -> None:
    folder, rows = tracked
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    found = [record for file in files for record in wandb_records(file)]
    history = [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in r.history.item} for r in found]
    entropies = [(row["step"], row["entropy"]) for row in history if "entropy" in row]
    assert entropies == [(row["step"], pytest.approx(row["entropy"])) for row in rows[1:]]
    assert [row["step"] for row in history if "rollouts/_type" in row] == [1, 2]
    assert {(r.run.project, r.run.display_name) for r in found if r.HasField("run")} == {("tried", "first")}
    assert {r.run.run_id for r in found if r.HasField("run")} == {
        json.loads((folder / "trackers.json").read_text())["wandb"]
    }
    (config,) = ({u.key: json.loads(u.value_json) for u in r.config.update} for r in found if r.HasField("config"))
    assert config["train.steps"] == 2
    tables = [json.loads(file.read_text()) for file in (folder / "wandb").glob("offline-*/files/media/table/*.json")]
    assert len(tables) == 2
    check_table(folder, min((table["data"] for table in tables), key=lambda data: data[0][0]), tables[0]["columns"])


def test_wandb_keeps_the_steps_that_a_run_does_again(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from accelerate import PartialState
from agentrl.report.folder import ReportConfig, RunFolder
from agentrl.report.trackers import Trackers

PartialState()
folder = RunFolder.create(Path(sys.argv[1]), {})
trackers = Trackers(ReportConfig(trackers=("wandb",)), folder, config={}, next_step=0, on_failure=print)
for step, entropy in enumerate([0.5, 0.4, 0.3, 0.2]):
    trackers.add_row({"step": step, "entropy": entropy})
# Offline, nothing but an open run knows how far it has come.
trackers = Trackers(ReportConfig(trackers=("wandb",)), folder, config={}, next_step=2, on_failure=print)
for step, entropy in ((2, 0.35), (3, 0.25)):
    trackers.add_row({"step": step, "entropy": entropy})
trackers.finish()
"""
    folder = tmp_path / "run"
    subprocess.run([sys.executable, "-c", script, folder], env=os.environ | places(tmp_path), check=True, timeout=400)
    found = [r for file in (folder / "wandb").glob("offline-run-*/run-*.wandb") for r in wandb_records(file)]
    history = [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in r.history.item} for r in found]
    entropies = [(row.get("step", row["_step"]), row["entropy"]) for row in history if "entropy" in row]
    assert entropies == [(0, 0.5), (1, 0.4), (2, 0.3), (3, 0.2), (2, 0.35), (3, 0.25)]
    axes = {r.metric.glob_name or r.metric.name: r.metric.step_metric for r in found if r.HasField("metric")}
    assert axes["*"] == "step"


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield what wandb wrote into a file of its own: a log in the format of LevelDB, with a header of 7 bytes."""
    kind = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        _, length, piece = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if piece in (1, 4):  # whole, or the last piece
            yield kind.FromString(whole)
            whole = b""


def test_mlflow_has_metrics_recipe_and_rollouts(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    folder, rows = tracked
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (folder.parent / "mlruns").as_uri())
    client = MlflowClient()
    (experiment,) = (found.experiment_id for found in client.search_experiments() if found.name == "tried")
    (run,) = client.search_runs([experiment])
    assert run.info.run_id == json.loads((folder / "trackers.json").read_text())["mlflow"]
    assert run.info.run_name == "first"
    entropies = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "entropy")]
    assert entropies == [(row["step"], row["entropy"]) for row in rows[1:]]
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "eval/pass_1")] == [0, 2, 3]
    assert run.data.params["train.steps"] == "2"
    table = client.load_table(experiment, "rollouts.json", [run.info.run_id])
    assert table["step"].tolist() == [1] * 4 + [2] * 4
    check_table(folder, table.head(4).to_numpy().tolist(), list(table.columns))


def check_table(folder: Path, rows: list[list[Any]], columns: list[str]) -> None:
    """Look whether a table says what the run's folder says of its first step."""
    recorded = [r for r in read_records(RunFolder(folder).rollouts()[0]) if not r.trajectory_id.endswith("/2")]
    assert columns == list(COLUMNS)
    assert [row[:4] for row in rows] == [[1, r.group_id, r.reward, r.stop_reason.value] for r in recorded]
    for row, record in zip(rows, recorded, strict=True):
        assert row[4].startswith(f"user: Say yes.\n\nassistant: {printable(str(record.turns[0].message['content']))}")


class Fragile(GeneralTracker):
    """Works until its first step."""

    name = "fragile"
    requires_logging_directory = False
    logged: ClassVar[list[int | None]] = []

    def __init__(self, project: str) -> None:
        super().__init__()
        self.project = project

    @property
    def tracker(self) -> str:
        return self.project

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append(step)
        if step == 1:
            raise ConnectionError("the network\nis gone")


class Refusing(Fragile):
    name = "refusing"

    def start(self) -> None:
        raise PermissionError("log in first.")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Fragile, Refusing):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, kind.name, kind)  # as register_tracker_class does, for this test
    monkeypatch.setattr(Fragile, "logged", [])


@pytest.mark.usefixtures("registered")
def test_a_tracker_that_fails_is_told_once_and_the_run_and_the_others_continue(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warnings: list[str] = []
    settings = recipe(tmp_path, report={"trackers": ["fragile", "tensorboard"]})
    folder, rows = train(settings, on_warning=warnings.append)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert Fragile.logged == [0, 1]
    (told,) = [words for words in warnings if "tracker" in words]
    assert "fragile fails, and the run continues without it" in told
    assert told.endswith("ConnectionError: the network is gone")
    assert [(told.step, told.name) for told in folder.warnings() if "tracker" in told.name] == [(1, "tracker_fragile")]
    found = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("entropy")] == [1, 2]


@pytest.mark.usefixtures("registered")
def test_a_tracker_that_does_not_start_is_refused_and_the_run_begins_without_it(tmp_path: Path) -> None:
    settings = recipe(tmp_path, report={"trackers": ["refusing"]})
    with pytest.raises(
        ConfigError, match=r"refusing does not start: PermissionError: log in first\. Mend that and run"
    ):
        train(settings)
    _, rows = train(recipe(tmp_path), RunFolder(tmp_path / "run"))
    assert [row["step"] for row in rows] == [0, 1, 2]


@pytest.mark.usefixtures("registered")
def test_a_tracker_that_cannot_be_resumed_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.trackers.write_text('{"refusing": "run"}')
    told: list[Any] = []
    config = ReportConfig(trackers=("refusing",))
    trackers = Trackers(config, folder, config={}, next_step=7, on_failure=lambda *words: told.append(words))
    trackers.add_row({"step": 7, "loss": 0.0})
    trackers.finish()
    assert [(step, name) for step, name, _ in told] == [(7, "tracker_refusing")]


@pytest.mark.usefixtures("registered")
def test_a_tracker_that_is_named_later_gets_the_steps_so_far(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.add_metrics({"step": 0, "entropy": 1.0})
    folder.add_metrics({"step": 2, "entropy": 0.5})
    config = ReportConfig(trackers=("fragile",))
    Trackers(config, folder, config={}, next_step=3, on_failure=print).add_row({"step": 3})
    assert Fragile.logged == [0, 2, 3]


@pytest.mark.usefixtures("registered")
def test_a_tracker_that_failed_or_was_left_out_gets_what_it_lacks_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path / "run", {})

    def go(steps: range, *names: str) -> None:
        trackers = Trackers(
            ReportConfig(trackers=names), folder, config={}, next_step=steps[0], on_failure=lambda *_: None
        )
        for step in steps:
            folder.add_metrics({"step": step, "entropy": 1.0})
            trackers.add_row({"step": step, "entropy": 1.0})
        trackers.finish()

    go(range(3), "fragile")  # it fails at 1
    assert Fragile.logged == [0, 1]
    monkeypatch.setattr(Fragile, "log", lambda _, values, step, **__: Fragile.logged.append(step))
    go(range(3, 5), "fragile")
    assert Fragile.logged == [0, 1, 1, 2, 3, 4]
    go(range(5, 7))
    noted = folder.trackers.read_text()
    Trackers(None, folder, config={}, next_step=7, on_failure=print).finish()  # of another process
    assert folder.trackers.read_text() == noted
    go(range(7, 8), "fragile")
    assert Fragile.logged[6:] == [5, 6, 7]
    noted = folder.trackers.read_text()
    Trackers(None, folder, config={}, next_step=8, on_failure=print).finish()
    assert folder.trackers.read_text() == noted
    go(range(8, 9), "fragile")
    assert Fragile.logged[9:] == [8]


@pytest.mark.usefixtures("registered")
def test_a_tracker_that_lacks_steps_gets_those_too_that_the_run_did_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fragile, "log", lambda _, values, step, **__: Fragile.logged.append(step))
    folder = RunFolder.create(tmp_path / "run", {})
    folder.trackers.write_text('{"fragile": ["key", 90]}')
    for step in range(100):
        folder.add_metrics({"step": step})
    Trackers(
        ReportConfig(), folder, config={}, next_step=61, on_failure=print
    )  # without it, from an older checkpoint on
    config = ReportConfig(trackers=("fragile",))
    Trackers(config, folder, config={}, next_step=100, on_failure=print).add_row({"step": 100})
    assert Fragile.logged == list(range(61, 101))


@each(
    ("name", "words"),
    [("comet_ml", r"^report\.trackers: 'comet_ml' is not installed: pip install comet-ml$"), ("wandbb", r"'wandb'\?$")],
)
def test_a_tracker_that_cannot_be_had_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_trackers(["tensorboard", name])


def test_a_dialogue_is_bounded_and_has_no_control_characters() -> None:
    said = replace(turn([1], [2]), observation=({"role": "user", "content": "\x1b[31m" + "x" * 100_000},))
    text = dialogue(trajectory(0, *[said] * 30))
    assert "\x1b" not in text
    assert len(text) < 21_000
