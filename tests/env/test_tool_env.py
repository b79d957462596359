import asyncio
import contextlib
import itertools
import multiprocessing
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import psutil
import pytest

from agentrl.env import MessageEnv, ToolEnv, tool, tool_call
from agentrl.env.background import BlockedLoopError, run_in_background
from agentrl.env.message_env import step_return
from agentrl.errors import EnvError, EnvironmentFailure
from agentrl.types import Message, Need
from tests.support.each import each


class Desk(ToolEnv):
    tool_timeout_s = 0.2
    max_tool_chars = 50
    max_error_chars = 80

    def start(self, options: dict[str, Any]) -> Sequence[Message]:
        self.options = options
        self.number = int(self.np_random.integers(1000))
        return ({"role": "system", "content": "Be kind."}, {"role": "user", "content": f"{self.number}"})

    def answer(self, text: str) -> str | None:
        if text == "bye":
            self.finish(success=False)
            return None
        if text == "half":
            self.finish(success=False, score=0.5)
        if text == "yes":
            self.finish(success=cast("bool", "yes"))
        if text == "5":
            return cast("str", 5)
        return f"You said {text!r}."

    @tool
    def pay(self, amount: float) -> str:
        """Pay."""
        self.reward(amount)
        self.reward(0.5, "tip")
        return "paid"

    @tool
    def win(self) -> str:
        """Win."""
        self.reward(1)
        self.finish(success=True)
        return "won"

    @tool
    def fail(self, words: str) -> str:
        """Fail."""
        raise KeyError(words)

    @tool
    def talk(self, num_chars: int) -> str:
        """Talk."""
        return "x" * num_chars

    @tool
    def silent(self) -> None:
        """Say nothing."""

    @tool
    async def thread(self) -> str:
        """Name the thread."""
        await asyncio.sleep(0)
        return threading.current_thread().name

    @tool
    async def dawdle(self) -> str:
        """Take too long."""
        await asyncio.sleep(30)
        return "never"


class Mute(ToolEnv):
    pass


@pytest.fixture
def desk() -> Desk:
    env = Desk()
    env.reset(seed=3)
    return env


def content(env: ToolEnv, action: str | Message) -> str:
    return str(env.step(action)[0][-1]["content"])


def calls(*functions: tuple[str, dict[str, Any]]) -> Message:
    listed = [{"id": f"c{i}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def test_reset_returns_the_messages_of_start_and_hands_on_its_options() -> None:
    env = Desk()
    observation, info = env.reset(seed=3, options={"rollout_index": 2})
    assert [m["role"] for m in observation] == ["system", "user"]
    assert observation == Desk().reset(seed=3)[0] != env.reset(seed=4)[0]
    assert (info, env.options) == ({}, {})
    env.reset(seed=3, options={"rollout_index": 2})
    assert env.options == {"rollout_index": 2}


def test_plain_text_goes_to_answer(desk: Desk) -> None:
    observation, reward, terminated, truncated, info = desk.step("hi")
    assert observation == ({"role": "user", "content": "You said 'hi'."},)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"tool_errors": 0, "reward_components": {}}


def test_rewards_of_a_turn_add_up_by_part_and_do_not_leak_into_the_next(desk: Desk) -> None:
    _, reward, _, _, info = desk.step(calls(("pay", {"amount": 2}), ("pay", {"amount": 0.25})))
    assert reward == 3.25  # 2 + 0.25 of reward, 0.5 + 0.5 of tip
    assert info["reward_components"] == {"reward": 2.25, "tip": 1.0}
    assert desk.step("hi")[1] == 0.0


def test_each_call_is_answered_with_its_id_in_order(desk: Desk) -> None:
    observation = desk.step(calls(("talk", {"num_chars": 1}), ("no", {}), ("talk", {"num_chars": 2})))[0]
    assert [(m["tool_call_id"], m["name"]) for m in observation] == [("c0", "talk"), ("c1", "no"), ("c2", "talk")]
    assert observation[0]["content"] == "x"
    assert observation[2]["content"] == "xx"


def test_finish_ends_the_task_and_the_calls_after_it_are_not_carried_out(desk: Desk) -> None:
    observation, reward, terminated, _, info = desk.step(calls(("win", {}), ("pay", {"amount": 9})))
    assert [m["content"] for m in observation] == ["won"]
    assert (reward, terminated, info["success"], info["score"]) == (1.0, True, True, 1.0)


def test_success_without_a_score_scores_zero_or_one_and_a_score_stands_for_itself(desk: Desk) -> None:
    observation, _, terminated, _, info = desk.step("bye")
    assert (observation, terminated, info["success"], info["score"]) == ((), True, False, 0.0)
    desk.reset(seed=3)
    assert desk.step("half")[4]["score"] == 0.5


def test_a_step_without_a_running_task_is_refused(desk: Desk) -> None:
    desk.step("bye")
    with pytest.raises(RuntimeError, match="call reset"):
        desk.step("hi")
    with pytest.raises(RuntimeError, match="call reset"):
        Desk().step("hi")
    desk.reset()
    assert not desk.step("hi")[2]


@each(
    ("action", "words"),
    [
        (tool_call("pai"), "Error: unknown tool 'pai'; the tools are pay, win, fail, talk, silent, thread, dawdle"),
        (tool_call("start", options={}), "Error: unknown tool 'start'"),
        (tool_call("pay", amount="much"), "Error: wrong arguments for pay: amount: Input should be a valid number"),
        (tool_call("fail", words="k"), "Error: KeyError: 'k'"),
        (tool_call("dawdle"), "Error: dawdle timed out"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "", "arguments": "{x"}}]},
            "Error: malformed tool call",
        ),
        ({"role": "assistant", "tool_calls": ["pay"]}, "Error: malformed tool call: pay"),
        ({"role": "assistant", "tool_calls": [{"function": None}]}, "Error: malformed tool call: None"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "pay", "arguments": "1" * 5000}}]}, "Error: "),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "pay", "arguments": "[" * 9**6}}]}, "Error: "),
    ],
)
def test_what_the_model_gets_wrong_is_answered_and_counted(desk: Desk, action: Message, words: str) -> None:
    desk.reset(seed=3)
    observation, reward, terminated, _, info = desk.step(action)
    assert observation[0]["role"] == "tool"
    assert observation[0]["content"].startswith(words[:80])
    assert len(observation[0]["content"]) < 120
    assert (reward, terminated, info["tool_errors"]) == (0.0, False, 1)


