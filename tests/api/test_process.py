"""An environment that changes what the whole process has: its working directory, its standard streams."""

import json
import os
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl import Message, TaskEnv
from agentrl.chat import local_folder
from agentrl.chat.template import TemplateConfig, template_text
from agentrl.data.files import absolute, keep_process, moved_to
from agentrl.env import make_env
from agentrl.env.endpoint import ReplyCache
from agentrl.recipe.config import load_recipe
from agentrl.report.terminal import Console, heard_by
from agentrl_envs.key_door import KeyDoor
from tests.api.test_training import TINY
from tests.support.commands import run
from tests.support.processes import Command

OPTIONS = {"tasks": "my.jsonl", "answer": "answer", "rewards": ["exact_match"]}


class Moving(TaskEnv):
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        os.chdir(Path("/"))
        return super().reset(seed=seed, options=options)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": f"Say {number}.", "answer": number}) for number in range(99)]
    (tmp_path / "my.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_an_environment_that_changes_the_directory_moves_neither_the_run_nor_its_tasks(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"id": Moving, "options": OPTIONS, "wrappers": [{"id": "record", "path": "played.jsonl"}]}
    trained = agentrl.train(TINY, env=env, run_dir="runs/one")
    assert Path.cwd() == here
    assert [row["step"] for row in trained.metrics] == [0, 1, 2]
    assert trained.path == here / "runs" / "one"
    assert (here / "played.jsonl").is_file()
    words = f"the environment 'tests.api.test_process:Moving' changed the working directory to {Path('/')}: "
    assert capsys.readouterr().out.count(words) == 1
    assert trained.evaluate().metrics["episodes"] == 2
    assert capsys.readouterr().out.count(words) == 1
    assert Path.cwd() == here


def test_paths_of_a_recipe_begin_in_the_directory_of_the_start(here: Path) -> None:
    (here / "model").mkdir()
    (here / "x.jinja").write_text("{{ messages }}")
    (here / "elsewhere").mkdir()
    nothing: Any = None
    with keep_process():
        os.chdir("elsewhere")
        with keep_process():
            assert local_folder("./model") == here / "model"
            chat = load_recipe(None, ["--chat.renderer", "template", "--chat.template", "x.jinja"]).chat
            assert isinstance(chat, TemplateConfig)
            assert template_text(nothing, chat, "") == "{{ messages }}"
            assert make_env("tasks", OPTIONS).reset()[0][0]["content"].startswith("Say")
            ReplyCache(Path("cache.sqlite"))
            assert [moved_to(), moved_to()] == [str(here / "elsewhere"), None]
    assert Path.cwd() == here
    assert absolute("a/b") == here / "a" / "b"


def test_a_directory_that_is_gone_does_no_harm(here: Path) -> None:
    (here / "gone").mkdir()
    with keep_process():
        os.chdir("gone")
        (here / "gone").rmdir()
        assert absolute("a") == here / "a"
        assert moved_to() is not None
        assert make_env("tasks", OPTIONS).reset()[0][0]["content"].startswith("Say")
    assert Path.cwd() == here


class Printed:
    """No more than what `print` needs of a stream, and not even that."""

    def write(self, text: str) -> int:
        raise RuntimeError(text)


class Capturing(KeyDoor):
    def reset(self, **options: Any) -> Any:
        sys.stdout, sys.stderr = None, Printed()
        return super().reset(**options)


@pytest.mark.slow
def test_an_environment_that_replaces_the_standard_streams_hides_nothing_of_a_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    streams = sys.stdout, sys.stderr
    agentrl.train(TINY, env=Capturing, run_dir="run")
    assert (sys.stdout, sys.stderr) == streams
    assert "run folder: run" in capsys.readouterr().out.splitlines()
    (here / "tiny.yaml").write_text(json.dumps({**TINY, "env": {"id": "tests.api.test_process:Capturing"}}))
    status, printed = run(["train", "tiny.yaml", "--run_dir", "other"])
    assert (status, "run folder: other" in printed.splitlines()) == (0, True)


LEAVING = """
import os
from pathlib import Path
from agentrl_envs.key_door import KeyDoor

class Leaving(KeyDoor):
    def reset(self, **options):
        if Path("run/checkpoints/step-000001").is_dir() and not Path("left").exists():
            Path("left").touch()
            os._exit(0)
        return super().reset(**options)
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_process_that_an_environment_ends_is_told_of_by_the_next_command(here: Path) -> None:
    (here / "leaving.py").write_text(LEAVING)
    (here / "tiny.yaml").write_text(json.dumps({**TINY, "env": {"id": "leaving:Leaving"}}))
    ended = Command("train", "tiny.yaml", "--run_dir", "run", "--train.checkpoint_every", "1")
    ended.finish()
    assert "training 2/2" not in ended.out
    words = "ended without a word: it was killed (perhaps for its memory), or an environment or a library ended it (os._exit)"
    asked = Command("eval", "run")
    asked.finish()
    assert asked.out.count(f"which trained {here / 'run'} since ") == asked.out.count(words) == 1
    resumed = Command("train", "run")
    resumed.finish()
    assert resumed.out.count(words) == 1
    again = Command("train", "run", "--train.steps", "3")
    again.finish()
    assert words not in again.out
    assert not (here / "run" / "training.json").exists()


def test_a_stream_that_is_closed_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, printed = StringIO(), list[str]()
    monkeypatch.setattr(sys, "stdout", stream)
    console = Console()
    stream.close()
    with heard_by(printed.append):
        console.print("a step")
    assert printed == ["a step\n"]
