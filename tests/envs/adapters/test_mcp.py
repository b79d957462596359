import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl import EnvironmentFailure, Message, UserError, tool, tool_call
from agentrl.env import make_env
from agentrl.testing import check_env
from agentrl_envs.adapters.mcp import McpEnv
from tests.support import mcp_server
from tests.support.each import each
from tests.support.ports import free_port
from tests.support.threads import wait_until

pytestmark = pytest.mark.process

STDIO = [sys.executable, mcp_server.__file__, "stdio"]
STATELESS = ["add", "fail", "data", "only_data", "picture"]


class Sums(McpEnv):
    """Add two numbers of the seed."""

    def start(self, options: dict[str, Any]) -> str:
        self.has_called = False
        self.a, self.b = map(int, self.np_random.integers(100, size=2))
        return f"{self.a} + {self.b}?"

    @tool
    def give_up(self) -> str:
        """End the task."""
        self.finish(success=False)
        return "Pity."

    def answer(self, text: str) -> None:
        is_right = text == str(self.a + self.b)
        self.reward(float(is_right))
        self.finish(success=is_right)

    def oracle(self, *, skill: float = 1.0, rng: object = None) -> Message:
        return (
            tool_call("add", a=self.a, b=self.b) if not self.has_called else {"role": "assistant", "content": self.said}
        )

    has_called = False
    said = ""

    def run_tool(self, name: str, arguments: Any) -> str:
        said = super().run_tool(name, arguments)
        if name == "add":
            self.has_called, self.said = True, said
        return said


def contents(env: McpEnv, *actions: Message) -> list[str]:
    return [env.step(action)[0][0]["content"] for action in actions]


def num_open() -> tuple[int, int]:
    process = psutil.Process()
    return process.num_fds(), len(process.children(recursive=True))


@pytest.fixture
def make() -> Iterator[Callable[..., Sums]]:
    """Make environments that are closed when the test is over."""
    made: list[Sums] = []

    def make(**options: Any) -> Sums:
        made.append(Sums(**options))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.mark.slow
