"""Parts of all environments: checks of constructor options, invented names, and splits by a hash of the task."""

import functools
import hashlib
import itertools
import math
from collections.abc import Mapping
from typing import Any, get_args

from agentrl import Message, Prompt, SandboxConfig, UserError, sandbox_config
from agentrl_envs.data import read_yaml

_FORMS = {
    "person": "{first} {start}{end}",
    "title": "{adjective} {noun}",
    "city": "{start}{city_end}",
    "country": "{start}{country_end}",
    "company": "{start}{company_end} {company_kind}",
}


@functools.cache
def names(kind: str) -> tuple[str, ...]:
    """List all names of a kind: person (4,000), title (504), city (160), country (60) or company (400)."""
    form, parts = _FORMS[kind], read_yaml("names.yaml")
    fields = [field for field in parts if f"{{{field}}}" in form]
    return tuple(
        form.format(**dict(zip(fields, values, strict=True)))
        for values in itertools.product(*(parts[field] for field in fields))
    )


def whole_number(name: str, value: object, *, at_least: int, at_most: int | None = None) -> int:
    """Return `value` if it is a whole number of the range.

    Raises:
        UserError: naming the option, what it was given and what it takes.
    """
    highest = float("inf") if at_most is None else at_most
    if isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= highest:
        return value
    takes = f"of {at_least} or more" if at_most is None else f"from {at_least} to {at_most}"
    raise UserError(f"{name}: give a whole number {takes}, got {value!r}")


def share(name: str, value: object, *, at_least: float = 0.0) -> float:
    """Return `value` if it is a number from `at_least` to 1.

    Raises:
        UserError: naming the option, what it was given and what it takes.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and at_least <= value <= 1:
        return float(value)
    raise UserError(f"{name}: give a number from {at_least:g} to 1, got {value!r}")


def finite_number(name: str, value: object) -> float:
    """Return `value` if it is a finite number.

    Raises:
        UserError: naming the option, what it was given and what it takes.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise UserError(f"{name}: give a number, got {value!r}")


def prompt_form(value: object) -> Prompt:
    """Return `value` if it is a form of the prompt.

    Raises:
        UserError: naming the option, what it was given and what it takes.
    """
    if value == "short" or value == "full":
        return value
    raise UserError(f"prompt: give {' or '.join(get_args(Prompt))}, got {value!r}")


def opening(prompt: Prompt, text: str, *rules: str | bool, short: str = "") -> str | list[Message]:
    """Return the first messages of a task.

    Args:
        prompt: the form.
        text: what the user says.
        *rules: sentences of the system message in the full form; False stands for one that does not hold.
        short: the system message of the short form. Empty: there is none.
    """
    system = short if prompt == "short" else " ".join(rule for rule in rules if isinstance(rule, str))
    return [{"role": "system", "content": system}, {"role": "user", "content": text}] if system else text


def shell_sandbox(sandbox: str | Mapping[str, Any]) -> SandboxConfig:
    """Return the sandbox that an option names, which runs `sh`.

    Raises:
        UserError: if it is not available here, or runs none.
    """
    config = sandbox_config(sandbox)
    _run_sh(config)
    return config


@functools.cache
def _run_sh(config: SandboxConfig) -> None:
    with config.build() as box:
        box.exec("true", language="sh")


def in_split(task: str, split: str, *, one_in: int = 4) -> bool:
    """Return whether a task belongs to a split: one of `one_in` is for evaluation ("eval"), the others are for training."""
    return (task_hash(task) % one_in == 0) == (split == "eval")


def task_hash(task: str) -> int:
    """Return a number that follows from a task's text alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big")
