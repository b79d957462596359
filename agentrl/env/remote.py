"""Environments hosted elsewhere: a `RemoteEnv` is one in a worker of `agentrl env-serve`, and each of its methods a message.

Messages are JSON. Whoever calls an environment checks what it returns, and checks a remote one's in the same way.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NoReturn, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.data.plain import abbreviated, line_of, printable
from agentrl.env.background import BackgroundWork
from agentrl.env.endpoint import ApiKey
from agentrl.env.message_env import MessageEnv
from agentrl.errors import ConfigError, EnvError, RemoteError, UserError
from agentrl.types import Message

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
except ModuleNotFoundError as error:
    raise UserError(f"environments elsewhere need websockets ({error}); pip install 'agentrl[remote]'") from error

PROTOCOL = 1
"""Number of this form of messages."""
TOKEN = "AGENTRL_ENV_TOKEN"
"""Environment variable with the key that servers and their clients share."""
MAX_BYTES = 2**26
"""Largest message, in bytes."""
STATUS_PATH = "/status"
"""Path at which a server sends its status alone; at any other it opens a session."""

_OPEN_S = 10.0
"""Deadline for a server to accept a connection, in seconds."""
_CLOSE_S = 2.0
_PING_S = 10.0
_SILENT_S = 30.0
"""Seconds without an answer to a ping after which a server is lost."""
_PATIENCE_S = 30.0
"""Seconds for which a new episode waits for any server to answer; meanwhile one may be started again."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0
"""Seconds for which a server that was lost is left out; they double with each failure in a row."""

M = TypeVar("M", bound=BaseModel)


class Status(BaseModel):
    """First message of a server."""

    protocol: int
    env: dict[str, Any]
    """Environment, as fields of the section `env`."""
    workers: int
    """Processes that play."""
    sessions: int
    """Environments that clients have there, this one included."""


class Failure(BaseModel):
    """Error that a method raised elsewhere."""

    raised: Literal["EnvError", "UserError", "NotImplementedError", "Exception"]
    """Nearest of these classes."""
    words: str
    line: str
    kind: str
    """`Fault.kind`."""
    traceback: str


class Reply(BaseModel):
    """Return value of a method, or its failure."""

    value: Any = None
    failure: Failure | None = None


class Made(BaseModel):
    """Description of an environment that was just made."""

    number: int
    """Its name in later messages."""
    name: str
    """Name of its class, or its Gymnasium id."""
    tools: list[dict[str, Any]]
    turn_rewards: bool
    can_fork: bool
    default_action_key: bool
    """True if `action_key` is that of `MessageEnv`, which needs no server."""


class _Moment(BaseModel):
    """Return value of `reset` and `step`: fields of an `EnvReply`."""

    model_config = ConfigDict(extra="ignore")

    messages: list[Any]
    state_key: Any
    gold_answer: Any = None
    reward: Any = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}
    tools: list[Any] = []


class _Said(BaseModel):
    """Action of an oracle, and the state of the generator afterwards."""

    message: Any
    rng: dict[str, Any] | None


def _raise_lost(url: str, why: str) -> NoReturn:
    """Raise the error of an episode whose server or worker has ended: it is continued on another."""
    words = f"the environment server {url} was lost: {printable(why)}"
    raise EnvError(words) from RemoteError(words, kind=f"lost environment server {url}", is_resumable=True)


class _UnreachableError(Exception):
    """A server that accepts no session."""


async def _connect(url: str, path: str) -> tuple[ClientConnection, Status]:
    """Return an open connection, and what the server said first.

    Raises:
        _UnreachableError: with the reason.
    """
    connection: ClientConnection | None = None
    try:
        connection = await connect(
            url.rstrip("/") + path,
            additional_headers=ApiKey(TOKEN).headers,
            compression=None,
            proxy=None,
            open_timeout=_OPEN_S,
            close_timeout=_CLOSE_S,
            ping_interval=_PING_S,
            ping_timeout=_SILENT_S,
            max_size=MAX_BYTES,
        )
        async with asyncio.timeout(_OPEN_S):
            return connection, Status.model_validate_json(await connection.recv())
    except InvalidStatus as error:
        is_refused = error.response.status_code == 401
        why = f"it refuses the token; set {TOKEN} to the server's" if is_refused else line_of(error)
        raise _UnreachableError(why) from error
    except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
        raise _UnreachableError(line_of(error)) from error
    except ValidationError as error:
        raise _UnreachableError("it is no server of `agentrl env-serve`") from error
    finally:
        if connection is not None and path == STATUS_PATH:
            await connection.close()