def test_a_server_inherits_no_key_but_those_that_are_named(
    make: Callable[..., Sums], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("PASSED", "one")
    server = {"command": STDIO[0], "args": STDIO[1:], "pass_env": ["PASSED"], "env": {"GIVEN": "two"}}
    env = make(server=server)
    env.reset(seed=0)
    asked = [tool_call("variable", name=name) for name in ("OPENAI_API_KEY", "PASSED", "GIVEN")]
    assert contents(env, *asked) == ["unset", "one", "two"]
    monkeypatch.delenv("PASSED")
    with pytest.raises(UserError, match="pass_env: the variable PASSED is not set"):
        make(server=server)


@pytest.fixture(scope="module")
def http() -> Iterator[str]:
    with Http() as server:
        yield server.url


class Http:
    """A server of ours on a port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    def __enter__(self) -> "Http":
        self.process = subprocess.Popen(
            [sys.executable, mcp_server.__file__, "http", str(self.port)], stderr=subprocess.DEVNULL
        )
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", self.port)) == 0)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def test_an_environment_offers_the_tools_of_a_server_beside_its_own(make: Callable[..., Sums]) -> None:
    env = make(server=mcp_server.server, tool_names=["add", "count*"])
    assert [schema["function"]["name"] for schema in env.tools] == ["give_up", "add", "count_up"]
    parameters = env.tools[1]["function"]["parameters"]
    assert parameters["properties"]["b"]["minimum"] == 0
    assert env.tools[1]["function"]["description"] == "Add two numbers."
    env.reset(seed=0)
    assert contents(env, tool_call("add", a=1, b=2), tool_call("give_up")) == ["3", "Pity."]


@each("server", [mcp_server.server, "tests.support.mcp_server:server", STDIO, "http"])
@each("lives", ["episode", "process"])
def test_every_kind_of_server_answers(make: Callable[..., Sums], server: Any, lives: Any, http: str) -> None:
    env = make(server=http if server == "http" else server, server_lives=lives)
    env.reset(seed=0)
    said = contents(
        env,
        tool_call("add", a=1, b=2),
        tool_call("picture"),
        tool_call("only_data"),
        tool_call("fail"),
        tool_call("long_text", length=5000),
    )
    assert said[:4] == [
        "3",
        "see\n[image: image/png, 6 bytes]",
        '{"b": "ü"}',
        "Error: Error executing tool fail: no such thing",
    ]
    assert said[4] == "x" * 4000 + "\n[1000 characters cut]"


@each(
    ("arguments", "words"),
    [
        ({"a": 1}, "'b' is a required property"),
        ({"a": 1, "b": -1}, "b: -1 is less than the minimum of 0"),
        ({"a": "x", "b": 1}, "a: 'x' is not of type 'integer'"),
        ({"a": 1, "b": float("nan")}, "Out of range float values"),
        ("{", "not valid JSON"),
    ],
)
def test_arguments_that_do_not_fit_the_schema_do_not_reach_the_server(
    make: Callable[..., Sums], arguments: Any, words: str
) -> None:
    env = make(server=mcp_server.server)
    env.reset(seed=0)
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
    (reply,), _, terminated, _, info = env.step({"role": "assistant", "content": "", "tool_calls": [call]})
    assert reply["content"].startswith("Error: ")
    assert words in reply["content"]
    assert (info["tool_errors"], terminated) == (1, False)


def test_a_call_that_takes_too_long_is_an_error_and_the_server_goes_on_answering(make: Callable[..., Sums]) -> None:
    env = make(server=STDIO, call_timeout_s=1.0)
    env.reset(seed=0)
    env.step(tool_call("add", a=1, b=2))  # it has started
    assert contents(env, tool_call("wait", seconds=600), tool_call("add", a=1, b=2)) == ["Error: wait timed out", "3"]


@pytest.mark.slow
def test_a_server_of_each_episode_forgets_and_a_shared_one_does_not(make: Callable[..., Sums]) -> None:
    def counts(lives: Any) -> list[str]:
        env = make(server=STDIO, server_lives=lives)
        said = []
        for seed in range(2):
            env.reset(seed=seed)
            said += contents(env, tool_call("count_up"), tool_call("count_up"))
        env.close()
        return said

    assert counts("episode") == ["1", "2", "1", "2"]
    assert counts("process") == ["1", "2", "3", "4"]


def test_one_process_serves_all_environments_and_ends_with_the_last(make: Callable[..., Sums]) -> None:
    before = len(psutil.Process().children())
    envs = [make(server=STDIO, server_lives="process") for _ in range(4)]
    for env in envs:
        env.reset(seed=0)
        env.step(tool_call("add", a=1, b=2))
    assert len(psutil.Process().children()) == before + 1
    for env in envs:
        env.close()
        env.close()
    assert len(psutil.Process().children()) == before


@pytest.mark.slow
def test_a_fork_is_a_server_that_was_told_the_same(make: Callable[..., Sums]) -> None:
    env = make(server=STDIO)
    env.reset(seed=0)
    env.step(tool_call("count_up", by=3))
    fork = env.fork()
    assert contents(fork, tool_call("count_up")) == ["4"]
    assert contents(env, tool_call("count_up", by=10)) == ["13"]
    assert contents(fork, tool_call("count_up")) == ["5"]
    env.close()
    fork.close()


@pytest.mark.slow
def test_a_fork_is_told_what_took_too_long_too(make: Callable[..., Sums]) -> None:
    env = make(server=STDIO, call_timeout_s=1.0)
    env.reset(seed=0)
    env.step(tool_call("count_up"))  # it has started
    assert contents(env, tool_call("slowly_count", seconds=600)) == ["Error: slowly_count timed out"]
    fork = env.fork()
    assert contents(fork, tool_call("count_up")) == contents(env, tool_call("count_up")) == ["3"]
    env.close()
    fork.close()


@pytest.mark.parametrize("lives", ["episode", "process"])
def test_a_server_that_dies_is_started_and_called_again(make: Callable[..., Sums], lives: Any, tmp_path: Path) -> None:
    env = make(server=STDIO, server_lives=lives)
    env.reset(seed=0)
    said = contents(env, tool_call("count_up"), tool_call("die_once", path=str(tmp_path / "a")), tool_call("count_up"))
    # One of the episode's own is told again what it was told; a shared one begins from nothing.
    assert said == ["1", "alive", "2" if lives == "episode" else "1"]


def test_what_a_server_writes_between_messages_is_told_in_a_line(
    make: Callable[..., Sums], caplog: pytest.LogCaptureFixture
) -> None:
    env = make(server=STDIO)
    env.reset(seed=0)
    assert contents(env, tool_call("babble", words="hello \x1b[2J"), tool_call("add", a=1, b=2)) == ["said", "3"]
    (record,) = caplog.records
    assert record.exc_info is None
    assert "Failed to parse" in record.getMessage()
    assert not set(record.getMessage()) & set("\n\x1b")


@pytest.mark.slow
def test_a_server_that_dies_again_and_again_fails_the_episode_with_its_last_words(make: Callable[..., Sums]) -> None:
    env = make(server=STDIO, max_restarts=1)
    env.reset(seed=0)
    with pytest.raises(EnvironmentFailure, match=r"died.*its stderr ends: out of cheese"):
        env.step(tool_call("die", words="out of cheese"))
    env.reset(seed=0)
    assert contents(env, tool_call("add", a=1, b=2)) == ["3"]


@pytest.mark.slow
def test_a_server_that_does_not_take_the_calls_again_fails_the_episode_and_is_ended(
    make: Callable[..., Sums], tmp_path: Path
) -> None:
    env = make(server=STDIO, call_timeout_s=2)
    before = num_open()
    env.reset(seed=0)
    assert contents(env, tool_call("only_once", path=str(tmp_path / "a"))) == ["once"]
    for action in (tool_call("die", words=""), tool_call("count_up")):
        with pytest.raises(EnvironmentFailure, match=r"does not take the episode's calls again: only_once timed out$"):
            env.step(action)
        assert num_open() == before


def test_an_http_server_that_ends_fails_the_episode(make: Callable[..., Sums]) -> None:
    with Http() as server:
        env = make(server=server.url, max_restarts=1)
        env.reset(seed=0)
        assert contents(env, tool_call("add", a=1, b=2)) == ["3"]
    with pytest.raises(EnvironmentFailure, match="the MCP server died, or does not start"):
        env.step(tool_call("add", a=1, b=2))


@pytest.mark.slow
@each(
    ("options", "words"),
    [
        ({"server": ["no-such-program"]}, "No such file"),
        ({"server": [sys.executable, "-c", "raise SystemExit('lost my config')"]}, "lost my config"),
        (
            {"server": [sys.executable, "-c", "import time; time.sleep(60)"], "start_timeout_s": 0.5},
            "no answer within 0.5 s",
        ),
        ({"server": "no such thing"}, "server: 'no such thing' names no MCP server"),
        (
            {"server": "tests.support.no_module:server"},
            "server: 'tests.support.no_module:server' leads to no MCP server",
        ),
        (
            {"server": mcp_server.server, "tool_names": ["subtract"]},
            "tool_names: 'subtract' matches none of add, count.up",
        ),
        (
            {"server": mcp_server.server, "server_lives": "always"},
            "server_lives: give 'episode' or 'process', got 'always'",
        ),
    ],
)
def test_a_server_that_cannot_be_reached_is_told_with_why(
    make: Callable[..., Sums], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        make(**{"max_restarts": 0} | options)


@pytest.mark.slow
def test_environments_with_a_shared_server_keep_the_contract(make: Callable[..., Sums]) -> None:
    keeper = make(server=STDIO, server_lives="process")  # else it would end and start again between the checks
    keeper.reset(seed=0)
    keeper.step(tool_call("add", a=1, b=2))
    check_env(Sums, seeds=range(50), server=STDIO, server_lives="process", tool_names=STATELESS)


def test_environments_with_a_server_in_process_keep_the_contract() -> None:
    check_env(Sums, server="tests.support.mcp_server:server", tool_names=STATELESS)


@pytest.mark.slow
def test_nothing_is_left_after_many_episodes_with_faults(make: Callable[..., Sums]) -> None:
    def play(env: McpEnv, actions: Sequence[Message], num_episodes: int) -> int:
        num_failed = 0
        for seed in range(num_episodes):
            env.reset(seed=seed)
            try:
                env.step(actions[seed % len(actions)])
            except EnvironmentFailure:
                num_failed += 1
        return num_failed

    faults = [tool_call("add", a=1, b=2), tool_call("fail"), tool_call("wait", seconds=9.0), tool_call("add", a=1)]
    warm = make(server=mcp_server.server)
    play(warm, faults[:2], 2)
    warm.close()
    before = num_open()
    in_process = make(server=mcp_server.server, call_timeout_s=0.01)
    assert play(in_process, faults, 1000) == 0
    shared = make(server=STDIO, server_lives="process", call_timeout_s=0.2, max_restarts=0)
    assert play(shared, [*faults, tool_call("die", words="")], 10) == 2
    own = make(server=STDIO, max_restarts=0, call_timeout_s=0.2)
    assert play(own, [*faults, tool_call("die", words="")], 5) == 1
    for env in (in_process, shared, own):
        env.close()
    assert num_open() == before


@pytest.mark.slow
def test_a_forked_process_reaches_a_server_of_its_own(make: Callable[..., Sums]) -> None:
    env = make(server=STDIO, server_lives="process")
    env.reset(seed=0)
    env.step(tool_call("count_up"))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, contents(env, tool_call("count_up"))[0].encode())
        env.close()
        os._exit(0)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0
    with open(read, encoding="utf-8") as said:
        assert said.read() == "1"
    assert contents(env, tool_call("count_up")) == ["2"]


def test_a_recipe_names_an_environment_and_its_server() -> None:
    env = make_env("tests.envs.adapters.test_mcp:Sums", {"server": STDIO, "tool_names": ["add"]})
    env.reset(seed=0)


def test_a_table_of_tasks_is_played_with_a_servers_tools() -> None:
    tasks = [{"prompt": f"{a} + {a}?", "answer": str(2 * a)} for a in range(20)]
    options = {"server": "tests.support.mcp_server:server", "tool_names": ["add"], "tasks": tasks, "answer": "answer"}
    env = make_env("agentrl_envs.adapters.mcp:McpTaskEnv", options | {"rewards": ["exact_match"]})
    (first,), _ = env.reset(seed=0, options={"split": "train", "task_index": 3})
    a = int(first["content"].split()[0])
    (reply,), *_ = env.step(tool_call("add", a=a, b=a))
    assert env.step(reply["content"])[1:3] == (1.0, True)
    env.close()
