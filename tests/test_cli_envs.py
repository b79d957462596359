"""`agentrl envs play`, `check` and `new`, as a person uses them."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.types import Need
from agentrl_envs.key_door import KeyDoor
from tests.support.each import each

Played = Callable[..., str]

BROKEN = """
from agentrl import ToolEnv


class Broken(ToolEnv):
    def start(self, options):
        return "Hello?"

    def answer(self, text):
        raise KeyError("answers")
"""


@pytest.fixture
def play(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Played:
    def play(lines: str, *words: str) -> str:
        """Return what the terminal showed."""
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        main(["envs", "play", *words])
        return capsys.readouterr().out

    return play


def test_a_person_plays_with_answers_and_calls_whose_arguments_have_the_types_of_the_schema(play: Played) -> None:
    shown = play("/look\nhello there\n/open_box box=1\n/open_door\n/oracle\n/oracle\n", "key_door")
    assert "/open_box box=...  Open a box." in shown
    assert "tool: Nothing. Nice day?" in shown
    assert "user: Well. Long way?" in shown
    assert "No box here." in shown
    assert "The task is over after 5 turns: reward 0, success 0, score 0." in shown


def test_a_task_is_named_by_split_and_number_and_options_come_from_the_command_line(play: Played) -> None:
    words = ("key_door", "--env.options.num_boxes", "50", "--env.options.num_distractors=0")
    openings = {
        play("", *words, "--split", split, "--task", n).split("user: ")[1] for split in ("train", "eval") for n in "01"
    }
    assert len(openings) > 2
    assert play("", *words) == play("", *words)
    assert "You left after 0 turns, with a reward of 0." in play("", *words)
    assert "reward 1.2" in play("/oracle\n/oracle\n", *words)


def test_what_cannot_be_carried_out_is_said_and_asked_again(play: Played) -> None:
    shown = play('/open_box 1\n/open_box box="\n\n/quit\n', "key_door")
    assert "'1' is no argument: write key=value" in shown
    assert "No closing quotation" in shown
    assert shown.count("Write an answer, or call a tool") == 2
    assert "You left after 0 turns" in shown


def test_an_environment_that_raises_shows_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_env.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        play("hello\n", "broken_env:Broken")
    assert ended.value.code == 1
    assert "in answer" in (shown := capsys.readouterr().out)
    assert "KeyError" in shown


def test_whoever_interrupts_at_the_prompt_leaves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def readline(self) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    main(["envs", "play", "key_door"])
    assert "You left after 0 turns" in (shown := capsys.readouterr().out)
    assert "Traceback" not in shown


def test_an_oracle_that_raises_is_no_slip_of_the_persons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = (
        BROKEN.replace("Broken", "Wrong")
        + "\n    def oracle(self, *, skill=1.0, rng=None):\n        raise ValueError('no plan')\n"
    )
    (tmp_path / "wrong_oracle.py").write_text(wrong)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        play("/oracle\n", "wrong_oracle:Wrong")
    assert ended.value.code == 1
    assert "in oracle" in capsys.readouterr().out


UNFIT = """
from agentrl_envs.key_door import KeyDoor


class Reset(KeyDoor):
    def reset(self, **given):
        raise SystemExit(0)


class Step(KeyDoor):
    def step(self, action):
        raise SystemExit(0)


class Close(KeyDoor):
    def close(self):
        raise OSError("no close")


class Unwrapped(KeyDoor):
    @property
    def unwrapped(self):
        raise RuntimeError("no")


class Tasks(KeyDoor):
    def num_tasks(self, split):
        raise SystemExit(0)


class Key(KeyDoor):
    def state_key(self):
        return 5


class Closes(KeyDoor):
    async def close(self):
        print("closed")
