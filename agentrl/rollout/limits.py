"""Limits of the operating system: open files and threads for many live episodes."""

from pathlib import Path

import psutil

_FILES_PER_EPISODE = 4
"""Open files per episode: a connection, and the pipes of a subprocess of its environment."""


def check_limits(live: int) -> list[str]:
    """Raise the limit of open files to its maximum; return a warning for each limit that `live` episodes may exceed."""
    process, found = psutil.Process(), []
    if (files := _raise_open_files()) is not None and num_open_files(process) + live * _FILES_PER_EPISODE > files:
        found.append(
            f"rollout.max_live_episodes: {live} episodes may need {live * _FILES_PER_EPISODE} open files, and this process "
            f"may open {files}; raise that limit (`ulimit -Hn`), or lower it"
        )
    for limit, used, where in _thread_limits(process):
        if used + live > limit:
            found.append(
                f"rollout.max_live_episodes: {live} episodes need a thread each, and {limit} are allowed ({where}), of which "
                f"{used} are in use; raise that limit, or lower it"
            )
    return found


def num_open_files(process: psutil.Process) -> int:
    """Return the number of files, pipes and connections that a process has open."""
    return int(process.num_fds() if hasattr(process, "num_fds") else process.num_handles())  # as Windows calls them


def _raise_open_files() -> int | None:
    """Raise the soft limit of open files to the hard one and return it; None: there is none."""
    try:
        import resource
    except ImportError:  # not on this system
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (ValueError, OSError):  # macOS allows less than it says
        pass
    return None if soft == resource.RLIM_INFINITY else soft


def _thread_limits(process: psutil.Process) -> list[tuple[int, int, str]]:
    """List the limits of threads: the limit, the number in use, and where the limit is set."""
    found: list[tuple[int, int, str]] = []
    try:
        import resource
    except ImportError:
        return found
    if hasattr(resource, "RLIMIT_NPROC") and process.uids().effective != 0:  # does not bind root
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY:
            found.append((soft, process.num_threads(), "`ulimit -u`"))
    for folder in _pids_folders():
        limit = (folder / "pids.max").read_text(encoding="ascii").strip()
        if limit.isdecimal():
            found.append(
                (int(limit), int((folder / "pids.current").read_text(encoding="ascii")), f"{folder / 'pids.max'}")
            )
    return found


def _pids_folders(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """List the control groups of this process that count threads, in version 2 or 1, innermost first."""
    folders = []
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "pids"):
            top = root / controllers
            inner = top / path.lstrip("/")
            folders += [f for f in (inner, *inner.parents) if f.is_relative_to(top) and (f / "pids.max").is_file()]
    return folders
