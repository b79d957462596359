"""Server of environments, `agentrl env-serve`: worker processes that play, each one call at a time, behind a WebSocket.

Clients are `agentrl.env.remote`. A session is a client's environment with its copies, in the worker that has fewest. A worker
ends with a call that a client has given up; its other sessions are closed, and continue elsewhere.
"""

import asyncio
import ctypes
import hmac
import ipaddress
import itertools
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request as HTTPRequest
from websockets.http11 import Response

from agentrl.data.plain import MAX_DEPTH, plain_data, printable
from agentrl.env import MessageEnv, as_message, ask_oracle, base_env, close_env
from agentrl.env.make import EnvConfig
from agentrl.env.remote import MAX_BYTES, PROTOCOL, STATUS_PATH, TOKEN, Failure, Made, Reply, Status
from agentrl.errors import AgentRLError, ConfigError, EnvError, UserError
from agentrl.rollout.env_driver import Env, begin, copy_env, env_id, step
from agentrl.rollout.faults import RaisedError
from agentrl.types import Split

log = logging.getLogger(__name__)

_GRACE_S = 5.0
"""Seconds that a call may take whose client has left."""
_MAX_CALL_S = 3600.0
"""Seconds after which a call ends its worker, whoever waits for it."""
_LOOK_S = 0.5
_AGAIN_S = 0.5
"""Seconds between two starts of a worker."""
_NO_TEXT, _WORKER_ENDED = 1003, 1011


class Request(BaseModel):
    """Call of a method, as a client sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    call: Literal[
        "make",
        "reset",
        "step",
        "action_key",
        "oracle",
        "fork",
        "reseed",
        "provides",
        "num_tasks",
        "tasks_hash",
        "close",
    ]
    number: int = 0
    """Environment that `make` or `fork` returned."""
    stage: int = 0
    seed: int | None = None
    options: dict[str, Any] | None = None
    action: str | dict[str, Any] = ""
    skill: float = 1.0
    rng: dict[str, Any] | None = None
    """State of a numpy generator."""
    split: Split = "train"


class _Hosted:
    """The environments of a worker, by session and number."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        self._envs: dict[tuple[int, int], Env] = {}
        self._numbers = itertools.count()

    def answer(self, session: int, text: str) -> str:
        """Carry out a request and return the reply; whatever is raised becomes a part of it."""
        call = ""
        try:
            asked = Request.model_validate(json.loads(text))
            call = asked.call
            reply = Reply(value=self._do(session, asked))
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it becomes data, as in an episode played here
            # As `env_driver.construct` has it: a constructor's own error, and not what `make` says of the recipe.
            cause = error.__cause__ if call == "make" and isinstance(error, AgentRLError) else None
            reply = Reply(failure=_failure(error, cause=cause or error))
        return json.dumps(reply.model_dump())

    def end(self, session: int) -> None:
        """Close the environments of a session whose client has left."""
        for key in [key for key in self._envs if key[0] == session]:
            with suppress(BaseException):  # nobody is left to be told
                close_env(self._envs.pop(key))

    def _do(self, session: int, asked: Request) -> Any:
        if asked.call == "make":
            return self._keep(session, self._config.make(asked.stage))
        env = self._envs.get((session, asked.number))
        if env is None:
            raise EnvError(f"this session has no environment {asked.number}")
        match asked.call:
            case "reset":
                return _plain(begin(env, base_env(env), seed=asked.seed, options=asked.options)._asdict())
            case "step":
                return _plain(step(env, base_env(env), as_message(asked.action))._replace(snapshot=None)._asdict())
            case "fork":
                return self._keep(session, copy_env(env))
            case "close":
                close_env(self._envs.pop((session, asked.number)))
                return None
            case _:
                return _plain(_asked(base_env(env), asked))

    def _keep(self, session: int, env: Env) -> dict[str, Any]:
        number, base = next(self._numbers), base_env(env)
        self._envs[session, number] = env
        return Made(
            number=number,
            name=env_id(env),
            tools=_plain(base.tools),
            turn_rewards=bool(base.turn_rewards),
            can_fork=bool(base.can_fork),
            default_action_key=type(base).action_key is MessageEnv.action_key,
        ).model_dump()


