from pathlib import Path
from typing import Any

import pytest

from agentrl import EnvironmentFailure, SandboxConfig, UserError, sandbox_config, tool_call
from agentrl.env import ask_oracle
from agentrl_envs.repository import Repository, Task, patched, read_patch, read_task, share_at_start, share_passed
from agentrl_envs.sandboxes import bubblewrap
from agentrl_envs.sandboxes.bubblewrap import BubblewrapConfig
from tests.support.each import each

WHY_NOT = bubblewrap._problem(BubblewrapConfig())
needs_bubblewrap = pytest.mark.skipif(bool(WHY_NOT), reason=f"bubblewrap: {WHY_NOT}")
pytestmark = pytest.mark.process

BUILT_IN = sorted(path.parent for path in Path(str(bubblewrap.__file__)).parents[1].glob("data/repository/*/task.yaml"))


def box() -> SandboxConfig:
    return sandbox_config("bubblewrap")


def call(env: Repository, name: str, **arguments: Any) -> tuple[str, float]:
    observation, reward, *_ = env.step(tool_call(name, **arguments))
    return observation[0]["content"], round(float(reward), 9)


def submit(env: Repository) -> tuple[float, bool, float]:
    _, reward, terminated, _, info = env.step(tool_call("submit"))
    env.close()
    assert terminated
    return float(reward), info["success"], round(info["score"], 9)


