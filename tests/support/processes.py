"""Commands in processes of their own, forked from one that has imported what takes seconds."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# For all processes that are forked, by whichever test.
multiprocessing.set_forkserver_preload(
    [__name__, "agentrl.cli", "agentrl.run.loop", "accelerate", "torch.distributed.fsdp", "pytest", "hypothesis"]
)
START_METHOD = "forkserver"
_CONTEXT = multiprocessing.get_context("forkserver")


class Command:
    """`agentrl ...`, started as `subprocess.Popen` would start it; its standard error is kept in a file."""

    def __init__(self, *arguments: object) -> None:
        handle, name = tempfile.mkstemp()
        os.close(handle)
        self._errors = Path(name)
        self._process = _CONTEXT.Process(target=_enter, args=(list(map(str, arguments)), name, os.getcwd()))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or less the signal that ended it; None while it runs."""
        return self._process.exitcode

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
        if self.returncode is None:
            raise subprocess.TimeoutExpired("agentrl", timeout or 0.0, stderr=self._errors.read_bytes())
        return self._errors.read_text()

    def finish(self, timeout: float = 200) -> str:
        """Wait for it to end well; return its standard error."""
        errors = self.wait(timeout)
        assert self.returncode == 0, errors
        return errors


def _enter(arguments: list[str], errors: str, folder: str) -> None:
    with open(errors, "wb") as file, open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    os.chdir(folder)
    from agentrl.cli import main

    main(arguments)
