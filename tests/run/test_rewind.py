"""A run that is killed while it goes back to before a collapse has gone back when it is resumed, or does so then."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

import agentrl
from agentrl.distributed.checkpoints import by_step
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.report.folder import RunFolder
from agentrl.run import checkpoint as rewind
from agentrl.run.checkpoint import CollapsedError, go_back
from tests.support.each import each
from tests.test_run import Fallen, fallen

pytestmark = pytest.mark.process

KILLS: list[tuple[Any, str, int]] = [
    (RunFolder, "write_config", 1),
    (rewind, "finish_going_back", 1),
    (rewind, "rename", 2),
    (RunFolder, "add_warning", 1),
    (Path, "unlink", 1),
]
"""Some of what `go_back` calls, in this order: owner, name, and for which time, that of files written in part left out."""


class Killed(BaseException):
    """The process is gone."""


@contextmanager
def killed_before(owner: Any, name: str, nth: int = 1) -> Iterator[None]:
    real, num_calls = getattr(owner, name), 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += not (isinstance(args[0], Path) and args[0].suffix == ".partial")
        if num_calls == nth:
            raise Killed
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


def collapse(tmp_path: Path) -> tuple[Recipe, CollapsedError]:
    """Leave a run as it is when it is about to go back."""
    found: list[CollapsedError] = []

    def note(_recipe: Recipe, _folder: RunFolder, collapsed: CollapsedError) -> NoReturn:
        found.append(collapsed)
        raise Killed

    recipe = fallen(tmp_path, until=9999, on_collapse="rewind", checkpoint_every=1, keep_last=14)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.api.training.go_back", note)
        with pytest.raises(Killed):
            agentrl.train(recipe)
    return load_recipe(tmp_path / "run" / "config.yaml"), found[0]


@pytest.mark.slow
def test_a_kill_at_any_moment_of_going_back_leaves_a_run_that_has_or_will(tmp_path: Path) -> None:
    recipe, collapsed = collapse(tmp_path)
    folder, pristine = RunFolder(tmp_path / "run"), tmp_path / "pristine"
    back = collapsed.first - 2
    assert list(by_step(folder.checkpoints)) == list(range(collapsed.first + 3))
    folder.path.rename(pristine)
    outcomes = []
    for owner, name, nth in KILLS:
        shutil.copytree(pristine, folder.path)
        with killed_before(owner, name, nth), pytest.raises(Killed):
            go_back(recipe, folder, collapsed)
        has_gone_back = load_recipe(folder.config_file).train.on_collapse == "stop"
        outcomes.append(has_gone_back)
        # What has not gone back earns nothing in its next step, and collapses again; later, rewards are as they were.
        Fallen.num_ended, Fallen.pays_nothing = 0, (0, 0 if has_gone_back else 26)
        agentrl.train(folder.path)
        rows = folder.metrics()
        assert [row["step"] for row in rows] == list(range(15))
        assert [row["learning_rate"] for row in rows[1:]] == [1e-3] * back + [5e-4] * (14 - back)
        (warning,) = [warning for warning in folder.warnings() if warning.name == "rewind"]
        assert warning.step == back
        assert load_recipe(folder.config_file).train.on_collapse == "stop"
        assert folder.config(begun=True)["train"]["on_collapse"] == "rewind"
        assert not [path.name for path in folder.path.rglob("*") if path.name.endswith(".partial")]
        assert not folder.going_back.exists()
        shutil.rmtree(folder.path)
    assert outcomes == [False] + [True] * (len(KILLS) - 1)


@each(("first", "back"), [(25, 23), (21, 22)])  # of (21, 22) no checkpoint from before is left
def test_it_goes_back_to_before_the_first_step_that_shows_it_or_as_far_as_it_can(
    first: int, back: int, tmp_path: Path
) -> None:
    recipe = load_recipe({"train": {"on_collapse": "rewind", "checkpoint_every": 1, "keep_last": 5, "steps": 30}})
    folder = RunFolder.create(tmp_path / "run", recipe.model_dump(mode="json"))
    for step in range(22, 27):
        (folder.checkpoints / f"step-{step:06d}").mkdir(parents=True)
    _, words = go_back(recipe, folder, CollapsedError(27, "its entropy fell", first=first))
    assert f"goes back to step {back}, with half" in words
    assert max(by_step(folder.checkpoints)) == back
