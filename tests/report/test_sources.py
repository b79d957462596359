"""Hashes of the files of code that a recipe names."""

import hashlib
import sys
from pathlib import Path

import pytest

from agentrl.report.folder import RunFolder
from agentrl.report.sources import differing, read_sources, sources
from tests.support.runs import recipe, train

pytestmark = pytest.mark.process


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which modules are imported."""
    folder = tmp_path / "here"
    (folder / "their" / "envs").mkdir(parents=True)
    (folder / "their" / "__init__.py").write_text("raise SystemExit('it was imported')")
    (folder / "their" / "envs" / "doors.py").write_text("1")
    (folder / "mine.py").write_text("2")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_every_module_that_a_recipe_names_is_read_and_none_imported(here: Path) -> None:
    config = {
        "env": {"id": "their.envs.doors:Doors", "options": {"text": "mine:A says: mine:B", "reward": "absent:reward"}},
        "credit": {"scheme": "shuffled", "of": {"scheme": "mine:Scheme"}},
        "rollout": {"group_rewards": [{"id": "their:Reward"}]},
        "engine": {"urls": ["http://localhost:8000", "sys:path", "mine.part:Engine"]},
    }
    files = {"their.envs.doors": "their/envs/doors.py", "mine": "mine.py", "their": "their/__init__.py"}
    expected = {module: hashlib.sha256((here / file).read_bytes()).hexdigest() for module, file in files.items()}
    assert sources(config) == expected
    assert not {"their", "mine"} & sys.modules.keys()
    assert sources({"env": {"id": "mine:agentrl/Doors-v0"}}) == {"mine": expected["mine"]}


def test_what_is_known_of_one_alone_does_not_differ() -> None:
    assert differing({"a": "1", "b": "2", "c": "3"}, {"b": "2", "c": "4", "d": "5"}) == ["c"]


@pytest.mark.slow
def test_a_run_notes_those_with_which_it_began(tmp_path: Path) -> None:
    settings = recipe(tmp_path, credit={"scheme": "tests.support.runs:Noise"}, train={"steps": 1})
    folder, _ = train(settings)
    began = read_sources(folder)
    assert began == sources(settings.model_dump(mode="json"))
    assert list(began) == ["tests.support.runs"]
    folder.sources.write_text('{"tests.support.runs": "of before"}')
    train(recipe(tmp_path, credit={"scheme": "tests.support.runs:Noise"}), RunFolder.open(folder.path))
    assert read_sources(folder) == {"tests.support.runs": "of before"}
