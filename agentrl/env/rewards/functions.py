"""Reward functions as their authors write them, here or for other trainers, called with what they ask for by name.

`def exact(completion, answer)` reads one answer, `async def helpful(messages, task, info)` may wait, and
`def brevity(completions, **kwargs)` takes and returns lists, as TRL has it.
"""

import asyncio
import copy
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.data.plain import abbreviated
from agentrl.env.background import BlockedLoopError, run_in_background
from agentrl.env.message_env import as_number
from agentrl.errors import ConfigError, EnvironmentFailure, UserError
from agentrl.recipe.plugin import checked_options
from agentrl.recipe.registry import resolve
from agentrl.types import Message

_SPOKEN = ("completion", "completions", "messages")
"""A function is a reward where it takes one of these: nothing else that a recipe names is called."""
_SINGLE = ("prompt", "completion", "messages", "task", "info")
_BATCHED = ("prompts", "completions", "messages", "task", "info")
_TOLD = frozenset({*_SINGLE, *_BATCHED, "answer"})
_FIELDS = ("reward", "weight", "name")
_RESERVED = ("success", "score", "tool_errors", "env_s", "reward_components")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer to be graded, and what was asked."""

    prompt: str | list[Message] | None
    """Prompt in the table. None: it has none."""
    completion: str
    """The text of the answer."""
    messages: list[Message]
    """All that was said since the prompt, the answer last."""
    answer: Any
    """The right one. None: no column is said to have it, and `answer` is a column as any other."""
    task: dict[str, Any]
    """The row."""
    info: dict[str, Any]
    """Numbers that a function leaves, which become metrics of the episode."""

    @property
    def columns(self) -> dict[str, Any]:
        """Return the columns that a function may ask for beside the names that all tables have."""
        return self.task if self.answer is None else {**self.task, "answer": self.answer}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function, ready to be called."""

    name: str
    weight: float
    function: Callable[..., Any]
    options: dict[str, Any]
    arguments: frozenset[str]
    """Names of what it is called with."""
    refused: frozenset[str] | None
    """It takes whatever else there is but these: options of the recipe, which no table sets. None: it takes nothing else."""
    is_batched: bool
    """It takes lists, of which each has one entry here, and returns a list."""

    def __deepcopy__(self, memo: object) -> "Reward":
        return self

    def takes(self, name: str) -> bool:
        """Return whether it is called with an argument."""
        return name in self.arguments or (self.refused is not None and name not in self.refused)

    def call(self, answered: Answered) -> Any:
        """Return what the function returns, or will: nothing that it does to its arguments is seen by others."""
        arguments = copy.deepcopy(self._batch(answered) if self.is_batched else self._single(answered))
        arguments = {name: value for name, value in arguments.items() if self.takes(name)}
        if "info" in arguments:
            arguments["info"] = answered.info
        return self.function(**{**arguments, **self.options})

    def _single(self, answered: Answered) -> dict[str, Any]:
        return {**answered.columns, **{name: getattr(answered, name) for name in _SINGLE}}

    def _batch(self, answered: Answered) -> dict[str, Any]:
        is_text = isinstance(answered.prompt, str)  # a completion has the form of its prompt
        columns = {name: [value] for name, value in answered.columns.items()}
        return {
            **columns,
            "prompts": [answered.prompt],
            "completions": [answered.completion if is_text else answered.messages],
            "messages": [answered.messages],
            "task": [answered.task],
            "info": answered.info,
        }

    def value(self, returned: Any) -> float | None:
        """Return what was returned as a number. None: the function cannot score this answer.

        Raises:
            EnvironmentFailure: for what is none.
        """
        if self.is_batched:
            if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != 1:
                raise EnvironmentFailure(
                    f"reward {self.name!r} returned {abbreviated(returned)}; return a list of one number"
                )
            returned = returned[0]
        if returned is None:
            return None
        if (number := as_number(returned)) is None:
            raise EnvironmentFailure(
                f"reward {self.name!r} returned {abbreviated(returned)}; return a finite number, or None"
            )
        return number


def load_rewards(given: Sequence[object], *, columns: Sequence[str], has_answer: bool) -> tuple[Reward, ...]:
    """Return the rewards that an environment's option `rewards` lists.

    Args:
        given: of each the name of an installed one, `module:function`, or a function; or a mapping with one of these as
            `reward`, a `weight`, a `name`, and options of the function.
        columns: of the table, which a function may ask for.
        has_answer: one of them is said to be the right answer, and called `answer` too.

    Raises:
        UserError: for what names no reward function, with the nearest that does; and for options it does not take.
    """
    columns = tuple(dict.fromkeys([*columns, *["answer"] * has_answer]))
    rewards = tuple(_load(entry, f"rewards[{number}]", columns) for number, entry in enumerate(given))
    names = [reward.name for reward in rewards]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"rewards: two are called {twice!r}; give one another name: {{reward: ..., name: ...}}")
    return rewards


