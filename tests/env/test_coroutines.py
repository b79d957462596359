"""`async def` start, answer and oracle."""

import asyncio
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from agentrl import EnvironmentFailure, Message, ToolEnv
from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.env import ask_oracle, close_env
from agentrl.errors import CheckError
from agentrl.rollout import RolloutConfig, Tasks
from agentrl.rollout.demonstrations import demonstrations, oracle_ends
from agentrl.testing import check_env
from tests.support.each import each


class Phone(ToolEnv):
    """Everything it says takes a while, on the loop of all coroutines."""

    async def start(self, options: dict[str, Any]) -> str:
        self.number = int(self.np_random.integers(1000))
        await asyncio.sleep(0)
        self.thread = threading.current_thread().name
        return f"Dial {self.number}"

    async def answer(self, text: str) -> str:
        await asyncio.sleep(0)
        self.finish(success=text == str(self.number))
        return "Bye."

    async def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        await asyncio.sleep(0)
        return {"role": "assistant", "content": str(self.number)}


def test_they_are_awaited_on_the_loop_of_coroutines() -> None:
    env = Phone()
    ((first,), _) = env.reset(seed=3)
    assert (first["content"], env.thread) == (f"Dial {env.number}", "agentrl-tools")
    messages, _, terminated, _, info = env.step(ask_oracle(env))
    assert ([m["content"] for m in messages], terminated, info["success"]) == (["Bye."], True, True)


@each(
    ("said", "words"),
    [
        (None, r"oracle\(\) returned NoneType None; return text, or an assistant message"),
        (3, r"oracle\(\) returned int 3; return text, or an assistant message"),
        (
            {"role": "user", "content": "x"},
            r"oracle\(\) returned dict .*'user'.*; return text, or an assistant message",
        ),
        (
            {"role": "assistant", "content": b"x"},
            r"oracle\(\): the message\['content'\] is bytes b'x'.*; return text, or an assist",
        ),
    ],
)
def test_an_oracle_that_says_something_else_is_told(said: Any, words: str) -> None:
    class Odd(Phone):
        def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Any:
            return said

    with pytest.raises(EnvironmentFailure, match=words):
        asyncio.run(oracle_ends(Odd, max_turns=2, timeout_s=10, tasks=Tasks(seed=0)))
    with pytest.raises(CheckError, match=words):
        check_env(Odd)


class HangsUp(Phone):
    """Is closed by a coroutine."""

    num_closed = 0

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        HangsUp.num_closed += 1


def test_one_that_closes_is_awaited() -> None:
    HangsUp.num_closed = 0
    assert asyncio.run(oracle_ends(HangsUp, max_turns=2, timeout_s=10, tasks=Tasks(seed=0)))
    assert HangsUp.num_closed == 1
    close_env(TimeLimit(HangsUp(), 3))
    assert HangsUp.num_closed == 2
    check_env(HangsUp)


def test_they_keep_the_contract() -> None:
    check_env(Phone)


def test_demonstrations_are_played_by_an_oracle_that_is_a_coroutine() -> None:
    renderer = ChatMLRenderer(train_tokenizer([], vocab_size=261))
    playing = demonstrations(
        Phone, renderer, count=2, skill=1.0, config=RolloutConfig(max_turns=2, env_timeout_s=10), tasks=Tasks(seed=0)
    )
    assert [(len(d.turns), d.is_over) for d in asyncio.run(playing)] == [(1, True), (1, True)]
    assert asyncio.run(oracle_ends(Phone, max_turns=2, timeout_s=10, tasks=Tasks(seed=0)))


@each("method", ["start", "answer", "oracle"])
def test_one_that_takes_too_long_is_cancelled_and_fails_the_episode(method: str) -> None:
    cancelled = threading.Event()

    async def dawdle(self: Phone, *args: Any, **kwargs: Any) -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "never"

    slow = type("Slow", (Phone,), {"coroutine_timeout_s": 0.1, method: dawdle})()
    assert isinstance(slow, Phone)
    begin = time.monotonic()

    def play() -> None:
        slow.reset(seed=0)
        slow.step(ask_oracle(slow))

    with pytest.raises(EnvironmentFailure, match=rf"{method}\(\).*: it did not end within 0.1 s"):
        play()
    assert time.monotonic() - begin < 5
    assert cancelled.wait(5)


def test_what_one_raises_leaves_step() -> None:
    class Broken(Phone):
        async def answer(self, text: str) -> str:
            raise KeyError("number")

    env = Broken()
    env.reset(seed=0)
    with pytest.raises(KeyError, match="number"):
        env.step("1")


def test_a_deadline_of_ones_own_is_told_as_it_is() -> None:
    class Busy(Phone):
        async def answer(self, text: str) -> str:
            raise TimeoutError("the licence server is busy")

    env = Busy()
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"^TimeoutError: the licence server is busy$"):
        env.step("1")


def test_one_that_leaves_within_a_task_ends_the_loop_of_no_other() -> None:
    async def leave() -> None:
        sys.exit(3)

    class Leaves(Phone):
        async def answer(self, text: str) -> str:
            await asyncio.gather(leave(), asyncio.sleep(60))
            return "never"

    leaves, other = Leaves(), Phone()
    leaves.reset(seed=0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            leaves.step("1")
        other.reset(seed=1)
        assert other.step(ask_oracle(other))[4]["success"]
