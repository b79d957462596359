"""What a recipe's `env` section names, built."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any, get_origin, get_type_hints

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

from agentrl.env.message_env import MessageEnv
from agentrl.errors import ConfigError
from agentrl.plain_data import line_of
from agentrl.registry import import_named, names, resolve, suggest
from agentrl.types import Message

Env = gym.Env[tuple[Message, ...], str | Message]

_FIELD, _OPTIONS, _WRAPPERS = "env.id", "env.options", "env.wrappers"
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
    target: Any = resolve(spec, group="agentrl.envs", field=_FIELD)
    if inspect.isfunction(target):
        if not _is_env_class(_returned(target)):
            raise ConfigError(
                f"{_FIELD}: {spec!r} is a function that does not say that it makes environments, and is not called; write "
                f"`def {target.__name__}(...) -> gymnasium.Env`"
            )
    elif not _is_env_class(target):
        raise _no_message_env(spec, target)
    _check_options(spec, target, options)
    create: Callable[..., Any] = target
    return create


def _from_gymnasium(spec: str, options: Mapping[str, Any]) -> Callable[..., Any]:
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
    if creator is not None:
        _check_options(spec, creator, options, also=("max_episode_steps", "render_mode"))

    def create(**kwargs: Any) -> Any:
        # Gymnasium's passive checker looks at each first step; `agentrl.testing.check_env` looks once, and deeper.
        return gym.make(env_id, disable_env_checker=True, **kwargs)

    return create


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
