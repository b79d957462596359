"""A run whose episodes outlive a step: trained, interrupted, resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.engine.base import EngineContext
from agentrl.engine.batched import BatchedConfig
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.errors import ConfigError
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records
from agentrl.run.build import _journal, build
from agentrl.run.checkpoint import has_changed
from agentrl.run.parts import build_engine
from agentrl.types import TaskShard
from tests.support import runs
from tests.support.each import each
from tests.support.runs import recipe

pytestmark = pytest.mark.process


def settings(folder: Path, mode: str, steps: int) -> Recipe:
    return recipe(
        folder,
        rollout={"mode": mode, "max_live_episodes": 3, "max_turns": 6, "max_turn_tokens": 24},
        train={"steps": steps, "checkpoint_every": 2},
        evaluation={"every": 2, "num_tasks": 2},
        loss={"unit": "version", "anchor": "behavior"},
    )


def train(
    settings: Recipe, folder: RunFolder | None = None, *, killed_at: int | None = None, told: list[str] | None = None
) -> list[dict[str, float]]:
    def on_progress(phase: str, step: int, _: int, metrics: dict[str, Any]) -> None:
        if phase == "training" and step == killed_at:
            raise KeyboardInterrupt

    return runs.train(settings, folder, on_progress=on_progress, on_warning=([] if told is None else told).append)[1]


def trained_on(folder: RunFolder) -> list[str]:
    return [record.trajectory_id for path in folder.rollouts() for record in read_records(path)]


@pytest.mark.slow
@each("mode", ["partial", "async"])
def test_no_episode_is_lost_or_trained_on_twice_whenever_the_run_is_interrupted(mode: str, tmp_path: Path) -> None:
    steps = 8
    folder: RunFolder | None = None
    for killed_at in (3, 4, 5, 7):
        with pytest.raises(KeyboardInterrupt):
            train(settings(tmp_path, mode, steps), folder, killed_at=killed_at)
        folder = RunFolder.open(tmp_path / "run")
    rows = train(settings(tmp_path, mode, steps), folder)
    assert folder is not None
    assert [row["step"] for row in rows] == list(range(steps + 1))
    ids = trained_on(folder)
    assert len(ids) == len(set(ids)) == steps * 4
    groups = sorted({int(name.split("/")[1]) for name in ids})
    # Those that were overtaken are under way: two steps' groups at the most are started ahead.
    assert groups[-1] < (steps + 2) * 2
    assert all(0 <= row["staleness/max"] <= 2 for row in rows[1:])
    assert max(row["staleness/max"] for row in rows[1:]) > 0
    assert all("eval/reward" in row for row in rows[2::2])


@each(("mode", "given", "expected"), [("sync", None, True), ("async", None, False), ("partial", True, True)])
def test_lockstep_is_for_runs_that_can_repeat(mode: str, given: bool | None, expected: bool, tmp_path: Path) -> None:
    with build(recipe(tmp_path, rollout={"mode": mode}, engine={"name": "transformers", "lockstep": given})) as parts:
        assert isinstance(parts.engine, TransformersEngine)
        assert parts.engine._config.lockstep is expected


class Asked(BatchedConfig):
    """Returns its fields as an engine on the context's device would read them."""

    def build(self, context: EngineContext) -> Any:
        return self.resolved(context)


@each(("device", "given", "expected"), [("cpu", None, True), ("cuda", None, False), ("cuda", True, True)])
def test_on_a_gpu_there_is_lockstep_only_if_asked_for(
    device: str, given: bool | None, expected: bool, tmp_path: Path
) -> None:
    settings = recipe(tmp_path, rollout={"mode": "sync"})
    asked: Any = build_engine(
        Asked(lockstep=given),
        None,
        rollout=settings.rollout,
        train=settings.train.model_copy(update={"precision": "bfloat16"}),
        shard=TaskShard(1),
        device=torch.device(device),
        handover=tmp_path,
    )
    assert asked.lockstep is expected


def test_an_engine_that_keeps_no_cache_over_a_sync_is_refused(tmp_path: Path) -> None:
    settings = recipe(tmp_path, rollout={"mode": "async", "keep_cache": True})
    with pytest.raises(
        ConfigError, match=r"rollout\.keep_cache: engine\.name: auto keeps no cache; set it to vllm_server"
    ):
        build_engine(
            Asked(),
            None,
            rollout=settings.rollout,
            train=settings.train.model_copy(update={"precision": "bfloat16"}),
            shard=TaskShard(1),
            device=torch.device("cpu"),
            handover=tmp_path,
        )


