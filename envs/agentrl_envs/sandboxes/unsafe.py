"""A plain process under limits, ended by a deadline, for code that is trusted: it can read, write and send whatever you can."""

import atexit
import contextlib
import errno
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl import EnvironmentFailure, ExecResult, Language, SandboxConfig, UserError
from agentrl_envs.sandboxes.files import Files, FileSandbox, plain_path

_CHUNK = 1 << 16
_POLL_S = 0.05
"""Seconds between looks whether the program has ended, if something it started holds its outputs open."""
_CLOSED_POLL_S = 0.001
"""The same, if nothing reports the end."""
START_S = 60.0
"""Seconds for what is started before the code is, on a busy machine too."""
_LAST_OUTPUT_S = 1.0
"""Seconds to wait for the end of the outputs once the program is dead."""

_running: set[int] = set()
"""Process groups of what runs now, on threads that the end of this process does not wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Outcome of a program."""

    returncode: int
    """Exit status; negative: the signal that ended it."""
    output: bytes
    """Bytes of its standard output."""
    num_cut: int
    """Bytes of it that are left out."""
    second: bytes
    """Bytes of its standard error."""
    is_cut: bool
    """True if standard error was longer than asked for, so that the program was killed."""
    timed_out: bool


def run_process(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    timeout_s: float,
    max_output: int,
    max_second: int,
    environment: Mapping[str, str],
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
    begins_with: bytes = b"",
) -> Finished:
    """Run a program in its own session and process group, and kill the group at the deadline and when the program ends.

    The deadline counts from the start, or from when standard error holds `begins_with`, if that is given; up to then, it has
    `START_S`.

    The end of this process kills it too, if that is not killed itself.
    Its environment is the one given, and it inherits no descriptor but `pass_fds`. Outputs are read on to the end, but no more
    of them is kept than asked for.

    Raises:
        OSError: when it cannot be started.
    """
    deadline = time.monotonic() + (START_S if begins_with else timeout_s)
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        cwd=cwd,
        pass_fds=pass_fds,
        start_new_session=True,
        bufsize=0,
    ) as process:
        _running.add(process.pid)
        try:
            with contextlib.closing(_Pipes(process, stdin, (max_output, max_second))) as pipes:
                while not (has_ended := _has_ended(process.pid)) and not pipes.is_over and time.monotonic() < deadline:
                    pipes.move(_POLL_S if pipes.are_open else _CLOSED_POLL_S)
                    if begins_with and begins_with in pipes.kept[1]:
                        begins_with, deadline = b"", time.monotonic() + timeout_s
                returncode = _end(process)
                last = time.monotonic() + _LAST_OUTPUT_S
                while pipes.are_open and time.monotonic() < last:
                    pipes.move(_POLL_S)
        finally:
            _end(process)
    (output, second), (num_cut, num_over) = pipes.kept, pipes.num_cut
    return Finished(
        returncode=returncode,
        output=bytes(output),
        num_cut=num_cut,
        second=bytes(second),
        is_cut=num_over > 0,
        timed_out=not has_ended and num_over == 0,
    )


def limit(name: str, value: int) -> str:
    """Return an option of the program prlimit, no higher than this process itself may have."""
    return f"--{name}={allowed(name, value)}"


def allowed(name: str, value: int) -> int:
    """Return a limit, or the highest that this process itself may have."""
    import resource

    most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    return value if most == resource.RLIM_INFINITY else min(value, most)


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Kill the process group, and collect the status: only then can another process have its number."""
    if process.returncode is None:
        _kill(process.pid)
        _running.discard(process.pid)
    return process.wait()


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@atexit.register
def _kill_all() -> None:
    for group in tuple(_running):
        _kill(group)


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, without collecting its status."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _Pipes:
    """Feeds a program's input and reads its two outputs, a little at a time."""

    def __init__(self, process: "subprocess.Popen[bytes]", stdin: bytes, limits: tuple[int, int]) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self.kept = (bytearray(), bytearray())
        self.num_cut = [0, 0]
        self._limits = limits
        self._stdin, self._left = process.stdin.fileno(), memoryview(stdin)
        self._process = process
        self._selector = selectors.DefaultSelector()
        self._open = {process.stdout.fileno(): 0, process.stderr.fileno(): 1}
        for number in self._open:
            self._selector.register(number, selectors.EVENT_READ)
        os.set_blocking(self._stdin, False)
        self._selector.register(self._stdin, selectors.EVENT_WRITE)

    @property
    def are_open(self) -> bool:
        """True while an output may have more to say."""
        return bool(self._open)

    @property
    def is_over(self) -> bool:
        """True if standard error has said too much."""
        return self.num_cut[1] > 0

    def move(self, timeout_s: float) -> None:
        """Wait for a pipe that is ready, and read or write a piece of it."""
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._stdin:
                self._feed()
            else:
                self._read(key.fd, self._open[key.fd])

    def close(self) -> None:
        self._selector.close()

    def _feed(self) -> None:
        try:
            self._left = self._left[os.write(self._stdin, self._left[:_CHUNK]) :] if self._left else self._left
        except BrokenPipeError:
            self._left = self._left[:0]
        if not self._left:
            assert self._process.stdin
            self._selector.unregister(self._stdin)
            self._process.stdin.close()

    def _read(self, number: int, which: int) -> None:
        if not (data := os.read(number, _CHUNK)):
            self._selector.unregister(number)
            del self._open[number]
            return
        kept = self.kept[which]
        piece = data[: max(0, self._limits[which] - len(kept))]
        kept += piece
        self.num_cut[which] += len(data) - len(piece)


