"""Contract of every environment: its class, the Gymnasium spaces of messages and actions, and what `reset` and `step` return.

Returned values become plain data; a breach of the contract is answered with one line and the fix.
"""

import copy
import json
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import gymnasium as gym
import numpy as np

from agentrl.data.plain import PlainDataError, abbreviated, is_number, plain_data
from agentrl.env.background import awaited
from agentrl.errors import EnvError, EnvironmentFailure
from agentrl.types import MAX_REWARD, Message, Need

ROLES = ("system", "user", "assistant", "tool")


def is_message(value: object) -> bool:
    """Return whether `value` is one chat message: a dict with a known role and with text content or tool calls."""
    if not isinstance(value, dict) or value.get("role") not in ROLES or not _has_sound_calls(value):
        return False
    content = value.get("content")
    return isinstance(content, str) or (content is None and bool(value.get("tool_calls")))


def _has_sound_calls(message: Message) -> bool:
    """Return whether `tool_calls`, if a message has them, are a list of dicts, each with a function that has a name."""
    calls = message.get("tool_calls")
    return calls is None or (isinstance(calls, list) and all(map(_is_call, calls)))


def _is_call(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


class _Space(gym.Space[Any]):
    """A space of messages; all of one class are equal."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Messages cannot be flattened to an array."""
        return False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MessagesSpace(_Space):
    """Observations: a tuple of messages, the ones that are new since the last action."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> tuple[Message, ...]:  # noqa: ARG002
        """Return one user message with a random number in it."""
        return ({"role": "user", "content": str(int(self.np_random.integers(1000)))},)

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a tuple of messages."""
        return isinstance(x, tuple) and all(is_message(m) for m in x)


class ActionSpace(_Space):
    """Actions: text, or an assistant message (with tool calls if there are some)."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str | Message:  # noqa: ARG002
        """Return a random number as text."""
        return str(int(self.np_random.integers(1000)))

    def contains(self, x: Any) -> bool:
        """Return whether `x` is text or an assistant message."""
        return isinstance(x, str) or (is_message(x) and x["role"] == "assistant")


_LOGGED, _MAX_LOGGED = re.compile(r"[A-Za-z0-9_.-]{1,64}"), 64

MAX_METRIC = 1e50
"""Largest number in `info` that becomes a metric, either way: what is summed over a step's turns, and squared, stays finite."""


_ORACLE_FIX = "return text, or an assistant message (agentrl.env.tool_call makes one)"


def base_env(env: gym.Env[tuple[Message, ...], str | Message]) -> "MessageEnv":
    """Return the environment inside Gymnasium's wrappers."""
    base = env.unwrapped
    if not isinstance(base, MessageEnv):
        raise TypeError(f"expected a MessageEnv, got {type(base).__name__}")
    return base


def close_env(env: gym.Env[tuple[Message, ...], str | Message]) -> None:
    """Close an environment; a coroutine is run.

    Raises:
        EnvironmentFailure: when a coroutine does not end within `coroutine_timeout_s`.
    """
    close: Callable[[], object] = env.close
    awaited(close(), "close()", timeout_s=base_env(env).coroutine_timeout_s)


def as_message(action: str | Message) -> Message:
    """Return the assistant message that an action stands for."""
    return {"role": "assistant", "content": action} if isinstance(action, str) else action


def as_number(given: object) -> float | None:
    """Return what an environment gives as a number. None: it is none, or not finite."""
    try:
        number = math.nan if isinstance(given, str) else float(given)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - whatever is no number may raise anything
        return None
    return number if math.isfinite(number) else None


def ask_oracle(env: "MessageEnv", *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
    """Return what the environment's `oracle` says; a coroutine is run.

    Raises:
        EnvironmentFailure: when a coroutine does not end within `coroutine_timeout_s`, and for what is no assistant message.
        NotImplementedError: if there is none.
    """
    said = awaited(env.oracle(skill=skill, rng=rng), "oracle()", timeout_s=env.coroutine_timeout_s)
    said = as_message(said) if isinstance(said, str) else said
    try:
        message: Message = plain_data(said, "oracle(): the message")
    except PlainDataError as error:
        raise EnvironmentFailure(f"{error}; {_ORACLE_FIX}") from error
    if not (is_message(message) and message["role"] == "assistant"):
        raise EnvironmentFailure(f"oracle() returned {abbreviated(said)}; {_ORACLE_FIX}")
    return message


class MessageEnv(gym.Env[tuple[Message, ...], str | Message]):
    """A Gymnasium environment whose observations are only the messages that are new since the last action.

    `reset` and `step` follow Gymnasium: `terminated` means that the task ended, `truncated` that a limit was met; the
    reward is this turn's alone. `info["success"]` (bool) and `info["score"]` (0 to 1) at the end are what evaluation
    reports; other numbers in it are metrics too.

    The reward None at the end means that nothing could score the episode: it leaves training and evaluation, and is counted.
    None as `info["success"]` or `info["score"]` leaves the mean of that measure alone.

    Messages and `info` hold plain data: text, numbers, lists and dicts. They are copied when they are returned; tuples,
    sets, numpy and dates take their plain form, and an object or bytes fail the episode.

    `options` of `reset` says which task to begin: `split` is "train" or "eval", `task_index` its number within that split,
    and `rollout_index` which member of a group plays it. The task follows from the seed, the split and the task's number;
    what comes later may differ within a group. Where the tasks are a table, `num_tasks` says how long it is. Any of the
    three may be absent: a person who plays by hand gives none (0, "train" and None then).
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration
    tools: list[dict[str, Any]] = []  # noqa: RUF012 - a declaration; an instance may offer tools of its own
    """JSON schemas of the tools the agent may call, OpenAI style."""
    turn_rewards: bool = True
    """False if only the last turn carries a reward, so that turn-level credit has nothing to tell turns apart by."""
    can_fork: bool = True
    """False if a moment cannot be copied, so that no rollouts can be forked from it: schemes that read branches (`tree`) are
    refused then, all others work."""
    can_reuse: bool = True
    """False if an object must play one episode only, whatever a proof finds: each episode has a fresh one then."""

    can_snapshot: bool = False
    """True if a moment is to be pickled after every step: a killed run then resumes from there, instead of resetting
    the environment and taking its actions again. For environments that do not follow from their seed and the actions alone."""

    coroutine_timeout_s: ClassVar[float] = 50.0
    """Deadline of methods that are coroutines, tools aside, in seconds: less than `rollout.env_timeout_s`, at which the thread
    would be lost."""

    observation_space: gym.Space[tuple[Message, ...]]
    action_space: gym.Space[str | Message]

    def __init__(self) -> None:
        self.observation_space = MessagesSpace()
        self.action_space = ActionSpace()

    def log(self, **numbers: float) -> None:
        """Report numbers of this turn beside the reward: metrics are their sums over an episode, as means over episodes.

        What is logged more than once in a turn adds up too; log what is to be known at the end in the last turn alone. Numbers
        logged in `start` or `reset` count to the first turn. They are in `info["logged"]`, and the policy never sees them.

        Raises:
            EnvironmentFailure: for what is no number up to 1e50 in size, a name that is longer than 64 characters or holds
                others than letters, digits and `_.-`, and more than 64 names in a turn. It fails the episode, in a tool too.
        """
        logged = dict(getattr(self, "_logged", {}))
        for name, given in numbers.items():
            if not _LOGGED.fullmatch(name):
                raise EnvironmentFailure(f"log(): {abbreviated(name)} is no name: up to 64 letters, digits and _.-")
            number = as_number(given)
            if number is None or abs(total := logged.get(name, 0.0) + number) > MAX_METRIC:
                raise EnvironmentFailure(
                    f"log({name}=...) takes a finite number, got {abbreviated(given)}; at most {MAX_METRIC:g} in size"
                )
            logged[name] = total
        if len(logged) > _MAX_LOGGED:
            raise EnvironmentFailure(f"log(): more than {_MAX_LOGGED} names in one turn; log fewer")
        self._logged = logged

    def take_logged(self) -> dict[str, float]:
        """Return what was logged since this was last called. A rollout does, and so does `ToolEnv.step`."""
        logged, self._logged = dict(getattr(self, "_logged", {})), {}
        return logged

    def state_key(self) -> str | None:
        """Return a key of this moment: equal keys mean situations with the same future. None: no keys."""
        return None

    def action_key(self, action: str | Message) -> str | None:
        """Return a key of an action, blind to spelling: tool names with sorted arguments, or stripped text."""
        message = as_message(action)
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            return json.dumps([[f.get("name"), _plain(f.get("arguments"))] for f in functions], sort_keys=True)
        return str(message.get("content") or "").strip()

    def fork(self) -> Self:
        """Return an independent copy of this moment; override if a deep copy is not enough."""
        return copy.deepcopy(self)

    def reseed(self, seed: int) -> None:
        """Let chance bring something new from here on, as in each fork of `rollout.branches`.

        Override it if chance is drawn from more than `self.np_random`.
        """
        self.np_random = np.random.default_rng(seed)

    def abandon(self) -> None:
        """Give up a call that missed its deadline, on any thread; for environments that wait for another process."""

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Any:
        """Return a good assistant message, or its text, for this moment; with probability 1 - skill a plausible wrong one.

        It may be a coroutine (`async def`).

        Args:
            skill: share of turns that are played right; below 1, `rng` decides which (never `self.np_random`).
            rng: source of the mistakes.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no oracle(): define it, or train without warm-up (warmup.steps: 0)"
        )

    def num_tasks(self, split: str) -> int | None:  # noqa: ARG002 - tasks without end are those of any split
        """Return how many tasks a split ("train" or "eval") has. None: they follow from the seed, without end.

        Where it is a number, `options["task_index"]` of `reset` is below it: training goes through the train split in
        epochs, each in an order of its own, and evaluation covers the eval split once. Asked once, when a run begins.
        """
        return None

    def tasks_hash(self, split: str) -> str | None:  # noqa: ARG002 - tasks without end have none
        """Return a hash of the tasks of a split, in their order: a run is not resumed on others. None: nothing is compared."""
        return None

    def gold_answer(self) -> str | None:
        """Return the present task's right final answer as the policy would write it. None: there is no single one.

        Credit schemes may read it; the policy never does.
        """
        return None

    def provides(self) -> frozenset[Need]:
        """Return the data beyond returns that credit schemes may read from this environment."""
        met = {
            Need.TURN_REWARDS: self.turn_rewards,
            Need.STATE_KEYS: type(self).state_key is not MessageEnv.state_key,
            Need.ACTION_KEYS: True,
            Need.BRANCHES: self.can_fork,
            Need.ANSWER_LOGPROBS: type(self).gold_answer is not MessageEnv.gold_answer,
        }
        return frozenset(need for need, is_met in met.items() if is_met)


def _plain(arguments: Any) -> Any:
    """Return tool-call arguments as data, so that spacing and key order do not matter."""
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):  # malformed, or numbers and nesting that Python refuses to read
            return arguments
    return arguments


