"""`agentrl serve`, a server for rollouts, and `agentrl up`, servers and trainers together or a batch file for Slurm."""

import argparse
import math
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from string import Template
from typing import IO, TYPE_CHECKING, Any

import psutil

from agentrl.api.target import load, name_of
from agentrl.cli.commands import OVERRIDING, Commands
from agentrl.errors import ConfigError, TrainingError
from agentrl.report.terminal import Console
from agentrl.run.launch import USER_MISTAKE

if TYPE_CHECKING:
    from agentrl.recipe.config import DeploymentConfig

import re
import tempfile

from agentrl.api.target import untrained
from agentrl.errors import EngineError

_POLL_S = 0.5
_END_S = 60.0
"""Seconds that a process that is interrupted may take to end."""
_LONGEST_WAIT_S = 60.0
"""Longest wait before a server is started again; the first takes a second, each further one twice as long."""
_SERVES = b"serving at "
_FIRST_PORT, _RENDEZVOUS = 8000, 29500


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    words = f"Start a vLLM server for a recipe with engine.name: vllm_server. {OVERRIDING}"
    serve = commands.add("serve", _serve, words, overrides=True)
    serve.add_argument("target", type=Path, metavar="RECIPE|RUN", help="a recipe, or a run's folder")
    serve.add_argument("--server", type=int, default=0, help="which of several in engine.server.url, from 0")
    words = (
        "begin with the model's weights, a run's newest ones; without it a trainer must send them before anyone samples"
    )
    serve.add_argument("--weights", action="store_true", help=words)
    serve.add_argument("--start-timeout-s", type=float, default=600.0, help="deadline until it answers (default 600)")
    words = "Start the servers and trainers of a recipe (section deployment), restart what fails, and end all of it together."
    up = commands.add("up", _up, f"{words} {OVERRIDING}", overrides=True)
    up.add_argument("target", type=Path, metavar="RECIPE|RUN", help="a recipe, or the folder of a run to resume")
    up.add_argument("--slurm", action="store_true", help="print a file for sbatch, and start nothing")
    up.add_argument("--nodes", type=int, default=1, help="with --slurm: number of nodes (default 1)")
    up.add_argument("--gpus-per-node", type=int, default=8, help="with --slurm: GPUs of each (default 8)")


def _serve(options: argparse.Namespace, rest: list[str]) -> None:
    if not 0 < options.start_timeout_s < math.inf:
        raise ConfigError(f"--start-timeout-s: expected seconds above 0, got {options.start_timeout_s:g}")
    # Nothing is computed here: the server has the GPU to itself.
    recipe, run_dir = load(options.target, [*rest, "--engine.name", "vllm_server", "--train.device", "cpu"])
    from agentrl.engine.vllm.servers import VLLMServerConfig
    from agentrl.report.folder import RunFolder
    from agentrl.run.export import load_to_serve, serve

    config = recipe.engine
    assert isinstance(config, VLLMServerConfig)  # as named above
    num = len(config.server.urls)
    if not 0 <= options.server < num:
        raise ConfigError(f"--server: expected 0 to {num - 1}, the numbers of engine.server.url, got {options.server}")
    config = config.for_process(options.server)
    returns_experts = recipe.loss.routing_replay == "engine"
    recipe = untrained(recipe, process=options.server)
    computing_nothing = {"model": {"attention": None}, "train": {"layout": "padded"}}
    recipe = recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=changes) for name, changes in computing_nothing.items()}
    )
    console = Console(soft_wrap=True)
    hangup = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []  # Windows has none
    for number in (signal.SIGTERM, *hangup):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that the server ends too
    run = None if run_dir is None else RunFolder.open(run_dir)
    model, tokenizer = load_to_serve(recipe, run, with_weights=options.weights)
    with (
        tempfile.TemporaryDirectory(prefix="agentrl-serve-") as folder,
        serve(
            recipe,
            config,
            Path(folder),
            model=model,
            tokenizer=tokenizer,
            with_weights=options.weights,
            timeout_s=options.start_timeout_s,
            returns_experts=returns_experts,
        ) as server,
    ):
        del model
        console.print(f"serving at {server.url}; log: {folder}/server.log; end with Ctrl-C")
        status = server.process.wait()
        how = f"ended with status {status}"
        if status == -signal.SIGKILL:
            how = "was killed, perhaps for its memory"
        raise EngineError(f"the server {how}; the end of its log:\n{log_end(Path(folder) / 'server.log')}")