"""


@pytest.fixture
def unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "unfit_envs.py").write_text(UNFIT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "unfit_envs"


def test_an_installed_environment_that_fails_leaves_the_others_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def provides(_: KeyDoor) -> frozenset[Need]:
        raise SystemExit(0)

    monkeypatch.setattr(KeyDoor, "provides", provides)
    main(["envs"])
    assert "calculator" in capsys.readouterr().out


def test_an_environment_whose_package_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    monkeypatch.delitem(sys.modules, "agentrl_envs.adapters.textarena", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    main(["envs"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "pip install 'agentrl[textarena]'" in shown
    assert "calculator" in shown


@each("name", ["Reset", "Step", "Close", "Unwrapped", "Tasks", "Key"])
def test_no_recipe_is_written_for_an_environment_that_fails_and_it_is_told_in_a_line(
    name: str, unfit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["new", "a", "--env", f"{unfit}:{name}"])
    told = capsys.readouterr().err
    assert (ended.value.code, told.count("\n")) == (2, 1), told
    assert told.startswith("agentrl: ")
    assert not Path("a.yaml").exists()


@each(
    ("name", "status", "words"),
    [
        ("Reset", 1, "SystemExit: 0"),
        ("Step", 1, "SystemExit: 0"),
        ("Close", 1, "OSError: no close"),
        ("Unwrapped", 2, "'unfit_envs:Unwrapped' could not be made: RuntimeError: no"),
        ("Tasks", 2, "the environment raised SystemExit: 0 (unfit_envs.py:"),
    ],
)
def test_an_environment_that_ends_the_process_or_cannot_be_closed_is_told(
    name: str, status: int, words: str, unfit: str, play: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        play("hello\n", f"{unfit}:{name}")
    printed = capsys.readouterr()
    assert ended.value.code == status
    assert words in (printed.out, printed.err)[status - 1]


def test_an_environment_whose_close_is_a_coroutine_is_closed(
    unfit: str, play: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "closed" in play("hello\n", f"{unfit}:Closes")
    main(["new", "a", "--env", f"{unfit}:Closes"])
    assert "closed" in capsys.readouterr().out


def test_a_task_that_is_none_is_refused(play: Played, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        play("", "key_door", "--task", "-1")
    assert ended.value.code == 2
    assert "--task: -1 is none of the tasks of train" in capsys.readouterr().err


def test_what_is_wrong_is_said_in_plain_words_and_what_is_right_too(capsys: pytest.CaptureFixture[str]) -> None:
    main(["envs", "check", "key_door", "--seeds", "2"])
    shown = capsys.readouterr().out
    assert shown.startswith("key_door\n")
    assert "reset() forgets" in shown


def test_an_environment_is_checked_with_the_wrappers_of_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deaf.py").write_text(
        "import gymnasium\n\n\nclass Deaf(gymnasium.Wrapper):\n    def step(self, action):\n        raise ValueError('hm?')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe, record = tmp_path / "recipe.yaml", tmp_path / "episodes.jsonl"

    def check(wrapper: str) -> None:
        recipe.write_text(f"env: {{id: key_door, wrappers: [{wrapper}]}}\n")
        main(["envs", "check", str(recipe), "--seeds", "1"])

    check(f"{{id: record, path: {record}}}")
    assert capsys.readouterr().out.startswith("key_door\n")
    assert record.read_text(encoding="utf-8").count("\n") > 1
    for wrapper, words in (
        ("{id: 'deaf:Deaf'}", "- step() in its wrappers raised ValueError: hm?"),
        ("{id: recrod}", "env.wrappers.0.id: no 'recrod' is installed"),
    ):
        with pytest.raises(SystemExit) as ended:
            check(wrapper)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_new_environment_is_played_checked_tested_and_trained_at_once(tmp_path: Path) -> None:
    def run(*command: str, lines: str = "") -> str:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env=env,
            input=lines,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    told = run("agentrl", "envs", "new", "treasure_hunt")
    assert "agentrl train treasure_hunt.yaml" in told
    assert "over after" in run("agentrl", "envs", "play", "treasure_hunt:TreasureHunt", lines="/oracle\n" * 4)
    assert "treasure_hunt:TreasureHunt" in run("agentrl", "envs", "check", "treasure_hunt:TreasureHunt")
    run("pytest", "-q", "-p", "no:cacheprovider", "test_treasure_hunt.py")
    shorter = ("--warmup.steps", "4", "--train.steps", "2", "--evaluation.num_tasks", "4")
    run("agentrl", "train", "treasure_hunt.yaml", *shorter)
    assert list((tmp_path / "runs").glob("*/metrics.jsonl"))


@each(("name", "words"), [("Treasure-Hunt", "is no name of a module"), ("class", "is no name of a module")])
def test_a_name_that_is_none_of_a_module_is_refused(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["envs", "new", name])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
