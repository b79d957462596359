"""The command line: `agentrl train | launch | eval | export | doctor | serve | show | envs | credit`."""

import argparse
import datetime as dt
import errno
import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from agentrl import launch
from agentrl.errors import AgentRLError, ConfigError, CreditError, EngineError, UserError
from agentrl.files import parse_yaml
from agentrl.report.terminal import Console

if TYPE_CHECKING:
    from agentrl.config import Recipe
    from agentrl.report.folder import RunFolder
    from agentrl.report.records import TrajectoryRecord

_FAILURE, _INTERRUPTED = 1, 130

# Set by launchers of several processes.
_PROCESS, _NUM_PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
_NAME = f"agentrl, process {_PROCESS} of {_NUM_PROCESSES}" if _NUM_PROCESSES > 1 else "agentrl"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with 0, 2 for what the user can mend (a mistake, a full disk), 1 for failures, 130 if interrupted."""
    # transformers imports peft, which imports bitsandbytes, which warns of a 4-bit kernel that nothing here calls.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    options, rest = _parser().parse_known_args(arguments)
    console = Console(stderr=True, soft_wrap=True)
    try:
        _look_for_modules_here(options)
        if rest and not options.takes_overrides:
            raise ConfigError(f"agentrl {options.command} does not take {' '.join(rest)}")
        options.run(options, rest)
    except UserError as error:
        console.print(f"{_NAME}: {error}", style="red")
        sys.exit(launch.USER_MISTAKE)
    except AgentRLError as error:
        console.print(f"{_NAME}: {error}", style="red")
        sys.exit(_FAILURE)
    except OSError as error:
        if not (words := _disk_words(error, resume_command=_resume_command(options))):
            raise
        console.print(f"{_NAME}: {words}", style="red")
        sys.exit(launch.USER_MISTAKE)
    except KeyboardInterrupt:
        resume_command = _resume_command(options)
        words = (
            f"interrupted. Go on from the last checkpoint with {resume_command}" if resume_command else "interrupted"
        )
        console.print(f"{_NAME}: {words}")
        sys.exit(_INTERRUPTED)


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
    """Return the command that goes on with the run under way; None: none has begun."""
    if options.folder is None or not (options.folder / "config.yaml").is_file():
        return None
    how = "train" if _NUM_PROCESSES == 1 else f"launch --processes {_NUM_PROCESSES}"
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
            f". Nothing finished is lost: free the disk and go on with {resume_command}"
            if resume_command
            else "; free the disk"
        )
        return f"cannot write {file}: {error.strerror}{lost}"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentrl", description="Multi-turn RL for language-model agents.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Any, words: str, *, overrides: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        command.set_defaults(run=run, takes_overrides=overrides, folder=None)
        return command

    overriding = "Any field of the recipe can be given as an option: --rollout.group_size 4 --credit.gamma 0.5"
    train = add("train", _train, f"Train a recipe, or go on with a run. {overriding}", overrides=True)
    train.add_argument(
        "target", type=Path, metavar="RECIPE|RUN", help="a YAML recipe, or the folder of a run to go on with"
    )
    launched = add("launch", _launch, f"Train as several processes. {overriding}", overrides=True)
    launch.add_options(launched)
    launched.add_argument("target", type=Path, metavar="RECIPE|RUN", help="as for `agentrl train`")
    evaluate = add("eval", _eval, f"Evaluate on held-out tasks. {overriding}", overrides=True)
    evaluate.add_argument(
        "target", type=Path, metavar="RECIPE|RUN", help="a recipe (its model untrained), or a run's folder"
    )
    export = add("export", _export, "Write a run's newest weights as a Hugging Face folder, adapters merged.")
    export.add_argument("target", type=Path, metavar="RUN", help="a run's folder")
    export.add_argument("into", type=Path, metavar="FOLDER", help="to make")
    export.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: as trained)"
    )
    export.add_argument("--adapter", action="store_true", help="only the adapters of model.lora, in peft's format")
    doctor = add(
        "doctor",
        _doctor,
        f"Say what a recipe's engine is, whether it agrees with the trainer, how fast. {overriding}",
        overrides=True,
    )
    doctor.add_argument("target", type=Path, metavar="RECIPE|RUN", help="a recipe, or a run's folder")
    serve = add(
        "serve", _serve, f"Start a vLLM server for a recipe with engine.name: vllm_server. {overriding}", overrides=True
    )
    serve.add_argument("target", type=Path, metavar="RECIPE|RUN", help="a recipe, or a run's folder")
    serve.add_argument("--server", type=int, default=0, help="which of several in engine.server.url, from 0")
    serve.add_argument("--start-timeout-s", type=float, default=600.0, help="deadline until it answers (default 600)")
    show = add("show", _show, "Print rollouts, sampled tokens coloured by advantage.")
    _add_rollouts(show, default=1)
    show.add_argument("--faults", action="store_true", help="those whose environment failed, each kind (RUN/faults)")
    envs = add("envs", _envs, "List installed environments, or play a recorded episode again.")
    again = envs.add_subparsers(dest="action").add_parser(
        "replay",
        help="play an episode of a run again, with the traceback where its environment raises",
        description="Make the environment of a run's recipe, reset it as for a recorded episode, take the recorded actions "
        "again and print the dialogue; where the environment raises, print the traceback and exit with 1.",
        allow_abbrev=False,
    )
    again.set_defaults(run=_replay)
    again.add_argument("target", type=Path, metavar="RUN", help="a run's folder")
    again.add_argument("episode", metavar="EPISODE", help="its name, such as train/000012/3")
    credit = add("credit", _credit, "List installed credit schemes, or explain what one does to recorded rollouts.")
    explain = credit.add_subparsers(dest="action").add_parser(
        "explain",
        help="print the advantages of each turn of recorded rollouts",
        description="Print the advantages of each turn of recorded rollouts, coloured token by token. Any field of the scheme "
        "can be given as an option: --gamma 0.5",
        allow_abbrev=False,
    )
    explain.set_defaults(run=_explain, takes_overrides=True)
    explain.add_argument("scheme", metavar="SCHEME", help="an installed scheme, or module:Class")
    _add_rollouts(explain, default=8)
    return parser


def _add_rollouts(command: argparse.ArgumentParser, *, default: int) -> None:
    command.add_argument(
        "target", type=Path, metavar="RUN|FILE", help="a run's folder (its newest rollouts), or a rollouts file"
    )
    command.add_argument("-n", "--number", type=int, default=default, help=f"how many rollouts (default {default})")
    command.add_argument("--trajectory", help="only the one with this id")


def _load(target: Path, rest: list[str]) -> "tuple[Recipe, Path | None]":
    """Return the recipe, and the run's folder where `target` is one."""
    from agentrl.config import load_recipe
    from agentrl.report.folder import RunFolder

    if target.is_dir():
        if any(option.partition("=")[0] == "--run_dir" for option in rest):
            raise ConfigError(f"--run_dir: the run stays in {target}; leave it out, or copy the folder")
        return load_recipe(RunFolder.open(target).config_file, [*rest, f"--run_dir={target}"]), target
    return load_recipe(target, rest), None


