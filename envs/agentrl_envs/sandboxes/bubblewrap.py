"""CPython and a shell in namespaces of Linux, made by bubblewrap for each `exec` and gone with it.

A filter of seccomp refuses the calls of the kernel that namespaces and limits do not hold.
"""

import errno
import itertools
import os
import platform
import shutil
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

import agentrl
from agentrl import ConfigError, EnvironmentFailure, ExecResult, Language, SandboxConfig
from agentrl_envs.data import read_yaml
from agentrl_envs.sandboxes.files import Files, FileSandbox, packed, unpacked
from agentrl_envs.sandboxes.unsafe import Finished, limit, run_process

# Offsets into what the filter sees of a call: its number, the architecture, the lower half of its first argument.
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST = 16
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERROR = 0x00050000

_NEW_NAMESPACE = 0x7E020000 | 0x00000080
"""The flags of `clone` that make a namespace."""
_FAMILIES = (1, 2, 10)
"""Sockets that the namespace of the network holds: unix, inet, inet6. Others (vsock, alg, ...) reach the host or its kernel."""
_X32 = 0x40000000
"""On x86-64, calls from here on are those of another table."""

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)


def architectures() -> list[str]:
    """List the machines (as `platform.machine()` names them) that there are numbers for."""
    return list(_ARCHITECTURES)


@cache
def seccomp_filter(machine: str) -> bytes:
    """Return the filter, as the kernel takes it, for a machine as `platform.machine()` names it."""
    architecture, which = _ARCHITECTURES[machine]
    return b"".join(_program(architecture, which, has_x32=machine == "x86_64"))


def _program(architecture: int, which: int, *, has_x32: bool) -> Iterator[bytes]:
    """Yield one instruction after the other; a jump's two numbers are instructions to skip where it holds, and where not."""
    refuse = _step(_RETURN, _ERROR | errno.EPERM)
    yield _step(_LOAD, _ARCHITECTURE)
    yield _step(_JUMP_EQUAL, architecture, 1, 0)
    yield _step(_RETURN, _KILL)
    yield _step(_LOAD, _NUMBER)
    if has_x32:
        yield _step(_JUMP_AT_LEAST, _X32, 0, 1)
        yield refuse
    for numbers in read_yaml("refused_calls.yaml").values():
        yield _step(_JUMP_EQUAL, numbers[which], 0, 1)
        yield refuse
    # Its flags are in memory, where no filter looks; if it is missing, C libraries use `clone`.
    yield _step(_JUMP_EQUAL, _CLONE3[which], 0, 1)
    yield _step(_RETURN, _ERROR | errno.ENOSYS)
    yield _step(_JUMP_EQUAL, _CLONE[which], 0, 4)
    yield _step(_LOAD, _FIRST)
    yield _step(_JUMP_ANY_BIT, _NEW_NAMESPACE, 0, 1)
    yield refuse
    yield _step(_RETURN, _ALLOW)
    yield _step(_JUMP_EQUAL, _SOCKET[which], 1, 0)
    yield _step(_JUMP_EQUAL, _SOCKETPAIR[which], 0, 2 + len(_FAMILIES))
    yield _step(_LOAD, _FIRST)
    for at, family in enumerate(_FAMILIES):
        yield _step(_JUMP_EQUAL, family, len(_FAMILIES) - at, 0)
    yield _step(_RETURN, _ERROR | errno.EAFNOSUPPORT)
    yield _step(_RETURN, _ALLOW)


def _step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_so, if_not, value)


_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_ENVIRONMENT = {"HOME": "/work", "LANG": "C.UTF-8", "PYTHONPATH": "/work"}
_ENVIRONMENT |= {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}
_RUNS = itertools.count()
_OPEN_FILES = 64
BEGUN = b"agentrl: begun\n"
"""First line of the script: without it, the sandbox or the machine has failed, and no code has run."""
_MAX_WORDS = 500

# Its input is an archive of the files, its output what the code says, and its standard error an archive of what the code left.
# `kill -1` ends whatever else runs in here, so that nothing changes the files while they are packed.
_SCRIPT = f"""
echo {BEGUN.decode().strip()} >&2
exec 3>&2 2>&1
tar -xmf - --no-same-owner -C / && cd /work || exit 125
"$@" </dev/null 3>&-
status=$?
kill -s KILL -- -1 2>/dev/null
tar -cf - --format=ustar --hard-dereference --owner=0 --group=0 -C /work . >&3 2>/dev/null
exit $status
"""


