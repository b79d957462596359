"""`agentrl launch`: a run on several ranks, through accelerate's launcher."""

import argparse
import logging
import sys

from agentrl.errors import ConfigError, TrainingError

USER_MISTAKE = 2
"""Exit status of a command that the user's mistake ended."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of processes, and their machines."""
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="processes in all: one for each GPU")
    parser.add_argument("--machines", type=int, default=1, metavar="N", help="machines (default 1)")
    parser.add_argument("--machine", type=int, default=0, metavar="N", help="number of this machine, from 0")
    parser.add_argument("--host", default="127.0.0.1", help="address of machine 0, as the others see it")
    parser.add_argument("--port", type=int, default=0, help="a free port there (default, on one machine: any)")


def launch(options: argparse.Namespace, rest: list[str]) -> None:
    """Run this machine's processes, as `accelerate launch` does; what ends this one ends them all.

    Raises:
        ConfigError: if something else listens on that port.
        TrainingError: when a process has ended before the run has.
        SystemExit: with 2 for a mistake, which a process has printed; when interrupted.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # It would log at length what is raised below.
    report = logging.getLogger("torch.distributed.elastic")
    report.addHandler(logging.NullHandler())
    report.propagate = False
    try:
        launch_command(launch_command_parser().parse_args(_arguments(options, rest)))
    except ChildFailedError as error:
        # In the order in which they ended; those after the first were most often ended by the launcher.
        failures = list(error.failures.items())
        if any(failure.exitcode == USER_MISTAKE for _, failure in failures):
            sys.exit(USER_MISTAKE)
        process, failure = failures[0]
        how = f"exit status {failure.exitcode}" if failure.exitcode > 0 else failure.signal_name()
        how += " (perhaps for its memory)" if how == "SIGKILL" else ""
        raise TrainingError(
            f"process {process} of {options.processes} ended with {how}, and the run with it; "
            f"resume from its last checkpoint with `agentrl launch --processes {options.processes} RUN_FOLDER`"
        ) from error
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ConnectionError as error:
        raise ConfigError(f"--port: something else listens on {options.port}; name a port that is free") from error


def _arguments(options: argparse.Namespace, rest: list[str]) -> list[str]:
    return [
        # It means torch's launcher, on a CPU as well; what accelerate calls multi-CPU takes MPI.
        "--multi_gpu",
        *("--num_processes", str(options.processes), "--num_machines", str(options.machines)),
        *("--machine_rank", str(options.machine)),
        *("--main_process_ip", options.host, "--main_process_port", str(options.port)),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),  # the recipe says; without, accelerate warns
        *("--module", "agentrl", "train", str(options.target), *rest),
    ]


def check(options: argparse.Namespace) -> None:
    """Check the numbers of processes and machines.

    Raises:
        ConfigError: if there cannot be so many.
    """
    if min(options.processes, options.machines) < 1 or options.processes % options.machines:
        raise ConfigError(
            f"--processes: expected a positive multiple of --machines: {options.machines}, got {options.processes}"
        )
    if not 0 <= options.machine < options.machines:
        raise ConfigError(f"--machine: expected 0 to {options.machines - 1} (--machines less 1), got {options.machine}")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port: expected 0 to 65535, got {options.port}")
    if options.machines > 1 and not options.port:
        raise ConfigError("--port: several machines need one; name a port that is free on --host")
