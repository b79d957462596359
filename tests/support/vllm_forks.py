"""vLLM's servers, forked from a process that has imported vLLM: imports take most of the start of their two processes."""

import multiprocessing
import os
import runpy
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from agentrl.engine.vllm import launch as vllm_launch
from tests.support.processes import ForkedPython

_SERVER = "vllm.entrypoints.openai.api_server"
_PRELOAD = [
    __name__,
    _SERVER,
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "agentrl.engine.vllm.worker",
]


class VLLMForks:
    """A process from which servers are forked. It ends with those that know it."""

    def __init__(self, address: str | None = None) -> None:
        """Start it; with an address, another process has."""
        self._forks = cast("Any", forkserver.ForkServer())
        self._lock = Lock()
        self._forks.set_forkserver_preload(_PRELOAD)
        if address is None:
            with patch.dict(os.environ, vllm_launch._environment()):
                self._forks.ensure_running()
        else:
            self._forks._forkserver_address = address
            self._forks._forkserver_alive_fd = os.pipe()[1]
            self._forks.ensure_running = lambda: None

    def __reduce__(self) -> tuple[type["VLLMForks"], tuple[str]]:
        return VLLMForks, (self._forks._forkserver_address,)

    @contextmanager
    def used(self, pid_file: Path | None = None) -> Iterator[None]:
        """Let `start_server` fork, where it would start Python, and write down whom."""

        def popen(command: Sequence[str], **options: Any) -> Any:
            if list(command[1:3]) != ["-m", _SERVER]:
                return subprocess.Popen(command, **options)
            with self._lock, patch.object(forkserver, "connect_to_new_process", self._forks.connect_to_new_process):
                server = ForkedPython(
                    partial(_serve, command[2:]), environment=options["env"], out=Path(options["stdout"].name)
                )
            if pid_file is not None:
                pid_file.write_text(str(server.pid))
            return server

        with patch.object(vllm_launch, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen})):
            yield


def _serve(arguments: Sequence[str]) -> None:
    real = multiprocessing.get_context
    # What computes is forked too; vLLM on a CPU starts Python for it, which inherits no socket.
    patch.object(
        multiprocessing, "get_context", lambda method=None: real("fork" if method == "spawn" else method)
    ).start()
    os.register_at_fork(after_in_child=_leave_sockets)
    sys.argv = list(arguments)
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)


def _leave_sockets() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(nothing, number)
