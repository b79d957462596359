"""`agentrl up`: servers and trainers together, on this machine, on a Ray cluster, or by a batch file for Slurm."""

import argparse
import math
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from string import Template
from typing import IO, TYPE_CHECKING, TypeAlias

from agentrl.api.target import find, load, name_of
from agentrl.cli.commands import OVERRIDING, Commands
from agentrl.cli.members import OWN_HOST, OWN_PORT, LocalMember, Member, RayMember, RayTrainers, Server, watch
from agentrl.errors import ConfigError
from agentrl.report.terminal import Console
from agentrl.run.launch import USER_MISTAKE

if TYPE_CHECKING:
    from agentrl.recipe.config import DeploymentConfig

_FIRST_PORT, _RENDEZVOUS = 8000, 29500
Serving: TypeAlias = Callable[[int, Sequence[str]], list[str]]
"""Returns the arguments of a server, from its number and the addresses of all."""
Training: TypeAlias = Callable[[Sequence[str], Sequence[str]], list[str]]
"""Returns the arguments of trainers, from options of `agentrl launch` and the servers' addresses."""


def add(commands: Commands) -> None:
    """Add the command of this file."""
    words = "Start the servers and trainers of a recipe (section deployment), restart what fails, and end all of it together."
    up = commands.add("up", _up, f"{words} {OVERRIDING}", overrides=True)
    up.add_argument("target", type=Path, metavar="RECIPE|RUN", help="a recipe, or the folder of a run to resume")
    where = up.add_mutually_exclusive_group()
    where.add_argument(
        "--ray", action="store_true", help="on the nodes of a running Ray cluster, which share the folders"
    )
    where.add_argument("--slurm", action="store_true", help="print a file for sbatch, and start nothing")
    up.add_argument("--nodes", type=int, default=1, help="with --slurm: number of nodes (default 1)")
    up.add_argument("--gpus-per-node", type=int, default=8, help="with --slurm: GPUs of each (default 8)")


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

    recipe = with_run_dir(recipe, run_dir, name=name_of(options.target, recipe))
    assert recipe.run_dir is not None
    folder, console = recipe.run_dir, Console(soft_wrap=True)

    environment = {}
    if deployment.env_servers:
        from agentrl.env.remote import TOKEN

        environment[TOKEN] = os.environ.setdefault(TOKEN, secrets.token_urlsafe())

    def serving(index: int, addresses: Sequence[str]) -> list[str]:
        if index < deployment.servers:
            engines = deployment.options(addresses[: deployment.servers])
            return ["serve", str(options.target), "--server", str(index), *rest, *engines]
        host, _, port = addresses[index].rpartition(":")
        where = ["--workers", str(deployment.env_workers), "--host", host, "--port", port]
        return ["env-serve", str(find(options.target)), *where, *rest]

    def training(launching: Sequence[str], addresses: Sequence[str]) -> list[str]:
        how = ["train"] if deployment.trainers == 1 else ["launch", *launching]
        given = [*rest, *deployment.options(addresses)]
        if (folder / "config.yaml").is_file():
            return [*how, str(folder), *given]
        return [*how, str(options.target), *given, "--run_dir", str(folder)]

    logs = folder.with_name(f"{folder.name}-servers")
    with ExitStack() as stack:
        servers: Sequence[Server]
        trainers: Member
        if options.ray:
            folders = {"run_dir": folder, "logs": logs}
            servers, trainers = on_ray(
                deployment, serving, training, environment=environment, say=console.print, **folders
            )
        else:
            servers, trainers = _here(deployment, serving, training, logs=logs, stack=stack)
        # Ray has set signals too.
        for number in (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that all others end too
        try:
            watch(servers, trainers, max_restarts=deployment.max_restarts, say=console.print)
        except KeyboardInterrupt:
            how = "agentrl up --ray" if options.ray else "agentrl up"
            console.print(f"resume with `{how} {shlex.quote(str(folder))}`")
            raise


def _here(
    deployment: "DeploymentConfig", serving: Serving, training: Training, *, logs: Path, stack: ExitStack
) -> tuple[list[LocalMember], LocalMember]:
    """Return servers and trainers on the GPUs of this machine."""
    from agentrl.compare.runner import visible_gpus

    names = deployment.server_names
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(len(names))]
    gpus = _divided(visible_gpus(), deployment)
    servers = []
    for index, name in enumerate(names):
        logs.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context(_log_file(logs, name).open("ab"))
        servers.append(LocalMember(name, partial(serving, index, addresses), log, gpus=gpus[1 + index]))
    arguments = partial(training, ["--processes", str(deployment.trainers)], addresses)
    return servers, LocalMember("the trainers", arguments, sys.stdout.buffer, gpus=gpus[0])


def _log_file(logs: Path, name: str) -> Path:
    return logs / f"{name.removeprefix('server ').replace(' ', '-')}.log"


