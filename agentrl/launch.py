"""`agentrl launch`: a run as several processes, through accelerate's launcher."""

import argparse
import os
import sys
from typing import NoReturn

from agentrl.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what says how many processes there are, and where."""
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="processes in all: one for each GPU")
    parser.add_argument("--machines", type=int, default=1, metavar="N", help="machines (default 1)")
    parser.add_argument("--machine", type=int, default=0, metavar="N", help="number of this machine, from 0")
    parser.add_argument("--host", default="127.0.0.1", help="address of machine 0, as the others see it")
    parser.add_argument("--port", type=int, default=0, help="a free port there (default, on one machine: any)")


def command(options: argparse.Namespace, rest: list[str]) -> list[str]:
    """Return what starts this machine's processes: `accelerate launch ... --module agentrl train TARGET ...`."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        # Which means torch's launcher, on a CPU as well; what accelerate calls multi-CPU takes MPI.
        *(["--multi_gpu"] if options.processes > 1 else []),
        *("--num_processes", str(options.processes), "--num_machines", str(options.machines)),
        *("--machine_rank", str(options.machine)),
        *("--main_process_ip", options.host, "--main_process_port", str(options.port)),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),  # the recipe says; without, accelerate warns
        *("--module", "agentrl", "train", str(options.target), *rest),
    ]


def launch(options: argparse.Namespace, rest: list[str]) -> NoReturn:
    """Become the launcher, so that what ends this process ends all of them."""
    os.execv(sys.executable, command(options, rest))


def check(options: argparse.Namespace) -> None:
    """Check the numbers of processes and machines.

    Raises:
        ConfigError: where there cannot be so many.
    """
    if min(options.processes, options.machines) < 1 or options.processes % options.machines:
        raise ConfigError(
            f"--processes: expected a positive multiple of --machines: {options.machines}, got {options.processes}"
        )
    if options.machines > 1 and not options.port:
        raise ConfigError("--port: several machines need one; name a port that is free on --host")
