"""Asks an OpenAI-compatible endpoint: at a bounded rate, again after a fault, and the same question once."""

import asyncio
import hashlib
import json
import os
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from agentrl.env.rewards.reply_cache import ReplyCache
from agentrl.errors import EnvironmentFailure
from agentrl.plain_data import abbreviated, line_of

_MAX_WAIT_S = 20.0
_MAX_WORDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to ask, and how fast."""

    url: str
    """Of the API: `http://127.0.0.1:8000/v1`."""
    api_key_env: str
    """Name of the environment variable that holds the key. It need not be set for a server that asks for none."""
    requests_per_minute: float
    max_concurrent: int
    """Requests under way at the same time."""
    timeout_s: float
    """Of one request."""
    max_retries: int
    """After a fault."""
    cache: Path | None
    """File of the replies. None: nothing is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What was answered."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    is_cached: bool
    """Nothing was asked: the answer was known, or is that of another who asks the same."""


class _Fault(Exception):  # noqa: N818 - what may go better the next time
    def __init__(self, words: str, *, wait_s: float = 0.0) -> None:
        super().__init__(words)
        self.wait_s = wait_s


async def ask(endpoint: Endpoint, body: dict[str, Any], *, check: Callable[[str], object]) -> Reply:
    """Return the reply to a chat completion request.

    Args:
        endpoint: to ask.
        body: of the request: model, messages and so on.
        check: raises a ValueError for a text that is no answer; then it is asked again.

    Raises:
        EnvironmentFailure: when the endpoint refuses the request, or there were too many faults, with the last one's words.
    """
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    if endpoint not in clients:
        clients[endpoint] = _Client(endpoint)
    return await clients[endpoint].ask(body, check)


class _Client:
    """Asks one endpoint from one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._cache = None if endpoint.cache is None else ReplyCache(endpoint.cache)
        self._slots = asyncio.Semaphore(endpoint.max_concurrent)
        self._next_s = 0.0
        self._asking: dict[str, asyncio.Task[Reply]] = {}
        key = os.environ.get(endpoint.api_key_env)
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(endpoint.timeout_s),
            limits=httpx2.Limits(max_connections=endpoint.max_concurrent, keepalive_expiry=2.0),
        )

    async def ask(self, body: dict[str, Any], check: Callable[[str], object]) -> Reply:
        said = json.dumps([self._endpoint.url, body], sort_keys=True)
        key = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
        if is_new := key not in self._asking:
            self._asking[key] = asyncio.create_task(self._answer(key, body, check))
            self._asking[key].add_done_callback(lambda task: self._asking.pop(key, None) and task.cancelled())
        # Whoever gives up leaves the request to the others who wait for it, and to the cache.
        reply = await asyncio.shield(self._asking[key])
        return reply if is_new else Reply(text=reply.text, prompt_tokens=0, completion_tokens=0, is_cached=True)

    async def _answer(self, key: str, body: dict[str, Any], check: Callable[[str], object]) -> Reply:
        if self._cache is not None and (known := await self._cache.get(key)) is not None:
            return Reply(text=known, prompt_tokens=0, completion_tokens=0, is_cached=True)
        reply = await self._retried(body, check)
        if self._cache is not None:
            await self._cache.put(key, reply.text)
        return reply

    async def _retried(self, body: dict[str, Any], check: Callable[[str], object]) -> Reply:
        num, prompt_tokens, completion_tokens = 1 + self._endpoint.max_retries, 0, 0
        for attempt in range(num):
            try:
                reply = await self._once(body)
                prompt_tokens, completion_tokens = (
                    prompt_tokens + reply.prompt_tokens,
                    completion_tokens + reply.completion_tokens,
                )
                try:
                    check(reply.text)
                except ValueError as error:
                    raise _Fault(f"{error}, in {reply.text[:_MAX_WORDS]!r}") from error
                return Reply(
                    text=reply.text, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, is_cached=False
                )
            except _Fault as fault:
                if attempt + 1 == num:
                    raise EnvironmentFailure(
                        f"{self._endpoint.url}, asked {num} times, did not answer as it should; the last time: {fault}"
                    ) from fault
                wait_s = 0.5 * 2**attempt * (0.5 + random.random())
                await asyncio.sleep(min(_MAX_WAIT_S, max(wait_s, fault.wait_s)))
        raise AssertionError("unreachable")

    async def _once(self, body: dict[str, Any]) -> Reply:
        async with self._slots:
            await self._wait_for_turn()
            try:
                response = await self._http.post(f"{self._endpoint.url.rstrip('/')}/chat/completions", json=body)
            except (httpx2.RequestError, httpx2.InvalidURL) as error:
                raise _Fault(line_of(error)) from error
        words = f"HTTP {response.status_code}: {response.text[:_MAX_WORDS]}"
        if response.status_code in (408, 409, 429) or response.status_code >= 500:
            raise _Fault(words, wait_s=_retry_after_s(response))
        if response.status_code >= 300:
            hint = f"; set the environment variable {self._endpoint.api_key_env}" if response.status_code == 401 else ""
            raise EnvironmentFailure(f"{self._endpoint.url} refused the request: {words}{hint}")
        try:
            answer = response.json()
            text, usage = answer["choices"][0]["message"]["content"], answer.get("usage") or {}
            if not isinstance(text, str):
                raise TypeError(f"content is {abbreviated(text)}")
            tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _Fault(f"an answer that is none ({line_of(error)}): {response.text[:_MAX_WORDS]!r}") from error
        return Reply(text=text, prompt_tokens=tokens[0], completion_tokens=tokens[1], is_cached=False)

    async def _wait_for_turn(self) -> None:
        now = time.monotonic()
        turn = max(now, self._next_s)
        self._next_s = turn + 60.0 / self._endpoint.requests_per_minute
        await asyncio.sleep(turn - now)


_clients: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Endpoint, _Client]]" = weakref.WeakKeyDictionary()


def _retry_after_s(response: httpx2.Response) -> float:
    try:
        return float(response.headers.get("retry-after", 0))
    except ValueError:  # a date
        return 0.0