def test_long_texts_are_cut_and_say_so(desk: Desk) -> None:
    assert content(desk, tool_call("talk", num_chars=50)) == "x" * 50
    assert content(desk, tool_call("talk", num_chars=57)) == "x" * 50 + "\n[7 characters cut]"
    # "Error: KeyError: " has 17 characters, the words in quotes 102: 119, of which 80 stay.
    assert content(desk, tool_call("fail", words="w" * 100)).endswith("w\n[39 characters cut]")


def test_a_tool_that_returns_nothing_says_nothing(desk: Desk) -> None:
    assert content(desk, tool_call("silent")) == ""


def test_coroutine_tools_share_one_background_thread(desk: Desk) -> None:
    assert threading.current_thread().name != "agentrl-tools"
    assert content(desk, tool_call("thread")) == "agentrl-tools"


def test_an_instance_may_offer_fewer_tools(desk: Desk) -> None:
    desk.tools = desk.tools[:1]
    assert content(desk, tool_call("win")) == "Error: unknown tool 'win'; the tools are pay"
    assert content(desk, tool_call("pay", amount=1)) == "paid"
    assert len(Desk.tools) == 7


def test_a_coroutine_that_blocks_the_loop_is_replaced_once_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.env.background._GRACE_S", 0.2)
    free, is_blocked = threading.Event(), threading.Event()
    process = psutil.Process()

    async def block() -> None:
        is_blocked.set()
        free.wait()

    async def answer() -> int:
        return 7

    def outcome(coroutine: Coroutine[Any, Any, Any], *, timeout_s: float = 60.0) -> Any:
        try:
            return run_in_background(coroutine, timeout_s=timeout_s)
        except BlockedLoopError as error:
            return str(error)

    def used() -> tuple[int, int]:
        loops = [thread for thread in threading.enumerate() if thread.name == "agentrl-tools"]
        return len(loops), process.num_fds()

    with ThreadPoolExecutor(40) as waiters:
        assert set(waiters.map(lambda _: outcome(answer()), range(40))) == {7}
        loops, descriptors = used()
        for event in range(1, 4):
            is_blocked.clear()
            blocking = waiters.submit(outcome, block(), timeout_s=1.0)
            assert is_blocked.wait(60)  # the others wait on it
            others = [waiters.submit(outcome, answer(), timeout_s=1.0) for _ in range(39)]
            assert all("blocks the event loop" in future.result() for future in [blocking, *others])
            assert outcome(answer()) == 7
            assert used()[0] == loops + event  # one for each time that it is blocked, whoever waits
        free.set()
        deadline = time.monotonic() + 60
        while used() != (loops, descriptors):
            assert time.monotonic() < deadline, (used(), loops, descriptors)
            time.sleep(0.01)
        assert outcome(answer()) == 7


def test_a_coroutine_that_is_not_to_be_cancelled_blocks_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.env.background._GRACE_S", 1.0)
    over = threading.Event()

    async def stubborn() -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    before = run_in_background(loop(), timeout_s=60)
    with pytest.raises(TimeoutError) as caught:
        run_in_background(stubborn(), timeout_s=0.05)
    over.set()
    assert not isinstance(caught.value, BlockedLoopError)
    assert run_in_background(loop(), timeout_s=60) is before


