"""Language models behind OpenAI-compatible endpoints, for environments: a judge asks one, a simulated user is one.

Requests are made at a bounded rate, again after a fault, and the same one once: replies may be kept in a SQLite file that
several processes share.
"""

import asyncio
import hashlib
import json
import math
import os
import random
import sqlite3
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx2
from pydantic import BaseModel, ConfigDict, Field

from agentrl.data.files import absolute
from agentrl.data.plain import abbreviated, line_of
from agentrl.env.background import run_in_background
from agentrl.errors import EnvironmentFailure, UserError
from agentrl.types import Message

T = TypeVar("T")

_MAX_LOCK_WAIT_S = 20.0
"""Seconds to wait for others that write."""
_STEP_S = 0.05


class ReplyCache:
    """Texts by key. Each call opens the file for itself, so that it may come from any event loop, and from after a fork."""

    def __init__(self, path: Path) -> None:
        self._path = absolute(path)

    async def get(self, key: str) -> str | None:
        """Return what is kept under a key. None: nothing is."""

        def read(file: sqlite3.Connection) -> str | None:
            row = file.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
            return None if row is None else str(row[0])

        return await self._do(read)

    async def put(self, key: str, reply: str) -> None:
        """Keep a reply."""
        await self._do(lambda file: file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply)))

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        deadline = time.monotonic() + _MAX_LOCK_WAIT_S
        while True:
            try:
                return self._opened(work)
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                if not is_busy or time.monotonic() > deadline:
                    raise self._refusal(error) from error
            except (sqlite3.Error, OSError) as error:
                raise self._refusal(error) from error
            await asyncio.sleep(_STEP_S)  # not in SQLite, which would hold up all that waits on this loop

    def _opened(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(self._path, timeout=_STEP_S)
        try:
            with file:
                file.execute(
                    "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID"
                )
                return work(file)
        finally:
            file.close()

    def _refusal(self, error: Exception) -> UserError:
        return UserError(f"the cache {self._path} cannot be used ({error}); delete it, or name another: cache")


_MAX_WAIT_S = 20.0
_MAX_WORDS = 300
_MAX_CHARS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of a language model behind an OpenAI-compatible API, and limits of requests."""

    url: str
    """URL of the API: `http://127.0.0.1:8000/v1`."""
    api_key_env: str
    """Name of the environment variable that holds the key. It need not be set for a server that asks for none."""
    requests_per_minute: float
    max_concurrent: int
    """Requests under way at the same time."""
    timeout_s: float
    """Seconds for one request."""
    max_retries: int
    """After a fault."""
    cache: Path | None
    """File of the replies. None: nothing is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Reply of the model."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    is_cached: bool
    """Nothing was asked: the answer was known, or is that of another who asks the same."""


class ApiKey:
    """Key of an endpoint, from an environment variable: sent with each request, and left out of all that comes back."""

    def __init__(self, variable: str) -> None:
        """Read the variable; it need not be set.

        Raises:
            UserError: if no header can hold its text, which is not repeated.
        """
        self._key = os.environ.get(variable, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise UserError(f"the environment variable {variable} holds no key: a key is printable ASCII on one line")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request."""
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def removed_from(self, text: str) -> str:
        """Return what a server said without the key, which some repeat."""
        return text.replace(self._key, "***") if self._key else text


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
        self._key = ApiKey(endpoint.api_key_env)
        self._http = httpx2.AsyncClient(
            headers=self._key.headers,
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
        num = 1 + self._endpoint.max_retries
        prompt_tokens = 0
        completion_tokens = 0
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
        text = self._key.removed_from(response.text)
        words = f"HTTP {response.status_code}: {text[:_MAX_WORDS]}"
        if response.status_code in (408, 409, 429) or response.status_code >= 500:
            raise _Fault(words, wait_s=_retry_after_s(response))
        if response.status_code >= 300:
            hint = f"; set the environment variable {self._endpoint.api_key_env}" if response.status_code == 401 else ""
            raise EnvironmentFailure(f"{self._endpoint.url} refused the request: {words}{hint}")
        try:
            answer = json.loads(text)
            content, usage = answer["choices"][0]["message"]["content"], answer.get("usage") or {}
            if not isinstance(content, str):
                raise TypeError(f"content is {abbreviated(content)}")
            tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _Fault(f"an answer that is none ({line_of(error)}): {text[:_MAX_WORDS]!r}") from error
        return Reply(text=content, prompt_tokens=tokens[0], completion_tokens=tokens[1], is_cached=False)

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


class SimulatedUser(BaseModel):
    """A user that a language model plays: give one to an environment as an option, and let `answer` return its replies.

    An endpoint that does not answer fails the episode as a fault of the environment: it is played again, and never counts
    against the policy. Keep `rollout.env_timeout_s` above the time of all tries.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """Base of the endpoint, with its version: `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the model there."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Z0-9_]*API_KEY$")] = "OPENAI_API_KEY"
    """Environment variable that holds the key. It need not be set for a server that asks for none."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.7
    max_tokens: Annotated[int, Field(gt=0)] = 200
    """Tokens of a reply."""
    timeout_s: Annotated[float, Field(gt=0)] = 15.0
    """Deadline of a request."""
    max_retries: Annotated[int, Field(ge=0)] = 2
    """Retries of a request that got no answer, an error of the server's own, or an empty reply."""
    max_concurrent: Annotated[int, Field(gt=0)] = 64
    """Requests under way at the same time."""

    def reply(self, instructions: str, dialogue: Sequence[Message], *, seed: int) -> str:
        """Return what the user says next, at most 2,000 characters.

        Args:
            instructions: who the user is, what it wants and knows, and how it ends the talk.
            dialogue: so far, as the agent has it: its own messages are the assistant's. The user is sent what was spoken:
                no system message, call or result of a tool.
            seed: of the sampling, such as `int(self.np_random.integers(2**31))`: siblings then get replies of their own.

        Raises:
            EnvironmentFailure: if there is no reply.
        """
        endpoint = Endpoint(
            url=self.url,
            api_key_env=self.api_key_env,
            requests_per_minute=math.inf,
            max_concurrent=self.max_concurrent,
            timeout_s=self.timeout_s,
            max_retries=self.max_retries,
            cache=None,
        )
        others = {"user": "assistant", "assistant": "user"}  # the model plays the user: its words are the assistant's
        spoken = [each for each in dialogue if each["role"] in others and not each.get("tool_calls")]
        said = [{"role": others[each["role"]], "content": each.get("content") or "(silence)"} for each in spoken]
        body = {
            "model": self.model,
            "messages": [{"role": "system", "content": instructions}, *said],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": seed,
        }
        limit_s = (self.max_retries + 1) * (self.timeout_s + _MAX_WAIT_S)
        found: Reply = run_in_background(ask(endpoint, body, check=_check_text), timeout_s=limit_s)
        return found.text.strip()[:_MAX_CHARS]


def _check_text(text: str) -> None:
    if not text.strip():
        raise ValueError("an empty reply")