@pytest.mark.slow
def test_a_run_resumes_under_another_recipe_in_another_mode(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path, "partial", 6), killed_at=3)
    folder = RunFolder.open(tmp_path / "run")
    other = {"num_groups": 1, "group_size": 3, "max_turns": 6, "max_turn_tokens": 24}
    rows = train(
        recipe(tmp_path, rollout=other, train={"steps": 8, "checkpoint_every": 2}, loss={"unit": "turn"}), folder
    )
    assert [row["step"] for row in rows] == list(range(9))
    ids = trained_on(folder)
    assert len(ids) == len(set(ids)) == 2 * 4 + 6 * 3  # two steps were in the checkpoint


@pytest.mark.slow
def test_what_another_recipe_sampled_before_a_kill_is_not_trained_on(tmp_path: Path) -> None:
    def colder(temperature: float) -> Recipe:
        before = settings(tmp_path, "partial", 4)
        rollout = before.rollout.model_copy(update={"temperature": temperature})
        train = before.train.model_copy(update={"checkpoint_every": 100})
        return before.model_copy(update={"rollout": rollout, "train": train})

    with pytest.raises(KeyboardInterrupt):
        train(colder(1.0), killed_at=1)
    folder = RunFolder.open(tmp_path / "run")
    for is_told in (True, False):  # the second time nothing is sampled again
        told: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            train(colder(0.3), folder, killed_at=1, told=told)
        assert any(words.startswith("the recipe has changed: ") for words in told) is is_told
    rows = train(colder(1.0), folder)
    # The engine's log-probabilities are those of the trainer's temperature, or the tokens are another recipe's.
    assert all(row["first/engine_difference"] < 1e-4 for row in rows if row["step"] > 0)
    assert not any("recipe_changes" in row for row in rows)
    longer = colder(0.3).model_copy(update={"train": colder(0.3).train.model_copy(update={"steps": 6})})
    assert [row.get("recipe_changes", 0) for row in train(longer, folder)[1:]] == [0, 0, 0, 0, 1, 1]


def test_a_run_that_has_a_journal_keeps_it_whatever_the_engine(tmp_path: Path) -> None:
    repeats = recipe(tmp_path, engine={"name": "transformers", "lockstep": None})
    assert _journal(repeats, torch.device("cuda")) is not None  # which does not repeat its samples
    assert _journal(repeats, torch.device("cpu")) is None
    RunFolder(tmp_path / "run").journal.mkdir(parents=True)
    assert _journal(repeats, torch.device("cpu")) is not None


@pytest.mark.slow
def test_settings_that_are_changed_in_the_folder_itself_are_seen(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path, "partial", 6), killed_at=3)
    folder = RunFolder.open(tmp_path / "run")
    text = folder.config_file.read_text()
    assert "group_size: 2\n" in text
    folder.config_file.write_text(text.replace("group_size: 2\n", "group_size: 3\n"))
    changed = load_recipe(folder.config_file)
    assert has_changed(changed, folder)
    rows = train(changed, folder)
    assert [row["step"] for row in rows] == list(range(7))
    assert len(trained_on(folder)) == 2 * 4 + 4 * 6  # two steps were in the checkpoint


@pytest.mark.slow
def test_one_process_at_a_time_trains_a_run(tmp_path: Path) -> None:
    train(settings(tmp_path, "partial", 2))
    folder = RunFolder.open(tmp_path / "run")
    with folder.lock(), pytest.raises(ConfigError, match="another process is training this run; end it, or wait"):
        train(settings(tmp_path, "partial", 4), folder)
    assert len(train(settings(tmp_path, "partial", 4), folder)) == 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, RunFolder]:
    """Return a recipe, and the folder of a run by it."""
    path = tmp_path_factory.mktemp("trained")
    before = settings(path, "partial", 1)
    train(before)
    return before, RunFolder.open(path / "run")


@each(
    ("section", "name", "value", "changes"),
    [
        ("rollout", "env_timeout_s", 7.0, False),
        ("rollout", "max_retries", 5, False),
        ("rollout", "max_turns", 7, True),
        ("train", "max_tokens_per_micro_batch", 512, False),
        ("train", "steps", 9, False),
        ("train", "learning_rate", 1e-5, True),
    ],
)
def test_what_gets_a_run_over_a_fault_throws_nothing_away(
    section: str, name: str, value: float, changes: bool, trained: tuple[Recipe, RunFolder]
) -> None:
    before, folder = trained
    part = getattr(before, section).model_copy(update={name: value})
    assert has_changed(before.model_copy(update={section: part}), folder) is changes
