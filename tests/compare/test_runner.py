"""Scheduling, with stand-ins for the processes; a real one, killed and resumed, is in `test_cli_compare.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from agentrl.compare import runner
from agentrl.compare.runner import Arm, PlannedRun, is_done, make_arms, run_missing
from agentrl.errors import ConfigError
from agentrl.report.folder import RunFolder


class Processes:
    """Stands in for processes that train: how each ends is said by the name of its run's folder."""

    def __init__(self, statuses: dict[str, int]) -> None:
        self.statuses = statuses
        self.begun: list[tuple[Path, bool, str]] = []
        self.interrupted: list[Path] = []
        self.most_at_once = self.active = 0

    def start(self, arguments: Sequence[str], *, log: IO[bytes], environment: dict[str, str]) -> Any:
        is_new = "--run_dir" in arguments
        run = Path(arguments[-1])
        self.begun.append((run, is_new, environment["OMP_NUM_THREADS"]))
        self.active += 1
        self.most_at_once = max(self.most_at_once, self.active)
        return _Process(self, run, log, self.statuses.get(f"{run.parent.name[:5]}/{run.name}", 0))


class _Process:
    def __init__(self, of: Processes, run: Path, log: IO[bytes], status: int) -> None:
        self._of, self._run, self._status, self._polls = of, run, status, 0
        self.stdin = self
        if status != 2:
            if not (run / "config.yaml").is_file():
                RunFolder.create(run, {"train": {"steps": 2}})
            RunFolder(run).add_metrics({"step": 1 if status else 2})
        if status:
            log.write(b"run folder: x\nagentrl: the disk is full\n")
            log.flush()

    def poll(self) -> int | None:
        self._polls += 1
        if self._polls < 2 or self._status == 99:  # which hangs
            return None
        self._of.active -= 1
        return self._status

    def close(self) -> None:
        self._of.interrupted.append(self._run)

    def wait(self, timeout: float | None = None) -> int:
        return 130


@pytest.fixture
def two_arms(tmp_path: Path) -> list[Arm]:
    paths = []
    for name, rate in (("alpha", 1e-3), ("gamma", 1e-4)):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(f"train: {{steps: 2, device: cpu, learning_rate: {rate}}}")
    return make_arms(paths, varied={}, overrides=[], folder=tmp_path / "runs", control=False)[0]


def runs(arms: Sequence[Arm], seeds: int) -> list[PlannedRun]:
    return [arm.run(seed) for seed in range(seeds) for arm in arms]


def stand_in(monkeypatch: pytest.MonkeyPatch, **statuses: int) -> Processes:
    found = Processes({name.replace("_", "/", 1).replace("_", "-"): status for name, status in statuses.items()})
    monkeypatch.setattr(runner, "start", found.start)
    monkeypatch.setattr(runner, "_POLL_S", 0.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return found


def test_each_missing_run_is_trained_once_as_many_at_once_as_asked(
    monkeypatch: pytest.MonkeyPatch, two_arms: list[Arm]
) -> None:
    processes, told = stand_in(monkeypatch), []
    planned = runs(two_arms, 3)
    assert run_missing(planned, jobs=2, on_progress=lambda done, total: told.append((done, total))) == []
    assert processes.most_at_once == 2
    assert [run for run, _, _ in processes.begun] == [run.folder for run in planned]
    assert all(is_new for _, is_new, _ in processes.begun)
    assert told[-1] == (12, 12)
    assert all(map(is_done, planned))
    assert run_missing(planned, jobs=2) == []
    assert len(processes.begun) == 6, "nothing is missing"
    run_missing(runs(two_arms, 4), jobs=1)
    assert len(processes.begun) == 8, "one more seed"


def test_a_run_that_fails_is_told_and_resumed_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, two_arms: list[Arm]
) -> None:
    stand_in(monkeypatch, alpha_seed_0=1)
    told: dict[str, str | None] = {}
    planned = runs(two_arms, 2)
    [failure] = run_missing(planned, jobs=2, on_end=lambda run, words: told.update({run.name: words}))
    assert failure.run == planned[0]
    assert failure.words.startswith("the disk is full (log: ")
    assert [name for name, words in told.items() if words] == ["alpha, seed 0"]
    again = stand_in(monkeypatch)
    assert run_missing(planned, jobs=2) == []
    assert again.begun[0][:2] == (planned[0].folder, False)
    assert len(again.begun) == 1


def test_a_mistake_in_a_recipe_is_met_once_and_its_other_seeds_are_told(
    monkeypatch: pytest.MonkeyPatch, two_arms: list[Arm]
) -> None:
    processes, told = stand_in(monkeypatch, alpha_seed_0=2), []
    failures = run_missing(runs(two_arms, 3), jobs=1, on_end=lambda run, words: told.append((run.name, words)))
    assert [run.parent.name[:5] for run, _, _ in processes.begun] == ["alpha", "gamma", "gamma", "gamma"]
    assert [(failure.run.name, failure.words) for failure in failures] == [pair for pair in told if pair[1]]
    assert told[1:3] == [(f"alpha, seed {seed}", "left out, as seed 0 could not begin") for seed in (1, 2)]


def test_a_run_that_cannot_be_resumed_leaves_no_other_seed_out(
    monkeypatch: pytest.MonkeyPatch, two_arms: list[Arm]
) -> None:
    stand_in(monkeypatch, alpha_seed_0=2)
    planned = runs(two_arms, 3)
    RunFolder.create(planned[0].folder, {"train": {"steps": 2}})
    [failure] = run_missing(planned, jobs=1)
    assert failure.run == planned[0]
    assert all(map(is_done, planned[1:]))


def test_a_run_whose_metrics_are_damaged_fails_alone(monkeypatch: pytest.MonkeyPatch, two_arms: list[Arm]) -> None:
    stand_in(monkeypatch, gamma_seed_1=2)
    planned = runs(two_arms, 2)
    RunFolder.create(planned[3].folder, {"train": {"steps": 2}})
    (planned[3].folder / "metrics.jsonl").write_text("no row\n")
    [failure] = run_missing(planned, jobs=1)
    assert failure.run == planned[3]
    assert all(map(is_done, planned[:3]))


def test_an_interrupt_ends_the_runs_under_way(monkeypatch: pytest.MonkeyPatch, two_arms: list[Arm]) -> None:
    processes = stand_in(monkeypatch, gamma_seed_0=99)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_missing(runs(two_arms, 2), jobs=2, on_end=interrupt)
    assert two_arms[1].run(0).folder in processes.interrupted


def test_no_run_begins_in_a_recipes_folder_that_links_elsewhere(two_arms: list[Arm], tmp_path: Path) -> None:
    folder = two_arms[0].folder
    folder.mkdir(parents=True)
    (folder / "seed-1.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"seed-1\.log: a symbolic link out of the recipe's folder"):
        runner.check_sources([arm.run(1) for arm in two_arms])


def test_threads_are_divided(monkeypatch: pytest.MonkeyPatch, two_arms: list[Arm]) -> None:
    processes = stand_in(monkeypatch)
    monkeypatch.setattr(runner, "default_jobs", lambda *, is_cpu: 8)
    run_missing(runs(two_arms, 1), jobs=2)
    assert {threads for _, _, threads in processes.begun} == {"4"}
