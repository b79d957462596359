"""Entry of `agentrl COMMAND ...`: options of every command, messages of errors, exit statuses."""

import argparse
import errno
import logging
import os
import select
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from agentrl.cli.commands import make_parser, rank, world_size
from agentrl.data.files import absolute, keep_process, shown
from agentrl.data.plain import line_of
from agentrl.errors import AgentRLError, ConfigError, UserError
from agentrl.report.terminal import Console
from agentrl.run import launch

_FAILURE, _INTERRUPTED = 1, 130


@contextmanager
def exits(run_dir: Path | None = None) -> Iterator[None]:
    """End a command with 2 for what the user can mend (a mistake, a full disk or memory), 1 for failures, 130 if interrupted.

    Args:
        run_dir: of the run under way: if it has begun, the command that resumes it is printed. None: there is no run.
    """
    name = f"agentrl, process {rank()} of {world_size()}" if world_size() > 1 else "agentrl"
    console, output = Console(stderr=True, soft_wrap=True), sys.stdout
    try:
        yield
        if output is not None and not output.closed:
            output.flush()
    except UserError as error:
        console.print(f"{name}: {shown(error)}", style="red")
        sys.exit(launch.USER_MISTAKE)
    except AgentRLError as error:
        console.print(f"{name}: {shown(error)}", style="red")
        sys.exit(_FAILURE)
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError) and _is_unread(output):
            sys.exit(_FAILURE)
        resume_command = _resume_command(run_dir)
        words = _memory_words(error, resume_command=resume_command)
        if words is None and isinstance(error, OSError):
            words = _disk_words(error, resume_command=resume_command)
        if words is None:
            raise
        console.print(f"{name}: {shown(words)}", style="red")
        sys.exit(launch.USER_MISTAKE)
    except KeyboardInterrupt:
        resume_command = _resume_command(run_dir)
        words = (
            f"interrupted. Resume from the last checkpoint with {resume_command}" if resume_command else "interrupted"
        )
        console.print(f"{name}: {words}")
        sys.exit(_INTERRUPTED)


def _is_unread(output: TextIO) -> bool:
    """Return whether who read our output has gone, as `head` does; what is still to be written goes nowhere."""
    if not hasattr(select, "poll"):
        return False
    reader = select.poll()
    reader.register(output.fileno(), 0)
    if not any(event & select.POLLERR for _, event in reader.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    return True


def _resume_command(run_dir: Path | None) -> str | None:
    """Return the command that resumes a run; None: it has not begun."""
    if run_dir is None or not (run_dir / "config.yaml").is_file():
        return None
    how = "train" if world_size() == 1 else f"launch --processes {world_size()}"
    return f"`agentrl {how} {shlex.quote(shown(run_dir))}`"


def _disk_words(error: OSError, *, resume_command: str | None) -> str | None:
    """Return what to say about a disk that is full or closed to us; None: the error is another one."""
    file = error.filename or "the run folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission for {file}: {error.strerror}"
    if error.errno == errno.EEXIST:
        return f"cannot make {file}: something else stands there; move it away"
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


_NO_MEMORY = ("out of memory", "can't allocate memory", "can't start new thread")
"""Words of errors that are RuntimeErrors: torch's on a GPU and on a CPU, and Python's if a thread finds no room."""


def _memory_words(error: Exception, *, resume_command: str | None) -> str | None:
    """Return what to say about memory that is used up; None: the error is another one."""
    is_one = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if not is_one and not any(words in str(error) for words in _NO_MEMORY):
        return None
    resume = f" Nothing finished is lost: resume with {resume_command}" if resume_command else ""
    return (
        f"out of memory ({line_of(error)[:200]}). Lower train.max_tokens_per_micro_batch, engine.max_batch_size or "
        "rollout.max_live_episodes, set train.gradient_checkpointing: true, or take a smaller model; `agentrl plan RECIPE` "
        f"counts what it needs.{resume}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, and exit as `exits` says."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what models say has letters that not every terminal knows
    # peft imports bitsandbytes, which warns of a 4-bit kernel that nothing here calls.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    with exits(), keep_process():
        options, rest = make_parser().parse_known_args(arguments)
        if "--" in (sys.argv if arguments is None else arguments):
            raise ConfigError("-- means nothing to agentrl; leave it out")
        _look_for_modules_here(options)
        if rest and not options.takes_overrides:
            raise ConfigError(f"agentrl {options.command} does not take {' '.join(rest)}")
        options.run(options, rest)


def _look_for_modules_here(options: argparse.Namespace) -> None:
    """Let `module:Class` mean a file of the working directory, as with `python -m`; not where that is a run's, of anyone."""
    here = absolute("")
    runs = getattr(options, "targets", None) or [getattr(options, "target", None)]
    if not any(run and run.is_dir() and here.is_relative_to(run.resolve()) for run in runs):
        sys.path.insert(0, str(here))