def _launch(options: argparse.Namespace, rest: list[str]) -> None:
    # What can be checked now is told once, and with the exit status of a mistake.
    launch.check(options)
    recipe, run_dir = _load(options.target, rest)
    from agentrl.distributed.checkpoints import checkpoint_errors, checkpoints
    from agentrl.report.folder import RunFolder
    from agentrl.run.engines import share_of
    from agentrl.run.resume import check_processes

    share_of(recipe, 0, options.processes)
    if run_dir is not None:
        for newest in checkpoints(RunFolder.open(run_dir).checkpoints)[-1:]:
            with checkpoint_errors(newest):
                check_processes(newest, options.processes)
    elif recipe.run_dir is not None and options.machine == 0:
        RunFolder.check_free(recipe.run_dir)
    if options.processes == 1:
        _train(options, rest)
        return
    sys.stdout.flush()
    launch.launch(options, rest)


def _train(options: argparse.Namespace, rest: list[str]) -> None:
    console = Console(soft_wrap=True, quiet=_PROCESS > 0)
    recipe, run_dir = _load(options.target, rest)
    from agentrl.config import plan
    from agentrl.report.folder import RunFolder
    from agentrl.run.build import build
    from agentrl.run.loop import train
    from agentrl.run.resume import has_changed

    folder = RunFolder.open(run_dir) if run_dir else None
    steps_done = _steps_done(folder) if folder else None
    if steps_done is not None and recipe.train.steps < steps_done:
        raise ConfigError(
            f"train.steps: {recipe.train.steps} is less than the {steps_done} steps that {run_dir} has done; raise it"
        )
    if folder and steps_done == recipe.train.steps:
        _print_end(console, folder, recipe)
        console.print(f"all {recipe.train.steps} steps are done; go on with a larger --train.steps")
        return
    if recipe.run_dir is None:
        stamp = dt.datetime.now().strftime("%Y%m%d-%H%M%S")  # local time: a name for a person
        recipe = recipe.model_copy(update={"run_dir": Path("runs") / f"{options.target.stem}-{stamp}"})
    elif folder is None and _PROCESS == 0:
        RunFolder.check_free(recipe.run_dir)  # before the work of building a model
    table = Table(title=f"{recipe.env.id}, seed {recipe.seed}", title_justify="left", show_header=False, box=None)
    for name, value in plan(recipe).items():
        table.add_row(name, value)
    console.print(table)
    console.print(f"run folder: {recipe.run_dir}")
    options.folder = recipe.run_dir
    teller = console if _PROCESS == 0 else Console(soft_wrap=True)  # what one process alone has found, it tells

    def warn(words: str) -> None:
        teller.print(f"warning: {words}", style="yellow")

    with build(recipe, tokenizer_folder=_tokenizer(run_dir), on_warning=warn) as parts:
        recipe = parts.recipe  # the first process named the folder
        options.folder = recipe.run_dir
        warnings = list(parts.warnings)
        if folder and has_changed(recipe, folder):
            warnings.append("the recipe has changed: what was sampled since the last checkpoint is sampled again")
        for warning in warnings:
            console.print(f"warning: {warning}", style="yellow")
        with _progress(console) as on_progress:
            folder, _ = train(parts, folder, on_progress=on_progress)
    _print_end(console, folder, recipe)