class _Session:
    """A connection to a worker, for an environment and its copies."""

    def __init__(self, servers: "_Servers", url: str, connection: ClientConnection) -> None:
        self.num_envs = 0
        """Environments that are not closed."""
        self._servers, self._url = servers, url
        self._connection = connection
        self._is_open = True

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the worker and return its value.

        Raises:
            EnvError: if the server or the worker is lost; else whatever the environment raised, with its description.
        """
        try:
            reply = _read(Reply, BackgroundWork(self._ask(json.dumps({"call": method, **arguments}))).future.result())
        except CancelledError:  # the loop was abandoned with all that ran on it
            _raise_lost(self._url, "its connection was closed")
        if reply.failure is not None:
            _raise(reply.failure)
        return reply.value

    async def _ask(self, request: str) -> str | bytes:
        try:
            await self._connection.send(request)
            return await self._connection.recv()
        except ConnectionClosed as closed:
            why = "" if closed.rcvd is None else closed.rcvd.reason
            _raise_lost(self._url, why or "it closed the connection")

    def hang_up(self) -> BackgroundWork | None:
        """Begin to close the connection, on any thread; a call under way is lost."""
        if not self._is_open:
            return None
        self._is_open = False
        return BackgroundWork(self._close())

    async def _close(self) -> None:
        self._servers.left(self._url)
        await self._connection.close()


def _read(model: type[M], data: object) -> M:
    """Return a value from the network as a model.

    Raises:
        EnvError: if it is something else.
    """
    try:
        return model.model_validate(json.loads(data) if isinstance(data, str | bytes) else data)
    except (ValueError, RecursionError) as error:  # pydantic's is a ValueError
        raise EnvError(f"an environment server answered with {abbreviated(data)}, no {model.__name__}") from error


def _raise(failure: Failure) -> NoReturn:
    """Raise what an environment raised elsewhere, from its description."""
    described = RemoteError(printable(failure.line), kind=printable(failure.kind), traceback=failure.traceback)
    words = printable(failure.words)
    match failure.raised:
        case "EnvError":
            raise EnvError(words) from described
        case "UserError":
            raise UserError(words) from described
        case "NotImplementedError":
            raise NotImplementedError(words) from described
        case "Exception":
            raise described


@dataclass(slots=True)
class _Server:
    """State of a server, as far as a client knows."""

    sessions: int = 0
    """Environments there: as the server said last, and ours since."""
    workers: int = 1
    failures: int = 0
    """Times in a row that it could not be reached."""
    back_at: float = 0.0
    """Time of the event loop before which it is left out."""


class _Servers:
    """Servers of one environment. All coroutines run on the background loop."""

    def __init__(self, urls: Sequence[str], hosted: Mapping[str, Any]) -> None:
        self._hosted = hosted
        self._known = {url: _Server() for url in urls}
        self._is_checked = False

    def open(self) -> _Session:
        """Open a session on the server with the fewest for each worker; the first time, look whether all servers answer.

        Raises:
            ConfigError: naming the server that does not, or that hosts another environment.
            EnvError: if none answers for a while.
        """
        if not self._is_checked:
            BackgroundWork(self._check()).future.result()
            self._is_checked = True
        session: _Session = BackgroundWork(self._open()).future.result()
        return session

    def left(self, url: str) -> None:
        """Note the end of a session."""
        self._known[url].sessions -= 1

    async def _check(self) -> None:
        async def one(place: int, url: str) -> None:
            try:
                _, status = await _connect(url, STATUS_PATH)
            except _UnreachableError as error:
                raise ConfigError(
                    f"env.servers.{place}: {url} does not answer: {error}. Start it with `agentrl env-serve RECIPE`, or "
                    "remove it"
                ) from error
            self._note(url, status)

        found = await asyncio.gather(*(one(*server) for server in enumerate(self._known)), return_exceptions=True)
        for error in filter(None, found):
            raise error

    async def _open(self) -> _Session:
        loop = asyncio.get_running_loop()
        end = loop.time() + _PATIENCE_S
        while True:
            url = min(self._known, key=self._rank)
            server = self._known[url]
            if (wait_s := server.back_at - loop.time()) > 0:
                await asyncio.sleep(min(wait_s, max(0.0, end - loop.time())))
            server.sessions += 1
            try:
                connection, status = await _connect(url, "/")
                self._note(url, status)
                return _Session(self, url, connection)
            except _UnreachableError as error:
                pause_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2**server.failures)
                server.failures, server.back_at = server.failures + 1, loop.time() + pause_s
                server.sessions -= 1
                if loop.time() >= end:
                    _raise_lost(url, f"{error}; nor did another one of env.servers answer")
            except BaseException:
                server.sessions -= 1
                raise

    def _rank(self, url: str) -> tuple[float, float]:
        server, now = self._known[url], asyncio.get_running_loop().time()
        return max(0.0, server.back_at - now), server.sessions / server.workers

    def _note(self, url: str, status: Status) -> None:
        """Keep what a server says of itself.

        Raises:
            ConfigError: if it hosts something else.
        """
        server = self._known[url]
        server.sessions, server.workers = status.sessions, max(1, status.workers)
        server.failures = 0
        theirs, ours = {"protocol": status.protocol, **status.env}, {"protocol": PROTOCOL, **self._hosted}
        for name in ours:
            if theirs.get(name) != ours[name]:
                where = name if name == "protocol" else f"env.{name}"
                raise ConfigError(
                    f"env.servers: {url} hosts {where}: {abbreviated(theirs.get(name))}, and the recipe has "
                    f"{abbreviated(ours[name])}; start it with this recipe"
                )


@cache
def _servers(urls: tuple[str, ...], hosted: str) -> _Servers:
    """Return what this process knows of servers; how many sessions they have is known to all that use them."""
    return _Servers(urls, json.loads(hosted))


def remote_env(urls: Sequence[str], *, hosted: Mapping[str, Any], stage: int = 0) -> "RemoteEnv":
    """Make an environment on one of several servers.

    Args:
        urls: of the servers, `ws://HOST:PORT`.
        hosted: fields of the section `env` that all of them must host.
        stage: entry of its schedule.

    Raises:
        UserError: for servers that do not answer, and whatever its construction raises there.
    """
    session = _servers(tuple(urls), json.dumps(hosted, sort_keys=True)).open()
    try:
        made = _read(Made, session.call("make", stage=stage))
    except BaseException:
        session.hang_up()
        raise
    # By the class's name elsewhere, which trajectories and messages show.
    named: type[RemoteEnv] = type(printable(made.name), (RemoteEnv,), {"__doc__": RemoteEnv.__doc__})
    return named(session, made)


class RemoteEnv(MessageEnv):
    """An environment in a worker of `agentrl env-serve`. It follows from its seed and the actions: snapshots stay there."""

    can_reuse = False  # so that episodes go to the server that has fewest

    def __init__(self, session: _Session, made: Made) -> None:
        super().__init__()
        self.tools = made.tools
        self.turn_rewards, self.can_fork = made.turn_rewards, made.can_fork
        self._session, self._made = session, made
        self._state_key: Any = None
        self._gold_answer: Any = None
        self._is_open = True
        session.num_envs += 1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Begin an episode."""
        moment = self._moment("reset", seed=seed, options=options)
        self.tools, self._gold_answer = moment.tools, moment.gold_answer
        return tuple(moment.messages), moment.info

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        """Execute an action."""
        moment = self._moment("step", action=action)
        return tuple(moment.messages), moment.reward, moment.terminated, moment.truncated, moment.info

    def state_key(self) -> str | None:
        """Return the key of the moment after the last step."""
        key: str | None = self._state_key
        return key

    def action_key(self, action: str | Message) -> str | None:
        """Return the key of an action."""
        if self._made.default_action_key:
            return super().action_key(action)
        key: str | None = self._call("action_key", action=action)
        return key

    def gold_answer(self) -> str | None:
        """Return the answer that was right at the reset."""
        answer: str | None = self._gold_answer
        return answer

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Any:
        """Return what the environment's own policy says, drawing from `rng` as it would here."""
        state = None if rng is None else rng.bit_generator.state
        said = _read(_Said, self._call("oracle", skill=skill, rng=state))
        if rng is not None and said.rng is not None:
            rng.bit_generator.state = said.rng
        return said.message

    def fork(self) -> Self:
        """Return a copy, in the same worker."""
        copied = type(self)(self._session, _read(Made, self._call("fork")))
        copied._state_key, copied._gold_answer = self._state_key, self._gold_answer
        return copied

    def reseed(self, seed: int) -> None:
        """Let chance bring something new from here on."""
        self._call("reseed", seed=seed)

    def provides(self) -> Any:
        """Return the data that credit schemes may read."""
        needs = self._call("provides")
        return frozenset(needs) if isinstance(needs, list) and all(isinstance(need, str) for need in needs) else needs

    def num_tasks(self, split: str) -> int | None:
        """Return how many tasks a split has."""
        num: int | None = self._call("num_tasks", split=split)
        return num

    def tasks_hash(self, split: str) -> str | None:
        """Return a hash of the tasks of a split."""
        found: str | None = self._call("tasks_hash", split=split)
        return found

    def close(self) -> None:
        """Close it there, and with the last copy the session. One that is lost is closed already."""
        if not self._is_open:
            return
        self._is_open = False
        self._session.num_envs -= 1
        try:
            self._call("close")
        except EnvError as error:
            if not (isinstance(error.__cause__, RemoteError) and error.__cause__.is_resumable):
                raise
        finally:
            if not self._session.num_envs and (closing := self._session.hang_up()) is not None:
                closing.future.result()

    def abandon(self) -> None:
        """Close the session: its worker ends what has not returned."""
        self._session.hang_up()

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._session.call(method, number=self._made.number, **arguments)

    def _moment(self, method: str, **arguments: Any) -> _Moment:
        moment = _read(_Moment, self._call(method, **arguments))
        self._state_key = moment.state_key
        return moment