def test_a_coroutine_that_exits_ends_no_loop() -> None:
    async def leave() -> None:
        sys.exit("enough")

    async def answer() -> int:
        return 7

    with pytest.raises(RuntimeError, match="SystemExit: enough"):
        run_in_background(leave(), timeout_s=60)
    assert run_in_background(answer(), timeout_s=60) == 7


def test_loops_that_stay_blocked_end_in_a_failure_that_names_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.env.background._GRACE_S", 0.05)
    monkeypatch.setattr("agentrl.env.background._MAX_BLOCKED", 1)
    free = threading.Event()

    async def block() -> None:
        while not free.is_set():
            time.sleep(0.01)

    with pytest.raises(BlockedLoopError):
        run_in_background(block(), timeout_s=0.05)
    with pytest.raises(EnvironmentFailure, match=r"2 coroutines block their event loops, .*test_tool_env\.py:\d+"):
        run_in_background(block(), timeout_s=0.05)
    free.set()


def _call_in_child(queue: Any) -> None:
    env = Desk()
    env.reset(seed=0)
    queue.put(content(env, tool_call("thread")))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking with threads is what is tested
def test_coroutine_tools_work_in_a_forked_process(desk: Desk) -> None:
    assert content(desk, tool_call("thread")) == "agentrl-tools"  # the loop runs before the fork
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_call_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=100) == "agentrl-tools"
    child.join(100)


def test_a_missing_method_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"Mute must define start\(options\)"):
        cast("Any", Mute)().reset(seed=0)


def test_action_keys_do_not_see_spelling(desk: Desk) -> None:
    def written(arguments: str) -> Message:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    assert desk.action_key(written('{"a":1,"b":2}')) == desk.action_key(tool_call("f", b=2, a=1))
    assert desk.action_key(written('{"a":1}')) != desk.action_key(written('{"a":2}'))
    assert desk.action_key(" yes\n") == desk.action_key({"role": "assistant", "content": "yes"}) == "yes"
    assert desk.action_key(written("{")) == '[["f", "{"]]'
    assert desk.action_key(written("1" * 5000)) == f'[["f", "{"1" * 5000}"]]'


def test_an_environment_provides_what_it_defines(desk: Desk) -> None:
    class Keyed(Desk):
        def state_key(self) -> str:
            return "k"

    class Known(Desk):
        def gold_answer(self) -> str:
            return "42"

    keyed, always = Keyed(), {Need.ACTION_KEYS, Need.BRANCHES}
    assert desk.provides() == {Need.TURN_REWARDS} | always
    assert keyed.provides() == {Need.TURN_REWARDS, Need.STATE_KEYS} | always
    assert Known().provides() == {Need.TURN_REWARDS, Need.ANSWER_LOGPROBS} | always
    keyed.turn_rewards = keyed.can_fork = False
    assert keyed.provides() == {Need.STATE_KEYS, Need.ACTION_KEYS}


def test_a_missing_oracle_says_what_to_do(desk: Desk) -> None:
    with pytest.raises(NotImplementedError, match=r"Desk has no oracle\(\): define it, or train without warm-up"):
        MessageEnv.oracle(desk)


def test_tools_of_a_tool_environment_are_its_methods() -> None:
    with pytest.raises(TypeError, match=r"Listed.tools: the tools of a ToolEnv are its methods marked with @tool"):
        type("Listed", (Desk,), {"tools": []})


def test_messages_without_end_are_cut_and_refused() -> None:
    class Talks(ToolEnv):
        def start(self, options: dict[str, Any]) -> str:
            return "go"

        def answer(self, text: str) -> Any:
            return itertools.repeat({"role": "user", "content": text})

    env = Talks()
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"step\(\): messages.* values"):
        step_return(env.step("more"))


@each("amount", [float("nan"), "1.0"])
def test_a_reward_that_is_no_number_is_the_environments_fault_and_no_answer_to_the_model(amount: Any) -> None:
    class Pays(ToolEnv):
        def start(self, options: dict[str, Any]) -> str:
            return "go"

        @tool
        def pay(self) -> str:
            """Pay."""
            self.reward(amount)
            return "paid"

        def answer(self, text: str) -> str:
            return text

    env = Pays()
    env.reset(seed=0)
    with pytest.raises(EnvironmentFailure, match=rf"reward\(\) takes a finite number, or None, got \w+ {amount!r}"):
        env.step(tool_call("pay"))


@each(
    ("text", "words"),
    [
        ("yes", r"finish\(success=...\) takes a number or a truth value, got str 'yes'"),
        ("5", r"answer\(\) returned int 5; return a text, a list of messages, or None"),
    ],
)
def test_what_an_environment_says_wrongly_is_told_with_the_method(text: str, words: str) -> None:
    env = Desk()
    env.reset(seed=1)
    with pytest.raises(EnvironmentFailure, match=words):
        env.step(text)