def _steps_done(folder: "RunFolder") -> int | None:
    """Return the step of a run's newest checkpoint, where it would go on; None: it has none yet."""
    from agentrl.distributed.checkpoints import newest_step

    return newest_step(folder.checkpoints)


def _eval(options: argparse.Namespace, rest: list[str]) -> None:
    recipe, run_dir = _load(options.target, rest)
    recipe = _untrained(recipe)
    from agentrl.report.folder import RunFolder
    from agentrl.run.build import build
    from agentrl.run.evaluate import evaluate
    from agentrl.run.resume import load_weights

    folder = RunFolder.open(run_dir) if run_dir else None
    console = Console(soft_wrap=True)

    def warn(words: str) -> None:
        console.print(f"warning: {words}", style="yellow")

    with build(recipe, tokenizer_folder=_tokenizer(run_dir), on_warning=warn) as parts:
        if folder:
            load_weights(parts, folder)
        parts.link.start(0)
        metrics = evaluate(parts).metrics
    table = Table("metric", "value", title=f"{recipe.env.id}: {recipe.evaluation.num_tasks} held-out tasks")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)


def _export(options: argparse.Namespace, _: list[str]) -> None:
    from agentrl.report.folder import RunFolder

    if options.adapter and options.dtype:
        raise ConfigError("--dtype: adapters are written as they were trained; leave it out")
    folder = RunFolder.open(options.target)
    recipe, _folder = _load(options.target, [])
    import torch

    from agentrl.run.export import export

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    export(recipe, folder, options.into, dtype=dtype, only_adapter=options.adapter)
    Console(soft_wrap=True).print(f"written: {options.into}")


def _tokenizer(run_dir: Path | None) -> Path | None:
    """Return the folder of a run's tokenizer, where there is one yet."""
    folder = run_dir / "tokenizer" if run_dir else None
    return folder if folder and folder.is_dir() else None


def _untrained(recipe: "Recipe", *, process: int = 0) -> "Recipe":
    """Return a recipe for one process that trains and writes nothing; what only training reads is not asked for."""
    return recipe.model_copy(
        update={
            "run_dir": None,
            "engine": recipe.engine.of_process(process),
            "credit": {"scheme": "uniform", "lone": "keep"},
            "loss": recipe.loss.model_copy(update={"kl_coefficient": 0.0, "routing_replay": False}),
            "train": recipe.train.model_copy(update={"optimizer": "adamw", "sharding": "none"}),
        }
    )


def _doctor(options: argparse.Namespace, rest: list[str]) -> None:
    recipe, run_dir = _load(options.target, rest)
    from agentrl.doctor import examine
    from agentrl.run.build import build

    console = Console(soft_wrap=True)
    with build(_untrained(recipe), tokenizer_folder=_tokenizer(run_dir)) as parts:
        for name, words in examine(parts):
            console.print(f"{name:13} {words}")