def grade(rewards: Sequence[Reward], answered: Answered, *, timeout_s: float) -> dict[str, float]:
    """Return what each reward gives for an answer, without those that cannot score it; coroutines run side by side.

    Raises:
        EnvironmentFailure: for what is no number, and for coroutines that take longer than `timeout_s` seconds.
        Exception: whatever a function raises. It fails the episode: a judge that cannot be reached has judged nothing.
    """
    returned: dict[str, Any] = {}
    try:
        for reward in rewards:
            returned[reward.name] = reward.call(answered)
    except BaseException:
        for value in filter(inspect.iscoroutine, returned.values()):
            value.close()  # else Python warns that it was never awaited
        raise
    pending = {name: value for name, value in returned.items() if inspect.isawaitable(value)}
    if pending:
        try:
            returned |= run_in_background(_gathered(pending), timeout_s=timeout_s)
        except TimeoutError as error:
            why = f": {error}" if isinstance(error, BlockedLoopError) else ""
            listed = ", ".join(pending)
            raise EnvironmentFailure(
                f"rewards: {listed} did not return within reward_timeout_s: {timeout_s:g} s{why}"
            ) from error
    found = {reward.name: reward.value(returned[reward.name]) for reward in rewards}
    return {name: value for name, value in found.items() if value is not None}


async def _gathered(pending: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
    return dict(zip(pending, await asyncio.gather(*pending.values()), strict=True))


def _load(entry: object, field: str, columns: Sequence[str]) -> Reward:
    settings = dict(entry) if isinstance(entry, Mapping) else {"reward": entry}
    named, weight = settings.get("reward"), settings.get("weight", 1.0)
    if isinstance(named, str):
        function = resolve(named, group="agentrl.rewards", field=field, kind="function")
        if not inspect.isfunction(function):
            raise ConfigError(f"{field}: {named!r} is {abbreviated(function)}, no function")
    elif callable(named):
        function = named
    else:
        raise UserError(
            f"{field}: {abbreviated(entry)} names no reward; give a name, 'module:function', or {{reward: NAME, weight: 1.0}}"
        )
    parameters = _parameters(function, field)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise UserError(f"{field}: weight is {abbreviated(weight)}; give a number")
    name = settings.get("name") or (named.rpartition(":")[2] if isinstance(named, str) else _name_of(function))
    if not isinstance(name, str):
        raise UserError(f"{field}: name is {abbreviated(name)}; give text")
    if name in _RESERVED:
        raise UserError(
            f"{field}: every episode has a metric {name!r}, so a reward needs another name: rename the function, or give "
            f"{{reward: ..., name: my_{name}}}"
        )
    is_batched = "completions" in parameters
    offered = {*columns, *(_BATCHED if is_batched else _SINGLE)}
    options = {key: value for key, value in settings.items() if key not in _FIELDS}
    options = checked_options(function, options, told=_TOLD, where=f"{field}, {name}")
    for parameter in parameters.values():
        is_given = parameter.name in offered or parameter.name in options or parameter.default is not parameter.empty
        if not is_given and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise UserError(
                f"{field}: {name} asks for {parameter.name!r}, which is neither among its options here nor a column "
                f"({', '.join(columns)}) nor one of {', '.join(_BATCHED if is_batched else _SINGLE)}"
            )
    return Reward(
        name=name,
        weight=float(weight),
        function=function,
        options=options,
        arguments=frozenset(parameters) - _own_options(parameters),
        refused=_own_options(parameters) if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else None,
        is_batched=is_batched,
    )


def _own_options(parameters: Mapping[str, inspect.Parameter]) -> frozenset[str]:
    """Return the names of parameters by keyword alone that have a default, but for what is always passed."""
    own = {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    return frozenset(own - _TOLD)


def _parameters(function: Callable[..., Any], field: str) -> Mapping[str, inspect.Parameter]:
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = {}
    if not any(name in parameters for name in _SPOKEN) or any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
        raise UserError(
            f"{field}: {_name_of(function)} is no reward function; one takes {', '.join(_SPOKEN[:-1])} or {_SPOKEN[-1]} "
            "by name: `def reward(completion, task, **kwargs) -> float`"
        )
    return parameters


def _name_of(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
