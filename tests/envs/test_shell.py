from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import UserError, tool_call
from agentrl.errors import ConfigError
from agentrl_envs.sandboxes import bubblewrap
from agentrl_envs.sandboxes.bubblewrap import BubblewrapConfig
from agentrl_envs.shell import KINDS, Shell, draw_job
from tests.support.each import each

WHY_NOT = bubblewrap._problem(BubblewrapConfig())
needs_bubblewrap = pytest.mark.skipif(bool(WHY_NOT), reason=f"bubblewrap: {WHY_NOT}")


pytestmark = pytest.mark.process


def shell(env: Shell, command: str) -> tuple[str, float]:
    observation, reward, _, _, _ = env.step(tool_call("shell", command=command))
    return observation[0]["content"], round(float(reward), 9)


def deleting(**options: Any) -> Shell:
    """Return the environment with two files to delete and one to keep."""
    env = Shell(num_jobs=1, kinds=["delete"], num_files=3, **options)
    for seed in range(100):
        env.reset(seed=seed)
        if env.num_at_first == 2:
            return env
    raise AssertionError("no such task")


@needs_bubblewrap
@each("kind", KINDS)
def test_every_kind_of_job_is_done_by_its_command(kind: str) -> None:
    env = Shell(num_jobs=1, kinds=[kind])
    for seed in range(5):
        env.reset(seed=seed)
        assert env.num_at_first > 0
        assert shell(env, env.jobs[0].command) == ("(no output)", 0.5)
        _, reward, terminated, _, info = env.step(tool_call("done"))
        assert (reward, terminated, info["success"], info["score"]) == (1.0, True, True, 1.0)
    env.close()


@needs_bubblewrap
def test_progress_pays_once() -> None:
    env = deleting()
    first, second = sorted(path for path in env.jobs[0].before if path.endswith(".tmp"))
    assert shell(env, f"rm {first}") == ("(no output)", 0.25)
    assert shell(env, f"echo x > {first}")[1] == 0.0
    assert shell(env, f"rm {first}")[1] == 0.0
    assert shell(env, f"rm {second}")[1] == 0.25


@needs_bubblewrap
def test_without_turn_rewards_the_end_alone_pays() -> None:
    env = deleting(turn_rewards=False)
    assert shell(env, "rm red/*.tmp")[1] == 0.0
    assert env.step(tool_call("done"))[1] == 1.0


@needs_bubblewrap
@pytest.mark.parametrize(
    ("command", "score"), [("true", 0.0), ("rm red/*.tmp; touch x", 0.5), ("rm -r red", 0.5), ("rm red/*", 0.5)]
)
def test_files_that_are_wrong_or_too_many_fail(command: str, score: float) -> None:
    env = deleting()
    shell(env, command)
    observation, reward, _, _, info = env.step(tool_call("done"))
    assert (reward, info["success"], info["score"]) == (0.0, False, score)
    assert observation[0]["content"].startswith("Wrong files: ")


@needs_bubblewrap
def test_the_output_of_commands_is_the_reply() -> None:
    env = deleting()
    assert shell(env, "ls")[0] == "red"
    assert shell(env, "cat nothing 2> /dev/null")[0] == "(status 1)"
    assert shell(env, "grep nothing red/*")[0] == "(status 1)"
    assert env.step("I am done.")[0][0]["content"] == "Use shell, or done."
    env.close()


@needs_bubblewrap
def test_blank_space_at_the_end_of_a_file_does_not_matter() -> None:
    env = Shell(num_jobs=1, kinds=["count_lines"])
    env.reset(seed=0)
    count = env.jobs[0].after["red/count"]
    shell(env, f"echo -n {count} > red/count")
    assert env.step(tool_call("done"))[4]["success"] is True


@needs_bubblewrap
def test_keys_tell_files_and_empty_folders_apart() -> None:
    env = deleting()
    keys = [env.state_key()]
    for command in ("mkdir a", "rmdir a", "touch a", "rm a", "echo x > a", "echo y > a", "mv a b"):
        shell(env, command)
        keys.append(env.state_key())
    assert [keys.index(key) for key in keys] == [0, 1, 0, 3, 0, 5, 6, 7]


@needs_bubblewrap
def test_a_fork_has_files_of_its_own() -> None:
    env = deleting()
    other = env.fork()
    shell(other, "rm red/*.tmp")
    assert other.state_key() != env.state_key()
    assert shell(env, "ls red/*.tmp | wc -l")[0] == "2"


def test_without_bubblewrap_one_line_names_what_to_install_and_the_other_sandboxes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap._problem.cache_clear()
    try:
        with pytest.raises(ConfigError) as caught:
            Shell()
    finally:
        bubblewrap._problem.cache_clear()
    message = str(caught.value)
    assert message.count("\n") == 0
    for words in ("bwrap", "apt-get install bubblewrap", "'monty' runs Python", "'unsafe'"):
        assert words in message


def test_wrong_options_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kinds": ["fly"]}, r"kinds: give some of count_files, .*, got \['fly'\]"),
        ({"kinds": []}, "kinds: give some of .*, got none"),
        ({"num_jobs": 5}, "num_jobs"),
        ({"sandbox": "monty"}, "'monty' does not run sh"),
    ]
    for options, words in cases:
        with pytest.raises(UserError, match=words):
            Shell(**options)


@each("kind", KINDS)
def test_jobs_differ(kind: str) -> None:
    rng = np.random.default_rng(0)
    jobs = [draw_job(kind, "red", num_files=5, rng=rng) for _ in range(50)]
    assert len({str(job.before) for job in jobs}) == 50
    assert all(job.before != job.after for job in jobs)