def _serve(options: argparse.Namespace, rest: list[str]) -> None:
    # The model is only written down here: the server has the GPU to itself.
    recipe, run_dir = _load(options.target, [*rest, "--engine.name", "vllm_server", "--train.device", "cpu"])
    from agentrl.engine.vllm_server import VLLMServerConfig
    from agentrl.run.build import build
    from agentrl.run.serve import serve

    config = recipe.engine
    assert isinstance(config, VLLMServerConfig)  # as named above
    if not 0 <= options.server < (num := len(config.server.urls)):
        raise ConfigError(f"--server: expected 0 to {num - 1}, the numbers of engine.server.url, got {options.server}")
    config, tokenizer = config.of_process(options.server), _tokenizer(run_dir)
    recipe = _untrained(recipe, process=options.server)
    console = Console(soft_wrap=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that the server ends too
    with (
        build(recipe, tokenizer_folder=tokenizer) as parts,
        tempfile.TemporaryDirectory(prefix="agentrl-serve-") as folder,
        serve(parts, config, Path(folder), timeout_s=options.start_timeout_s) as server,
    ):
        console.print(f"serving at {server.url}; log: {folder}/server.log; end with Ctrl-C")
        status = server.process.wait()
        raise EngineError(
            f"the server ended with status {status}; the end of its log:\n{_tail(Path(folder) / 'server.log')}"
        )


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:]


def _show(options: argparse.Namespace, _: list[str]) -> None:
    from agentrl.report.show import legend, render

    chosen = _read_rollouts(options)[1]
    console = Console()
    console.print(legend())
    for record in chosen:
        console.print(render(record))


def _explain(options: argparse.Namespace, rest: list[str]) -> None:
    from agentrl.credit import load_credit
    from agentrl.report.explain import explain
    from agentrl.report.show import legend

    scheme = load_credit({"scheme": options.scheme, **_fields(rest)}, field="credit")
    everyone, chosen = _read_rollouts(options)
    try:
        tables = list(explain(scheme, everyone, shown=chosen))
    except CreditError as error:
        raise CreditError(f"{error}. Rollouts hold what the credit scheme of their own run read") from error
    console = Console()
    console.print(Text(repr(scheme)))
    console.print(legend())
    for table in tables:
        console.print(table)


def _fields(arguments: list[str]) -> dict[str, Any]:
    """Read `--name value` and `--name=value` pairs; values are YAML."""
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"expected --FIELD VALUE, a field of the scheme, got {name!r}")
        if not has_value and not rest:
            raise ConfigError(f"{name}: needs a value")
        value = value if has_value else rest.pop(0)
        found[name.removeprefix("--")] = parse_yaml(value, where=f"{name}: {value[:80]!r}")
    return found


def _read_rollouts(options: argparse.Namespace) -> "tuple[list[TrajectoryRecord], list[TrajectoryRecord]]":
    """Return all records of a file, and those that were asked for."""
    from agentrl.report.folder import RunFolder
    from agentrl.report.records import read_records

    path = options.target
    if options.number < 1:
        raise ConfigError(f"--number: at least 1, got {options.number}")
    if getattr(options, "faults", False):
        everyone = [record for file in RunFolder.open(path).kept_faults() for record in read_records(file)]
        if not everyone:
            raise ConfigError(f"{path} has no episode whose environment failed")
        return everyone, _chosen(everyone, options, path)
    if path.is_dir():
        files = RunFolder.open(path).rollouts()
        if not files:
            raise ConfigError(f"{path} has no rollouts yet (report.rollouts_every says how often they are written)")
        path = files[-1]
    if not path.is_file():
        raise ConfigError(f"there is no {path}")
    everyone = list(read_records(path))
    return everyone, _chosen(everyone, options, path)


def _chosen(records: "list[TrajectoryRecord]", options: argparse.Namespace, path: Path) -> "list[TrajectoryRecord]":
    chosen = [r for r in records if options.trajectory in (None, r.trajectory_id)][: options.number]
    if not chosen:
        which = "no rollouts" if options.trajectory is None else f"no trajectory {options.trajectory!r}"
        raise ConfigError(f"{path} has {which}")
    return chosen


