"""Runs commands of agentrl without what Windows lacks: `python -m tests.support.like_windows COMMAND ... [, COMMAND ...]`.

Python is that of this system, and so are other packages. Not imitated are Windows' ends of lines and its names of files.
"""

import importlib
import os
import pkgutil
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from errno import EBADF
from pathlib import Path
from typing import Any

MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
CALLS = {"fork", "geteuid", "getuid", "killpg", "mkfifo", "pread", "setsid", "sync", "uname", "waitid"}
SIGNALS = {"SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "alarm", "setitimer"}


def main() -> None:
    """Import every module without what Windows lacks, then run commands."""
    import_all()  # with it, so that other packages are loaded: they know on which system they are
    for name in [name for name in sys.modules if name.startswith("agentrl")]:
        del sys.modules[name]
    become_windows()
    import_all()
    from agentrl.cli import main

    for command in " ".join(sys.argv[1:]).split(","):
        main(command.split())


def import_all() -> None:
    """Import every module, but for the scripts that others run."""
    for package in ("agentrl", "agentrl_envs", "agentrl_credit"):
        path = importlib.import_module(package).__path__
        for found in pkgutil.walk_packages(path, f"{package}."):
            if not found.name.endswith(("__main__", "worker")):
                importlib.import_module(found.name)


def become_windows() -> None:
    """Take away what Windows lacks, and refuse what it refuses."""
    import psutil

    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # so that its import fails
    for module, names in ((os, CALLS), (signal, SIGNALS), (psutil.Process, {"num_fds"})):
        for name in names:
            delattr(module, name)
    psutil.Process.num_handles = lambda self: len(open_files())
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    system: Any = os
    system.fsync, system.open = without_read_only(os.fsync), without_folders(os.open)
    for name in ("rename", "replace", "unlink", "remove"):
        setattr(os, name, without_open_files(getattr(os, name)))


def open_files() -> list[Path]:
    """Return the files that this process has open."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return [link.resolve() for link in links if link.exists()]


def without_read_only(fsync: Callable[[int], None]) -> Callable[[int], None]:
    """Refuse to write back what is open only for reading."""

    def checked(number: int) -> None:
        _, flags, *_ = Path(f"/proc/self/fdinfo/{number}").read_text(encoding="utf-8").splitlines()
        if int(flags.split()[1], 8) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(EBADF, "opened for reading only")
        fsync(number)

    return checked


def without_folders(opened: Callable[..., int]) -> Callable[..., int]:
    """Refuse to open a folder."""

    def checked(path: Any, *arguments: Any, **options: Any) -> int:
        number = opened(path, *arguments, **options)
        if stat.S_ISDIR(os.fstat(number).st_mode):
            os.close(number)
            raise PermissionError(f"{path} is a folder")
        return number

    return checked


def without_open_files(changed: Callable[..., None]) -> Callable[..., None]:
    """Refuse to rename or to remove what is open, or has open files within."""

    def checked(*paths: Any, **options: Any) -> None:
        if not options:  # relative to an open folder, which Windows has not
            for path in map(Path, paths):
                if not path.is_symlink() and any(file.is_relative_to(path.resolve()) for file in open_files()):
                    raise PermissionError(f"{path} is open")
        changed(*paths, **options)

    return checked


if __name__ == "__main__":
    main()
