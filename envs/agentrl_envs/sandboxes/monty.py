"""Monty: an interpreter of Python, written in Rust, that has no host to get out to."""

import atexit
import datetime as dt
import os
import threading
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from agentrl import ExecResult, Language, SandboxConfig, UserError
from agentrl_envs.sandboxes.files import Files, FileSandbox, plain_path

if TYPE_CHECKING:
    from pydantic_monty import Monty as Pool
    from pydantic_monty import OSAccess

_FOLDER = PurePosixPath("/work")
_CLOCK = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
_MAX_HOST_CALLS = 1000
"""Files opened, read and written, and seconds slept, by one program."""
_MAX_DEPTH = 20
"""Depth of folders in folders."""


class MontyConfig(SandboxConfig):
    """Most of the language and some of the library, in a process that can only ask for the sandbox's files.

    Time stands still in it and its random numbers begin alike, so the same code does the same again.
    """

    name: Literal["monty"] = "monty"
    max_recursion: Annotated[int, Field(ge=10, le=5000)] = 500
    """Calls within calls."""

    def build(self) -> "Monty":
        """Return a new sandbox.

        Raises:
            UserError: if pydantic-monty is not installed.
        """
        try:
            import pydantic_monty  # noqa: F401 - an extra
        except ImportError as error:
            raise UserError(
                f"sandbox: 'monty' needs the package pydantic-monty ({error}): pip install 'agentrl[monty]'"
            ) from error
        return Monty(self)


class Monty(FileSandbox):
    """Each `exec` is a session of an interpreter's process, which this process keeps for the next."""

    languages = ("python",)

    def __init__(self, config: MontyConfig) -> None:
        super().__init__(config)
        self.config = config

    def _run(self, code: str, language: Language, files: Files) -> tuple[ExecResult, Files | None]:  # noqa: ARG002
        from pydantic_monty import MontyCrashedError, MontyError

        config = self.config
        said, host = _Said(config.max_output_bytes), _host(files, self.max_bytes, timeout_s=config.timeout_s)
        limits: Any = {
            "max_feed_duration_secs": config.timeout_s,
            "max_memory": config.max_memory_mb * 1_000_000,
            "max_recursion_depth": config.max_recursion,
            "max_suspensions": _MAX_HOST_CALLS,
        }
        policy: Any = {"datetime": _CLOCK, "sleep": "zero", "random_start": {"seed": 0}}
        returncode = 0
        timed_out = False
        words = ""
        try:
            with _interpreters.get().checkout(
                limits=limits, os_policy=policy, assert_message_annotations=False
            ) as session:
                session.feed_run(code, os=host, cwd=str(_FOLDER), print_callback=said)
        except MontyCrashedError as error:
            returncode = 1
            timed_out = error.timed_out
            words = f"{error}\n"
        except MontyError as error:
            words = f"{getattr(error, 'display', error.__str__)()}\n"
            returncode, timed_out = 1, words.startswith("TimeoutError: feed time limit")
        said("stderr", words)
        result = ExecResult(output=said.text(), returncode=returncode, timed_out=timed_out, num_cut=said.num_cut)
        return result, None if timed_out else _left(host)


class _Said:
    """Keeps the first output, and counts the rest."""

    def __init__(self, limit: int) -> None:
        self.num_cut = 0
        self._kept, self._limit = bytearray(), limit

    def __call__(self, stream: str, text: str) -> None:  # noqa: ARG002 - both streams are one output
        data = text.encode(errors="replace")
        piece = data[: self._limit - len(self._kept)]
        self._kept += piece
        self.num_cut += len(data) - len(piece)

    def text(self) -> str:
        return self._kept.decode(errors="replace")


def _host(files: Files, max_bytes: int, *, timeout_s: float) -> "OSAccess":
    """Return what a session may ask for, for a while: these files, and so many bytes written."""
    from pydantic_monty import MemoryFile, OSAccess

    class Host(OSAccess):
        left = max_bytes
        deadline: float | None = None

        def __call__(self, *, args: tuple[Any, ...], **call: Any) -> Any:
            # The interpreter's own clock stands still while it asks. A wait for a free one is over by now.
            self.deadline = self.deadline or time.monotonic() + timeout_s
            if time.monotonic() > self.deadline:
                raise TimeoutError("time limit exceeded")
            if any(isinstance(a, PurePosixPath) and (len(str(a)) > 255 or len(a.parts) > _MAX_DEPTH) for a in args):
                raise OSError(36, "File name too long")
            return super().__call__(args=args, **call)

        def _write_file(self, path: PurePosixPath, data: bytes | str) -> None:
            self._charge(data)
            super()._write_file(path, data)

        def _append(self, path: PurePosixPath, data: bytes | str) -> None:
            self._charge(data)
            super()._append(path, data)

        def _charge(self, data: bytes | str) -> None:
            self.left -= len(data) if isinstance(data, bytes) else len(data.encode(errors="replace"))
            if self.left < 0:
                raise OSError(28, "No space left on device")

    host = Host([MemoryFile(_FOLDER / path, content) for path, content in files.items() if not path.endswith("/")])
    for folder in (".", *(path for path in files if path.endswith("/"))):
        host.path_mkdir(_FOLDER / folder, parents=True, exist_ok=True)
    return host


def _left(host: "OSAccess") -> Files:
    """Return the files and folders that a session left."""
    files: Files = {}
    folders = [_FOLDER]
    while folders:
        for path in host.path_iterdir(folders.pop()):
            place = plain_path(str(path.relative_to(_FOLDER)))
            if host.path_is_dir(path):
                folders.append(path)
                files[f"{place}/"] = b""
            else:
                files[place] = host.path_read_bytes(path)
    return files


class _Interpreters:
    """Those of this process, from the first `exec` on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._pid = 0

    def get(self) -> "Pool":
        from pydantic_monty import Monty

        if self._pool is not None and self._pid != os.getpid():  # its threads are not here: a call would wait for ever
            raise UserError(
                "sandbox: 'monty' does not survive a fork, and this process was forked from one in which it ran; "
                "start processes by 'spawn' or 'forkserver'"
            )
        with self._lock:
            if self._pool is None:
                self._pool, self._pid = Monty(), os.getpid()
                self._pool.__enter__()
                atexit.register(self._close)
            return self._pool

    def _close(self) -> None:
        if self._pool is not None and self._pid == os.getpid():
            self._pool.__exit__(None, None, None)


_interpreters = _Interpreters()
