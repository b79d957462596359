"""Environments of a recipe: the section `env`, the environment built from it, and what it offers, looked at once."""

import inspect
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Annotated, Any, Self, get_origin, get_type_hints

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator
from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from agentrl.data.plain import PlainDataError, abbreviated, line_of, plain_data
from agentrl.env.message_env import MessageEnv
from agentrl.env.tool_env import tool_schemas
from agentrl.errors import ConfigError, EnvironmentFailure
from agentrl.recipe.plugin import MayChange
from agentrl.recipe.registry import import_named, names, resolve, suggest
from agentrl.types import Amount, Message, Need, NumTasks, Prompt, Split, TaskHashes, check_address

Env = gym.Env[tuple[Message, ...], str | Message]

_FIELD = "env.id"
_OPTIONS = "env.options"
_WRAPPERS = "env.wrappers"
_GYMNASIUM_ID = re.compile(r"/|-v\d+\Z")


def make_env(spec: str, options: Mapping[str, Any] | None = None, *, wrappers: Sequence[Mapping[str, Any]] = ()) -> Env:
    """Build the environment that `spec` names.

    Args:
        spec: a name that an installed package registered (`calculator`), `module:Class`, `module:function` where the
            function says that it returns an environment (`-> gymnasium.Env`, or a class of it), or a Gymnasium id
            (`agentrl/KeyDoor-v0`; `module:id` imports the module that registers it first). A Gymnasium id comes with
            the wrappers that it was registered with; anything else comes bare. Nothing else is called, because a recipe
            may come from someone else.
        options: keyword arguments of its constructor; with a Gymnasium id also `max_episode_steps`.
        wrappers: what is put around it, the first innermost: `id`, a name that an installed package registered (`record`)
            or `module:Class` of a `gymnasium.Wrapper`, and keyword arguments of its constructor.

    Raises:
        ConfigError: naming `env.id`, `env.options` or a place of `env.wrappers`, for a name that leads nowhere, a module
            that cannot be imported, an option that the constructor does not know or refuses, whatever else it raises, and
            what is no `MessageEnv`, or no wrapper.
    """
    options = dict(options or {})
    create = _from_gymnasium(spec, options) if _GYMNASIUM_ID.search(spec) else _from_registry(spec, options)
    env: Env = _created(partial(create, **options), spec, field=_OPTIONS)
    if not isinstance(env, gym.Env) or not isinstance(
        _created(lambda: env.unwrapped, spec, field=_OPTIONS), MessageEnv
    ):
        raise _no_message_env(spec, env)
    for place, wrapper in enumerate(wrappers):
        env = _wrapped(env, wrapper, field=f"{_WRAPPERS}.{place}")
    return env


def _wrapped(env: Env, wrapper: Mapping[str, Any], *, field: str) -> Env:
    spec, options = wrapper.get("id"), {name: value for name, value in wrapper.items() if name != "id"}
    if not isinstance(spec, str):
        known = ", ".join(names("agentrl.wrappers"))
        raise ConfigError(f"{field}.id: name a wrapper ({known}), or write 'module:Class'")
    target: Any = resolve(spec, group="agentrl.wrappers", field=f"{field}.id")
    if not (isinstance(target, type) and issubclass(target, gym.Wrapper)):
        raise ConfigError(f"{field}.id: {spec!r} is no class of gymnasium.Wrapper")
    _check_options(spec, target, options, field=field, without="env")
    wrapped: Env = _created(partial(target, env, **options), spec, field=field)
    return wrapped


def _created(create: Callable[[], Any], spec: str, *, field: str) -> Any:
    try:
        return create()
    except (Exception, SystemExit) as error:  # a stranger's constructor may raise anything
        # The first two are what arguments are refused with: their words are about an option and need no type.
        words = line_of(error)
        if isinstance(error, TypeError | ValueError):
            words = words.partition(": ")[2] or words
        raise ConfigError(f"{field}: {spec!r} could not be made: {words}") from error


