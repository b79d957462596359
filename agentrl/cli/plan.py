"""`agentrl plan` and `agentrl doctor`: what a recipe needs, and whether its engine is right and quick here."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from agentrl.api.target import load, tokenizer_of, untrained
from agentrl.cli.commands import OVERRIDING, Commands
from agentrl.errors import ConfigError
from agentrl.report.terminal import Console

if TYPE_CHECKING:
    from agentrl.recipe.config import Recipe
    from agentrl.run.memory import ProcessMemory, Sizes

_MAX_GB = 1_000_000


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    words = f"Say what a recipe needs of GPUs' memory, and which field helps where it does not fit. {OVERRIDING}"
    plan = commands.add("plan", _plan, words, overrides=True)
    plan.add_argument("target", type=Path, metavar="RECIPE|RUN", help="a recipe, or a run's folder")
    plan.add_argument(
        "--gpus", type=int, help="how many in all, those of servers included (default: of its deployment)"
    )
    plan.add_argument("--memory", type=float, default=80, help="of each, in GB of 10^9 bytes (default 80)")
    words = f"Say what a recipe's engine is, whether it agrees with the trainer, how fast. {OVERRIDING}"
    doctor = commands.add("doctor", _doctor, words, overrides=True)
    doctor.add_argument("target", type=Path, metavar="RECIPE|RUN", help="a recipe, or a run's folder")


def _plan(options: argparse.Namespace, rest: list[str]) -> None:
    if (options.gpus is not None and options.gpus < 1) or not 0 < options.memory <= _MAX_GB:
        raise ConfigError(f"--gpus and --memory: expected positive numbers, and at most {_MAX_GB:,} GB")
    from agentrl.recipe.config import deployed

    recipe = deployed(load(options.target, rest)[0])
    deployment = recipe.deployment
    gpus = options.gpus or deployment.trainers + deployment.servers * deployment.tensor_parallel
    from agentrl.run.memory import GB, model_sizes, plan_memory, tokens_of_a_pass
    from agentrl.run.parts import task_shard

    memory = int(options.memory * GB)
    sizes = model_sizes(recipe)
    processes = plan_memory(recipe, gpus=gpus, memory=memory, sizes=sizes)
    task_shard(recipe.engine, num_groups=recipe.rollout.num_groups, rank=0, num_ranks=processes[0].count)
    console = Console()
    _print_warnings(console, recipe)
    for process in processes:
        console.print(_table(process, memory=options.memory))
        if process.at_start:
            console.print(
                f"Before its weights are shared out, each holds the whole model: {process.at_start / GB:.2f} GB."
            )
        if process.kept_versions:
            console.print(
                f"loss.kept_versions: {recipe.loss.kept_versions} take {process.kept_versions / GB:.2f} GB of the host's "
                "memory for each."
            )
        if process.cached_tokens is not None:
            _print_room(console, process, recipe)
        console.print()
    tokens, rollout = tokens_of_a_pass(recipe), recipe.rollout
    if rollout.history.rewrites and rollout.max_turns * rollout.max_context_tokens > tokens:
        console.print(
            f"rollout.history: an episode is one pass of all its contexts, up to {rollout.max_turns}. Where these have more "
            f"than the {tokens:,} tokens that are counted here, it takes more."
        )
    console.print("Counted, not measured. Leave a tenth: for fragments.")
    _check_played(recipe)
    for process in processes:
        if process.cached_tokens is not None and process.cached_tokens < recipe.rollout.max_context_tokens:
            raise ConfigError(
                f"engine.vllm: beside the model's weights there is room for {process.cached_tokens} tokens, less than "
                f"rollout.max_context_tokens: {recipe.rollout.max_context_tokens}; raise gpu_memory_utilization, or "
                "set tensor_parallel_size"
            )
    training = processes[0]
    if training.at_start > memory:
        raise ConfigError(
            f"before its weights are shared out, a training process holds the whole model: "
            f"{training.at_start / GB:.1f} GB, and a GPU has {options.memory:g}; take a smaller model, or GPUs with more memory"
        )
    if training.total > memory:
        raise ConfigError(
            f"a training process needs {training.total / GB:.1f} GB, and a GPU has {options.memory:g}. What helps, each by "
            f"itself: {_remedies(recipe, gpus=gpus, memory=memory, sizes=sizes)}"
        )


def _remedies(recipe: "Recipe", *, gpus: int, memory: int, sizes: "Sizes") -> str:
    """Return what makes a recipe smaller, and the cheapest changes with which it fits."""
    from agentrl.run.doctor import as_options, cheapest_fit, remedies
    from agentrl.run.memory import GB

    found = sorted(remedies(recipe, gpus=gpus, memory=memory, sizes=sizes), key=lambda one: one[1])
    helps = "; ".join(f"{words} ({total / GB:.1f} GB)" for words, total in found) or "more GPUs, or a smaller model"
    if (fit := cheapest_fit(recipe, gpus=gpus, memory=memory, sizes=sizes)) is None:
        return f"{helps}. All of it is not enough"
    return f"{helps}. The cheapest that fits, with {fit[1] / GB:.1f} GB: {as_options(fit[0])}"


def _check_played(recipe: "Recipe") -> None:
    """Check what is played against the model's tokenizer; a folder with the model's config.json alone has none."""
    from agentrl.chat import local_folder
    from agentrl.run.build import check_before_loading

    name = recipe.model.name_or_path
    folder = None if name is None else local_folder(name)
    if folder is None or any(folder.glob("tokenizer*")):
        check_before_loading(recipe)


def _print_room(console: Console, process: "ProcessMemory", recipe: "Recipe") -> None:
    """Print how many sequences a vLLM samples at once, and has room for; warn if it is going to idle."""
    assert process.cached_tokens is not None
    room = process.cached_tokens // recipe.rollout.max_context_tokens
    console.print(
        f"vLLM has room for keys and values of {process.cached_tokens:,} tokens: {room} sequences of "
        f"rollout.max_context_tokens. Live sequences a server: {process.live}."
    )
    if process.live < room / 2:
        limits = {"engine.max_batch_size": recipe.engine, "rollout.max_live_episodes": recipe.rollout}
        given = [name for name in limits if getattr(limits[name], name.partition(".")[2], None) is not None]
        helps = [f"set {name} to null" for name in given] or ["raise rollout.num_groups", "take fewer servers"]
        console.print(f"warning: less than half of that room is used; {', or '.join(helps)}")


def _table(process: "ProcessMemory", *, memory: float) -> Table:
    from agentrl.run.memory import GB

    table = Table(f"{process.count} x {process.name}", "GB", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for name, size in process.uses.items():
        table.add_row(name, f"{size / GB:.2f}")
    table.add_row("together", f"{process.total / GB:.2f} of {memory:g}", style="bold")
    return table


def _print_warnings(console: Console, recipe: "Recipe") -> None:
    from agentrl.recipe.config import warnings

    for words in warnings(recipe):
        console.print(f"warning: {words}")


def _doctor(options: argparse.Namespace, rest: list[str]) -> None:
    recipe, run_dir = load(options.target, rest)
    from agentrl.run.build import build
    from agentrl.run.doctor import examine

    console = Console(soft_wrap=True)
    _print_warnings(console, recipe)
    with build(untrained(recipe), tokenizer_folder=tokenizer_of(run_dir)) as parts:
        for name, words in examine(parts):
            console.print(f"{name:13} {words}")
