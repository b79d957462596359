"""`agentrl eval`."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.api.target import load_to_play, shipped
from agentrl.cli.commands import OVERRIDING, Commands
from agentrl.data.files import shown
from agentrl.errors import ConfigError
from agentrl.report.terminal import Console, announced_by

if TYPE_CHECKING:
    from agentrl.rollout.endpoint import Playing
    from agentrl.rollout.evaluation import Evaluation
    from agentrl.types import Trajectory

_SHOWN = 3
"""Dialogues that are printed, each of another task."""


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    words = (
        "Play the evaluation tasks of a recipe, a run or an environment: with its weights, or with --endpoint by a model "
        f"behind any OpenAI-compatible API. {OVERRIDING}"
    )
    evaluate = commands.add("eval", _eval, words, overrides=True)
    evaluate.add_argument(
        "target",
        type=Path,
        metavar="RECIPE|RUN|ENV",
        help="a recipe (its model untrained), a run's folder, or with --model an environment: a name or module:Class",
    )
    evaluate.add_argument("--model", metavar="NAME", help="another model; with --endpoint, its name there")
    evaluate.add_argument("--endpoint", metavar="URL", help="of the API, such as http://127.0.0.1:8000/v1")
    evaluate.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="VARIABLE",
        help="environment variable that holds the endpoint's key (default: OPENAI_API_KEY)",
    )
    evaluate.add_argument(
        "--prices", nargs=2, type=float, metavar=("READ", "WRITTEN"), help="price of a million tokens read, and written"
    )
    evaluate.add_argument("-n", "--tasks", type=int, metavar="N", help="--evaluation.num_tasks N")
    evaluate.add_argument("-k", "--samples", type=int, metavar="K", help="K episodes a task: pass@1 and pass@K")
    evaluate.add_argument(
        "--dialogues",
        type=Path,
        metavar="FILE",
        help="new file for the episodes (default: in the run, or evaluations/)",
    )
    shown = evaluate.add_mutually_exclusive_group()
    shown.add_argument("-q", "--quiet", action="store_true", help="print figures, and no dialogues")
    shown.add_argument("--json", action="store_true", help="metrics, intervals and every task, as one JSON object")


def _eval(options: argparse.Namespace, rest: list[str]) -> None:
    rest = [*rest, *_short(options)]
    console = Console(soft_wrap=True, stderr=options.json)
    if options.endpoint is not None:
        found, envs, file = _at_endpoint(options, rest, console)
    elif options.prices is not None:
        raise ConfigError("--prices: give --endpoint too; own weights have no price")
    else:
        found, envs, file = _of_weights(options, rest, console)
    from agentrl.report.statistics import as_json, tables
    from agentrl.report.terminal import in_short

    if options.json:
        print(json.dumps(as_json(found, envs, file), indent=1))
        return
    for each in found.values() if not options.quiet else ():
        for group in each.groups[:_SHOWN]:
            for line in (*in_short(group.trajectories[0]), ""):
                console.print(line)
    for table in tables(found, envs, file):
        Console().print(table)


def _short(options: argparse.Namespace) -> list[str]:
    """Return the options of the recipe for which short ones stand."""
    found = [] if options.tasks is None else ["--evaluation.num_tasks", str(options.tasks)]
    if (k := options.samples) is not None:
        found += ["--evaluation.samples", str(k), "--evaluation.pass_at", json.dumps(sorted({1, k}))]
    return found


def _env_ids(config: Any, own: str, found: "Mapping[str, Evaluation]") -> dict[str, str]:
    """Return the environment of each evaluation, by the prefix of its metrics."""
    envs = {f"eval/{name}/" if name else "eval/": env.id for name, env in config.evaluation.env.items()}
    return {prefix: envs.get(prefix, own) for prefix in found}


def _of_weights(
    options: argparse.Namespace, rest: list[str], console: Console
) -> "tuple[Mapping[str, Evaluation], dict[str, str], Path | None]":
    target: Path | None = options.target
    changes: dict[str, Any] = {} if options.model is None else {"model": {"name_or_path": options.model}}
    if options.model is not None and _is_env(options.target):
        target, rest = None, [f"--env.id={options.target}", *rest]
    recipe, run_dir = load_to_play(target, rest, changes=changes)
    from agentrl.api.evaluation import evaluated, new_dialogue_file

    dialogues = options.dialogues
    if dialogues is None and run_dir is None:
        dialogues = new_dialogue_file(str(recipe.player_id), options.target.stem if target else options.model)
    with announced_by(lambda words: console.print(f"{words} ...")):
        found, path = evaluated(recipe, run_dir, console=console, dialogues=dialogues)
    return found, _env_ids(recipe, recipe.player_id, found), None if path is None else Path(shown(path))


def _is_env(target: Path) -> bool:
    """Return whether a target can only be the name of an environment."""
    return not (target.exists() or str(target) in shipped() or target.suffix in (".yaml", ".yml"))


def _at_endpoint(
    options: argparse.Namespace, rest: list[str], console: Console
) -> "tuple[Mapping[str, Evaluation], dict[str, str], Path | None]":
    from agentrl.api.evaluation import (
        dialogue_writer,
        evaluated_at_endpoint,
        new_dialogue_file,
        to_play_at_endpoint,
    )
    from agentrl.rollout.endpoint import ChatModel

    if options.model is None:
        raise ConfigError("--model: name the model as the endpoint knows it")
    prices = None if options.prices is None else tuple(options.prices)
    model = ChatModel(url=options.endpoint, name=options.model, api_key_env=options.api_key_env, prices=prices)
    playing = to_play_at_endpoint(options.target, rest, changes={})
    file = options.dialogues or new_dialogue_file(playing.env.id, options.model)
    counter = _Counter(playing, None if options.quiet else console)
    keep = dialogue_writer(file)

    def on_end(trajectory: "Trajectory") -> None:
        keep(trajectory)
        counter.add(trajectory)

    found = evaluated_at_endpoint(playing, model, console=console, on_end=on_end)
    console.print(counter.usage(has_prices=prices is not None))
    return found, _env_ids(playing, playing.env.id, found), file


class _Counter:
    """Counts finished episodes and their tokens, and prints a line now and then."""

    def __init__(self, playing: "Playing", console: Console | None) -> None:
        evaluation = playing.evaluation
        self._most = evaluation.num_tasks * evaluation.samples * max(1, len(evaluation.env))
        self._console = console
        self._num = self._num_failed = 0
        self._sums = dict.fromkeys(("prompt_tokens", "completion_tokens", "cost"), 0.0)

    def add(self, trajectory: "Trajectory") -> None:
        """Count an episode."""
        self._num += 1
        self._num_failed += trajectory.failed
        for name in self._sums:
            self._sums[name] += trajectory.metrics.get(name, 0.0)
        if self._console is not None and self._num % max(10, self._most // 10) == 0:
            failed = f", {self._num_failed} failed" if self._num_failed else ""
            self._console.print(f"{self._num} episodes{failed} ...")

    def usage(self, *, has_prices: bool) -> str:
        """Return the tokens of all episodes, failed ones included, and their price."""
        sums = self._sums
        if not any(sums.values()):
            return "tokens: the endpoint does not count them"
        cost = f"; cost {sums['cost']:.4g}" if has_prices else ""
        return f"tokens: {sums['prompt_tokens']:,.0f} read, {sums['completion_tokens']:,.0f} written{cost}"
