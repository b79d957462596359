"""`agentrl serve`, a server for rollouts."""

import argparse
import math
import re
import signal
import sys
import tempfile
from pathlib import Path

from agentrl.api.target import load, untrained
from agentrl.cli.commands import OVERRIDING, Commands
from agentrl.errors import ConfigError, EngineError
from agentrl.report.terminal import Console


def add(commands: Commands) -> None:
    """Add the command of this file."""
    words = f"Start a vLLM server for a recipe with engine.name: vllm_server. {OVERRIDING}"
    serve = commands.add("serve", _serve, words, overrides=True)
    serve.add_argument("target", type=Path, metavar="RECIPE|RUN", help="a recipe, or a run's folder")
    serve.add_argument("--server", type=int, default=0, help="which of several in engine.server.url, from 0")
    words = (
        "begin with the model's weights, a run's newest ones; without it a trainer must send them before anyone samples"
    )
    serve.add_argument("--weights", action="store_true", help=words)
    serve.add_argument("--start-timeout-s", type=float, default=600.0, help="deadline until it answers (default 600)")


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