def _replay(options: argparse.Namespace, _: list[str]) -> None:
    recipe, _folder = _load(options.target, [])
    from agentrl.env import make_env
    from agentrl.plain_data import words_of
    from agentrl.report.replay import find, replay
    from agentrl.rollout.fault import fault_of

    record = find(options.target, options.episode)
    env = make_env(recipe.env.id, recipe.env.options)
    console = Console(soft_wrap=True)
    try:
        for line in replay(env, record):
            console.print(line)
    except (Exception, KeyboardInterrupt) as error:
        console.print(Text(fault_of(error).traceback or words_of(error), "red"))
        if isinstance(error, KeyboardInterrupt):  # it hung
            raise
        sys.exit(_FAILURE)
    finally:
        env.close()
    console.print(Text(f"It was recorded to end like this: {record.stop_reason} {record.error or ''}", "dim"))


def _envs(_: argparse.Namespace, __: list[str]) -> None:
    table = Table("name", "what it is", "tools", "state keys", "turn rewards")
    from agentrl.env import describe, make_env
    from agentrl.registry import names
    from agentrl.types import Need

    for name in names("agentrl.envs"):
        base: Any = make_env(name).unwrapped
        described = describe(base)
        keys, rewards = ("yes" if need in described.needs else "no" for need in (Need.STATE_KEYS, Need.TURN_REWARDS))
        tools = ", ".join(tool["function"]["name"] for tool in described.tools)
        table.add_row(name, _first_line(type(base)), tools, keys, rewards)
    Console().print(table)


def _credit(_: argparse.Namespace, __: list[str]) -> None:
    table = Table("scheme", "what it is", "needs", "credits each", "paper", "fields and defaults")
    from agentrl.credit import credit_class, installed_credit

    for name, needs in installed_credit().items():
        try:
            scheme = credit_class(name)
        except ConfigError as error:
            table.add_row(name, Text(str(error)))
            continue
        fields = ", ".join(f"{field} {info.default}" for field, info in scheme.model_fields.items())
        mark = " (experimental)" if scheme.experimental else ""
        table.add_row(
            name + mark,
            Text(_first_line(sys.modules[scheme.__module__]) or _first_line(scheme)),
            ", ".join(sorted(scheme.needs if needs is None else needs)) or "-",
            scheme.granularity,
            scheme.paper or "-",
            Text(fields),
        )
    Console().print(table)


def _first_line(documented: Any) -> str:
    return (documented.__doc__ or "").strip().partition("\n")[0]


def _print_end(console: Console, folder: "RunFolder", recipe: "Recipe") -> None:
    console.print(_summary(folder.metrics(), recipe.evaluation.num_tasks))
    console.print(f"run folder: {folder.path}")


def _summary(rows: list[dict[str, float]], num_tasks: int) -> str:
    """Compare the first and the last evaluation; one whose every episode failed has no means to compare."""
    evaluations = [row for row in rows if "eval/episodes" in row]
    played = [row for row in evaluations if "eval/reward" in row]
    if not played:
        return f"no result on {num_tasks} held-out tasks: every held-out episode failed"
    first, last = played[0], played[-1]

    def change(name: str, form: str) -> str:
        before, after = first[f"eval/{name}"], last[f"eval/{name}"]
        return f"{name} {before:{form}} -> {after:{form}}"

    parts = [change(name, ".1%") for name in ("score", "success") if f"eval/{name}" in first and f"eval/{name}" in last]
    words = (
        f"{', '.join([*parts, change('reward', '.3f')])} on {num_tasks} held-out tasks, {rows[-1]['step']:.0f} steps"
    )
    if len(played) == len(evaluations):
        return words
    steps = ", ".join(f"{row['step']:.0f}" for row in evaluations if "eval/reward" not in row)
    return f"{words}; left out, because every held-out episode failed: step {steps}"


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    """Show one bar a phase; where there is no terminal, a line now and then."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars: dict[str, Any] = {}

        def on_progress(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
            note = _note(metrics)
            if phase not in bars:
                bars[phase] = progress.add_task(phase, total=total, note="")
            progress.update(bars[phase], completed=step, note=note)
            if not console.is_terminal and (step == total or step % max(1, total // 20) == 0):
                console.print(f"{phase} {step}/{total}  {note}")

        yield on_progress


def _note(metrics: dict[str, float]) -> str:
    faults = f"  faults {metrics['pool/faults']:.0f}" if metrics.get("pool/faults") else ""
    shown = {"loss": "loss", "reward/mean": "reward", "episode/score": "score", "clip/tokens": "clipped"}
    if "reward/mean" in metrics:
        del shown["loss"]
    return "  ".join(f"{word} {metrics[name]:.3f}" for name, word in shown.items() if name in metrics) + faults
