"""The one configuration tree: a YAML recipe, command-line overrides, and clear words about what is wrong with them."""

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from agentrl.agent.config import KINDS, AgentConfig
from agentrl.chat import AutoConfig, RendererConfig
from agentrl.credit import CreditScheme, load_credit, load_fallback
from agentrl.data.files import MAX_DEPTH, nests_deeper, parse_yaml
from agentrl.data.plain import merged
from agentrl.engine import EngineConfig
from agentrl.engine.auto import AutoConfig as AutoEngineConfig
from agentrl.env.make import EnvConfig
from agentrl.errors import ConfigError
from agentrl.learn.config import (
    ADAPTER_RATE,
    PRETRAINED_RATE,
    PRETRAINED_WARMUP,
    LossConfig,
    TrainConfig,
    WarmupConfig,
    algorithm,
)
from agentrl.learn.health import COLLAPSED_STEPS
from agentrl.learn.signals import SignalsConfig
from agentrl.policy.config import ModelConfig
from agentrl.recipe.foreign_names import at_home, of_field, of_path
from agentrl.recipe.plugin import ELSEWHERE, MayChange, Plugin, explain, section_of
from agentrl.recipe.registry import suggest
from agentrl.report.folder import ReportConfig
from agentrl.rollout import RolloutConfig
from agentrl.rollout.evaluation import EvaluationConfig
from agentrl.types import AmountOrZero, Count

_MAX_EPISODES = 1_000_000
"""Episodes of a step, or of an evaluation."""


class DeploymentConfig(BaseModel):
    """Processes that `agentrl up` starts and watches, each on GPUs of its own if there are any; `agentrl plan` counts them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trainers: Count = 1
    """Processes that train."""
    servers: AmountOrZero = 0
    """vLLM servers. 0: the engine is the recipe's."""
    tensor_parallel: Count = 1
    """GPUs of each server."""
    env_servers: AmountOrZero = 0
    """Servers of environments (`agentrl env-serve`). 0: episodes play where `env` says."""
    env_workers: Count = 8
    """Processes in which each of these plays; on Ray each takes a core."""
    max_restarts: AmountOrZero = 3
    """Times that the trainers are resumed after a failure; and that a server may fail in a row before it serves."""

    @property
    def server_names(self) -> list[str]:
        """Names of all servers: vLLM's, then those of environments."""
        engines = [f"server {index}" for index in range(self.servers)]
        return engines + [f"environments {index}" for index in range(self.env_servers)]

    def options(self, addresses: Sequence[str]) -> list[str]:
        """Return the options of a recipe whose servers have these addresses, `HOST:PORT`, in the order of their names."""
        engines, envs = addresses[: self.servers], addresses[self.servers :]
        found = []
        if engines:
            urls = ", ".join(f"http://{address}" for address in engines)
            found += ["--engine.name", "vllm_server", "--engine.server.url", f"[{urls}]"]
        if engines and self.tensor_parallel > 1:
            found += ["--engine.vllm.tensor_parallel_size", str(self.tensor_parallel)]
        if envs:
            found += ["--env.servers", f"[{', '.join(f'ws://{address}' for address in envs)}]"]
        return found