class ResetReturn(NamedTuple):
    """Values that `reset` returned."""

    messages: tuple[Message, ...]
    info: dict[str, Any]


class StepReturn(NamedTuple):
    """Values that `step` returned."""

    messages: tuple[Message, ...]
    reward: float | None
    """None: the episode is over, and nothing could score it."""
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def reset_return(result: object, *, method: str = "reset()") -> ResetReturn:
    """Return what `reset` returned.

    Args:
        result: of the method.
        method: its name in error messages.

    Raises:
        EnvError: if it breaks the contract. So do the functions below.
    """
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvError(f"{method} returned {abbreviated(result)}; return (messages, info)")
    return ResetReturn(_messages(result[0], method), _info(result[1], method))


def step_return(result: object, *, method: str = "step()") -> StepReturn:
    """Return what `step` returned."""
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvError(
            f"{method} returned {abbreviated(result)}; return (messages, reward, terminated, truncated, info)"
        )
    messages, reward, terminated, truncated, info = result
    is_unscored = reward is None and bool(terminated or truncated)
    return StepReturn(
        messages=_messages(messages, method),
        reward=None if is_unscored else _reward(reward, method),
        terminated=bool(terminated),
        truncated=bool(truncated),
        info=_metrics(info, method),
    )


def key_return(key: object, *, method: str) -> str | None:
    """Return a key, or an answer, that the environment may not have."""
    if key is not None and not isinstance(key, str):
        raise EnvError(f"{method} returned {abbreviated(key)}; return a str, or None where there is none")
    plain: str | None = _plain_reply(key, f"{method}: the key")
    return plain


