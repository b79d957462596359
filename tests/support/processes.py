"""Commands in processes of their own, forked from one that has imported what takes seconds."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from unittest.mock import patch

import psutil

if TYPE_CHECKING:
    from tests.support.vllm_forks import VLLMForks

# For all processes that are forked, by whichever test.
multiprocessing.set_forkserver_preload(
    [__name__, "agentrl.cli", "agentrl.run.loop", "accelerate", "torch.distributed.fsdp", "pytest", "hypothesis"]
)
START_METHOD = "forkserver"
_CONTEXT = multiprocessing.get_context("forkserver")
T = TypeVar("T")


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that is dead and waits to be reaped does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


def in_process(function: Callable[[], T]) -> T:
    """Call a function of a test's module in a process of its own, and return what it returns."""
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        return pool.submit(function).result()


class Command:
    """`agentrl ...`, started as `subprocess.Popen` would start it; what it prints is kept in files."""

    def __init__(self, *arguments: object, vllm: "VLLMForks | None" = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="agentrl-command-"))
        self._process = _CONTEXT.Process(
            target=_command, args=(list(map(str, arguments)), self._folder, os.getcwd(), dict(os.environ), vllm)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or less the signal that ended it; None while it runs."""
        return self._process.exitcode

    @property
    def out(self) -> str:
        """What it has written to standard output so far."""
        return _text(self._folder / "out")

    @property
    def server(self) -> psutil.Process:
        """The server that `agentrl serve` has started."""
        return psutil.Process(int((self._folder / "server").read_text()))

    def member(self, index: int) -> psutil.Process:
        """Return a process that `agentrl launch` has started, by its number."""
        return psutil.Process(int((self._folder / f"member-{index}").read_text()))

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
        self._process.join()

    def check_runs(self) -> None:
        """Fail where it has ended."""
        assert self.returncode is None, self.wait()

    def wait(self, timeout: float | None = None) -> str:
        """Wait for its end, and return what it has written to standard error.

        Raises:
            subprocess.TimeoutExpired: after so many seconds.
        """
        self._process.join(timeout)
        errors = _text(self._folder / "err")
        if self.returncode is None:
            raise subprocess.TimeoutExpired("agentrl", timeout or 0.0, stderr=errors.encode())
        return errors

    def finish(self, timeout: float = 400) -> str:
        """Wait for it to end well; return its standard error."""
        errors = self.wait(timeout)
        assert self.returncode == 0, errors
        return errors


class ForkedPython:
    """A function's process, forked where others start Python, with what they use of `subprocess.Popen`. It leads a group."""

    def __init__(
        self, function: Callable[[], object], *, environment: Mapping[str, str], out: Path, err: Path | None = None
    ) -> None:
        has_begun, begins = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_lead, args=(function, (out, err or out), os.getcwd(), dict(environment), begins)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        has_begun.recv()  # its group may be ended

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return status


def _command(
    arguments: list[str], folder: Path, cwd: str, environment: dict[str, str], vllm: "VLLMForks | None"
) -> None:
    _become((folder / "out", folder / "err"), cwd, environment)
    if arguments[:1] == ["launch"]:
        patch.object(forkserver._forkserver, "ensure_running").start()  # it is ours that runs; else it starts another
        from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

        patch.object(SubprocessHandler, "_popen", lambda _, given, env: _member(given, env, folder)).start()
    with nullcontext() if vllm is None else vllm.used(folder / "server"):
        _main(arguments)


def _member(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> ForkedPython:
    """Fork one of the processes of `agentrl launch`, where torch's launcher starts Python."""
    assert tuple(arguments[:4]) == (sys.executable, "-u", "-m", "agentrl")
    member = ForkedPython(
        partial(_main, list(arguments[4:])), environment=environment, out=folder / "out", err=folder / "err"
    )
    (folder / f"member-{environment['RANK']}").write_text(str(member.pid))
    return member


def _main(arguments: list[str]) -> None:
    from agentrl.cli import main

    main(arguments)


def _lead(
    function: Callable[[], object],
    streams: tuple[Path, Path],
    cwd: str,
    environment: dict[str, str],
    begins: "multiprocessing.connection.Connection",
) -> None:
    os.setsid()
    begins.send(None)
    _become(streams, cwd, environment)
    function()


def _become(streams: tuple[Path, Path], cwd: str, environment: Mapping[str, str]) -> None:
    """Take on what a process that is started is given: streams, working directory and environment."""
    for number, path in enumerate(streams, start=1):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False, buffering=1) for number in (1, 2))  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
