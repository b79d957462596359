"""A run that an earlier version wrote, killed in its third step (tests/earlier_run), is read and resumed today.

Its recipe holds the fields of all engines, and its rollouts have what was measured beside the other columns.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agentrl.cli import main
from agentrl.report.folder import RunFolder
from agentrl.report.records import groups_of, read_records
from agentrl.types import Need

RUN = Path(__file__).parent / "earlier_run"
Told = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    shutil.copytree(RUN, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return RunFolder(Path("run"))


@pytest.fixture
def agentrl(capsys: pytest.CaptureFixture[str]) -> Told:
    def call(*words: str) -> tuple[int, str]:
        """Return the exit status, and what was printed."""
        try:
            main(words)
        except SystemExit as ended:
            return int(ended.code or 0), capsys.readouterr().err
        return 0, capsys.readouterr().out

    return call


def test_it_is_refused_in_one_line_with_file_and_fields_until_these_are_removed_and_then_goes_on_from_its_checkpoint(
    run: RunFolder, agentrl: Told
) -> None:
    before, trained = (
        run.metrics(),
        {group.group_id for file in run.rollouts() for group in groups_of(read_records(file))},
    )
    status, told = agentrl("train", "run")
    assert status == 2
    assert told.startswith("agentrl: run/config.yaml: ")
    recipe = yaml.safe_load(run.config_file.read_text())
    for section, field in (("chat", "rewritten_history"), ("engine", "server"), ("train", "warmup_updates")):
        assert f"{section}.{field}: " in told
        del recipe[section][field]
    assert told.count("\n") == 1
    run.config_file.write_text(yaml.safe_dump(recipe))
    status, told = agentrl("train", "run")
    assert status == 0
    # Its checkpoint does not say by which settings the started episodes were sampled.
    assert "what was sampled since the last checkpoint is sampled again" in told
    assert run.metrics()[: len(before)] == before
    assert [row["step"] for row in run.metrics()] == [0, 1, 2, 3]
    (group,) = groups_of(read_records(run.rollouts()[-1]))
    assert group.group_id not in trained
    assert {version for t in group.trajectories for turn in t.turns for version in turn.versions} == {2}


def test_its_rollouts_are_shown_with_what_was_measured(run: RunFolder, agentrl: Told) -> None:
    status, shown = agentrl("show", "run")
    assert (status, "The key is in box 2." in shown) == (0, True)
    (group,) = groups_of(read_records(run.rollouts()[-1]))
    turn = group.trajectories[0].turns[0]
    assert turn.signals.keys() == {Need.ENTROPIES}
    assert len(turn.signals[Need.ENTROPIES]) == len(turn.action_ids)
