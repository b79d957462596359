"""Programs that play an episode: what they are given, and how they end."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.agent.clients import AgentError, Command, Function, Service
from agentrl.agent.config import AgentConfig
from agentrl.agent.session import AgentSession
from agentrl.errors import ConfigError
from tests.support.each import each

SESSION = AgentSession(
    base_url="http://127.0.0.1:9/s/key/v1",
    api_key="key",
    anthropic_url="http://127.0.0.1:9/s/key",
    seed=7,
    split="train",
    report=lambda _: None,
)
TASK = {"question": "2 + 2?", "number": 4}


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def run(client: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await client.run(TASK, SESSION)

    return asyncio.run(bounded())


def test_a_command_finds_its_task_its_address_and_its_files_and_is_checked(tmp_path: Path) -> None:
    (tmp_path / "seen").write_text("here")
    code = """
import json, os, pathlib, sys
assert sys.argv[1:] == ["2 + 2?", "n=4"], sys.argv
assert json.loads(os.environ["AGENTRL_TASK"])["number"] == 4
assert os.environ["OPENAI_BASE_URL"].endswith("/v1") and os.environ["OPENAI_API_KEY"] == "key"
assert not os.environ["ANTHROPIC_BASE_URL"].endswith("/v1")
assert os.environ["MORE"] == "yes" and "SECRET" not in os.environ
assert pathlib.Path("seen").read_text() == "here"
pathlib.Path("written").write_text("done")
"""
    check = python("import pathlib, sys; sys.exit(pathlib.Path('written').read_text() != 'done')")
    client = Command(
        argv=python(code, "{prompt}", "n={number}"),
        variables={"MORE": "yes"},
        files=tmp_path,
        prompt="question",
        check=check,
    )
    assert run(client) == {"reward": 1.0, "success": True}
    assert not (tmp_path / "written").exists()
    failing = Command(argv=python(""), variables={}, check=python("raise SystemExit(1)"))
    assert run(failing) == {"reward": 0.0, "success": False}


def test_a_command_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="exit status 3: no model") as raised:
        run(Command(argv=python("import sys; print('no model'); sys.exit(3)"), variables={}))
    assert raised.value.kind == "exit status 3"


def test_a_command_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    code = f"""
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(told)!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""

    async def cancelled() -> None:
        running = asyncio.create_task(Command(argv=python(code), variables={}).run(TASK, SESSION))
        while not told.exists() or len(told.read_text().split()) < 2:
            await asyncio.sleep(0.02)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    for pid in map(int, told.read_text().split()):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(timeout=30)


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_a_command_dies_with_a_process_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    inner = f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); time.sleep(600)"
    outer = f"""
import asyncio, sys
from agentrl.agent.clients import Command
from tests.agent.test_clients import SESSION, TASK
asyncio.run(Command(argv=[sys.executable, "-c", {inner!r}], variables={{}}).run(TASK, SESSION))
"""
    trainer = psutil.Popen([sys.executable, "-c", outer], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 120
    while not told.exists() or not told.read_text():
        assert trainer.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(told.read_text())).wait(timeout=30)


@contextmanager
def service(status: int, answer: bytes) -> Iterator[tuple[str, list[Any]]]:
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/run", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_service_is_posted_the_task_and_answers_with_its_reward() -> None:
    with service(200, b'{"reward": 0.5}') as (url, asked):
        assert run(Service(url=url, timeout_s=60)) == {"reward": 0.5}
    assert asked[0]["task"] == TASK
    assert asked[0]["base_url"] == SESSION.base_url


def test_a_service_that_fails_says_how() -> None:
    with service(500, b"out of memory") as (url, _), pytest.raises(AgentError, match="500: out of memory"):
        run(Service(url=url, timeout_s=60))
    with pytest.raises(AgentError, match=r"agent\.url"):
        run(Service(url="http://127.0.0.1:9/run", timeout_s=60))


def test_a_function_may_leave_the_interpreter_and_may_return_a_coroutine() -> None:
    def leaves(task: dict[str, Any], session: AgentSession) -> None:
        raise SystemExit(2)

    with pytest.raises(SystemExit):
        run(Function(leaves))

    def later(task: dict[str, Any], session: AgentSession) -> Any:
        return asyncio.sleep(0, result=task["number"])

    assert run(Function(later)) == 4


@each(
    ("fields", "words"),
    [
        ({}, "name one of run, command and url, got none"),
        ({"run": "json:loads", "url": "http://x"}, "got run and url"),
        ({"run": "json:loads", "check": ["true"]}, "belongs to a command"),
        ({"url": "http://x", "processes": 2}, "processes: belongs to run"),
        ({"command": []}, "it is empty"),
        ({"command": ["no-such-program-here"]}, "no program 'no-such-program-here'"),
        ({"command": ["true"], "files": "/no/such/folder"}, "there is no folder /no/such/folder"),
        ({"command": ["true"], "check": ["true"], "reward": "exact_match"}, "remove one"),
        ({"run": "json:loads", "host": "0.0.0.0"}, "set public_host"),
    ],
)
def test_a_section_that_cannot_be_carried_out_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AgentConfig.model_validate({"tasks": [{"question": "q"}], **fields})


def test_a_program_that_is_none_is_named() -> None:
    config = AgentConfig.model_validate({"tasks": [{"question": "q"}, {"question": "r"}], "run": "json:no_such"})
    with pytest.raises(ConfigError, match=r"agent\.run"):
        config.client()
    with pytest.raises(ConfigError, match=r"agent\.run: 'sys:path' is no function"):
        config.model_copy(update={"run": "sys:path"}).client()
