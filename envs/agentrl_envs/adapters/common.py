"""Parts of all adapters.

Arguments are held against JSON schemas, sources are copied by making their actions again, a source's tasks are split, and
sources that use the global random numbers get generators of their own.
"""

import contextlib
import hashlib
import os
import random
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jsonschema
import numpy as np
import referencing

from agentrl import EnvironmentFailure, ToolEnv
from agentrl.env.tool_env import ToolCallError


def check_arguments(name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Refuse arguments that do not fit a schema.

    Patterns are left to the server, which checks what it is sent: a search may take for ever (`^(a+)+$`), and meanwhile no
    other thread runs.

    Raises:
        ToolCallError: in words for the model.
    """
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = jsonschema.validators.extend(kind, _PATTERNS | {"additionalProperties": _additional(kind)})
    # A registry of our own: by default a `$ref` to a URL would be downloaded.
    problems = validator(_of_one_dialect(schema), registry=referencing.Registry()).iter_errors(arguments)
    if (problem := jsonschema.exceptions.best_match(problems)) is not None:
        place = ".".join(map(str, problem.absolute_path))
        raise ToolCallError(f"wrong arguments for {name}: {f'{place}: ' if place else ''}{problem.message}")


def _of_one_dialect(schema: Any) -> Any:
    """Return a schema whose parts name no dialect: each that does would be checked by that one, patterns included."""
    if isinstance(schema, Mapping):
        of_parts = {key: _of_one_dialect(part) for key, part in schema.items()}
        return {key: part for key, part in of_parts.items() if key != "$schema" or not isinstance(part, str)}
    return list(map(_of_one_dialect, schema)) if isinstance(schema, list) else schema


def _unchecked(*_: Any) -> Iterator[jsonschema.ValidationError]:
    yield from ()


_PATTERNS = dict.fromkeys(("pattern", "patternProperties", "unevaluatedProperties"), _unchecked)
"""Keywords that search for patterns."""


def _additional(kind: Any) -> Any:
    """Return the check of what `properties` does not name, which searches where there are patterns of names."""

    def check(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
        if "patternProperties" not in schema:
            yield from kind.VALIDATORS["additionalProperties"](validator, allowed, instance, schema)

    return check


class ReplayedEnv(ToolEnv):
    """A `ToolEnv` whose state is its source's, and follows from the task and the actions.

    What is copied or pickled is the environment without its source. The copy's source begins the same task and takes the same
    actions when it is first needed. So a source that draws at random, or reads a clock, has forks that go elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Any] = []
        self._is_live = False

    @abstractmethod
    def begin_source(self) -> Any:
        """Let the source begin the task that `start` chose, and return what it says."""

    @abstractmethod
    def step_source(self, action: Any) -> Any:
        """Let the source take an action, and return what it says."""

    def begin(self) -> Any:
        """Begin the task; for use in `start`."""
        self.actions = []
        said = self.begin_source()
        self._is_live = True
        return said

    def act(self, action: Any) -> Any:
        """Take an action; for use in `answer` and tools. One that raises is not taken."""
        if not self._is_live:
            self.begin_source()
            for earlier in self.actions:
                self.step_source(earlier)
            self._is_live = True
        said = self.step_source(action)
        self.actions.append(action)
        return said

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_is_live": False, "source": None}


T = TypeVar("T")
_MAX_TRIES = 64
_MAX_ALIKE = 6
"""Draws of one and the same task, after which a source is taken to have no other."""


def draw(rng: np.random.Generator, options: dict[str, Any], make: Callable[[int], tuple[str, T]]) -> T:
    """Return a task for the split that `options` names: train and eval never share one, if a source has several.

    A task belongs to a half by the hash of its text. A source with a single task (one map, one puzzle) begins it on both
    sides: nothing can be held out of it.

    Args:
        rng: the environment's; it draws the seeds.
        options: of `reset`.
        make: returns, for a seed of the source, the text that tells its tasks apart, and the task.
    """
    is_eval = options.get("split") == "eval"
    texts = set()
    for num_tried in range(1, _MAX_TRIES + 1):
        text, task = make(int(rng.integers(2**31)))
        if (hashlib.sha256(text.encode(errors="replace")).digest()[0] < 128) == is_eval:
            break
        texts.add(text)
        if len(texts) == 1 and num_tried == _MAX_ALIKE:
            break
    return task


_MAX_HELD_S = 60.0
"""Seconds that others wait for a source: as long as a call may take (`rollout.env_timeout_s`, unless a recipe changes it)."""
_lock = threading.RLock()
"""Held by whoever has the global generators in a state of its own."""
_holder: tuple[str, float] | None = None
"""Who that is, and since when."""


def _begin_again() -> None:
    """Forget who holds the generators: in a forked process nobody does, and nobody would ever let go of the lock."""
    global _lock, _holder
    _lock, _holder = threading.RLock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


class OwnRandom:
    """Generator that a source takes for the global random numbers: from a seed, and its own whenever the source is called.

    The generators of the process are as before afterwards. Other threads that draw from them meanwhile do so at random.
    """

    def __init__(self, seed: int = 0) -> None:
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def in_use(self, source: str) -> Iterator[None]:
        """Let the global generators continue where this source left them.

        Args:
            source: whose they are meanwhile, for those who wait.

        Raises:
            EnvironmentFailure: if another source has them and does not return.
        """
        with _taken(source):
            before = random.getstate(), np.random.get_state()
            _set_states(self._states)
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                _set_states(before)


@contextlib.contextmanager
def _taken(source: str) -> Iterator[None]:
    global _holder
    lock = _lock
    while not lock.acquire(timeout=min(1.0, _MAX_HELD_S)):
        if (holder := _holder) is not None and time.monotonic() - holder[1] > _MAX_HELD_S:
            raise EnvironmentFailure(
                f"{source} cannot draw random numbers: {holder[0]} has had the process's for more than {_MAX_HELD_S:g} s; "
                "it hangs, so resume the run without it"
            )
    outer, _holder = _holder, (source, time.monotonic())
    try:
        yield
    finally:
        _holder = outer
        lock.release()


def _set_states(states: tuple[object, object]) -> None:
    random.setstate(states[0])  # type: ignore[arg-type]
    np.random.set_state(states[1])  # type: ignore[arg-type]