def _messages(messages: object, method: str) -> tuple[Message, ...]:
    plain = _plain_reply(messages, f"{method}: messages")
    if not isinstance(plain, list):
        raise EnvError(f"{method} returned {abbreviated(messages)} as messages; return a tuple of them")
    for message in plain:
        if not is_message(message):
            raise EnvError(
                f"{method} returned {abbreviated(message)} as a message; return a dict with role "
                "(system, user, assistant, tool) and content (a str); tool_calls, where it has any, are a list of "
                '{"type": "function", "function": {"name": ..., "arguments": ...}}'
            )
    return tuple(plain)


def _reward(reward: object, method: str) -> float:
    number = _plain_reply(reward, f"{method}: the reward")
    if not is_number(number) or abs(number) > MAX_REWARD:
        hint = ". None is for the last turn of an episode that nothing can score" if reward is None else ""
        raise EnvError(
            f"{method} returned the reward {abbreviated(reward)}; return a finite float, at most {MAX_REWARD:g} in size{hint}"
        )
    return float(number)


def _info(info: object, method: str) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise EnvError(f"{method} returned {abbreviated(info)} as info; return a dict")
    plain: dict[str, Any] = _plain_reply(info, f"{method}: info")
    return plain


def _metrics(info: object, method: str) -> dict[str, Any]:
    """Return the `info` of a step, whose numbers become metrics of the episode."""
    plain = _info(info, method)
    success = plain.get("success")
    if success is not None and not (is_number(success) and success in (0, 1)):
        raise EnvError(
            f"{method} returned info['success'] = {abbreviated(success)}; return a bool, and a share as info['score']"
        )
    for part in (plain, plain.get("logged"), plain.get("reward_components")):
        for name, value in part.items() if isinstance(part, dict) else ():
            if is_number(value) and abs(value) > MAX_METRIC:
                raise EnvError(
                    f"{method} returned {abbreviated(value)} in info as {name[:80]!r}; numbers there become metrics: return at "
                    f"most {MAX_METRIC:g} in size, or text"
                )
    return plain


def _plain_reply(value: object, place: str) -> Any:
    try:
        return plain_data(value, place)
    except PlainDataError as error:
        raise EnvError(str(error)) from error