def log_end(path: Path) -> str:
    """Return the last errors of a log and its end, without what nanobind prints when Python ends."""
    log = path.read_text(encoding="utf-8", errors="replace").partition("nanobind: leaked")[0]
    errors = [line for line in log.splitlines() if re.search(r"ERROR.*(Error|Exception)\b", line)]
    return "\n".join([*errors[-3:], log[-2000:]])


def _up(options: argparse.Namespace, rest: list[str]) -> None:
    recipe, run_dir = load(options.target, rest)
    deployment = recipe.deployment
    rest = _without_run_dir(rest)
    if options.slurm:
        name = name_of(options.target, recipe)
        where = "runs/{name}-$SLURM_JOB_ID" if recipe.run_dir is None else shlex.quote(str(recipe.run_dir))
        command = (str(options.target), *rest)
        numbers = {"nodes": options.nodes, "gpus_per_node": options.gpus_per_node}
        print(batch_file(name, command, deployment, run_dir=where.format(name=name), **numbers), end="")
        return
    from agentrl.api.training import with_run_dir
    from agentrl.compare.runner import visible_gpus

    recipe = with_run_dir(recipe, run_dir, name=name_of(options.target, recipe))
    assert recipe.run_dir is not None
    folder, console = recipe.run_dir, Console(soft_wrap=True)
    given = [
        *rest,
        *deployment.engine_options([f"http://127.0.0.1:{port}" for port in _free_ports(deployment.servers)]),
    ]
    how = ["train"] if deployment.trainers == 1 else ["launch", "--processes", str(deployment.trainers)]
    gpus = _divided(visible_gpus(), deployment)

    def training() -> list[str]:
        if (folder / "config.yaml").is_file():
            return [*how, str(folder), *given]
        return [*how, str(options.target), *given, "--run_dir", str(folder)]

    logs = folder.with_name(f"{folder.name}-servers")
    with ExitStack() as stack:
        for number in (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that all others end too
        servers = []
        for index in range(deployment.servers):
            logs.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context((logs / f"{index}.log").open("ab"))
            arguments = ["serve", str(options.target), "--server", str(index), *given]
            servers.append(Member(f"server {index}", partial(list, arguments), log, gpus=gpus[1 + index]))
        trainers = Member("the trainers", training, sys.stdout.buffer, gpus=gpus[0])
        try:
            watch(servers, trainers, max_restarts=deployment.max_restarts, say=console.print)
        except KeyboardInterrupt:
            console.print(f"resume with `agentrl up {shlex.quote(str(folder))}`")
            raise


def _without_run_dir(words: Sequence[str]) -> list[str]:
    """Return options without that of the folder, which a run that is resumed does not take."""
    kept, is_value = [], False
    for word in words:
        if not is_value and word.partition("=")[0] != "--run_dir":
            kept.append(word)
        is_value = word == "--run_dir"
    return kept


def start(*arguments: Any, **options: Any) -> Any:
    """Start a command; see `agentrl.compare.runner.start`, which loads torch."""
    from agentrl.compare.runner import start as begin

    return begin(*arguments, **options)


class Member:
    """A process of a deployment, with all that it has started. It is interrupted if this process ends, however that ends."""

    def __init__(
        self, name: str, arguments: Callable[[], list[str]], log: IO[bytes], *, gpus: Sequence[str] | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            name: for messages.
            arguments: returns those of `agentrl`, at each start.
            log: file for its output.
            gpus: GPUs that it sees. None: all.
        """
        self.name = name
        self.failures = 0
        """Times in a row that it ended before it served."""
        self.next_start = 0.0
        """Time before which it is not started again."""
        self._arguments, self._log = arguments, log
        self._environment = {**os.environ} | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        self._process: Any = None
        self._family: set[psutil.Process] = set()
        self._begin = 0

    @property
    def is_running(self) -> bool:
        """Whether it was started, and its end has not been seen."""
        return self._process is not None

    def start(self) -> None:
        """Start it."""
        self._log.flush()
        self._begin = os.fstat(self._log.fileno()).st_size
        self._process = start(self._arguments(), log=self._log, environment=self._environment)

    def poll(self) -> int | None:
        """Return the exit status of a process that has ended since; what it had started ends too. None: it has not."""
        if self._process is None:
            return None
        with suppress(psutil.NoSuchProcess):
            self._family |= {*psutil.Process(self._process.pid).children(recursive=True)}
        status: int | None = self._process.poll()
        if status is not None:
            self._clear()
        return status

    def has_served(self) -> bool:
        """Return whether a server has said that it serves."""
        return self.is_running and _SERVES in self._written()

    def last_words(self) -> str:
        """Return the last line of its output."""
        lines = self._written().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return f"{lines[-1].removeprefix('agentrl: ')} (log: {self._log.name})"

    def interrupt(self) -> None:
        """Let it end as Ctrl-C would."""
        self.poll()
        if self._process is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """Wait for its end, and after a while end it."""
        end = time.monotonic() + _END_S
        while self.poll() is None and self.is_running:
            if time.monotonic() > end:
                self._process.kill()
            time.sleep(0.05)

    def _written(self) -> bytes:
        return Path(self._log.name).read_bytes()[self._begin :]

    def _clear(self) -> None:
        """End what it has started, in other sessions too, whatever it could do about that itself."""
        for process in self._family:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # of another process with this number there is none: psutil knows when it began
        psutil.wait_procs(self._family, timeout=_END_S)
        self._process.stdin.close()
        self._process, self._family = None, set()


def watch(
    servers: Sequence[Member], trainers: Member, *, max_restarts: int, say: Callable[[str], object] = lambda _: None
) -> None:
    """Keep servers up, and resume the trainers once these serve, until the run ends; then end everything.

    Raises:
        TrainingError: if the trainers fail, or a server cannot serve, more often than `max_restarts`.
        SystemExit: with 2 for a mistake, which a trainer has printed.
    """
    restarts = 0
    try:
        while True:
            for server in servers:
                _keep_up(server, max_restarts=max_restarts, say=say)
            if not trainers.is_running:
                if all(server.has_served() for server in servers):
                    trainers.start()
            elif (status := trainers.poll()) is not None:
                if status == 0:
                    return
                if status == USER_MISTAKE:
                    sys.exit(USER_MISTAKE)
                restarts += 1
                if restarts > max_restarts:
                    raise TrainingError(
                        f"the trainers ended {restarts} times (deployment.max_restarts: {max_restarts})"
                    )
                say(f"the trainers ended with status {status}: resuming ({restarts} of {max_restarts})")
            time.sleep(_POLL_S)
    finally:
        for member in (trainers, *servers):
            member.interrupt()
        for member in (trainers, *servers):
            member.end()


def _keep_up(server: Member, *, max_restarts: int, say: Callable[[str], object]) -> None:
    """Start a server that is due; note the end of one that has ended."""
    has_served = server.has_served()
    if (status := server.poll()) is not None:
        server.failures = 1 if has_served else server.failures + 1
        if not has_served and (status == USER_MISTAKE or server.failures > max_restarts):
            raise TrainingError(f"{server.name} does not start: {server.last_words()}")
        wait_s = min(_LONGEST_WAIT_S, 2.0 ** (server.failures - 1))
        server.next_start = time.monotonic() + wait_s
        say(f"{server.name} ended with status {status}: starting it again in {wait_s:g} s; a weight sync fills it")
    if not server.is_running and time.monotonic() >= server.next_start:
        server.start()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _divided(gpus: Sequence[str], deployment: "DeploymentConfig") -> list[Sequence[str] | None]:
    """Return the GPUs of the trainers, and of each server. None: there are none.

    Raises:
        ConfigError: if there are too few.
    """
    num, each = deployment.trainers, deployment.tensor_parallel
    if not gpus:
        return [None] * (1 + deployment.servers)
    if (needed := num + deployment.servers * each) > len(gpus):
        raise ConfigError(
            f"deployment: needs {needed} GPUs, and this machine has {len(gpus)}; lower trainers or servers"
        )
    return [gpus[:num], *(gpus[num + index * each :][:each] for index in range(deployment.servers))]


def batch_file(
    name: str,
    command: Sequence[str],
    deployment: "DeploymentConfig",
    *,
    run_dir: str,
    nodes: int,
    gpus_per_node: int,
) -> str:
    """Return a file for sbatch: trainers on the first nodes, servers on the others; on one node `agentrl up` itself.

    Args:
        name: of the job.
        command: target, and options of the recipe.
        deployment: numbers of processes.
        run_dir: the run's folder, as a shell reads it.
        nodes: number of nodes.
        gpus_per_node: GPUs of each.

    Raises:
        ConfigError: if the processes do not fill the nodes.
    """
    num, each = deployment.trainers, deployment.tensor_parallel
    head = f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus_per_node}
#SBATCH --exclusive
# If nodes talk over another network than the default one, export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
"""
    if nodes == 1:
        return f"{head}exec srun --ntasks=1 agentrl up {shlex.join(command)}\n"
    if each > gpus_per_node:
        raise ConfigError(f"deployment.tensor_parallel: {each} is more than --gpus-per-node: {gpus_per_node}")
    a_node, num_training = gpus_per_node // each, math.ceil(num / gpus_per_node)
    if num % num_training or (needed := num_training + math.ceil(deployment.servers / a_node)) != nodes:
        needed = num_training + math.ceil(deployment.servers / a_node)
        raise ConfigError(
            f"--nodes: {num} trainers, alike on each node, and {deployment.servers} servers take {needed} nodes of "
            f"{gpus_per_node} GPUs, got {nodes}"
        )
    places = [(num_training + index // a_node, index % a_node) for index in range(deployment.servers)]
    urls = ", ".join(f"http://${{hosts[{node}]}}:{_FIRST_PORT + slot}" for node, slot in places)
    serving = "\n".join(
        f'serve {index} "${{hosts[{node}]}}" {",".join(map(str, range(slot * each, (slot + 1) * each)))} &'
        for index, (node, slot) in enumerate(places)
    )
    target, *rest = command
    engine = " ".join(f'"{word}"' for word in deployment.engine_options([urls] if places else []))
    return head + Template(_SCRIPT).substitute(
        given=f"{engine} {shlex.join(rest)}",
        run=run_dir,
        target=shlex.quote(target),
        serving=serving,
        restarts=deployment.max_restarts,
        num=num,
        machines=num_training,
        port=_RENDEZVOUS,
        mistake=USER_MISTAKE,
    )


_SCRIPT = """hosts=($$(scontrol show hostnames "$$SLURM_JOB_NODELIST"))
given=($given)
run=$run
serve() { # NUMBER HOST GPUS: again whenever it ends; the next weight sync fills it
  while true; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$$2" env CUDA_VISIBLE_DEVICES="$$3" \\
      agentrl serve $target --server "$$1" "$${given[@]}"
    sleep 10
  done
}
trap 'kill $$(jobs -p)' EXIT
$serving
for attempt in $$(seq 0 $restarts); do
  target=($target --run_dir "$$run")
  [ -f "$$run/config.yaml" ] && target=("$$run")
  srun --overlap --nodes=$machines --ntasks=$machines --nodelist="$$(IFS=,; echo "$${hosts[*]:0:$machines}")" \\
    bash -c 'exec agentrl launch --processes $num --machines $machines --machine "$$SLURM_PROCID" \\
      --host "$$0" --port $port "$$@"' "$${hosts[0]}" "$${target[@]}" "$${given[@]}"
  status=$$?
  [ $$status -eq 0 ] || [ $$status -eq $mistake ] && break
done
exit $$status
"""