_OF_NAMES = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
}
"""Errors of names and modes of files, which are the code's own; other errors are the machine's."""
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
"""The program ends with the thread that runs it, also where this process is killed; what it has started in turn does not."""


class UnsafeConfig(SandboxConfig):
    """No sandbox at all: limits on time, memory, processes, files and output keep mistakes in bounds, and no attack.

    A process that leaves its session outlives its `exec`, and the limit of processes does not hold for root.
    """

    name: Literal["unsafe"] = "unsafe"
    max_processes: Annotated[int, Field(ge=4, le=100_000)] = 1000
    """Processes of yours at the same time, those that run already among them."""

    def build(self) -> "Unsafe":
        """Return a new sandbox.

        Raises:
            UserError: if its limits cannot be set.
        """
        for program in ("prlimit", "setpriv"):
            if shutil.which(program) is None:
                raise UserError(
                    f"sandbox: 'unsafe' sets its limits by the program {program}, which is not installed "
                    "(Linux: apt-get install util-linux); or name another sandbox: 'monty'"
                )
        return Unsafe(self)


class Unsafe(FileSandbox):
    """Each `exec` is a process in a folder of its own, which is removed with it."""

    def __init__(self, config: UnsafeConfig) -> None:
        super().__init__(config)
        self.config = config

    def _run(self, code: str, language: Language, files: Files) -> tuple[ExecResult, Files | None]:
        try:
            done, left = self._finished(code, language, files)
        except OSError as error:
            raise EnvironmentFailure(
                f"the sandbox 'unsafe' could not run code: {type(error).__name__}: {error}"
            ) from error
        result = ExecResult(
            output=done.output.decode(errors="replace"),
            returncode=done.returncode,
            timed_out=done.timed_out,
            num_cut=done.num_cut,
        )
        return result, left

    def _finished(self, code: str, language: Language, files: Files) -> tuple[Finished, Files | None]:
        config = self.config
        program = [sys.executable, "-s"] if language == "python" else ["sh"]
        limits = {"as": config.max_memory_mb * 1_000_000, "cpu": int(config.timeout_s) + 1, "core": 0}
        limits |= {"fsize": self.max_bytes, "nproc": config.max_processes}
        path = f"{Path(sys.executable).resolve().parent}:{os.defpath}"
        options = [limit(name, value) for name, value in limits.items()]
        with tempfile.TemporaryDirectory(prefix="agentrl-unsafe-", ignore_cleanup_errors=True) as top:
            work, main = Path(top, "work"), Path(top, "main")
            work.mkdir()
            _lay_out(files, work)
            main.write_text(code, encoding="utf-8", errors="replace")
            done = run_process(
                ["sh", "-c", 'exec "$@" 2>&1', "sh", *_DIES_WITH_US, "prlimit", *options, "--", *program, str(main)],
                timeout_s=config.timeout_s,
                max_output=config.max_output_bytes,
                max_second=0,
                environment={"PATH": path, "HOME": str(work), "LANG": "C.UTF-8", "PYTHONPATH": str(work)},
                cwd=str(work),
            )
            return done, None if done.timed_out else _collected(work, self.max_bytes)


def _lay_out(files: Files, top: Path) -> None:
    """Write the files.

    Raises:
        ValueError: for names that cannot be those of files, or not beside one another.
    """
    for path, content in files.items():
        try:
            if path.endswith("/"):
                (top / path).mkdir(parents=True, exist_ok=True)
            else:
                (top / path).parent.mkdir(parents=True, exist_ok=True)
                (top / path).write_bytes(content)
        except OSError as error:
            if error.errno in _OF_NAMES:
                raise ValueError(f"{path}: {error.strerror}") from error
            raise


def _collected(top: Path, max_bytes: int) -> Files | None:
    """Return the plain files and folders; links and what is no file, or cannot be read, stay out. None: there are too many."""
    files: Files = {}
    for folder, _, names in os.walk(top, onerror=_unless_of_names):
        at = Path(folder)
        if at != top:
            files[f"{plain_path(str(at.relative_to(top)))}/"] = b""
        for path in (at / name for name in names):
            try:
                if path.is_symlink() or not path.is_file():
                    continue
                max_bytes -= path.stat().st_size
                if max_bytes < 0:
                    return None
                files[plain_path(str(path.relative_to(top)))] = path.read_bytes()
            except OSError as error:
                _unless_of_names(error)
    return files


def _unless_of_names(error: OSError) -> None:
    if error.errno not in _OF_NAMES:
        raise error
