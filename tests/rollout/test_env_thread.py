import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import pytest

from agentrl.rollout import env_driver as gate
from agentrl.rollout.env_driver import EnvThread
from agentrl.rollout.faults import RaisedError
from tests.support.each import each

R = TypeVar("R")


def on_a_thread(run: Callable[[EnvThread], Coroutine[Any, Any, R]]) -> R:
    thread = EnvThread()
    try:
        return asyncio.run(run(thread))
    finally:
        thread.close()


def leave() -> None:
    sys.exit(3)


def cancel() -> None:
    raise asyncio.CancelledError


def time_out() -> None:
    raise TimeoutError("the shop did not answer")


def test_calls_run_one_after_the_other_on_one_thread() -> None:
    async def run(thread: EnvThread) -> list[Any]:
        running: list[int] = []

        def work(number: int) -> tuple[int, int | None, int]:
            running.append(number)
            time.sleep(0.01)
            running.remove(number)
            return number, threading.current_thread().ident, len(running)

        return await asyncio.gather(*(thread.call(lambda n=n: work(n), timeout_s=60) for n in range(4)))  # type: ignore[misc]

    results = on_a_thread(run)
    assert [number for number, _, _ in results] == [0, 1, 2, 3]
    assert len({ident for _, ident, _ in results} - {threading.current_thread().ident}) == 1
    assert [left for _, _, left in results] == [0, 0, 0, 0]


def test_the_event_loop_continues_while_an_environment_blocks() -> None:
    released = threading.Event()

    async def run(thread: EnvThread) -> bool:
        blocking = asyncio.create_task(thread.call(released.wait, timeout_s=200))
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not blocking.done()
        released.set()
        return await blocking

    assert on_a_thread(run)


@each(
    ("function", "words"),
    [
        (lambda: 1 // 0, "ZeroDivisionError: .*division"),
        (lambda: next(iter(())), "StopIteration"),
        (leave, "SystemExit: 3"),
        (cancel, "CancelledError"),
        (time_out, "TimeoutError: the shop did not answer"),
    ],
)
def test_whatever_a_call_raises_comes_back_at_once(function: Callable[[], Any], words: str) -> None:
    with pytest.raises(RaisedError, match=words):
        on_a_thread(lambda thread: thread.call(function, timeout_s=60))


def test_a_thread_continues_after_a_call_that_raised() -> None:
    async def run(thread: EnvThread) -> tuple[bool, int]:
        for function in (leave, time_out):
            with pytest.raises(RaisedError):
                await thread.call(function, timeout_s=60)
        return thread.is_lost, await thread.call(lambda: 7, timeout_s=60)

    assert on_a_thread(run) == (False, 7)


def test_a_call_that_misses_its_deadline_loses_the_thread() -> None:
    released = threading.Event()

    async def run(thread: EnvThread) -> tuple[float, bool]:
        begin = time.perf_counter()
        with pytest.raises(TimeoutError):
            await thread.call(released.wait, timeout_s=0.05)
        return time.perf_counter() - begin, thread.is_lost

    waited_s, is_lost = on_a_thread(run)
    assert waited_s >= 0.05
    assert is_lost
    released.set()  # the call comes back after its event loop was closed: nobody is told, nothing is raised


def test_calls_that_wait_hold_up_no_others() -> None:
    released = threading.Event()

    async def run() -> str:
        waiting = [asyncio.create_task(thread.call(released.wait, timeout_s=200)) for thread in threads[1:]]
        await asyncio.sleep(0.01)
        result = await asyncio.wait_for(threads[0].call(lambda: "done", timeout_s=60), 60)
        released.set()
        await asyncio.gather(*waiting)
        return result

    threads = [EnvThread() for _ in range(3 * gate._MAX_RUNNING)]
    try:
        assert asyncio.run(run()) == "done"
    finally:
        released.set()
        for thread in threads:
            thread.close()


def test_so_many_calls_are_let_in_at_once_in_their_order() -> None:
    async def run() -> tuple[list[int], list[int]]:
        loop, begun = asyncio.get_running_loop(), list[int]()
        calls: list[gate.Call] = [loop.create_future() for _ in range(100)]
        for number, call in enumerate(calls):
            gate.Gate.for_loop(loop).enter(call, partial(begun.append, number))
        await asyncio.sleep(0)
        first = list(begun)
        while len(begun) < len(calls):
            for number in list(begun):
                gate.Gate.for_loop(loop).leave(calls[number])
            await asyncio.sleep(0.001)
        return first, begun

    first, all_of_them = asyncio.run(run())
    assert first == list(range(gate._MAX_RUNNING))
    assert all_of_them == list(range(100))


def test_a_call_that_is_cancelled_before_its_turn_never_begins() -> None:
    released, begun = threading.Event(), threading.Event()

    async def run() -> bool:
        waiting = [asyncio.create_task(thread.call(released.wait, timeout_s=200)) for thread in threads[1:]]
        late = asyncio.create_task(threads[0].call(begun.set, timeout_s=200))
        await asyncio.sleep(0)  # all of them wait for their turn now
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        released.set()
        await asyncio.gather(*waiting)
        return threads[0].is_lost

    threads = [EnvThread() for _ in range(gate._MAX_RUNNING + 1)]
    try:
        assert not asyncio.run(run())
        assert not begun.is_set()
    finally:
        released.set()
        for thread in threads:
            thread.close()


def test_a_lost_thread_still_does_what_is_left_to_do_when_its_call_returns() -> None:
    released, closed = threading.Event(), threading.Event()

    async def run(thread: EnvThread) -> None:
        with pytest.raises(TimeoutError):
            await thread.call(released.wait, timeout_s=0.05)
        thread.call_unattended(lambda: 1 // 0)
        thread.call_unattended(closed.set)

    on_a_thread(run)
    assert not closed.is_set()
    released.set()
    assert closed.wait(60)


@pytest.mark.process
def test_a_hanging_environment_does_not_hold_up_the_end_of_the_process() -> None:
    script = """
import asyncio, time
from agentrl.rollout.env_driver import EnvThread

async def main():
    try:
        await EnvThread().call(lambda: time.sleep(600), timeout_s=0.05)
    except TimeoutError:
        print("lost")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "lost\n", "")
