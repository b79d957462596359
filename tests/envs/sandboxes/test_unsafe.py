"""What the option named `unsafe` holds, and what it does not: the column of docs/environments.md."""

import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentrl import EnvironmentFailure, Sandbox
from agentrl_envs.sandboxes.unsafe import UnsafeConfig
from tests.support.processes import is_alive
from tests.support.threads import wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with UnsafeConfig(timeout_s=30).build() as sandbox:
        yield sandbox


def test_code_reaches_the_files_the_network_and_the_processes_of_its_host(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("in the open")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import os, socket
print(open({str(tmp_path / "secret")!r}).read())
open({str(tmp_path / "written")!r}, "w").write("by code")
socket.create_connection(("127.0.0.1", {port})).sendall(b"hello")
os.kill({os.getpid()}, 0)
print(len(os.listdir("/proc/{os.getpid()}/fd")) > 2)
"""
        assert sandbox.exec(code).output == "in the open\nTrue\n"
        server.settimeout(10)
        assert server.accept()[0].recv(5) == b"hello"
    assert (tmp_path / "written").read_text() == "by code"


def test_it_inherits_neither_the_environment_nor_descriptors(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        seen = sandbox.exec(
            "import os\nprint(os.environ.get('TOKEN'), [os.readlink(f'/proc/self/fd/{n}') for n in (0, 1)])"
        )
        names = sandbox.exec(
            "import os\nfor n in os.listdir('/proc/self/fd'): print(os.path.realpath(f'/proc/self/fd/{n}'))"
        )
    assert seen.output.startswith("None ")
    assert str(tmp_path / "open") not in names.output


def test_a_signal_that_is_ignored_does_not_help(sandbox: Sandbox) -> None:
    with UnsafeConfig(timeout_s=1).build() as brief:
        begun = time.monotonic()
        result = brief.exec("import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass")
        assert (result.timed_out, time.monotonic() - begun < 20) == (True, True)


def test_a_daemon_outlives_its_exec(sandbox: Sandbox, tmp_path: Path) -> None:
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for n in range(3): os.close(n)
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
"""
    sandbox.exec(code)
    wait_until(lambda: (tmp_path / "pid").is_file() and bool((tmp_path / "pid").read_text()))
    daemon = psutil.Process(int((tmp_path / "pid").read_text()))
    assert daemon.is_running()
    daemon.send_signal(signal.SIGKILL)
    daemon.wait(20)


WAITS = "import os, time\nopen({path!r}, 'w').write(f'{{os.getpid()}}.')\ntime.sleep(600)"
"""Says who it is, and waits."""


def wait_for(file: Path) -> int:
    """Return the process whose number a program writes."""
    wait_until(lambda: file.is_file() and file.read_text(encoding="utf-8").endswith("."))
    return int(file.read_text(encoding="utf-8")[:-1])


@pytest.mark.parametrize(("end", "status"), [("", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)])
def test_what_runs_ends_with_the_process_that_waits_for_it(end: str, status: int, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = f"""
import os, signal, threading, time
from pathlib import Path
from agentrl_envs.sandboxes.unsafe import UnsafeConfig

sandbox, file = UnsafeConfig(timeout_s=600).build(), Path({str(file)!r})
threading.Thread(target=sandbox.exec, args=({WAITS.format(path=str(file))!r},), daemon=True).start()
while not (file.is_file() and file.read_text().endswith(".")):
    time.sleep(0.02)
{end}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (status, "")
    wait_until(lambda: not is_alive(wait_for(file)))


def test_a_program_is_killed_whose_outputs_cannot_be_read(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"

    class NoneLeft(selectors.DefaultSelector):
        def __init__(self) -> None:
            wait_for(file)
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(selectors, "DefaultSelector", NoneLeft)
    with pytest.raises(EnvironmentFailure, match=r"'unsafe' could not run code: OSError.*Too many open files"):
        sandbox.exec(WAITS.format(path=str(file)))
    assert not is_alive(wait_for(file))


def test_names_that_no_disk_holds_are_the_callers_fault(sandbox: Sandbox) -> None:
    sandbox.write("a", "one")
    sandbox.write("a/b", "within it")
    with pytest.raises(ValueError, match=r"^a/b: ") as caught:
        sandbox.exec("print(1)")
    assert not isinstance(caught.value, EnvironmentFailure)


def test_files_out_of_reach_stay_out(sandbox: Sandbox) -> None:
    code = """
import os
open("kept", "w").write("here")
for _ in range(30):  # its path grows longer than any call takes
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
    open("f" * 200, "w").write("far")
"""
    assert sandbox.exec(code).returncode == 0
    assert sandbox.read("kept") == b"here"
    assert sandbox.exec("print(1)").output == "1\n"
