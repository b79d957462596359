"""Start of vLLM's own HTTP server. Names are those of vLLM 0.32."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx2
import torch

from agentrl.engine.vllm.common import BACKEND, HOW_TO_INSTALL, engine_arguments, is_installed
from agentrl.errors import ConfigError, EngineError

_LOG_CHARACTERS = 4000
"""Largest number of characters of the server's log in an error."""


@dataclass(slots=True, kw_only=True)
class Server:
    """A running vLLM server; close it, or use it as a context manager."""

    url: str
    process: "subprocess.Popen[bytes]"
    guard: "subprocess.Popen[bytes] | None" = None
    """Process that ends the server if this process is killed."""

    def close(self) -> None:
        """End the server and every process it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.guard is not None:
            self.guard.kill()
            self.guard.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_server(model: Path, *, port: int, log: Path, options: Mapping[str, Any], timeout_s: float) -> Server:
    """Start vLLM's server in a process group of its own, and wait until it answers.

    Anyone who reaches the port can run code: it listens on this machine only, unless `options` has a `host`.

    Args:
        model: folder of a transformers model.
        port: port of the server.
        log: file for the server's output.
        options: further arguments, named as in vLLM's `EngineArgs`, such as max_model_len; they override ours.
        timeout_s: deadline of the start, in seconds.

    Raises:
        ConfigError: when vLLM is not installed, or the port is taken.
        EngineError: when the server ends or does not answer in time, with the end of its log.
    """
    if not is_installed():
        raise ConfigError(f"engine.name: vLLM is not installed; {HOW_TO_INSTALL}")
    arguments = _arguments(model, port) | dict(options)
    _check_port(str(arguments["host"]), port)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *_command_line(arguments)]
    host = "127.0.0.1" if arguments["host"] == "0.0.0.0" else arguments["host"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment() | os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
            start_new_session=True,
        )
    server = Server(url=f"http://{f'[{host}]' if ':' in host else host}:{port}", process=process)
    try:
        server.guard = subprocess.Popen(  # ends the server even if this process is killed
            [sys.executable, str(Path(__file__).with_name("guard.py")), str(process.pid)],
            stdin=subprocess.PIPE,  # never written to; it closes with this process
            start_new_session=True,
        )
        _wait(server, log, timeout_s)
    except BaseException:
        server.close()
        raise
    return server


def _arguments(model: Path, port: int) -> dict[str, Any]:
    is_cpu = not torch.cuda.is_available()
    arguments = engine_arguments(is_cpu=is_cpu) | {
        "model": str(model.resolve()),
        "host": "127.0.0.1",
        "port": port,
        "enable_scale_out": True,
        "weight_transfer_config": {"backend": BACKEND},
        "enable_prompt_tokens_details": True,  # number of cached tokens
        "disable_uvicorn_access_log": True,
    }
    return arguments | ({"dtype": "float32"} if is_cpu else {})


def _environment() -> dict[str, str]:
    """Return defaults of environment variables that the user has not set."""
    environment = {"VLLM_NO_USAGE_STATS": "1"}
    if not torch.cuda.is_available():
        # Threads that spin on shared cores slow everything down; compiling takes 18 s.
        environment |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # The scheduler's process computes too: another process takes 15 s of a core to start.
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return environment


def _command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Format arguments for vLLM's command line; leave out those that are None."""
    line: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list | tuple):
            line += [f"--{option}", *map(str, value)]
        elif value is not None:
            line += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return line


def _check_port(host: str, port: int) -> None:
    """Raise for a port in use: the other process's answers would be taken for the server's."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"engine.server.url: cannot listen on {host}:{port}: {error}") from error


def _wait(server: Server, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not _is_healthy(server.url):
        status = server.process.poll()
        if status is not None or time.monotonic() > deadline:
            end = log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:]
            what = f"was not up within {timeout_s:g} s" if status is None else f"ended with status {status}"
            raise EngineError(f"vLLM's server {what}; the end of {log}:\n{end}")
        time.sleep(0.1)


def _is_healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5.0, trust_env=False).is_success
    except httpx2.RequestError:
        return False