def _without_run_dir(words: Sequence[str]) -> list[str]:
    """Return options without that of the folder, which a run that is resumed does not take."""
    kept, is_value = [], False
    for word in words:
        if not is_value and word.partition("=")[0] != "--run_dir":
            kept.append(word)
        is_value = word == "--run_dir"
    return kept


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _divided(gpus: Sequence[str], deployment: "DeploymentConfig") -> list[Sequence[str] | None]:
    """Return the GPUs of the trainers, and of each server; none for environments. None: there are none.

    Raises:
        ConfigError: if there are too few.
    """
    num, each = deployment.trainers, deployment.tensor_parallel
    if not gpus:
        return [None] * (1 + len(deployment.server_names))
    if (needed := num + deployment.servers * each) > len(gpus):
        raise ConfigError(
            f"deployment: needs {needed} GPUs, and this machine has {len(gpus)}; lower trainers or servers"
        )
    engines = [gpus[num + index * each :][:each] for index in range(deployment.servers)]
    return [gpus[:num], *engines, *[()] * deployment.env_servers]


def on_ray(
    deployment: "DeploymentConfig",
    serving: Serving,
    training: Training,
    *,
    run_dir: Path,
    logs: Path,
    environment: Mapping[str, str],
    say: Callable[[str], object],
) -> tuple[list[RayMember], RayTrainers]:
    """Return servers and trainers that a Ray cluster places on its nodes: on GPUs, or on cores if it has no GPU.

    Environments take cores.

    Args:
        deployment: numbers of processes.
        serving: returns the arguments of a server.
        training: returns the arguments of trainers.
        run_dir: the run's folder.
        logs: folder for their output.
        environment: further variables of all of them.
        say: prints a message.

    Raises:
        ConfigError: if Ray is not installed or does not run, or no node has room for a server.
    """
    try:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError as error:
        raise ConfigError(f"--ray: needs Ray on each node ({error}); pip install 'agentrl[ray]'") from error
    try:
        ray.init(address="auto", logging_level="warning")
    except ConnectionError as error:
        raise ConfigError("--ray: found no cluster; begin one with `ray start --head`, or set RAY_ADDRESS") from error
    found = ray.cluster_resources()
    kind = "GPU" if found.get("GPU") else "CPU"
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = {each: max(node.get(each, 0) for node in nodes) for each in ("CPU", "GPU")}
    num, names = deployment.trainers, deployment.server_names
    serve = [("tensor_parallel", kind, deployment.tensor_parallel)] * deployment.servers
    serve += [("env_workers", "CPU", deployment.env_workers)] * deployment.env_servers
    for field, each, need in serve:
        if need > largest[each]:
            raise ConfigError(
                f"deployment.{field}: {need} is more than the {largest[each]:g} {each}s of the largest node"
            )
    machines = next(count for count in range(1, num + 1) if num % count == 0 and num // count <= largest[kind])
    needs = [{kind: num // machines}] * machines + [{each: need} for _, each, need in serve]
    for each in largest:
        if (needed := sum(need.get(each, 0) for need in needs)) > found.get(each, 0):
            say(f"waiting for {needed} {each}s: the cluster has {found.get(each, 0):g}")
    logs.mkdir(parents=True, exist_ok=True)
    group = placement_group(needs, strategy="PACK")
    ray.get(group.ready())

    def member(name: str, bundle: int, echo: IO[bytes] | None = None) -> RayMember:
        options = {f"num_{each.lower()}s": needs[bundle].get(each, 0) for each in ("CPU", "GPU")}
        place = PlacementGroupSchedulingStrategy(group, bundle)
        return RayMember(
            name, _log_file(logs, name), {**options, "scheduling_strategy": place}, environment=environment, echo=echo
        )

    servers = [member(name, machines + index) for index, name in enumerate(names)]
    for index, server in enumerate(servers):
        server.arguments = serving(index, [f"{OWN_HOST}:{OWN_PORT}"] * len(servers))
    trainers = [member(f"trainers-{machine}", machine, sys.stdout.buffer) for machine in range(machines)]
    return servers, RayTrainers(trainers, servers, training, num_processes=num, run_dir=run_dir)


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
    if deployment.env_servers:
        raise ConfigError(
            "deployment.env_servers: with --slurm on one node only; start `agentrl env-serve` and set env.servers"
        )
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
    addresses = [f"${{hosts[{node}]}}:{_FIRST_PORT + slot}" for node, slot in places]
    serving = "\n".join(
        f'serve {index} "${{hosts[{node}]}}" {",".join(map(str, range(slot * each, (slot + 1) * each)))} &'
        for index, (node, slot) in enumerate(places)
    )
    target, *rest = command
    engine = " ".join(f'"{word}"' for word in deployment.options(addresses))
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