class Recipe(BaseModel):
    """Everything that defines a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Every random choice follows from it."""
    run_dir: Annotated[Path | None, MayChange()] = None
    """Folder of the run. None: `runs/<recipe>-<date>`; after the environment, if it is not the recipe's."""
    env: EnvConfig = EnvConfig()
    agent: AgentConfig | None = None
    """A program that plays, in place of an environment. None: `env` plays."""
    chat: SerializeAsAny[RendererConfig] = AutoConfig()
    model: ModelConfig = ModelConfig()
    warmup: WarmupConfig = WarmupConfig()
    engine: Annotated[SerializeAsAny[EngineConfig], MayChange()] = AutoEngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    credit: dict[str, Any] = {"scheme": "uniform"}
    """A credit scheme's name and its fields; `fallback: uniform` replaces a scheme that the environment cannot serve."""
    signals: SignalsConfig = SignalsConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    evaluation: Annotated[EvaluationConfig, MayChange()] = EvaluationConfig()
    report: Annotated[ReportConfig, MayChange()] = ReportConfig()
    deployment: Annotated[DeploymentConfig, MayChange()] = DeploymentConfig()

    @model_validator(mode="before")
    @classmethod
    def _of_algorithm(cls, given: Any) -> Any:
        """Fill in what the algorithm of the loss sets in other sections, and what it takes from them."""
        if not isinstance(given, Mapping):
            return given
        data = named_sections(given)
        loss, credit = data.get("loss", {}), data.get("credit", {})
        fields = dict(loss) if isinstance(loss, Mapping | LossConfig) else {}
        chosen = algorithm(str(fields.get("algorithm", LossConfig().algorithm)))
        if isinstance(credit, Mapping):
            own = chosen.credit or {"scheme": "uniform"}
            data["credit"] = {**(own if credit.get("scheme", own["scheme"]) == own["scheme"] else {}), **credit}
        if isinstance(train := data.get("train", {}), Mapping):
            data["train"] = {**chosen.train, **train}
        if data.get("agent") is not None:
            _fill_in_agent(data)
        _fill_in_pretrained(data)
        resolved = chosen.loss | fields
        if resolved["aggregation"] == "constant" and resolved.get("constant_length") is None:
            data["loss"] = {**fields, "constant_length": _max_episode_tokens(data.get("rollout"))}
        return data

    @field_validator("run_dir")
    @classmethod
    def _of_home(cls, path: Path | None) -> Path | None:
        if path is not None and "\0" in str(path):
            raise ConfigError("run_dir: no path holds a null byte")
        try:
            return path and path.expanduser()
        except RuntimeError as error:
            raise ConfigError(f"run_dir: {path}: {error}; write the whole path") from error

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, value in _numbers(self):
            if not math.isfinite(value):
                raise ValueError(f"{name}: must be a finite number (got {value})")
        rollout, episodes = self.rollout, self.rollout.num_groups * self.rollout.group_size
        evaluated = self.evaluation.num_tasks * self.evaluation.samples
        for what, number in (("rollout.group_size", episodes), ("evaluation.samples", evaluated)):
            if number > _MAX_EPISODES:
                raise ValueError(f"{what}: makes {number} episodes, more than {_MAX_EPISODES}; lower it")
        train, least = self.train, COLLAPSED_STEPS + rollout.staleness_bound
        if train.on_collapse == "rewind" and train.checkpoint_every * (train.keep_last - 1) < least:
            raise ValueError(
                f"train.on_collapse: rewind takes a checkpoint from {least + 1} steps before, and checkpoint_every: "
                f"{train.checkpoint_every} with keep_last: {train.keep_last} may keep none; raise one of them until "
                f"checkpoint_every * (keep_last - 1) is at least {least}"
            )
        if rollout.max_turn_tokens >= rollout.max_context_tokens:
            raise ValueError(
                f"rollout.max_turn_tokens: {rollout.max_turn_tokens} leaves no room for a prompt in "
                f"rollout.max_context_tokens: {rollout.max_context_tokens}"
            )
        if self.env.schedule and rollout.curriculum is not None:
            raise ValueError(
                "rollout.curriculum: judges tasks by their numbers, and env.schedule gives a number another task; use one of "
                "the two"
            )
        if self.agent is not None and getattr(self.engine, "lockstep", None):
            raise ValueError(
                "engine.lockstep: waits until every episode has asked, and a program asks when it likes; remove it"
            )
        scheme = load_credit(self.credit, elsewhere=_FIELDS)
        if rollout.group_size == 1:
            alone = "rollout.group_size: 1 gives every trajectory nothing to be compared with; raise it, or"
            if field := _field_of_error(scheme):
                raise ValueError(f"{alone} set {field}")
            if "fallback" in self.credit and _field_of_error(load_fallback(scheme)):
                raise ValueError(f"{alone} remove credit.fallback")
        if self.warmup.dialogues is not None:
            if self.model.name_or_path is None:
                raise ValueError(
                    "warmup.dialogues: a model made here is shown its environment's oracle(), from which its tokenizer is made "
                    "too; set model.name_or_path, or remove it"
                )
            if not (self.warmup.steps or self.loss.reads_demonstrations):
                raise ValueError("warmup.dialogues: with warmup.steps: 0 nothing reads them; raise it, or remove them")
        if self.train.num_minibatches > episodes:
            raise ValueError(
                f"train.num_minibatches: {self.train.num_minibatches} is more than the {episodes} episodes of a step "
                "(rollout.num_groups * rollout.group_size); lower it"
            )
        return self

    @property
    def player_id(self) -> str:
        """Name of the environment, or of the program that plays in place of one."""
        return self.env.id if self.agent is None else self.agent.name


