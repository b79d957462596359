"""HTTP endpoint at which programs that play episodes ask for answers: routes, sessions and their keys."""

import asyncio
import json
import logging
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.endpoint import chat, messages, responses
from agentrl.endpoint.call import Asked, RefusalKind, RefusedError, Report, Said
from agentrl.endpoint.canonical import prompt_of, request_digest
from agentrl.endpoint.heartbeat import EVENTS, JSON, Reply, deliver
from agentrl.endpoint.reading import Dialect
from agentrl.endpoint.requests import Arrival, Request, Requests
from agentrl.errors import ConfigError

MAX_BODY_BYTES = 32 * 1024**2
MAX_HEADER_BYTES = 16 * 1024

Answer = Callable[[Asked], Awaitable[Said]]
"""Samples one completion. It is awaited in the endpoint's loop, `asked.n` times for a request, and raises `RefusedError`."""
Count = Callable[[Asked], Awaitable[int]]
"""Counts the tokens of a prompt. It is awaited in the endpoint's loop, and raises `RefusedError`."""

TakeReport = Callable[[Report], None]
"""Takes a reward or a state that a program reports. It is called in the endpoint's loop, and raises `RefusedError`."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Address and key of one episode, for its client."""

    base_url: str
    """Base URL of OpenAI's SDKs: it ends with `/v1`."""
    api_key: str

    @property
    def anthropic_url(self) -> str:
        """Return the base URL of Anthropic's SDKs, which add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")


@dataclass(slots=True, kw_only=True)
class _Live:
    """An open session. It changes."""

    answer: Answer
    count: Count | None
    report: TakeReport | None
    requests: Requests = field(default_factory=Requests)
    work: "dict[Request, asyncio.Task[list[Said]]]" = field(default_factory=dict)
    """Task that samples each request."""
    is_closed: bool = False

    def arrive(self, asked: Asked, *, is_retry: bool) -> "tuple[Request, asyncio.Task[list[Said]]]":
        """Return the request that is sampled for a prompt, and what samples it."""
        prompt = prompt_of(asked)
        arrival, request = self.requests.arrive(request_digest(asked, prompt), prompt.path(), is_retry=is_retry)
        if arrival is Arrival.NEW:

            def finish(work: "asyncio.Task[list[Said]]") -> None:
                request.is_finished = True
                if not work.cancelled() and (error := work.exception()) and not isinstance(error, RefusedError):
                    _LOG.error("endpoint: a call failed", exc_info=error)

            self.work[request] = asyncio.create_task(_sample(self.answer, asked))
            self.work[request].add_done_callback(finish)
        return request, self.work[request]

    async def close(self) -> list[int]:
        """End the calls under way, and return the numbers of the calls whose answer the client does not have."""
        self.is_closed = True
        for work in self.work.values():
            work.cancel()
        await asyncio.gather(*self.work.values(), return_exceptions=True)
        lost = [_outcome(self.work[request]) for request in self.requests.undelivered()]
        return [said.number for outcome in lost if isinstance(outcome, list) for said in outcome]


class Endpoint:
    """A server of three dialects on a thread and an event loop of its own, while its context is entered.

    A session is found by its token: in the path, as a bearer token, or as `x-api-key`. A client sees only its own.
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        public_host: str | None = None,
        heartbeat_s: float = 10,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """Listen.

        Args:
            models: names that clients may list.
            host: address to listen on; clients on other machines reach only another than the default.
            port: 0 takes a free one.
            public_host: name under which clients reach the host. None: the host.
            heartbeat_s: seconds of silence before each heartbeat.
            max_body_bytes: size from which a request is refused.

        Raises:
            ConfigError: for an address that is not free.
        """
        self._models = tuple(models)
        self._heartbeat_s = heartbeat_s
        self._max_body_bytes = max_body_bytes
        self._sessions: dict[str, _Live] = {}
        self._socket = _listen(host, port)
        name = public_host or host
        self._url = f"http://{f'[{name}]' if ':' in name else name}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._application(),
                http="h11",  # bounds headers, as others do not
                h11_max_incomplete_event_size=4 * MAX_HEADER_BYTES,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # a connection that is cut is no error
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=3600,  # clients close first: a request never meets a closing socket
                timeout_graceful_shutdown=1,
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="endpoint", daemon=True)

    def __enter__(self) -> Self:
        """Serve."""
        self._thread.start()
        self._has_started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the sessions and stop."""
        for token in list(self._sessions):
            self._close(token)
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def open_session(self, answer: Answer, *, count: Count | None = None, report: TakeReport | None = None) -> Session:
        """Open a session with a token of its own.

        Args:
            answer: samples its completions.
            count: counts tokens. None: clients that want to count are refused.
            report: takes rewards and states. None: clients that report any are refused.
        """
        token = secrets.token_urlsafe(32)
        self._sessions[token] = _Live(answer=answer, count=count, report=report)
        return Session(base_url=f"{self._url}/s/{token}/v1", api_key=token)

    def close_session(self, session: Session) -> list[int]:
        """Close a session: its waiting requests are refused, and so is each later one.

        Returns:
            Numbers of the calls whose answer the client does not have.
        """
        return self._close(session.api_key)

    def _close(self, token: str) -> list[int]:
        live = self._sessions.pop(token)
        assert self._loop is not None, "the endpoint does not serve"
        return asyncio.run_coroutine_threadsafe(live.close(), self._loop).result()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_started.set()
        await self._server.serve(sockets=[self._socket])

    def _application(self) -> Starlette:
        dialects: dict[str, Dialect] = {"/chat/completions": chat, "/responses": responses, "/messages": messages}
        routes = [self._route(path, dialect, self._complete) for path, dialect in dialects.items()]
        routes += [self._route("/messages/count_tokens", messages, self._count)]
        routes += [
            self._route("/agentrl/reward", None, self._report),
            self._route("/agentrl/state", None, self._report),
            self._route("/models", None, self._list, "GET"),
            self._route("/models/{model:path}", None, self._list, "GET"),
        ]
        alive = [Route(path, _alive, methods=["GET"]) for path in ("/", "/s/{token}", "/s/{token}/")]
        by_path = [Route("/s/{token}" + route.path, route.endpoint, methods=route.methods) for route in routes]
        return Starlette(routes=[*alive, *routes, *by_path], exception_handlers={HTTPException: _no_route})

    def _route(
        self,
        path: str,
        dialect: Dialect | None,
        handle: Callable[[Dialect, _Live, HTTPRequest], Awaitable[ASGIApp]],
        method: str = "POST",
    ) -> Route:
        async def endpoint(request: HTTPRequest) -> ASGIApp:
            try:
                return await handle(dialect or _dialect(request), self._session(request), request)
            except RefusedError as refusal:
                return _response(_refusal(dialect or _dialect(request), refusal))

        return Route("/v1" + path, endpoint, methods=[method])

    def _session(self, request: HTTPRequest) -> _Live:
        """Return the session of a request.

        Raises:
            RefusedError: for headers that are too large, and for a key that is wrong.
        """
        if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEADER_BYTES:
            raise RefusedError(RefusalKind.HEADERS_TOO_LARGE, f"the headers have more than {MAX_HEADER_BYTES} bytes")
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = {request.path_params.get("token"), request.headers.get("x-api-key")}
        keys = {key.strip() for key in given | {bearer if scheme.lower() == "bearer" else None} if key}
        if len(keys) > 1:
            words = (
                "the path and the headers name different keys: use the session's base URL and its key, or one of them"
            )
            raise RefusedError(RefusalKind.UNAUTHORIZED, words)
        live = self._sessions.get(keys.pop()) if keys else None
        if live is None:
            words = "no open session has this key: use the base URL or the key of a session that is not over"
            raise RefusedError(RefusalKind.UNAUTHORIZED, words)
        return live

    async def _body(self, request: HTTPRequest) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_body_bytes:
                words = f"the body has more than {self._max_body_bytes} bytes"
                raise RefusedError(RefusalKind.TOO_LARGE, words)
        return bytes(body)

    async def _complete(self, dialect: Dialect, live: _Live, request: HTTPRequest) -> ASGIApp:
        asked = dialect.read(await self._body(request))
        if live.is_closed:
            raise _over()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - of every application
            sampled, work = live.arrive(asked, is_retry=is_retry)
            try:
                if await deliver(
                    work,
                    lambda has_begun: _reply(dialect, asked, _outcome(work), has_begun=has_begun),
                    media=EVENTS if asked.form.stream else JSON,
                    heartbeat_s=self._heartbeat_s,
                    receive=receive,
                    send=send,
                ):
                    sampled.is_delivered = True
            finally:
                sampled.sockets -= 1

        return respond

    async def _count(self, dialect: Dialect, live: _Live, request: HTTPRequest) -> ASGIApp:
        asked = dialect.read(await self._body(request))
        if live.count is None:
            raise RefusedError(RefusalKind.NOT_FOUND, "tokens are not counted here")
        return _response(_json({"input_tokens": await live.count(asked)}))

    async def _report(self, dialect: Dialect, live: _Live, request: HTTPRequest) -> ASGIApp:  # noqa: ARG002 - as others
        body = await self._body(request)
        try:
            given = json.loads(body)
        except ValueError:
            given = None
        kind = request.url.path.rpartition("/")[2]
        if live.report is None or not isinstance(given, dict) or not given.keys() <= {kind, "call"}:
            words = 'a body is {"reward": 1.0}, {"reward": 1.0, "call": ID} or {"state": KEY}'
            raise RefusedError(RefusalKind.INVALID, words)
        if kind == "reward":
            live.report(Report.of_reward(given.get("reward"), given.get("call")))
        else:
            live.report(Report.of_state(given.get("state")))
        return _response(_json({}))

    async def _list(self, dialect: Dialect, live: _Live, request: HTTPRequest) -> ASGIApp:  # noqa: ARG002 - as others
        name: str | None = request.path_params.get("model")
        if name is not None:
            return _response(_json(_model(name)))
        found = [_model(each) for each in self._models]
        page = {"has_more": False, "first_id": self._models[0], "last_id": self._models[-1]} if found else {}
        return _response(_json({"object": "list", "data": found, **page}))


def _listen(host: str, port: int) -> socket.socket:
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        found = socket.create_server(address[4][:2], family=address[0], backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"the endpoint cannot listen on {host}:{port}: {error}; name another host or port") from error
    # Connections inherit it. asyncio sets it only for sockets that name their protocol, as those of create_server do not:
    # the second packet of an answer would wait 40 ms for the client's delayed acknowledgement.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


async def _sample(answer: Answer, asked: Asked) -> list[Said]:
    return await asyncio.gather(*(answer(asked) for _ in range(asked.n)))


def _outcome(work: "asyncio.Task[list[Said]]") -> list[Said] | RefusedError:
    """Return the answers of finished work, or the reason for which there are none."""
    if work.cancelled():
        return _over()
    error = work.exception()
    if error is None:
        return work.result()
    return error if isinstance(error, RefusedError) else RefusedError(RefusalKind.FAILED, "the engine failed")


def _over() -> RefusedError:
    return RefusedError(RefusalKind.ENDED, "the episode is over")


def _reply(dialect: Dialect, asked: Asked, outcome: list[Said] | RefusedError, *, has_begun: bool) -> Reply | None:
    """Return an answer in its dialect. None: a refusal that only the client's retry can be given."""
    if isinstance(outcome, list):
        if asked.form.stream:
            return Reply(body="".join(dialect.events(asked, outcome)).encode(), media=EVENTS)
        return _json(dialect.write(asked, outcome))
    if not has_begun:
        return _refusal(dialect, outcome)
    if asked.form.stream:
        return Reply(body="".join(dialect.error_events(asked, outcome)).encode(), media=EVENTS)
    return None


def _refusal(dialect: Dialect, refusal: RefusedError) -> Reply:
    return _json(dialect.error(refusal), refusal.kind.status)


def _json(data: dict[str, Any], status: int = 200) -> Reply:
    return Reply(body=json.dumps(data).encode(), status=status)


def _response(reply: Reply) -> Response:
    return Response(reply.body, reply.status, reply.headers)


def _model(name: str) -> dict[str, Any]:
    """Return a model as both OpenAI and Anthropic list it."""
    of_anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentrl", **of_anthropic}


def _dialect(request: HTTPRequest) -> Dialect:
    """Return the dialect of a route that several share."""
    return messages if "anthropic-version" in request.headers else chat


async def _alive(request: HTTPRequest) -> Response:  # noqa: ARG001 - of every route
    return Response()


async def _no_route(request: HTTPRequest, error: Exception) -> Response:  # noqa: ARG001 - of every handler
    words = (
        f"no {request.method} here: the base URL ends with /v1 for OpenAI's SDKs and without it for Anthropic's; "
        f"known are chat/completions, responses, messages, messages/count_tokens and models"
    )
    return _response(_refusal(_dialect(request), RefusedError(RefusalKind.NOT_FOUND, words)))
