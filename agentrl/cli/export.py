"""`agentrl export`."""

import argparse
from pathlib import Path

from agentrl.api.target import load
from agentrl.cli.commands import Commands
from agentrl.errors import ConfigError
from agentrl.report.terminal import Console


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    words = "Write a run's weights as a Hugging Face folder with a model card, adapters merged."
    export = commands.add("export", _export, words)
    export.add_argument("target", type=Path, metavar="RUN", help="a run's folder")
    export.add_argument("into", type=Path, metavar="FOLDER", help="to make")
    export.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights (default: that of the model that was trained; float32 if it has adapters)",
    )
    export.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    export.add_argument("--adapter", action="store_true", help="only the adapters of model.lora, in peft's format")
    export.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to the Hugging Face Hub as well")
    export.add_argument("--private", action="store_true", help="with --push: where others do not see it")


def _export(options: argparse.Namespace, _: list[str]) -> None:
    from agentrl.report.card import check_repo_id, push
    from agentrl.report.folder import RunFolder

    if options.adapter and options.dtype:
        raise ConfigError("--dtype: adapters are written as they were trained; leave it out")
    if options.private and not options.push:
        raise ConfigError("--private: is of --push; give it, or leave both out")
    if options.push:
        check_repo_id(options.push)
    folder = RunFolder.open(options.target)
    recipe, _folder = load(options.target, [])
    import torch

    from agentrl.run.export import export

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    export(
        recipe, folder, options.into, dtype=dtype, only_adapter=options.adapter, name=options.push, step=options.step
    )
    console = Console(soft_wrap=True)
    console.print(f"written: {options.into}")
    if options.push:
        console.print(f"pushed: {push(options.into, options.push, private=options.private)}")