class BubblewrapConfig(SandboxConfig):
    """CPython and `sh` without network, on a read-only system, killed as a tree at their limits."""

    name: Literal["bubblewrap"] = "bubblewrap"
    max_processes: Annotated[int, Field(ge=4, le=1000)] = 16
    """Processes and threads at the same time, three of which are the sandbox's own. Each has `max_memory_mb`."""
    python: str | None = None
    """Path of the interpreter. None: the one that agentrl runs on, without what is installed beside it."""

    def build(self) -> "Bubblewrap":
        """Return a new sandbox.

        Raises:
            ConfigError: bubblewrap is missing or may not do its work.
        """
        if problem := _problem(self):
            raise ConfigError(
                f"sandbox: 'bubblewrap' is not available here: {problem}. It needs Linux with user namespaces, and the package "
                "bubblewrap (apt-get install bubblewrap). In a container, allow it to make namespaces, or name another "
                "sandbox: 'monty' runs Python without it; sh needs a sandbox of your own, or 'unsafe', which is none"
            )
        return Bubblewrap(self)


class Bubblewrap(FileSandbox):
    """Each `exec` is a tree of processes in new namespaces, with the files in memory."""

    def __init__(self, config: BubblewrapConfig) -> None:
        super().__init__(config)
        self.config = config

    def _run(self, code: str, language: Language, files: Files) -> tuple[ExecResult, Files | None]:
        config = self.config
        command = [_python(config.python), "-s", "/tmp/main"] if language == "python" else ["sh", "/tmp/main"]
        command = [*_limits(config), "sh", "-c", _SCRIPT, "sh", *command]
        try:
            done = _finished(config, command, archive_of(code, files))
        except OSError as error:
            raise failure(self.name, f"{type(error).__name__}: {error}") from error
        return outcome(self.name, done, timeout_s=config.timeout_s)


def archive_of(code: str, files: Files) -> bytes:
    """Return the input of a script: the files in the folder `work`, and the code as `tmp/main`."""
    inside = {f"work/{path}": content for path, content in files.items()}
    return packed({**inside, "tmp/main": code.encode(errors="replace")})


def outcome(name: str, done: Finished, *, timeout_s: float) -> tuple[ExecResult, Files | None]:
    """Return what a script printed, and the files that it left; None: they are lost.

    Raises:
        EnvironmentFailure: if it did not begin, and no code ran.
    """
    before, begun, archive = done.second.partition(BEGUN)
    if not begun:
        ended = f"within {timeout_s:g} s" if done.timed_out else f"and ended with status {done.returncode}"
        raise failure(
            name, " ".join(before.decode(errors="replace").split())[:_MAX_WORDS] or f"it did not begin {ended}"
        )
    result = ExecResult(
        output=done.output.decode(errors="replace"),
        returncode=done.returncode,
        timed_out=done.timed_out,
        num_cut=done.num_cut,
    )
    try:
        return result, unpacked(archive)
    except ValueError:  # cut short, as where the script itself was killed
        return result, None


def failure(name: str, words: str) -> EnvironmentFailure:
    """Return the error of a sandbox that the machine did not let run."""
    return EnvironmentFailure(f"the sandbox {name!r} could not run code: {words}")


def _finished(config: BubblewrapConfig, command: list[str], archive: bytes) -> Finished:
    """Run a command in new namespaces."""
    with ExitStack() as stack:
        filter_fd = _readable(seccomp_filter(platform.machine()), stack)
        # Its own arguments name folders of the host, and code sees its command line as that of process 1.
        options_fd = _readable(b"".join(f"{option}\0".encode() for option in _options(config, filter_fd)), stack)
        return run_process(
            [*_bubblewrap(options_fd), *command],
            stdin=archive,
            timeout_s=config.timeout_s,
            max_output=config.max_output_bytes,
            max_second=2 * config.max_files_mb * 1_000_000 + 1_000_000,
            environment={**_ENVIRONMENT, "PATH": f"{Path(_python(config.python)).parent}:{_PATH}"},
            pass_fds=(filter_fd, options_fd),
        )


