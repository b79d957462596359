import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentrl.env import run_command
from agentrl.env.subprocesses import CommandResult
from tests.support.each import each
from tests.support.processes import is_alive

pytestmark = pytest.mark.process


def run(code: str, **options: object) -> CommandResult:
    return asyncio.run(run_command([sys.executable, "-c", code], **options))  # type: ignore[arg-type]


def test_a_command_inherits_what_it_needs_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("SHOWN", "1")
    code = "import os; print(*sorted(os.environ.keys() - {'LC_CTYPE'}))"
    names = run(code, env={"SHOWN": "2"}).output.split()
    assert {"PATH", "HOME", "SHOWN"} <= set(names)
    assert not {"OPENAI_API_KEY", "PYTEST_CURRENT_TEST"} & set(names)
    assert run("import os; print(os.environ['SHOWN'])", env={"SHOWN": "2"}).output == "2\n"


DAEMON = """
import os, time
if os.fork():
    os.write(1, b'out')
    time.sleep(0.5)
    os._exit(0)
os.setsid()
open(PID_FILE, 'w').write(str(os.getpid()))
time.sleep(60)
"""


def wait_until_dead(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


# A shell that starts a sleep, writes its id to a file, and goes on to `then`.
def parent(pid_file: Path, then: str) -> list[str]:
    return ["sh", "-c", f"sleep 600 & echo $! > {pid_file}; {then}"]


linux_only = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks processes up in /proc")


def test_output_and_status_are_returned_in_order() -> None:
    result = run("import sys; print('a', flush=True); print('b', file=sys.stderr, flush=True); print('c'); sys.exit(3)")
    assert result == CommandResult(returncode=3, output="a\nb\nc\n")


def test_the_program_reads_its_input() -> None:
    assert run("print(input()[::-1])", stdin="abc\n").output == "cba\n"


def test_a_program_that_leaves_its_input_unread_is_no_error() -> None:
    assert run("print(1)", stdin="x" * 10_000_000) == CommandResult(returncode=0, output="1\n")


def test_the_program_runs_in_its_folder(tmp_path: Path) -> None:
    assert run("import os; print(os.getcwd())", cwd=str(tmp_path)).output.strip() == str(tmp_path.resolve())


def test_output_that_is_no_utf8_is_replaced() -> None:
    assert run("import os; os.write(1, bytes([65, 255, 66]))").output == "A\ufffdB"


def test_a_flood_of_output_is_cut_and_does_not_block() -> None:
    result = run("import sys\nfor _ in range(300): sys.stdout.write('y' * 100_000)", max_output=1234)
    assert (result.returncode, result.output) == (0, "y" * 1234)


def test_an_endless_flood_ends_at_the_deadline() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        run("while True: print('y' * 1000)", timeout_s=1)
    assert time.monotonic() - begun < 50


def test_a_program_that_cannot_be_started_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(run_command(["/no/such/program"]))


@linux_only
def test_children_die_at_the_deadline(tmp_path: Path) -> None:
    timeout_s = 0.5
    while not (tmp_path / "pid").exists():  # a busy machine may not have started the shell by then
        with pytest.raises(TimeoutError):
            asyncio.run(run_command(parent(tmp_path / "pid", "sleep 600"), timeout_s=timeout_s))
        timeout_s *= 4
    assert wait_until_dead(int((tmp_path / "pid").read_text()))


@linux_only
def test_children_die_when_the_program_itself_ends(tmp_path: Path) -> None:
    begun = time.monotonic()
    result = asyncio.run(run_command(parent(tmp_path / "pid", "sleep 0.5; echo done")))  # the child holds the pipe open
    assert result == CommandResult(returncode=0, output="done\n")
    assert time.monotonic() - begun < 50
    assert wait_until_dead(int((tmp_path / "pid").read_text()))


@linux_only
def test_children_die_on_cancellation(tmp_path: Path) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(run_command(parent(tmp_path / "pid", "sleep 60")))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert wait_until_dead(int((tmp_path / "pid").read_text()))


SLOW_START = """
import asyncio, asyncio.base_subprocess
transport = asyncio.base_subprocess.BaseSubprocessTransport
connect = transport._connect_pipes

async def later(*args):
    await asyncio.sleep(0.3)
    await connect(*args)

transport._connect_pipes = later
"""


@pytest.mark.slow
@linux_only
@each("before", ["", SLOW_START])
def test_children_die_with_the_process_that_waits_for_them(tmp_path: Path, before: str) -> None:
    file = tmp_path / "pid"
    script = f"""
{before}
import contextlib, threading, time
from pathlib import Path
from agentrl.env import run_command
from agentrl.env.background import run_in_background

argv, file = {parent(file, "sleep 60")}, Path({str(file)!r})

def tool():
    with contextlib.suppress(TimeoutError):
        run_in_background(run_command(argv, timeout_s=600), timeout_s=600)

threading.Thread(target=tool, daemon=True).start()
while not (file.exists() and file.read_text()):
    time.sleep(0.02)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert wait_until_dead(int(file.read_text()))


@linux_only
@each("turns", range(6))
def test_nothing_is_left_of_a_command_that_is_cancelled_as_it_starts(turns: int) -> None:
    mark = f"600.{os.getpid()}{turns}"

    async def cancelled() -> None:
        task = asyncio.create_task(run_command(["sh", "-c", f"sleep {mark} & sleep 60"]))
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.3)  # the shell comes further than the event loop
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)

    asyncio.run(cancelled())
    found = [process.pid for process in psutil.process_iter() if mark in " ".join(_arguments(process))]
    assert all(map(wait_until_dead, found))  # what was killed a moment ago may still be there


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return []


@linux_only
def test_a_daemon_that_keeps_the_output_open_does_not_keep_us(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    begun = time.monotonic()
    result = run(DAEMON.replace("PID_FILE", repr(str(pid_file))))
    assert result == CommandResult(returncode=0, output="out")
    assert time.monotonic() - begun < 50
    os.kill(int(pid_file.read_text()), signal.SIGKILL)  # it is ours to end: it left the group
