"""A customer played by a language model, behind an OpenAI-compatible endpoint."""

import os
import time
from collections.abc import Sequence
from typing import Any

import httpx2
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat

from agentrl import EnvironmentFailure, Message
from agentrl_envs.customer_world import Case

END = "[END]"
"""What the customer says when nothing is left to say."""
_FIRST_WAIT_S = 0.5
_MAX_CHARS = 2_000
_MAX_ERROR = 300


class UserConfig(BaseModel):
    """Where the model is that plays the customer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """Base of the endpoint, with its version: `http://127.0.0.1:8000/v1`."""
    model: str
    key_variable: str | None = None
    """Environment variable that holds the key."""
    temperature: float = 0.7
    max_tokens: int = 200
    timeout_s: PositiveFloat = 15.0
    """Deadline of a request; keep `rollout.env_timeout_s` above that of all tries."""
    max_retries: NonNegativeInt = 2
    """How often a request is made again that got no answer, or an error of the server's own."""


def script(case: Case) -> str:
    """Return what the model is told about the customer it plays."""
    wishes = []
    for place, wish in enumerate(case.wishes, start=1):
        facts = (
            f" (order number {wish.number}{', wished: ' + wish.detail if wish.detail else ''})" if wish.number else ""
        )
        insists = " If it is refused, insist once, then let it go." if wish.insists else ""
        wishes.append(f"{place}. You want to {wish.text}{facts}.{insists}")
    return (
        "You are a customer of a shop, writing to its service. Stay in this role, write one or two short sentences at a "
        f"time, and make up nothing. Your email is {case.email}; tell it, order numbers and what you wish instead only when "
        "asked. Your wishes, one after the other, each when the one before is done or refused:\n"
        + "\n".join(wishes)
        + f"\nWhen all are done or refused, write {END} and nothing else."
    )


def speak(config: UserConfig, case: Case, said: Sequence[Message]) -> str:
    """Return what the model says next in a talk in which the customer is the assistant.

    Raises:
        EnvironmentFailure: where it does not answer; the policy did nothing wrong.
    """
    messages = [{"role": "system", "content": script(case)}, *said]
    body = {
        "model": config.model, "messages": messages, "temperature": config.temperature, "max_tokens": config.max_tokens,
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {_key(config.key_variable)}"} if config.key_variable else {}
    for retry in range(config.max_retries + 1):
        if retry:
            time.sleep(_FIRST_WAIT_S * 2 ** (retry - 1))
        try:
            response = httpx2.post(
                f"{config.url.rstrip('/')}/chat/completions", json=body, headers=headers, timeout=config.timeout_s
            )
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            words = f"{type(error).__name__}: {error}"
            continue
        if response.status_code == 200:
            return _content(config, response)
        words = f"{response.status_code}: {response.text[:_MAX_ERROR]}"
        if response.status_code < 500 and response.status_code != 429:
            break
    raise EnvironmentFailure(f"user: {config.url} did not answer ({words})")


def _content(config: UserConfig, response: httpx2.Response) -> str:
    try:
        content: Any = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        content = None
    if not (isinstance(content, str) and content.strip()):
        raise EnvironmentFailure(f"user: {config.url} answered without a text: {response.text[:_MAX_ERROR]}")
    return content.strip()[:_MAX_CHARS]


def _key(variable: str) -> str:
    if not (key := os.environ.get(variable)):
        raise EnvironmentFailure(f"user: set the environment variable {variable} to the key of the endpoint")
    return key