def _from_registry(spec: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    target = _registered(spec)
    if not inspect.isfunction(target) and not _is_env_class(target):
        raise _no_message_env(spec, target)
    _check_options(spec, target, options)
    return target


def _registered(spec: str) -> Callable[..., Any]:
    target: Callable[..., Any] = resolve(spec, group="agentrl.envs", field=_FIELD)
    if inspect.isfunction(target) and not _is_env_class(_returned(target)):
        raise ConfigError(
            f"{_FIELD}: {spec!r} is a function that does not say that it makes environments, and is not called; write "
            f"`def {target.__name__}(...) -> gymnasium.Env`"
        )
    return target


def _from_gymnasium(spec: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    if (creator := _gymnasium_creator(spec)) is not None:
        _check_options(spec, creator, options, also=("max_episode_steps", "render_mode"))

    def create(**kwargs: Any) -> Any:
        # Gymnasium's passive checker looks at each first step; `agentrl.testing.check_env` looks once, and deeper.
        return gym.make(spec.rpartition(":")[2], disable_env_checker=True, **kwargs)

    return create


def _gymnasium_creator(spec: str) -> Callable[..., Any] | None:
    module, _, env_id = spec.rpartition(":")
    modules = [module] if module else []
    if not module and env_id not in gym.registry:  # packages with agentrl environments may register them on import
        modules = [point.module.partition(".")[0] for point in entry_points(group="agentrl.envs")]
    try:
        for name in modules:
            import_named(name, spec=spec, field=_FIELD)
        creator: Any = gym.spec(env_id).entry_point
        if isinstance(creator, str):
            import_named(creator.partition(":")[0], spec=spec, field=_FIELD)
            creator = load_env_creator(creator)
    except (gym.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(
            f"{_FIELD}: Gymnasium cannot find {spec!r}: {error} "
            "Write 'module:id' with the module that registers it, or 'module:Class'."
        ) from error
    found: Callable[..., Any] | None = creator
    return found


def takes_prompt(spec: str) -> bool:
    """Return whether an environment's constructor has an option `prompt: agentrl.Prompt`; False if it cannot be looked at."""
    try:
        create: Any = _gymnasium_creator(spec) if _GYMNASIUM_ID.search(spec) else _registered(spec)
        option = inspect.signature(create, eval_str=True).parameters.get("prompt")
    except (ConfigError, NameError, TypeError, ValueError):  # one that cannot be made is refused when it is made
        return False
    return option is not None and option.annotation == Prompt


def _is_env_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, gym.Env)


def _returned(function: Callable[..., Any]) -> object:
    """Return the class that a function says that it returns."""
    try:
        returned = get_type_hints(function).get("return")
    except (NameError, TypeError):  # of names that only a type checker imports
        return None
    return get_origin(returned) or returned


def _check_options(
    spec: str,
    create: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    field: str = _OPTIONS,
    also: Sequence[str] = (),
    without: str | None = None,
) -> None:
    parameters = inspect.signature(create).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != without]
    known += also
    for name in options:
        if name not in known:
            hint = suggest(name, known) if known else " Options are arguments of its __init__, and it has none."
            raise ConfigError(f"{field}.{name}: {spec!r} has no such option.{hint}")


def _no_message_env(spec: str, got: object) -> ConfigError:
    got = got.unwrapped if isinstance(got, gym.Env) else got
    what = got.__name__ if isinstance(got, type) else type(got).__name__
    return ConfigError(
        f"{_FIELD}: {spec!r} gives {what}, which is no agentrl.MessageEnv. "
        "Subclass agentrl.ToolEnv (tools, start, answer) or agentrl.MessageEnv (reset, step)."
    )


def _as_kept(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as a run's folder keeps them: a run is resumed in the environment in which it began."""
    try:
        kept: dict[str, Any] = plain_data(options)
        json.dumps(options, allow_nan=False, default=str)
    except PlainDataError as error:
        raise PydanticCustomError("plain", "{words}", {"words": str(error)}) from error
    except ValueError:
        raise PydanticCustomError("finite", "expected finite numbers") from None
    return kept


Options = Annotated[dict[str, Any], AfterValidator(_as_kept)]


class StageConfig(BaseModel):
    """Options of the environment that hold in training from a step on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    from_step: Amount
    """The first step whose groups are started with them."""
    options: Options
    """Laid over `env.options`, until the next entry."""


class EnvConfig(BaseModel):
    """Environment that the agent lives in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = "calculator"
    """An installed name (`agentrl envs` lists them), `module:Class`, or a Gymnasium id."""
    options: Options = {}
    """Keyword arguments of the environment's constructor. One that has `prompt: agentrl.Prompt` (`short` or `full`) gets `full`
    with a pretrained model, unless it is given here."""

    wrappers: tuple[Options, ...] = ()
    """Wrappers around it, the first innermost: each an `id`, an installed name or `module:Class` of a
    `gymnasium.Wrapper`, and beside it keyword arguments of its constructor."""

    schedule: tuple[StageConfig, ...] = ()
    """Options that change with the step, in training alone: a schedule of difficulty."""

    servers: Annotated[tuple[str, ...], MayChange()] = ()
    """Addresses, `ws://HOST:PORT`, of servers that `agentrl env-serve` started with this recipe: each episode plays on the one
    with the fewest per worker, and continues on another if that is lost. Empty: episodes play here."""

    def make(self, stage: int = 0) -> gym.Env[tuple[Message, ...], str | Message]:
        """Return a new environment.

        Args:
            stage: with the options of an entry of the schedule, from 1. 0: with `options` alone.

        Raises:
            ConfigError: see `make_env`; and for an entry that there is not.
        """
        if not 0 <= stage <= (num := len(self.schedule)):
            raise ConfigError(f"env.schedule has no entry {stage}; it has {num}")
        if self.servers:
            from agentrl.env.remote import remote_env

            return remote_env(self.servers, hosted=self.hosted(), stage=stage)
        options = self.options | (self.schedule[stage - 1].options if stage else {})
        return make_env(self.id, options, wrappers=self.wrappers)

    def with_prompt(self, prompt: Prompt) -> Self:
        """Fill in the option `prompt` if the environment has one (`takes_prompt`) and it is left open."""
        if "prompt" in self.options or not takes_prompt(self.id):
            return self
        return self.model_copy(update={"options": {**self.options, "prompt": prompt}})

    def hosted(self) -> dict[str, Any]:
        """Return the fields that a server of this environment has too."""
        return self.model_dump(mode="json", exclude={"servers"})

    @model_validator(mode="after")
    def _addressed(self) -> Self:
        for url in self.servers:
            check_address("servers", url, "ws", "wss")
        return self

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for place, (one, following) in enumerate(pairwise(self.schedule)):
            if following.from_step <= one.from_step:
                raise ValueError(
                    f"schedule.{place + 1}.from_step: {following.from_step} does not come after {one.from_step}; order the "
                    "entries by their steps"
                )
        return self


MAX_TASKS = 10**8
"""Tasks of a split: each epoch has an order of its own, of eight bytes a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvDescription:
    """Data that an environment offers to credit schemes, to the model and to the order of tasks."""

    needs: frozenset[Need]
    """Data that credit schemes may read from it."""
    tools: list[dict[str, Any]]
    """JSON schemas of its tools."""
    num_tasks: NumTasks
    task_hashes: TaskHashes


def describe(env: MessageEnv) -> EnvDescription:
    """Return what an environment offers.

    Raises:
        EnvironmentFailure: naming what `provides()`, `tools`, `num_tasks()` or `tasks_hash()` should be.
    """
    name, provided = type(env).__name__, env.provides()
    if not isinstance(provided, set | frozenset) or not all(need in list(Need) for need in provided):
        raise EnvironmentFailure(
            f"environment {name}: provides() returned {abbreviated(provided)}; return a frozenset of agentrl.Need"
        )
    try:
        tools = tool_schemas(env.tools)
    except PlainDataError as error:
        raise EnvironmentFailure(f"environment {name}: {error}") from error
    num_tasks = NumTasks(train=_num_tasks(env, "train"), eval=_num_tasks(env, "eval"))
    hashes = TaskHashes(train=_tasks_hash(env, "train"), eval=_tasks_hash(env, "eval"))
    return EnvDescription(needs=frozenset(map(Need, provided)), tools=tools, num_tasks=num_tasks, task_hashes=hashes)


def _tasks_hash(env: MessageEnv, split: Split) -> str | None:
    given: object = env.tasks_hash(split)
    if given is not None and not isinstance(given, str):
        raise EnvironmentFailure(
            f"environment {type(env).__name__}: tasks_hash({split!r}) returned {abbreviated(given)}; return a str, or None"
        )
    return given


def _num_tasks(env: MessageEnv, split: Split) -> int | None:
    given: Any = env.num_tasks(split)  # of a stranger's: it may be anything
    if given is None:
        return None
    try:
        number = -1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = -1
    if number > MAX_TASKS:
        raise EnvironmentFailure(
            f"environment {type(env).__name__}: num_tasks({split!r}) returned {abbreviated(given)}; an order is kept of up to "
            f"{MAX_TASKS:,} tasks: return None, and let tasks follow from the seed"
        )
    if number < 0:
        raise EnvironmentFailure(
            f"environment {type(env).__name__}: num_tasks({split!r}) returned {abbreviated(given)}; return the number of "
            "tasks, or None where they follow from the seed"
        )
    return int(number)


CALL_ID = "call_0"


def bad_actions(tools: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str | Message, bool]]:
    """Yield what it is, the action, and whether a `ToolEnv` must answer it with an error."""
    yield "plain text", "hello", False
    yield "empty text", "", False
    yield "unicode text", "naïve \u2603 \U0001f600 \x00 \u202e", False
    yield "very long text", "x" * 100_000, False
    yield "a message with content None and a call", {**call("no_such_tool", {}), "content": None}, True
    yield "an unknown tool", call("no_such_tool", {}), True
    yield "an unknown tool with a very long name", call("x" * 100_000, {}), True
    yield "a malformed call", call("", '{"name": '), True
    for function in (schema["function"] for schema in tools if is_schema(schema)):
        name, properties = function["name"], function["parameters"].get("properties", {})
        yield f"{name} with malformed JSON", call(name, "{"), True
        yield f"{name} with a list of arguments", call(name, [1]), True
        yield f"{name} with an argument it does not have", call(name, {"no such argument": "\ud800"}), True
        yield f"{name} without arguments", call(name, {}), False
        yield f"{name} with arguments of a wrong type", call(name, {p: {"no": [None]} for p in properties}), False
        yield f"{name} with huge numbers", call(name, dict.fromkeys(properties, 10**400)), False
        yield f"{name} with very long texts", call(name, dict.fromkeys(properties, "9" * 100_000)), False


def is_schema(schema: Any) -> bool:
    """Return whether a tool's schema is sound enough to call it."""
    function = schema.get("function") if isinstance(schema, dict) else None
    return isinstance(function, dict) and "name" in function and isinstance(function.get("parameters"), dict)


def likely_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that a tool may well accept."""
    values = {"integer": 1, "number": 0.5, "string": "a", "boolean": True, "array": [], "object": {}}
    properties: dict[str, Any] = schema["function"]["parameters"].get("properties", {})
    return {name: (p.get("enum") or [values.get(str(p.get("type")), "a")])[0] for name, p in properties.items()}


def call(name: str, arguments: Any) -> Message:
    """Return a message with one call, whose arguments may be anything."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}],
    }
