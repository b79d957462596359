"""Limits of the operating system, told before a run reaches them."""

import asyncio
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.errors import EnvironmentFailure
from agentrl.rollout import EpisodeContext, RolloutConfig, limits
from agentrl.rollout.conversation import Conversation, Task
from agentrl.rollout.env_driver import EnvDriver, EnvThread
from agentrl.testing import ScriptedEngine
from tests.support.each import each


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, found)


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_thread_limits", lambda process: [])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert limits.check_limits(64) == []
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_too_few_open_files_and_threads_are_told_in_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_raise_open_files", lambda: 1024)
    monkeypatch.setattr(limits, "_thread_limits", lambda process: [(500, 3, "`ulimit -u`"), (9000, 3, "elsewhere")])
    assert limits.check_limits(100) == []
    assert limits.check_limits(1500) == [
        "rollout.max_live_episodes: 1500 episodes may need 6000 open files, and this process may open 1024; raise that limit "
        "(`ulimit -Hn`), or lower it",
        "rollout.max_live_episodes: 1500 episodes need a thread each, and 500 are allowed (`ulimit -u`), of which 3 are in "
        "use; raise that limit, or lower it",
    ]


@each(("line", "folder"), [("0::/a/b", ""), ("8:pids:/a/b", "pids")])
def test_limits_of_control_groups_are_found_on_the_way_to_the_root(line: str, folder: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text(f"12:cpu:/elsewhere\n{line}\n")
    inner = tmp_path / "root" / folder / "a" / "b"
    inner.mkdir(parents=True)
    for path in (inner, inner.parent):
        (path / "pids.max").write_text("max\n")
    assert limits._pids_folders(tmp_path / "root", own) == [inner, inner.parent]
    assert limits._pids_folders(tmp_path / "root", tmp_path / "none") == []


def test_a_thread_that_cannot_be_started_is_a_limit_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    context = EpisodeContext(
        engine=ScriptedEngine(lambda request_id, number: []),
        renderer=ChatMLRenderer(train_tokenizer([], vocab_size=261)),
        config=RolloutConfig(),
    )
    task = Task(group_id="train/000000", rollout_index=0, seed=1, sampling_seed=1)
    driver = EnvDriver(Conversation(context, task), EnvThread())
    with pytest.raises(EnvironmentFailure, match=r"lower rollout.max_live_episodes, or raise the limit of threads"):
        asyncio.run(driver.call("construction", dict))