def begun(folder: Path | None = None, **options: Any) -> Repository:
    """Return the environment with its first training task."""
    env = Repository(tasks=None if folder is None else str(folder), **options)
    env.reset(seed=0, options={"split": "train", "task_index": 0})
    return env


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Return a folder with one task in the form of those that people measure agents by: a status alone tells success."""
    write(
        tmp_path / "tasks" / "double",
        {
            "task.yaml": "words: double(2) is 5\ncommand: python3 -m unittest -q test_double\n",
            "repository/double.py": "from twice import twice\n\n\ndef double(x):\n    return twice(x) + 1\n",
            "repository/twice.py": "def twice(x):\n    return x + x\n",
            "repository/test_double.py": "import unittest\n",
            "repository/.git/logs": "the solution",
            "hidden/test_double.py": "import unittest\nfrom double import double\n\n\nclass T(unittest.TestCase):\n"
            "    def test_it(self):\n        self.assertEqual(double(2), 4)\n",
            "solution.patch": "--- a/double.py\n+++ b/double.py\n@@ -4,2 +4,2 @@\n def double(x):\n"
            "-    return twice(x) + 1\n+    return twice(x)\n",
        },
    )
    return tmp_path / "tasks"


def test_there_are_ten_tasks_and_three_are_for_evaluation() -> None:
    splits = [read_task(folder).file.split for folder in BUILT_IN]
    assert (len(splits), splits.count("eval")) == (10, 3)


@needs_bubblewrap
@each("folder", BUILT_IN)
def test_the_oracle_succeeds_and_nobody_succeeds_by_doing_nothing(folder: Path) -> None:
    env = Repository(only=[folder.name])
    split = {"split": read_task(folder).file.split}
    env.reset(seed=0, options=split)
    assert submit(env) == (0.0, False, 0.0)
    env.reset(seed=0, options=split)
    turns, rewards, is_over = [], [], False
    while not is_over:
        turns.append(ask_oracle(env))
        _, reward, is_over, _, info = env.step(turns[-1])
        rewards.append(float(reward or 0))
    assert (info["success"], info["score"], rewards[-1]) == (True, 1.0, 1.0)
    assert sum(rewards[:-1]) == pytest.approx(0.3, abs=1e-9)
    names = [turn["tool_calls"][0]["function"]["name"] for turn in turns]
    assert names[0] == "read_file"
    assert set(names) == {"read_file", "edit_file", "submit"}
    env.close()


@pytest.mark.slow
@needs_bubblewrap
@each("folder", BUILT_IN)
def test_the_tests_that_can_be_seen_pass_before_and_after_and_a_fault_fails_several_checks(folder: Path) -> None:
    task = read_task(folder)
    solved = task.files | patched(task.files, read_patch(task.patch or ""))
    for files in (task.files, solved):
        with box().build() as sandbox:
            for path, content in files.items():
                sandbox.write(path, content)
            assert sandbox.exec("python3 -m unittest -q", language="sh").returncode == 0
    num_checks = 1 + len((task.expected or "").splitlines())
    assert num_checks >= 7
    assert 0 < share_at_start(folder, box()) <= 1 - 2 / num_checks


def scoreboard(source: str) -> tuple[Task, dict[str, bytes]]:
    task = next(read_task(folder) for folder in BUILT_IN if folder.name == "scoreboard")
    return task, task.files | {"scoreboard.py": source.encode()}


CHEATS = {
    "ends with success": "import sys\nsys.exit(0)\n",
    "ends at once": "import os\nos._exit(0)\n",
    "prints": "print('OK')\n",
    "takes the expected output": "import os\nos.write(1, open('expected.txt', 'rb').read())\nos._exit(0)\n",
    "prints whatever is there": "import glob, os\nfor name in glob.glob('/work/**/*.*', recursive=True):\n"
    "    os.write(1, open(name, 'rb').read())\nos._exit(0)\n",
    "equals everything": "class Any(list):\n    __eq__ = lambda *a: True\n    __repr__ = lambda s: '...'\n"
    "def board(text):\n    return Any()\n",
}


@needs_bubblewrap
@each("source", CHEATS.values())
def test_code_that_forges_success_fails(source: str) -> None:
    task, files = scoreboard(source)
    assert share_passed(task, files, box()) < 1


@needs_bubblewrap
def test_files_that_do_not_count_change_nothing() -> None:
    task, files = scoreboard("")
    files["scoreboard.py"] = task.files["scoreboard.py"]
    at_start = share_passed(task, files, box())
    forged = f"import os\nos.write(1, {task.expected!r}.encode())\nos._exit(0)\n".encode()
    names = ["check.py", "sitecustomize.py", "unittest.py", "test_scoreboard.py", "scoreboard/__init__.py", "print.pth"]
    assert share_passed(task, files | dict.fromkeys(names, forged), box()) == at_start
    assert share_passed(task, files | {"scoreboard.py": forged}, box()) == 1  # so the forgery would work if it counted


@pytest.mark.slow
@needs_bubblewrap
def test_a_command_that_hangs_is_killed_and_fails() -> None:
    task, files = scoreboard("import time\nwhile True:\n    time.sleep(1)\n")
    config = sandbox_config({"name": "bubblewrap", "timeout_s": 3})
    assert share_passed(task, files, config) == 0
    env = begun(sandbox={"name": "bubblewrap", "timeout_s": 3})
    assert call(env, "run", command="echo begun; sleep 60") == ("begun\n(stopped after 3 s)", 0.0)
    env.close()


@needs_bubblewrap
def test_a_machine_that_fails_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise EnvironmentFailure("no space left")

    monkeypatch.setattr(bubblewrap.Bubblewrap, "_run", fail)
    with pytest.raises(EnvironmentFailure, match="no space left"):
        share_passed(*scoreboard(""), box())


@needs_bubblewrap
def test_hidden_files_are_in_no_sandbox_that_the_policy_reaches() -> None:
    env = begun(only=["scoreboard"], sandbox={"name": "bubblewrap", "timeout_s": 60})
    assert call(env, "run", command="find . -type f | sort")[0].split() == ["./scoreboard.py", "./test_scoreboard.py"]
    names = "-name expected.txt -o -name solution.patch -o -name task.yaml"
    found = call(env, "run", command=f"find / -path /proc -prune -o {names} 2> /dev/null; echo looked")
    assert found == ("/proc\nlooked", 0.0)
    assert call(env, "read_file", path="check.py")[0].startswith("Error: ")
    assert call(env, "read_file", path="../hidden/check.py")[0].startswith("Error: ")
    assert submit(env)[1] is False


@needs_bubblewrap
def test_a_test_that_the_policy_changes_is_as_it_was(tasks: Path) -> None:
    env = begun(tasks)
    call(env, "write_file", path="test_double.py", content="import os\nos._exit(0)\n")
    assert submit(env) == (0.0, False, 0.0)


@needs_bubblewrap
def test_a_status_alone_tells_success_and_files_may_come_and_go(tasks: Path) -> None:
    env = begun(tasks)
    assert call(env, "run", command="ls -A")[0].split() == ["double.py", "test_double.py", "twice.py"]  # without .git
    assert call(env, "run", command="rm twice.py; echo 'double = lambda x: 2 * x' > double.py") == ("(no output)", 0.3)
    assert submit(env) == (1.0, True, 1.0)
    env = begun(tasks)
    call(env, "run", command="rm twice.py; sed -i 's/ + 1//' double.py")
    assert submit(env)[1] is False  # a file that is removed is missing


@needs_bubblewrap
def test_only_what_is_editable_counts(tasks: Path) -> None:
    file = tasks / "double" / "task.yaml"
    file.write_text(file.read_text(encoding="utf-8") + "editable: [src/*, double.py]\n", encoding="utf-8")
    env = begun(tasks, prompt="full")
    opened = env.reset(seed=0)[0]
    assert "Only changes to src/*, double.py count." in opened[0]["content"]
    call(env, "write_file", path="twice.py", content="def twice(x):\n    return x + x - 1\n")
    assert submit(env) == (0.0, False, 0.0)
    env.reset(seed=0)
    assert call(env, "edit_file", path="double.py", old=" + 1", new="") == ("Written.", 0.3)
    assert submit(env) == (1.0, True, 1.0)


@needs_bubblewrap
@each("command", ["rm *; mkdir double.py", "rm double.py; ln -s /etc/passwd double.py", "rm *.py; touch test_double"])
def test_a_ruined_repository_fails_and_raises_nothing(command: str, tasks: Path) -> None:
    env = begun(tasks)
    call(env, "run", command=command)
    assert submit(env) == (0.0, False, 0.0)


@needs_bubblewrap
def test_progress_pays_for_the_best_so_far() -> None:
    # Of 7 checks (the status and 6 boards) 3 fail at the start: 9 above 10, equal points, and both; numbers mend the first.
    env = begun(only=["scoreboard"])
    compared = {"path": "scoreboard.py", "old": "points.strip()", "new": "int(points)"}
    back = {"path": "scoreboard.py", "old": "int(points)", "new": "points.strip()"}
    assert share_passed(env.task, env.task.files, env.sandbox) == pytest.approx(4 / 7)
    assert call(env, "edit_file", **compared) == ("Written.", 0.1)
    assert call(env, "edit_file", **back)[1] == 0.0
    assert call(env, "edit_file", **compared)[1] == 0.0
    assert submit(env) == (0.0, False, round(1 / 3, 9))


@needs_bubblewrap
def test_keys_tell_files_apart_and_a_fork_has_its_own(tasks: Path) -> None:
    env = begun(tasks)
    keys = [env.state_key()]
    for command in ("touch a", "rm a", "echo x > a", "mv a b"):
        call(env, "run", command=command)
        keys.append(env.state_key())
    assert [keys.index(key) for key in keys] == [0, 1, 0, 3, 4]
    other = env.fork()
    call(other, "edit_file", path="double.py", old=" + 1", new="")
    assert other.state_key() != env.state_key()
    assert (submit(env)[1], submit(other)[1]) == (False, True)


@needs_bubblewrap
def test_tools_show_and_change_files(tasks: Path) -> None:
    env = begun(tasks)
    assert call(env, "read_file", path="twice.py")[0] == "def twice(x):\n    return x + x"
    shown = call(env, "read_file", path="double.py", first_line=4, num_lines=1)[0]
    assert shown == "def double(x):\n[lines 4 to 4 of 5]"
    for old, count in (("x", 3), ("y", 0), ("", 0)):
        assert f"old is {count} times in twice.py" in call(env, "edit_file", path="twice.py", old=old, new="z")[0]
    assert call(env, "write_file", path="a/b.txt", content="hi\n") == ("Written.", 0.0)
    assert call(env, "run", command="cat a/b.txt; exit 3")[0] == "hi\n\n(status 3)".replace("\n\n", "\n")
    assert "within the sandbox" in call(env, "write_file", path="/etc/passwd", content="")[0]
    assert env.step("I am done.")[0][0]["content"] == "Call a tool; submit ends the task."
    env.close()


@needs_bubblewrap
def test_the_oracle_repairs_what_wrong_turns_have_left(tasks: Path) -> None:
    env = begun(tasks)
    call(env, "write_file", path="double.py", content="nonsense\n")
    for _ in range(3):
        _, reward, *_, info = env.step(ask_oracle(env))
    assert (reward, info["success"]) == (1.0, True)
    (tasks / "double" / "solution.patch").unlink()
    read_task.cache_clear()
    with pytest.raises(NotImplementedError, match=r"double has no solution\.patch"):
        ask_oracle(begun(tasks))


@needs_bubblewrap
def test_a_task_without_a_fault_is_refused(tasks: Path) -> None:
    write(tasks / "double" / "repository", {"double.py": "double = lambda x: 2 * x\n"})
    env = Repository(tasks=str(tasks))
    with pytest.raises(EnvironmentFailure, match="the command succeeds at the start"):
        env.reset(seed=0)
    with pytest.raises(EnvironmentFailure, match="no task has `split: eval`"):
        env.reset(seed=0, options={"split": "eval"})


@each(
    ("text", "words"),
    [
        ("command: 'true'", r"task\.yaml: words: Field required"),
        ("words: a\ncommand: 'true'\nhidden: b", r"task\.yaml: hidden: Extra inputs"),
        ("words: a\ncommand: 'true'\nsplit: test", "split: Input should be 'train' or 'eval'"),
        ("words: a\ncommand: 'true'\neditable: []", "editable: "),
        ("- a", "the file: Input should be"),
        ("a: [", "task.yaml: while parsing"),
    ],
)
def test_a_wrong_task_is_refused_with_file_and_field(text: str, words: str, tmp_path: Path) -> None:
    write(tmp_path / "one", {"task.yaml": text})
    with pytest.raises(UserError, match=words) as caught:
        Repository(tasks=str(tmp_path))
    assert str(tmp_path / "one" / "task.yaml") in str(caught.value)


@needs_bubblewrap
def test_wrong_options_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "empty", {"task.yaml": "words: a\ncommand: 'true'"})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tasks": str(tmp_path / "empty")}, "holds no task; give a folder of folders"),
        ({"only": ["median", "mode"]}, r"only: give some of busy_hours, .*, got \['mode'\]"),
        ({"progress_reward": 2}, "progress_reward"),
        ({"sandbox": "monty"}, "'monty' does not run sh"),
    ]
    for options, words in cases:
        with pytest.raises(UserError, match=words):
            Repository(**options)
    with pytest.raises(UserError, match="repository holds no files"):
        Repository(tasks=str(tmp_path)).reset(seed=0)


@needs_bubblewrap
def test_a_hash_follows_the_tasks(tasks: Path) -> None:
    before = Repository(tasks=str(tasks)).tasks_hash("train")
    assert Repository(tasks=str(tasks)).tasks_hash("train") == before != Repository(tasks=str(tasks)).tasks_hash("eval")
    write(tasks / "double" / "hidden", {"more.py": ""})
    assert Repository(tasks=str(tasks)).tasks_hash("train") != before


PATCH = """diff --git a/a.py b/a.py
--- a/a.py
+++ b/a.py\t2024-01-01
@@ -1 +1,2 @@ def f():
+0
 1
@@ -4,2 +5,1 @@
 4
--- 5
\\ No newline at end of file
--- /dev/null
+++ b/new/b.py
@@ -0,0 +1,2 @@
+--- x
+++ y
"""


def test_a_patch_is_followed_line_by_line() -> None:
    files = {"a.py": b"1\n2\n3\n4\n-- 5", "c.py": b"c"}
    assert patched(files, read_patch(PATCH)) == {"a.py": b"0\n1\n2\n3\n4", "new/b.py": b"--- x\n++ y\n"}


def test_a_patch_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(UserError, match=r"it does not fit a\.py at line 4"):
        patched({"a.py": b"1\n2\n3\n5\n-- 5"}, read_patch(PATCH))
    with pytest.raises(UserError, match=r"removes or renames a\.py"):
        read_patch("--- a/a.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-1\n")
