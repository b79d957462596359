"""Functions that play in processes of their own."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentrl.agent.clients import AgentError
from agentrl.agent.session import AgentSession
from agentrl.agent.worker import Workers
from tests.agent.test_clients import SESSION
from tests.support.processes import is_alive

pytestmark = pytest.mark.process

Make = Callable[..., Workers]


async def does(task: dict[str, Any], session: AgentSession) -> Any:
    """Do what the task says."""
    match task:
        case {"returns": value}:
            print("words that are no answer", flush=True)
            return value
        case {"looks": _}:
            return os.getpid()
        case {"dies": status}:
            os._exit(status)
        case {"blocks": seconds}:
            time.sleep(seconds)
        case {"sleeps": seconds}:
            await asyncio.sleep(seconds)
    raise KeyError("price")


def waits(task: dict[str, Any], session: AgentSession) -> Any:
    time.sleep(0.5)
    return [session.seed, session.split, session.api_key, threading.active_count()]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Workers] = []

    def new(function: str = "does", num: int = 1) -> Workers:
        made.append(workers := Workers(f"{__name__}:{function}", num=num))
        return workers

    yield new
    for workers in made:
        workers.close()


def play(workers: Workers, *tasks: dict[str, Any], timeout_s: float = 60) -> list[Any]:
    async def all_of_them() -> list[Any]:
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*(workers.run(task, SESSION) for task in tasks), return_exceptions=True)

    return asyncio.run(all_of_them())


def test_what_a_function_returns_or_raises_crosses_over(make: Make) -> None:
    workers = make()
    assert play(workers, {"returns": {"reward": 0.5}}, {"returns": None}) == [{"reward": 0.5}, None]
    first, second = play(workers, {}, {})
    assert isinstance(first, AgentError)
    assert str(first) == str(second)
    assert str(first).startswith("KeyError: 'price' (test_worker.py:")
    assert first.kind == second.kind


def test_tasks_are_spread_over_the_processes(make: Make) -> None:
    pids = play(make(num=2), *[{"looks": 1}] * 4)
    assert len(set(pids)) == 2
    assert os.getpid() not in pids


def test_functions_without_async_play_at_once(make: Make) -> None:
    workers = make("waits")
    play(workers, {})
    found = play(workers, {}, {}, {})
    assert [each[:3] for each in found] == [[SESSION.seed, SESSION.split, SESSION.api_key]] * 3
    assert max(each[3] for each in found) >= 5  # the loop's, the reader's, and one for each


def test_a_process_that_ends_is_replaced_and_its_end_is_the_same_each_time(make: Make) -> None:
    workers = make()
    first, second = (play(workers, {"dies": 3})[0] for _ in range(2))
    assert "ended with exit status 3" in str(first)
    assert first.kind == second.kind == "exit status 3"
    assert play(workers, {"returns": 1.0}) == [1.0]


def test_the_end_of_a_process_is_no_failure_of_those_beside(make: Make) -> None:
    workers = make()
    kinds = [play(workers, {"sleeps": 60}, {"dies": 3})[0].kind for _ in range(2)]
    assert kinds[0] != kinds[1]


@pytest.mark.slow
def test_a_process_that_is_blocked_is_killed_once_one_of_its_tasks_is_given_up(make: Make) -> None:
    workers = make()
    (pid,) = play(workers, {"looks": 1})

    async def given_up() -> Any:
        blocking = asyncio.create_task(workers.run({"blocks": 60}, SESSION))
        beside = asyncio.create_task(workers.run({"sleeps": 60}, SESSION))
        await asyncio.sleep(0.5)
        blocking.cancel()
        async with asyncio.timeout(30):
            return await asyncio.gather(beside, return_exceptions=True)

    (error,) = asyncio.run(given_up())
    assert "exit status -9 of worker" in error.kind
    assert not is_alive(pid)
    assert play(workers, {"returns": 1.0}) == [1.0]


def test_a_coroutine_that_is_given_up_leaves_its_process_alone(make: Make) -> None:
    workers = make()
    (pid,) = play(workers, {"looks": 1})
    with pytest.raises(TimeoutError):
        play(workers, {"sleeps": 60}, timeout_s=0.5)
    time.sleep(2.5)
    assert play(workers, {"looks": 1}) == [pid]


def test_processes_end_when_they_are_closed(make: Make) -> None:
    workers = make()
    (pid,) = play(workers, {"looks": 1})
    workers.close()
    deadline = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_cannot_be_started_is_an_error_of_the_task(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert isinstance(play(make(), {"returns": 1.0})[0], OSError)
