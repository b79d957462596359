"""A model card, written from a run: the task, how it was trained, curves, and the evaluation with its intervals.

Private data is left out (`report/public.py`). Text of environments and recipes is escaped or fenced, so that it is text,
and the first line of an environment's docstring is read from its source: nothing of it is imported or run.
"""

import ast
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from agentrl.data.files import dump_yaml
from agentrl.data.plain import line_of, printable
from agentrl.errors import ConfigError, UserError
from agentrl.report.folder import EvaluationNote, RunFolder
from agentrl.report.public import public
from agentrl.report.records import groups_of, read_records
from agentrl.report.statistics import draw, player_of, settings_of, shown
from agentrl.rollout.evaluation import EvaluationConfig, Interval, summarize_evaluation, wilson


def first_line(env_id: str) -> str | None:
    """Return the first line of the docstring of what `env.id` or `agent.run` names.

    None: it has none, or no source that is found by its name.
    """
    registered = next((point.value for point in entry_points(group="agentrl.envs") if point.name == env_id), env_id)
    module, _, attribute = registered.partition(":")
    source = _source(module) if attribute else None
    try:
        tree = ast.parse(source.read_bytes()) if source else None
    except (OSError, SyntaxError, ValueError):  # what is no source says nothing
        return None
    for node in tree.body if tree else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == attribute:
            return (ast.get_docstring(node) or "").partition("\n")[0] or None
    return None


def _source(module: str) -> Path | None:
    top, *rest = module.split(".")
    spec = PathFinder.find_spec(top)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if not rest:
        return Path(spec.origin) if spec and spec.origin else None
    found = (place.joinpath(*rest) for place in places)
    files = (file for path in found for file in (path.with_suffix(".py"), path / "__init__.py"))
    return next((file for file in files if file.is_file()), None)


PICTURE = "curves.png"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_HUB_MODEL = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_MEASURES = ("success", "score", "reward")
_RANGES = {"success": 1.0, "episodes": 1e9, "failed": 1e9, "unscored": 1e9}
"""Upper bound of each figure of an evaluation; the lower one is 0."""
_PLAYED = ("episodes", "failed", "unscored")
_POINTS = 10
"""Rows of the table of curves, if there is no picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of an evaluation in one environment."""

    env_id: str
    name: str
    """In `evaluation.env`; empty if there is one environment."""
    num_tasks: int
    episodes: int
    values: dict[str, float]
    intervals: dict[str, Interval]

    @property
    def where(self) -> str:
        """Environment, with its name if there are several."""
        return f"{self.env_id} ({self.name})" if self.name else self.env_id

    @property
    def found(self) -> list[tuple[str, float, Interval | None]]:
        """Metrics with their values and intervals."""
        return [(name, value, self.intervals.get(name)) for name, value in self.values.items()]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Table of the metrics."""
        rows = [(name, f"{value:.4g}", _ends(interval) if interval else "") for name, value, interval in self.found]
        return [("metric", "value", "95 % interval over tasks"), *rows]


def write_card(
    folder: Path,
    run: RunFolder,
    config: Mapping[str, Any],
    *,
    name: str,
    step: int,
    adapter: bool,
    auto_class: str = "AutoModelForCausalLM",
) -> None:
    """Write `README.md`, and `curves.png` where matplotlib is installed.

    Args:
        folder: that is exported.
        run: whose weights they are.
        config: its recipe.
        name: under which the model is going to be loaded.
        step: of the weights.
        adapter: whether the folder holds adapters alone.
        auto_class: of transformers, that loads the model.
    """
    from huggingface_hub import ModelCard

    rows = [row for row in run.metrics() if row["step"] <= step]
    try:
        draw(rows, shown(rows)).savefig(folder / PICTURE, dpi=120)
        curves = f"![{', '.join(shown(rows))} over the steps]({PICTURE})"
    except UserError:
        curves = _table(_curve_rows(rows))
    measured, base = measure(run, config, step=step), _base_model(config)
    ModelCard.from_template(
        _card_data(config, measured, name=name, adapter=adapter),
        template_path=str(_TEMPLATE),
        title=name.rpartition("/")[2],
        config=config,
        base=base,
        player=player_of(config),
        docstring=first_line(player_of(config)),
        auto_class=auto_class,
        loaded=json.dumps((base or "THE BASE MODEL") if adapter else name),
        adapter=json.dumps(name) if adapter else None,
        recipe=dump_yaml(public({key: value for key, value in config.items() if key not in ("run_dir", "report")})),
        curves=curves,
        measured=measured,
        step=step,
        python=platform.python_version(),
        version=version,
        public=public,
        yaml=dump_yaml,
        code=_code,
        escaped=_escaped,
        fenced=_fenced,
        table=_table,
    ).save(folder / "README.md")


def measure(run: RunFolder, config: Mapping[str, Any], *, step: int) -> list[Measured]:
    """Return what is known of the weights of a step: of the newest `agentrl eval`, else of the run's own evaluation.

    One that was played with other settings than the recipe's says nothing here.
    """
    wanted = EvaluationNote(step=step, settings=settings_of(config))
    for file, note in reversed(run.played_evaluations()):
        if note == wanted:
            return list(_replayed(list(read_records(file)), config))
    row = next((row for row in run.metrics() if row["step"] == step), {})
    return list(_of_row(row, config))


def _envs(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the environments in which a run is evaluated, by name."""
    envs: Mapping[str, Any] = config["evaluation"]["env"] or {"": {"id": player_of(config)}}
    return envs


