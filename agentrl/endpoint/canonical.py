"""Messages as far as they count when a prompt is compared with what a policy was shown and has said.

Count do role, text (ends stripped) and calls (name, arguments in one form of JSON). Ids, nulls, cache marks, names and thoughts
do not: clients drop and rewrite them. Neighbouring assistant messages are one.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pydantic_core import from_json

from agentrl.endpoint.call import Asked
from agentrl.endpoint.reading import one_dialogue
from agentrl.types import Message


@dataclass(frozen=True, slots=True)
class Item:
    """A message, as far as it counts."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    """Name and canonical arguments of each call."""
    thought: str = ""
    """Thought, if thoughts count."""


_NONE: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of a call."""

    messages: tuple[Message, ...]
    items: tuple[Item, ...]
    """Each message as far as it counts."""
    tools: tuple[dict[str, Any], ...]
    tools_key: str
    """Digest of the tools: a prompt with other tools has another root."""

    def path(self, alias: Mapping[str, str] = _NONE) -> tuple[str, ...]:
        """Return a digest of each beginning of the prompt: of its tools alone, with one message, ..., the whole.

        Args:
            alias: digests that stand for others.
        """
        found = [self.tools_key]
        for item in self.items:
            digest = following(found[-1], item)
            found.append(alias.get(digest, digest))
        return tuple(found)


def prompt_of(asked: Asked, *, with_thoughts: bool = False) -> Prompt:
    """Return the prompt of a request."""
    messages = one_dialogue(asked.messages)
    items = tuple(item_of(message, with_thoughts=with_thoughts) for message in messages)
    return Prompt(messages, items, asked.tools, _tools_key(json.dumps(asked.tools)))


@lru_cache(maxsize=64)
def _tools_key(tools: str) -> str:
    return _digest("tools", canonical_arguments(tools))


def after_answer(asked: Asked, dialogue: Sequence[Message]) -> Asked:
    """Return a request with the whole dialogue that it continues by the id of an answer.

    A system message of its own replaces the one of the dialogue: `instructions` do not carry over.
    """
    own = asked.messages[:1] if asked.messages[0]["role"] == "system" else ()
    earlier = [*dialogue[1:]] if own and dialogue[0]["role"] == "system" else [*dialogue]
    return replace(asked, messages=one_dialogue([*own, *earlier, *asked.messages[len(own) :]]), previous="")


def request_digest(asked: Asked, prompt: Prompt | None = None) -> str:
    """Return a digest of all that decides what is sampled, and of nothing else: not of the way in which it is sent.

    Args:
        asked: the request.
        prompt: its prompt without thoughts, if it is known.
    """
    limits = [asked.max_tokens, asked.stop, asked.n, asked.model, asked.calls_as_text]
    return _digest((prompt or prompt_of(asked)).path()[-1], asked.previous, json.dumps(limits))


def item_of(message: Message, *, with_thoughts: bool = False) -> Item:
    """Return a message as far as it counts."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Item(
        role=message["role"],
        text=(message.get("content") or "").strip(),
        calls=tuple((call["name"], canonical_arguments(call.get("arguments"))) for call in calls),
        thought=(message.get("reasoning_content") or "").strip() if with_thoughts else "",
    )


def canonical_arguments(arguments: object) -> str:
    """Return the arguments of a call in one form: JSON with sorted keys, or text if they do not parse."""
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments or "{}", allow_inf_nan=False)
        except ValueError:
            return str(arguments).strip()
    return _json({} if arguments is None else arguments)


def following(digest: str, item: Item) -> str:
    """Return the digest of a beginning of a prompt and one more message."""
    return _digest(digest, item.role, item.text, item.thought, *(text for call in item.calls for text in call))


def _json(value: object) -> str:
    return json.dumps(_whole(value), sort_keys=True, separators=(",", ":"))


def _whole(value: Any) -> Any:
    """Return a value in which whole numbers are integers: JavaScript writes 2.0 as 2."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list | tuple) else value


def _digest(*texts: str) -> str:
    whole = "".join([f"{len(text)}:{text}" for text in texts])
    return hashlib.blake2b(whole.encode(errors="surrogatepass"), digest_size=16).hexdigest()
