"""A plain process under limits, for code that is trusted: it can read, write and send whatever you can."""

import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl import EnvironmentFailure, ExecResult, Language, SandboxConfig, UserError
from agentrl_envs.sandboxes.files import Files, FileSandbox, plain_path
from agentrl_envs.sandboxes.process import Finished, limit, run_process

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
"""What names and modes of files bring about, which are the code's own; other errors are the machine's."""
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
            UserError: where its limits cannot be set.
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
                environment={"PATH": os.defpath, "HOME": str(work), "LANG": "C.UTF-8", "PYTHONPATH": str(work)},
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