def _readable(data: bytes, stack: ExitStack) -> int:
    """Return a descriptor from which data can be read, closed with the stack; no more than a pipe holds."""
    end, start = os.pipe()
    stack.callback(os.close, end)
    with open(start, "wb") as file:
        file.write(data)
    return end


def _limits(config: BubblewrapConfig) -> list[str]:
    """Return the command that limits what it runs, as a user without rights."""
    seconds = int(config.timeout_s) + 1  # above the deadline, which is reported as such
    limits = {"as": config.max_memory_mb * 1_000_000, "cpu": seconds, "nproc": config.max_processes}
    limits |= {"fsize": config.max_files_mb * 1_000_000, "nofile": _OPEN_FILES, "stack": 8_000_000}
    limits |= dict.fromkeys(("core", "memlock", "msgqueue"), 0)
    user = f"{_user()}"
    as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if os.geteuid() == 0 else []
    return [*as_user, "prlimit", *(limit(name, value) for name, value in limits.items()), "--"]


def _user() -> int:
    """Return a user who owns nothing, another one for each run and process: the kernel counts processes by user."""
    return 1_900_000_000 + os.getpid() % 4096 * 256 + next(_RUNS) % 256


def _bubblewrap(options_fd: int) -> list[str]:
    return [shutil.which("bwrap") or "bwrap", "--args", str(options_fd)]


def _options(config: BubblewrapConfig, filter_fd: int) -> list[str]:
    options = [
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    if os.geteuid() == 0:
        options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    options += ["--die-with-parent", "--new-session", "--hostname", "sandbox"]
    for path in _visible(config.python):
        for parent in reversed(Path(path).parents[:-1]):
            options += ["--perms", "0755", "--dir", str(parent)]
        link = os.path.islink(path)
        options += ["--symlink", os.readlink(path), path] if link else ["--ro-bind", path, path]
    for path in _hidden(config.python):
        options += ["--tmpfs", path, "--remount-ro", path]
    options += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/work", "/tmp"):
        options += ["--perms", "0777", "--size", str(config.max_files_mb * 1_000_000), "--tmpfs", path]
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", str(filter_fd), "--chdir", "/work"]


@cache
def _python(python: str | None) -> str:
    return os.path.realpath(python or sys.executable)


@cache
def _visible(python: str | None) -> list[str]:
    """List the folders and links of the system that code sees: programs and libraries, and the interpreter."""
    home = sys.base_prefix if python is None else str(Path(_python(python)).parents[1])
    paths = ["/usr", *(path for path in _SYSTEM if os.path.lexists(path))]
    return paths if _is_within(home, "/usr") else [*paths, os.path.realpath(home)]


@cache
def _hidden(python: str | None) -> list[str]:
    """List the folders in those that code must not see: what is installed, among it tasks with their hidden tests."""
    visible = [path for path in _visible(python) if not os.path.islink(path)]
    installed = [folder for root in (*visible, "/usr/local") for folder in Path(root).glob("lib/python3*/*-packages")]
    paths = {os.path.realpath(path) for path in (*installed, Path(__file__).parents[1], Path(agentrl.__file__).parent)}
    return sorted(path for path in paths if any(_is_within(path, root) for root in visible))


def _is_within(path: str, folder: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


@cache
def _problem(config: BubblewrapConfig) -> str:
    """Return why there is none here; empty if there is one."""
    if not sys.platform.startswith("linux"):
        return "this is no Linux"
    if platform.machine() not in architectures():
        return f"its filter of system calls is written for {' and '.join(architectures())}, and this is {platform.machine()}"
    needed = ["bwrap", "prlimit", "tar", *(["setpriv"] if os.geteuid() == 0 else [])]
    if missing := [name for name in needed if shutil.which(name) is None]:
        return f"{' and '.join(missing)} is not installed"
    sandbox = Bubblewrap(
        config.model_copy(update={"timeout_s": 60.0, "max_output_bytes": 1000})
    )  # on a busy machine, too
    first: dict[Language, str] = {"sh": "echo well", "python": "print('well')"}
    for language, code in first.items():
        try:
            result = sandbox.exec(code, language=language)
        except EnvironmentFailure as error:
            return f"a first {language} program did not run: {error}"
        if result.output != "well\n":
            return f"a first {language} program ended with {' '.join(result.output.split())[:300] or result!r}"
    return ""
