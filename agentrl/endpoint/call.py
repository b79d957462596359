"""Data that passes between a dialect, which reads and writes JSON, and whoever samples the answer of a call."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from agentrl.errors import AgentRLError
from agentrl.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for one completion, in whatever dialect it came."""

    messages: tuple[Message, ...]
    """Messages in agentrl's form: text contents, roles `system`, `user`, `assistant`, `tool`; neighbouring assistant
    messages are one. Arguments of calls are objects, or text if they do not parse. Ids of calls are the client's."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas, OpenAI style: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    max_tokens: int | None = None
    """Largest number of tokens that the client wants. None: it names none."""
    stop: tuple[str, ...] = ()
    """Strings at whose first match the action ends. The answer is cut before it."""
    n: int = 1
    """Number of completions: each is a call of its own."""
    model: str = ""
    """Name of the model that the client asks for."""
    logprobs: bool = False
    """The client wants log-probabilities of the sampled tokens."""
    calls_as_text: bool = False
    """`tool_choice: none`: calls are returned as text."""
    previous: str = ""
    """Id of an answer of this session: `messages` follow its dialogue. Empty: they are all there is."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Parameters that are not carried out, with the client's values, abbreviated."""
    dialect: str = ""
    """Name of the dialect: `chat`, `responses` or `messages`."""
    form: "Form" = field(default_factory=lambda: Form())
    """Form in which the dialect answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Form that a client expects of an answer; no part of what is asked."""

    stream: bool = False
    """The answer is sent as events."""
    with_usage: bool = False
    """The last event of a stream tells the numbers of tokens (chat completions)."""
    with_thoughts: bool = True
    """The client reads thoughts."""
    custom_tools: frozenset[str] = frozenset()
    """Tools that take text in place of JSON (`type: custom`): the policy calls them with an argument `input`."""
    namespaces: tuple[str, ...] = ()
    """Namespaces whose tools bear their name and a dot before their own (responses)."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that the answer repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A sampled token as a client may read it."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The answer of one call."""

    number: int
    """Number of the call in its session: ids on the wire follow from it."""
    message: Message
    """Assistant message as `wire_message` makes it: the text is cut before the stop string, ids are unique in the session."""
    is_cut: bool = False
    """A limit of tokens ended it."""
    stopped_by: str = ""
    """Stop string of the client that ended it. Empty: none did."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that the engine did not compute again."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Sampled tokens, if they were asked for."""
    created: int = 0
    """Unix time in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report of a program about its episode: a reward, or the key of the state that the policy is in from now on."""

    reward: float | None = None
    call: str | None = None
    """Id of the answer that earned the reward. None: the newest."""
    state: str | None = None

    @classmethod
    def of_reward(cls, reward: object, call: object = None) -> Self:
        """Return the report of a reward.

        Raises:
            RefusedError: for what is no finite number, or an id that is no text.
        """
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RefusedError(RefusalKind.INVALID, f"reward: give a finite number, got {reward!r}", param="reward")
        if not isinstance(call, str | None):
            raise RefusedError(RefusalKind.INVALID, f"call: give the id of an answer, got {call!r}", param="call")
        return cls(reward=float(reward), call=call)

    @classmethod
    def of_state(cls, state: object) -> Self:
        """Return the report of a state.

        Raises:
            RefusedError: for what is no text.
        """
        if not isinstance(state, str):
            raise RefusedError(RefusalKind.INVALID, f"state: give a text, got {state!r}", param="state")
        return cls(state=state)


class RefusalKind(StrEnum):
    """Reason for which a request gets no answer. No retry changes it."""

    INVALID = "invalid"
    TOO_LONG = "too_long"
    """The prompt does not fit into the context: clients compact their history."""
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    """The body has too many bytes."""
    HEADERS_TOO_LARGE = "headers_too_large"
    ENDED = "ended"
    """The episode is over."""
    FAILED = "failed"
    """The engine gave up."""

    @property
    def status(self) -> int:
        """Return the HTTP status."""
        return _STATUSES[self]


_STATUSES = {
    RefusalKind.INVALID: 400,
    RefusalKind.TOO_LONG: 400,
    RefusalKind.UNAUTHORIZED: 401,
    RefusalKind.NOT_FOUND: 404,
    RefusalKind.TOO_LARGE: 413,
    RefusalKind.HEADERS_TOO_LARGE: 431,
    RefusalKind.ENDED: 410,
    RefusalKind.FAILED: 400,  # SDKs retry each 5xx, and the episode is lost already
}


class RefusedError(AgentRLError):
    """A request that gets no answer, and why."""

    def __init__(self, kind: RefusalKind, message: str, *, param: str | None = None) -> None:
        """Take the words for the client and the field at fault."""
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param


def too_long(*, num_tokens: int, max_tokens: int) -> RefusedError:
    """Return the refusal of a prompt that does not fit, in words on which clients compact their history."""
    # "maximum context length" (OpenAI), "prompt is too long: N tokens > M maximum" (Anthropic): harnesses search for both.
    words = (
        f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum. This model's maximum context length is {max_tokens} "
        f"tokens, and your input exceeds the context window. Please reduce the length of the messages."
    )
    return RefusedError(RefusalKind.TOO_LONG, words, param="messages")


def wire_message(message: Message, *, number: int, calls_as_text: str | None = None) -> Message:
    """Return a parsed assistant message as a client sees it.

    Calls get ids that are unique in the session. A malformed call, which no client can carry out, becomes text.

    Args:
        message: as a renderer parsed it.
        number: of the call in its session.
        calls_as_text: sampled text to show in place of calls. None: calls are calls.
    """
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    texts = [message.get("content") or ""]
    found: Message = {"role": "assistant"}
    if thought := message.get("reasoning_content"):
        found["reasoning_content"] = thought
    if calls and calls_as_text is not None:
        return found | {"content": calls_as_text}
    whole = [call["function"] for call in calls if call["function"]["name"]]
    texts += [str(call["function"]["arguments"]) for call in calls if not call["function"]["name"]]
    found["content"] = "\n".join(filter(None, texts))
    if whole:
        found["tool_calls"] = [
            {"id": f"call_{number}_{index}", "type": "function", "function": function}
            for index, function in enumerate(whole)
        ]
    return found