def _asked(base: MessageEnv, asked: Request) -> Any:
    """Return what a method that moves nothing but chance returns."""
    match asked.call:
        case "action_key":
            return base.action_key(asked.action)
        case "oracle":
            if asked.rng is None:
                return {"message": ask_oracle(base, skill=asked.skill), "rng": None}
            rng = np.random.Generator(np.random.PCG64())
            rng.bit_generator.state = asked.rng
            return {"message": ask_oracle(base, skill=asked.skill, rng=rng), "rng": rng.bit_generator.state}
        case "reseed":
            base.reseed(asked.seed or 0)
        case "provides":
            return base.provides()
        case "num_tasks":
            return base.num_tasks(asked.split)
        case "tasks_hash":
            return base.tasks_hash(asked.split)
    return None


def _plain(value: Any) -> Any:
    return plain_data(
        value, "its reply", max_depth=MAX_DEPTH + 4
    )  # fields, messages and tools hold what may be as deep


def _failure(error: BaseException, *, cause: BaseException) -> Failure:
    """Describe an error by its cause; one of the classes that callers tell apart keeps its class."""
    nearest = next((one for one in (EnvError, UserError, NotImplementedError) if isinstance(error, one)), Exception)
    described = RaisedError(cause)
    return Failure.model_validate(
        {
            "raised": nearest.__name__,
            "words": printable(str(error)),
            "line": described.line,
            "kind": described.fault.kind,
            "traceback": described.fault.traceback,
        }
    )


def _work(section: dict[str, Any], pipe: Connection) -> None:
    """Answer requests until nobody can ask: the main function of a worker."""
    os.setsid()  # a group of its own, to be killed with all that it starts
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with its parent, however that ends
    hosted = _Hosted(EnvConfig.model_validate(section))
    with suppress(EOFError, OSError):
        while True:
            session, _, text = pipe.recv_bytes().decode().partition(" ")
            if not text:
                hosted.end(int(session))
            pipe.send_bytes(hosted.answer(int(session), text).encode() if text else b"")
    os._exit(0)  # whatever its environments left running


class _WorkerEndedError(Exception):
    pass


class _Worker:
    """A process that answers one call at a time, and the sessions that it has."""

    def __init__(self, section: dict[str, Any], *, on_end: Callable[["_Worker"], None]) -> None:
        """Start it; returns before it is ready."""
        context = multiprocessing.get_context("forkserver")
        self.sessions: dict[int, ServerConnection] = {}
        self.running: tuple[int, float] | None = None
        """Session of the call under way, and when that began. None: there is none."""
        self._turn = asyncio.Lock()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(section, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._on_end = on_end
        self._has_ended = False
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._note_end)

    async def ask(self, session: int, text: str) -> str:
        """Return the reply to a request. An empty one ends the session.

        Raises:
            _WorkerEndedError: if the process ends first.
        """
        async with self._turn:
            self.running = session, time.monotonic()
            try:
                return await asyncio.to_thread(self._exchange, f"{session} {text}".encode())
            except (EOFError, OSError) as error:
                self._note_end()  # before the system tells it: nobody is to come here any more
                raise _WorkerEndedError from error
            finally:
                self.running = None

    def kill(self) -> None:
        """End it with all that it has started."""
        self._kill_group()
        self._process.kill()

    def _note_end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            asyncio.get_running_loop().remove_reader(self._process.sentinel)
            self._kill_group()
            self._on_end(self)

    def _kill_group(self) -> None:
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _exchange(self, request: bytes) -> str:
        self._pipe.send_bytes(request)
        return self._pipe.recv_bytes().decode()