def _fill_in_agent(data: dict[str, Any]) -> None:
    """Refuse an environment beside a program, and give `warmup` what a program needs, where the recipe leaves it open."""
    if data.get("env") not in (None, {}, EnvConfig(), EnvConfig().model_dump(mode="json")):
        raise ConfigError("agent: it plays in place of env; remove one of them")
    if isinstance(given := data.get("warmup", {}), Mapping):
        if str(given.get("steps") or 0) != "0" and given.get("dialogues") is None:  # text, from the command line
            raise ConfigError(
                "warmup.steps: a program has no oracle() that could be shown; set warmup.dialogues, or steps to 0"
            )
        if given.get("dialogues") is None:
            data["warmup"] = {**given, "steps": 0}


def named_sections(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections, with names that stand for one (`loss: grpo`, `credit: uniform`) written out."""
    return {
        section: {NAMED[section]: value} if section in NAMED and isinstance(value, str) else value
        for section, value in given.items()
    }


NAMED = {"loss": "algorithm", "credit": "scheme"}
"""Sections for which a name may stand, and the field that it is."""


def _fill_in_pretrained(data: dict[str, Any]) -> None:
    """Give the sections `train` and `warmup` what a pretrained model needs, where the recipe leaves it open."""
    model = data.get("model", {})
    name, lora = (
        model.get(field) if isinstance(model, Mapping) else getattr(model, field, None)
        for field in ("name_or_path", "lora")
    )
    if name is None:
        return
    factor = 1.0 if lora is None else ADAPTER_RATE
    for section, defaults in (("train", {"learning_rate": PRETRAINED_RATE}), ("warmup", PRETRAINED_WARMUP)):
        if isinstance(given := data.get(section, {}), Mapping):
            steps = {"steps": 20} if given.get("dialogues") is not None else {}
            data[section] = {**defaults, **steps, "learning_rate": factor * defaults["learning_rate"], **given}


def _max_episode_tokens(rollout: Any) -> Any:
    given = (
        rollout.get("max_episode_tokens")
        if isinstance(rollout, Mapping)
        else getattr(rollout, "max_episode_tokens", None)
    )
    return given or RolloutConfig().max_episode_tokens


def _field_of_error(scheme: CreditScheme) -> str | None:
    """Return the field of the recipe whose rule stops a run at a trajectory that has no sibling."""
    field = "credit"
    for layer in scheme.chain():
        if layer.lone_rule() == "error":
            return f"{field}.lone"
        field += next((f".{name}" for name, value in layer if isinstance(value, Mapping) and "scheme" in value), "")
    return None


_SEAMS = {
    name: seam
    for name, info in Recipe.model_fields.items()
    if (seam := section_of(info.annotation)) and issubclass(seam, Plugin)
}
"""The sections that name a plug-in, and hold whatever fields it has."""


def load_recipe(
    source: Path | Mapping[str, Any] | None, overrides: Sequence[str] = (), *, changes: Mapping[str, Any] | None = None
) -> Recipe:
    """Read a recipe (a YAML file, or its sections; None: an empty one), and lay over it what is to change.

    Args:
        source: of the recipe.
        overrides: options as on the command line: `--rollout.group_size 4`.
        changes: sections, as in a recipe, but with only the fields that change; overrides lie over them.

    Naming another `env.id`, `credit.scheme` or `loss.algorithm` drops the recipe's options for the former one, as does an
    environment in place of `agent`, an agent in place of `env`, and another kind of agent; naming another plug-in elsewhere
    (`chat.renderer`) drops those that it does not have. With a pretrained model, environments that have an option
    `prompt: agentrl.Prompt` get `full`, unless the recipe gives it.

    Raises:
        ConfigError: naming each field at fault, with the nearest name for one that does not exist.
    """
    data = named_sections(source if isinstance(source, Mapping) else _read(source))
    changed = merged(named_sections(changes or {}), _parse_overrides(overrides))
    if _nested(changed, "env", "id") not in (None, _nested(data, "env", "id") or EnvConfig().id):
        data["env"] = {}
    _drop_former_player(data, changed)
    if _nested(changed, "credit", "scheme") not in (None, _nested(data, "credit", "scheme")):
        data["credit"] = {}
    if _nested(changed, "loss", "algorithm") not in (None, _nested(data, "loss", "algorithm")):
        data["loss"] = {}
    for section, seam in _SEAMS.items():
        name, former = _nested(changed, section, seam.seam.key), data.get(section)
        if isinstance(name, str) and isinstance(former, dict):
            data[section] = {key: value for key, value in former.items() if key in seam.named(name).model_fields}
    try:
        recipe = Recipe.model_validate(merged(data, changed), context={ELSEWHERE: _FIELDS})
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, Recipe, elsewhere=_FIELDS))) from error
    if recipe.model.name_or_path is None:
        return recipe
    full: dict[str, Any] = {"evaluation": recipe.evaluation.with_prompt("full")}
    if recipe.agent is None:
        full["env"] = recipe.env.with_prompt("full")
    return recipe.model_copy(update=full)


def deployed(recipe: Recipe) -> Recipe:
    """Return a recipe with the engine that `agentrl up` gives it: as many servers as its section `deployment` has."""
    deployment = recipe.deployment
    options = deployment.options([f"127.0.0.1:{8000 + index}" for index in range(deployment.servers)])
    return load_recipe(recipe.model_dump(mode="json"), options) if options else recipe


def _drop_former_player(data: dict[str, Any], changed: Mapping[str, Any]) -> None:
    """Remove from a recipe what plays, where something else is to play."""
    if changed.get("agent") is not None and not data.get("agent"):
        data.pop("env", None)
    if _nested(changed, "env", "id") is not None and changed.get("agent") is None:
        data.pop("agent", None)
    former = data.get("agent")
    if isinstance(former, Mapping) and any(_nested(changed, "agent", kind) is not None for kind in KINDS):
        only_of_commands = () if _nested(changed, "agent", "command") else ("check", "files", "variables")
        data["agent"] = {key: value for key, value in former.items() if key not in (*KINDS, *only_of_commands)}


def _read(path: Path | None) -> dict[str, Any]:
    try:
        text = b"{}" if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from error
    data = parse_yaml(text, where=f"the recipe {path}")
    if not isinstance(data, dict):
        raise ConfigError(f"the recipe {path} must be a mapping of sections, got {type(data).__name__}")
    return data


def plan(recipe: Recipe) -> dict[str, str]:
    """Return what a step of this recipe amounts to, with units."""
    rollout, train = recipe.rollout, recipe.train
    episodes = rollout.num_groups * rollout.group_size
    minibatches = min(train.num_minibatches, episodes)
    updates = minibatches * train.epochs
    return {
        "episodes per step": f"{episodes} ({rollout.num_groups} groups of {rollout.group_size})",
        "turns per episode": f"at most {rollout.max_turns}, of at most {rollout.max_turn_tokens} tokens each",
        "updates per step": f"at most {updates}, on about {episodes // minibatches} trajectories each",
        "tokens per micro-batch": f"at most {train.max_tokens_per_micro_batch}, shared ones once",
        "steps": f"{train.steps} (at most {train.steps * updates} updates)",
        "credit": ", ".join(f"{key} {value}" for key, value in recipe.credit.items()),
        "loss": recipe.loss.describe() + _other_credit(recipe),
        "evaluation": f"{recipe.evaluation.num_tasks} evaluation tasks, {recipe.evaluation.samples} episodes each",
    }


_LARGEST_RATE = 5e-5
"""Learning rate above which whole weights of a pretrained model are lost within steps; usual are 1e-6 to 2e-5."""
_LARGEST_BOUND = 20.0
"""Nats of a whole episode above which a bound on each token bounds little: there the policy would hardly sample it again."""


def warnings(recipe: Recipe) -> list[str]:
    """List settings that are allowed but likely mistakes, before anything starts."""
    found = recipe.loss.warnings(staleness_bound=recipe.rollout.staleness_bound)
    rate, bound = recipe.train.learning_rate, recipe.train.target_kl
    if recipe.model.name_or_path is not None and recipe.model.lora is None and rate > _LARGEST_RATE:
        found.append(
            f"train.learning_rate: {rate:g} suits models made here and adapters (model.lora); the whole weights of a "
            "pretrained model want 1e-6 to 2e-5"
        )
    tokens = recipe.rollout.max_episode_tokens
    if bound is not None and bound * tokens > _LARGEST_BOUND:
        found.append(
            f"train.target_kl: {bound:g} nats a token are up to {bound * tokens:.3g} on an episode of "
            f"rollout.max_episode_tokens: {tokens}, which bounds little; lower it, or remove it"
        )
    return found


def _other_credit(recipe: Recipe) -> str:
    """Return a note if the credit is not that of the algorithm's paper."""
    own = algorithm(recipe.loss.algorithm).credit
    if own is None or own.items() <= recipe.credit.items():
        return ""
    return f" (its own credit is {', '.join(f'{key} {value}' for key, value in own.items())})"


def _parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse command-line options with pydantic-settings; return only what was given."""
    if not arguments:
        return {}

    class CommandLine(Recipe, BaseSettings):
        model_config = SettingsConfigDict(extra="forbid", frozen=True)

    try:
        source: Any = CliSettingsSource(CommandLine, cli_parse_args=_open_mappings(arguments), cli_exit_on_error=False)
        given: dict[str, Any] = source()
    except SettingsError as error:
        raise ConfigError(_wrong_options(str(error))) from error
    except RecursionError:  # before Python 3.12; later ones read on
        is_deep = True
    else:
        is_deep = nests_deeper(given, MAX_DEPTH)
    if is_deep:
        raise ConfigError(f"command line: a value nests deeper than {MAX_DEPTH}")
    return given


def _open_mappings(arguments: Sequence[str]) -> list[str]:
    """Rewrite options below free mappings (`--credit.gamma .5`) and YAML (`[{id: x}]`) as JSON, which argparse knows."""
    rewritten: list[str] = []
    mappings: dict[str, dict[str, Any]] = {}
    prefixes = ("--credit.", "--env.options.", *(f"--{section}." for section in _SEAMS))
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        name, has_value, value = option.partition("=")
        if (section := name.removeprefix("--")) in NAMED:  # --loss grpo
            named = value if has_value else "".join(rest[:1])
            if named and not named.lstrip().startswith(("{", "[", "--")):
                option = name = f"{name}.{NAMED[section]}"
                if has_value:
                    option = f"{name}={value}"
        prefix = next((p for p in prefixes if name.startswith(p)), None)
        given = value if has_value else "".join(rest[:1])
        if prefix is None and (name in _TEXTS or not (name.startswith("--") and given.lstrip().startswith(("{", "[")))):
            rewritten.append(option)
            continue
        if not has_value:
            if not rest:
                raise ConfigError(f"{name}: needs a value")
            value = rest.pop(0)
        nested: Any = parse_yaml(value, where=f"{name}: {value[:80]!r}")
        if not _has_names(nested):
            raise ConfigError(f"{name}: the names in a mapping must be text; put them in quotes")
        if prefix is None:
            rewritten += [name, json.dumps(nested, default=str)]
            continue
        for key in reversed(name.removeprefix(prefix).split(".")):
            nested = {key: nested}
        mappings[prefix] = merged(mappings.get(prefix, {}), nested)
    for prefix, nested in mappings.items():
        rewritten += [prefix.removesuffix("."), json.dumps(nested, default=str)]  # a YAML date is no JSON: as written
    return rewritten


def _has_names(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int | float) and _has_names(each) for key, each in value.items())
    return all(map(_has_names, value)) if isinstance(value, list) else True


def _wrong_options(message: str) -> str:
    """Turn argparse's words into ours: each unknown option with the nearest that exists. What is very long is cut."""
    if lacking := re.search(r"argument (--\S+): expected one argument", message):
        return f"{lacking[1]}: needs a value"
    if section := re.search(r'error parsing value for field "([^"]+)"', message):
        return f"--{section[1]}: expected JSON, such as {{}}; a field of it is --{section[1]}.FIELD VALUE"
    message = message.removeprefix("error parsing CLI: ")
    _, _, arguments = message.partition("unrecognized arguments: ")
    unknown = [word.partition("=")[0][:100] for word in arguments.split() if word.startswith("--")]
    if not unknown:
        return f"command line: {message[:300]}{'...' if len(message) > 300 else ''}"
    return "\n".join(f"{option}: no such option.{_nearest_option(option)}" for option in unknown)


def _nearest_option(option: str) -> str:
    """Suggest the nearest of all options, else those of the same section."""
    known = [f"--{name}" for name in _FIELDS if not any(other.startswith(f"{name}.") for other in _FIELDS)]
    name = option.removeprefix("--").rpartition(".")[2]
    own = of_path(option.removeprefix("--"))
    if own is None and (hint := at_home(name, known)):
        return hint
    if hint := own or of_field(name):
        return re.sub(r"^ Did you mean '([\w.]+)'\?$", r" Did you mean '--\1'?", hint)
    if difflib.get_close_matches(option, known):
        return suggest(option, known)
    return suggest(option, [name for name in known if name.rpartition(".")[0] == option.rpartition(".")[0]] or known)


def _numbers(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the name and value of each float of a tree of sections."""
    for name, value in model:
        if isinstance(value, BaseModel):
            yield from _numbers(value, f"{prefix}{name}.")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                yield prefix + name, number


def _field_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        if get_origin(info.annotation) is not tuple and (section := section_of(info.annotation)):
            yield from _field_names(section, f"{prefix}{name}.")


_FIELDS = tuple(_field_names(Recipe))
"""All fields of the tree by their paths, but for those of plug-ins."""


def _is_text(path: str) -> bool:
    *sections, last = path.split(".")
    model: Any = Recipe
    for section in sections:
        model = section_of(model.model_fields[section].annotation)
    annotation = model.model_fields[last].annotation
    is_union = get_origin(annotation) in (Union, UnionType)
    return not {str, Path}.isdisjoint(get_args(annotation) if is_union else [annotation])


_TEXTS = frozenset(f"--{path}" for path in _FIELDS if _is_text(path))
"""Options that are taken as they are written."""


def _nested(data: Any, *path: str) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data