def _replayed(records: Sequence[Any], config: Mapping[str, Any]) -> Iterator[Measured]:
    evaluation = EvaluationConfig.model_validate(config["evaluation"])
    by_prefix: dict[str, list[Any]] = {}
    for record in records:
        by_prefix.setdefault(record.group_id.rpartition("/")[0], []).append(record)
    for prefix, of_one in by_prefix.items():
        name = prefix.partition("/")[2]
        groups = groups_of(of_one)
        found = summarize_evaluation(groups, evaluation)
        yield Measured(
            env_id=_envs(config)[name]["id"] if name in _envs(config) else of_one[0].env_id,
            name=name,
            num_tasks=len(groups),
            episodes=round(found.metrics["episodes"]),
            values=_values(found.metrics),
            intervals=found.intervals(),
        )


def _of_row(row: Mapping[str, float], config: Mapping[str, Any]) -> Iterator[Measured]:
    for env_name, env in _envs(config).items():
        prefix = f"eval/{env_name}/" if env_name else "eval/"
        values = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
        for name, most in _RANGES.items():
            if not 0 <= (number := values.get(name, 0.0)) <= most:
                raise ConfigError(
                    f"metrics.jsonl is damaged: {prefix}{name} of step {row['step']:.0f} is {number:g}; mend that line, or "
                    "measure these weights with `agentrl eval`"
                )
        if not (episodes := round(values.get("episodes", 0))):
            continue
        is_one_each = config["evaluation"]["samples"] == 1 and "success" in values
        yield Measured(
            env_id=env["id"],
            name=env_name,
            num_tasks=round(sum(values.get(name, 0) for name in _PLAYED) / config["evaluation"]["samples"]),
            episodes=episodes,
            values=_values(values),
            intervals={"success": wilson(values["success"], episodes)} if is_one_each else {},
        )


def _values(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name in _MEASURES or name.startswith("pass@")}


def _card_data(config: Mapping[str, Any], measured: Sequence[Measured], *, name: str, adapter: bool) -> Any:
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="reinforcement-learning",
            dataset_type=re.sub(r"[^\w.-]+", "-", _public(each.where)).strip("-"),
            dataset_name=f"{_public(each.where)}, {each.num_tasks} evaluation tasks",
            metric_type=measure,
            metric_value=round(value, 6),
            metric_name=f"{measure} (95 % interval {_ends(interval)})" if interval else measure,
        )
        for each in measured
        for measure, value, interval in each.found
    ]
    return ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["agentrl", "reinforcement-learning", "agent"],
        base_model=_base_model(config),
        model_name=name.rpartition("/")[2],
        eval_results=results or None,
    )


def _curve_rows(rows: Sequence[dict[str, float]]) -> Iterator[tuple[str, ...]]:
    names = shown(rows)
    yield "step", *names
    every = max(1, -(-len(rows) // _POINTS))
    for row in [*rows[:-1:every], *rows[-1:]]:
        yield f"{row['step']:.0f}", *(f"{row[name]:.4g}" if name in row else "" for name in names)


def _ends(interval: Interval) -> str:
    return f"{interval.low:.4g} to {interval.high:.4g}"


def _base_model(config: Mapping[str, Any]) -> str | None:
    """Return the model of the Hub from which training began. None: a folder, or one made for the run."""
    name = config["model"]["name_or_path"]
    return name if name and _HUB_MODEL.fullmatch(name) and not Path(name).exists() else None


def _public(text: str) -> str:
    return printable(str(public(text)))


def _code(text: str) -> str:
    """Return text that stands between backticks."""
    return " ".join(_public(text).replace("`", "'").split())


def _escaped(text: str) -> str:
    """Return text in which no character means anything to Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&$])", r"\\\1", " ".join(_public(text).split()))


def _fenced(text: str) -> str:
    """Return YAML between fences that are longer than any in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}yaml\n{text.rstrip()}\n{fence}"


def _table(rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    head, *others = [[_escaped(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others))


def check_repo_id(repo_id: str) -> None:
    """Look whether the Hub could have a repository of this name.

    Raises:
        ConfigError: if it could not.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"--push: {line_of(error).partition(': ')[2]}") from error
    if "/" not in repo_id:
        raise ConfigError(f"--push: {repo_id!r} has no owner; write OWNER/{repo_id}")


def push(folder: Path, repo_id: str, *, private: bool = False) -> str:
    """Upload a folder as one commit into a repository of models, which is made if there is none; return its address.

    Args:
        folder: to upload.
        repo_id: `OWNER/NAME`.
        private: where it is made, it is so that others do not see it; one that they see already is refused.

    Raises:
        ConfigError: if it cannot be done; the folder stays.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    api: Any = HfApi()
    again = f"The folder stays; upload it later: hf upload {'--private ' if private else ''}{repo_id} {folder}"
    if get_token() is None:
        raise ConfigError(f"--push: no token of the Hub; run `hf auth login`, or set HF_TOKEN. {again}")
    try:
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise ConfigError(f"--private: {repo_id} exists, and is public; choose another name. {again}")
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload a policy trained with agentrl")
    except (HTTPError, OSError, RuntimeError) as error:
        raise ConfigError(f"--push: {_words(error, repo_id, api.endpoint)}. {again}") from error
    return str(url)


def _words(error: Exception, repo_id: str, endpoint: str) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # of the upload of a large file
        return _words(error.__cause__, repo_id, endpoint)
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        return "the Hub does not take the token; run `hf auth login`, or set another HF_TOKEN"
    if status in (403, 404):
        return f"the token may not write to {repo_id}; use one that may, or another name"
    if status is not None:
        return f"the Hub refused it: {line_of(error).rstrip('.')}"
    return f"{endpoint} was not reached: {line_of(error).rstrip('.')}"