class EnvServer:
    """Serves an environment to many clients; all methods run on one event loop."""

    def __init__(self, config: EnvConfig, *, num_workers: int, token: str | None = None) -> None:
        """Start nothing yet.

        Args:
            config: section `env` of a recipe; its `servers` are ignored.
            num_workers: processes.
            token: what clients must show. None: nothing.
        """
        self._section = config.hosted()
        self._num_workers, self._token = num_workers, token
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve within the context; give the address, with the port that the system chose for 0.

        Raises:
            ConfigError: if the environment cannot be made, or the address cannot be used.
        """
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(self._num_workers + 1))
        try:
            for _ in range(self._num_workers):
                self._start()
            await self._try()
            async with serve(
                self._session,
                host,
                port,
                process_request=self._admit,
                origins=[None],  # no page in a browser
                compression=None,
                max_size=MAX_BYTES,
            ) as server:
                yield f"ws://{host}:{server.sockets[0].getsockname()[1]}"
        except OSError as error:
            raise ConfigError(f"--host, --port: cannot listen on {host}:{port}: {error}") from error
        finally:
            workers, self._workers = self._workers, []
            for worker in workers:
                worker.kill()

    def _start(self) -> None:
        self._workers.append(_Worker(self._section, on_end=self._on_end))

    def _on_end(self, worker: _Worker) -> None:
        """Disconnect the clients of a worker that has ended, and start another."""
        if worker not in self._workers:  # all end
            return
        self._workers.remove(worker)
        log.warning("a worker ended with %d sessions; another one is started", len(worker.sessions))
        for connection in worker.sessions.values():
            self._run(connection.close(_WORKER_ENDED, "its worker ended"))
        asyncio.get_running_loop().call_later(_AGAIN_S, self._start)

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _try(self) -> None:
        """Make the environment once."""
        reply = Reply.model_validate_json(await self._workers[0].ask(next(self._numbers), '{"call": "make"}'))
        if reply.failure is not None:
            raise ConfigError(reply.failure.words)

    async def _admit(self, connection: ServerConnection, request: HTTPRequest) -> Response | None:
        """Refuse who lacks the token."""
        given = request.headers.get("Authorization", "")
        if self._token is None or hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return None
        return connection.respond(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong\n")

    def _status(self) -> str:
        num_sessions = sum(len(worker.sessions) for worker in self._workers)
        status = Status(protocol=PROTOCOL, env=self._section, workers=self._num_workers, sessions=num_sessions)
        return status.model_dump_json()

    async def _session(self, connection: ServerConnection) -> None:
        """Serve one client."""
        assert connection.request is not None
        if connection.request.path == STATUS_PATH:
            await connection.send(self._status())
            return
        while not self._workers:  # all have just ended
            await asyncio.sleep(_AGAIN_S)
        worker = min(self._workers, key=lambda each: len(each.sessions))
        number = next(self._numbers)
        worker.sessions[number] = connection
        try:
            await connection.send(self._status())
            async for text in connection:
                if not isinstance(text, str) or not text:
                    await connection.close(_NO_TEXT, "requests are JSON")
                    return
                if (reply := await self._reply(worker, number, text, connection)) is not None:
                    await connection.send(reply)
        except ConnectionClosed:
            pass
        except _WorkerEndedError:
            await connection.close(_WORKER_ENDED, "its worker ended")
        finally:
            del worker.sessions[number]
            if worker in self._workers:
                self._run(self._end(worker, number))

    async def _reply(self, worker: _Worker, number: int, text: str, connection: ServerConnection) -> str | None:
        """Return the reply to a request. None: the client has left; what does not end then is ended with its worker.

        Raises:
            _WorkerEndedError: if the worker ends first.
        """
        call = asyncio.create_task(worker.ask(number, text))
        gone = asyncio.create_task(connection.wait_closed())
        try:
            while not call.done():
                waited = {call} if gone.done() else {call, gone}
                await asyncio.wait(waited, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                limit_s = _GRACE_S if gone.done() else _MAX_CALL_S
                running, began = worker.running or (None, 0.0)
                if running == number and not call.done() and time.monotonic() - began > limit_s:
                    worker.kill()
            if gone.done():
                call.exception()  # nobody is left to be told
                return None
            return call.result()
        finally:
            gone.cancel()

    async def _end(self, worker: _Worker, number: int) -> None:
        with suppress(_WorkerEndedError):
            await worker.ask(number, "")


def run(config: EnvConfig, *, num_workers: int, host: str, port: int, say: Callable[[str], object]) -> None:
    """Serve until the process is interrupted.

    Raises:
        ConfigError: for another host than this machine without a token, and whatever `EnvServer.serving` refuses.
    """
    token = os.environ.pop(TOKEN, "").strip() or None  # no environment sees it
    if token is None and not _is_loopback(host):
        raise ConfigError(
            f"--host: {host} lets others in: set the environment variable {TOKEN}, here and for the clients"
        )
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise ConfigError("agentrl env-serve needs processes that Windows lacks: serve in WSL")

    multiprocessing.set_forkserver_preload([__name__])  # once, and not in each worker

    async def serve_until_interrupted() -> None:
        async with EnvServer(config, num_workers=num_workers, token=token).serving(host, port) as url:
            say(f"serving at {url} with {num_workers} workers; end with Ctrl-C")
            await asyncio.get_running_loop().create_future()

    with suppress(KeyboardInterrupt):
        asyncio.run(serve_until_interrupted())


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
