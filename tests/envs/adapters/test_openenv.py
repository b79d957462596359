import http.server
import json
import os
import random
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl import EnvironmentFailure, UserError, tool_call
from agentrl.testing import check_env
from tests.support.ports import free_port
from tests.support.threads import wait_until

pytest.importorskip("websockets", reason="needs websockets: pip install 'agentrl[openenv]'")

from agentrl_envs.adapters.openenv import OpenEnv
from tests.support.each import each

pytestmark = pytest.mark.process

SUPPORT = Path(__file__).parents[2] / "support"
PYTHON = os.environ.get("AGENTRL_OPENENV_PYTHON")
"""Of a virtual environment with openenv or openenv-core, which are hundreds of megabytes: not part of `make test`."""


class Server:
    """A server in a process of its own."""

    def __init__(self, python: str, script: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen([python, SUPPORT / script, str(self.port)])
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None
        try:
            with urllib.request.urlopen(f"{self.url}/schema", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def start(kind: str) -> Server:
    if kind == "stand-in":
        return Server(sys.executable, "openenv_stand_in.py")
    if PYTHON is None:
        pytest.skip("needs a Python with openenv-core, named by AGENTRL_OPENENV_PYTHON")
    return Server(PYTHON, "openenv_server.py")


@pytest.fixture(scope="module", params=["stand-in", "openenv"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = start(request.param)
    yield server
    server.close()


def secret(env: OpenEnv) -> int:
    return random.Random(env.seed).randrange(100)


@pytest.mark.slow
def test_its_environments_keep_the_contract(server: Server) -> None:
    check_env(OpenEnv, seeds=range(50), url=server.url)


def test_an_agent_that_searches_wins(server: Server) -> None:
    env = OpenEnv(url=server.url, prompt="Play.")
    for seed in range(10):
        (first,), _ = env.reset(seed=seed)
        assert first["content"] == "Play.\nGuess a number from 0 to 99."
        low, high, terminated, info = 0, 99, False, dict[str, Any]()
        while not terminated:
            middle = (low + high) // 2
            (reply,), reward, terminated, _, info = env.step(tool_call("act", number=middle))
            low, high = (middle + 1, high) if reply["content"] == "higher" else (low, middle - 1)
        assert (reply["content"], reward, info["success"]) == ("Right.", 1.0, True)
    env.close()


def test_what_the_server_refuses_is_an_error_and_the_session_goes_on(server: Server) -> None:
    env = OpenEnv(url=server.url)
    env.reset(seed=0)
    for arguments, words in (({"number": "x"}, "not of type 'integer'"), ({}, "required"), ({"number": 2**70}, "")):
        (reply,), _, terminated, _, info = env.step(tool_call("act", **arguments))
        if words:
            assert (reply["content"].startswith("Error: "), words in reply["content"]) == (True, True)
            assert (terminated, info["tool_errors"]) == (False, 1)
    assert env.step("hello")[0][0]["content"] == "Call act."
    assert env.step(tool_call("act", number=secret(env)))[2]
    env.close()


def test_a_fork_is_a_session_that_took_the_same_actions(server: Server) -> None:
    env = OpenEnv(url=server.url)
    env.reset(seed=0)
    env.step(tool_call("act", number=0))
    fork = env.fork()
    assert fork.step(tool_call("act", number=secret(env)))[2]
    assert env.step(tool_call("act", number=secret(env)))[2]
    env.close()
    fork.close()


def test_no_socket_is_left(server: Server) -> None:
    env = OpenEnv(url=server.url)
    env.reset(seed=0)
    env.close()
    before = psutil.Process().num_fds()
    for seed in range(100):
        env.reset(seed=seed)
        env.step(tool_call("act", number=1))
    env.close()
    assert psutil.Process().num_fds() == before


@each("kind", ["stand-in", "openenv"])
def test_a_server_that_dies_fails_the_episode_and_a_new_one_serves_the_next(kind: str) -> None:
    server = start(kind)
    env = OpenEnv(url=server.url)
    env.reset(seed=0)
    with pytest.raises(EnvironmentFailure, match=r"the OpenEnv server http.* does not answer"):
        env.step(tool_call("act", number=666))
    with pytest.raises(EnvironmentFailure, match="cannot be reached"):
        env.reset(seed=0)
    env.close()
    server.close()
    with pytest.raises(UserError, match=r"url: .* is no OpenEnv server"):
        OpenEnv(url=server.url)


@contextmanager
def schema_server(said: Any) -> Iterator[str]:
    """Serve a schema and nothing else."""

    class Schema(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Schema) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_an_action_without_fields_is_a_call_without_arguments() -> None:
    with schema_server({"action": {"type": "object"}}) as url:
        env = OpenEnv(url=url)
    assert env.tools[0]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert env.answer("anything") == "Call act."


def test_an_end_without_a_reward_is_none_that_was_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    with schema_server({"action": {"type": "object"}}) as url:
        env = OpenEnv(url=url)
    ends = iter([False, True])
    monkeypatch.setattr(env, "act", lambda _: {"observation": {"hint": "?"}, "reward": None, "done": next(ends)})
    monkeypatch.setattr(env, "_is_over", False)
    assert env.step(tool_call("act"))[1:3] == (0.0, False)
    assert env.step(tool_call("act"))[1:3] == (None, True)


@each("said", [[], {}, {"action": None}, {"action": {"properties": ["number"]}}])
def test_a_server_of_something_else_is_told_in_a_line(said: Any) -> None:
    with schema_server(said) as url, pytest.raises(UserError, match=r"^url: .* is no OpenEnv server: "):
        OpenEnv(url=url)
