"""What environments return, as plain data; what breaks the contract of `MessageEnv` is told in a line, with the fix."""

from typing import Any, NamedTuple

from agentrl.env.message_env import MAX_METRIC
from agentrl.env.spaces import is_message
from agentrl.errors import EnvError
from agentrl.plain_data import PlainDataError, abbreviated, is_number, plain_data
from agentrl.types import MAX_REWARD, Message


class ResetReturn(NamedTuple):
    """What `reset` returned."""

    messages: tuple[Message, ...]
    info: dict[str, Any]


class StepReturn(NamedTuple):
    """What `step` returned."""

    messages: tuple[Message, ...]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def reset_return(result: object, *, method: str = "reset()") -> ResetReturn:
    """Return what `reset` returned.

    Args:
        result: of the method.
        method: its name in error messages.

    Raises:
        EnvError: where it breaks the contract. So do the functions below.
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
    return StepReturn(
        _messages(messages, method), _reward(reward, method), bool(terminated), bool(truncated), _metrics(info, method)
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
        raise EnvError(
            f"{method} returned the reward {abbreviated(reward)}; return a finite float, at most {MAX_REWARD:g} in size"
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
