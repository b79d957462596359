"""`agentrl COMMAND ...`: what every command has in common, its exit status above all."""

import argparse
import errno
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl import launch
from agentrl.cli.commands import make_parser, rank, world_size
from agentrl.errors import AgentRLError, ConfigError, UserError
from agentrl.report.terminal import Console

_FAILURE, _INTERRUPTED = 1, 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with 0, 2 for what the user can mend (a mistake, a full disk), 1 for failures, 130 if interrupted."""
    # peft imports bitsandbytes, which warns of a 4-bit kernel that nothing here calls.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    options, rest = make_parser().parse_known_args(arguments)
    console = Console(stderr=True, soft_wrap=True)
    try:
        _look_for_modules_here(options)
        if rest and not options.takes_overrides:
            raise ConfigError(f"agentrl {options.command} does not take {' '.join(rest)}")
        options.run(options, rest)
    except UserError as error:
        console.print(f"{_name()}: {error}", style="red")
        sys.exit(launch.USER_MISTAKE)
    except AgentRLError as error:
        console.print(f"{_name()}: {error}", style="red")
        sys.exit(_FAILURE)
    except OSError as error:
        if not (words := _disk_words(error, resume_command=_resume_command(options))):
            raise
        console.print(f"{_name()}: {words}", style="red")
        sys.exit(launch.USER_MISTAKE)
    except KeyboardInterrupt:
        resume_command = _resume_command(options)
        words = (
            f"interrupted. Resume from the last checkpoint with {resume_command}" if resume_command else "interrupted"
        )
        console.print(f"{_name()}: {words}")
        sys.exit(_INTERRUPTED)


def _name() -> str:
    return f"agentrl, process {rank()} of {world_size()}" if world_size() > 1 else "agentrl"


def _look_for_modules_here(options: argparse.Namespace) -> None:
    """Let `module:Class` mean a file of the working directory, as with `python -m`; not where that is a run's, of anyone."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UserError("the working directory is gone; go to one that is there") from None
    run = getattr(options, "target", None)
    if not (run and run.is_dir() and here.is_relative_to(run.resolve())):
        sys.path.insert(0, str(here))


def _resume_command(options: argparse.Namespace) -> str | None:
    """Return the command that resumes the run under way; None: none has begun."""
    if options.folder is None or not (options.folder / "config.yaml").is_file():
        return None
    how = "train" if world_size() == 1 else f"launch --processes {world_size()}"
    return f"`agentrl {how} {shlex.quote(str(options.folder))}`"


def _disk_words(error: OSError, *, resume_command: str | None) -> str | None:
    """Return what to say about a disk that is full or closed to us; None: the error is another one."""
    file = error.filename or "the run folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission for {file}: {error.strerror}"
    if error.errno == errno.ENOTDIR:
        return f"cannot write {file}: a part of this path is a file"
    if error.errno in (errno.ENOENT, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO) and error.filename:
        return f"cannot read or write {file}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        lost = (
            f". Nothing finished is lost: free the disk and resume with {resume_command}"
            if resume_command
            else "; free the disk"
        )
        return f"cannot write {file}: {error.strerror}{lost}"
    return None
