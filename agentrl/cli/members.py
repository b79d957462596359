"""Members of a deployment: servers and trainers that are started, watched and ended together."""

import os
import re
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import psutil

from agentrl.errors import ConfigError, TrainingError
from agentrl.report.folder import RunFolder
from agentrl.run.launch import USER_MISTAKE

_POLL_S = 0.5
_END_S = 60.0
"""Seconds that a process that is interrupted may take to end."""
_LONGEST_WAIT_S = 60.0
"""Longest wait before a server is started again; the first takes a second, each further one twice as long."""
_SERVES = b"serving at "
OWN_HOST, OWN_PORT = "OWN_HOST", "OWN_PORT"
"""Words for a member's own address in its arguments; its node replaces them."""
_LOST = 1
"""Exit status of a process that was lost with its node or its actor."""


def start(*arguments: Any, **options: Any) -> Any:
    """Start a command; see `agentrl.compare.runner.start`, which loads torch."""
    from agentrl.compare.runner import start as begin

    return begin(*arguments, **options)


class Member(ABC):
    """A part of a deployment."""

    def __init__(self, name: str) -> None:
        """Start nothing yet.

        Args:
            name: for messages.
        """
        self.name = name
        self.failures = 0
        """Times in a row that it ended before it served."""
        self.next_start = 0.0
        """Time before which it is not started again."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether it was started, and its end has not been seen."""

    @abstractmethod
    def start(self) -> None:
        """Start it."""

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit status if it has ended since; what it had started ends too. None: it has not."""

    @abstractmethod
    def interrupt(self) -> None:
        """Let it end as Ctrl-C would."""

    @abstractmethod
    def end(self) -> None:
        """Wait for its end, and after a while end it."""


class Server(Member):
    """A member that serves once it has started."""

    @abstractmethod
    def has_served(self) -> bool:
        """Return whether it has said that it serves, since it was started."""

    @abstractmethod
    def last_words(self) -> str:
        """Return the last line of its output."""


class LocalMember(Server):
    """A process of this machine, with all that it has started. It is interrupted if this process ends, however that ends."""

    def __init__(
        self, name: str, arguments: Callable[[], list[str]], log: IO[bytes], *, gpus: Sequence[str] | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            name: for messages.
            arguments: returns those of `agentrl`, at each start.
            log: file for its output.
            gpus: GPUs that it sees. None: all.
        """
        super().__init__(name)
        self._arguments, self._log = arguments, log
        self._environment = {**os.environ} | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        self._process: Any = None
        self._family: set[psutil.Process] = set()
        self._begin = 0

    @property
    def is_running(self) -> bool:
        """Whether it was started, and its end has not been seen."""
        return self._process is not None

    def start(self) -> None:
        """Start it."""
        self._log.flush()
        self._begin = os.fstat(self._log.fileno()).st_size
        self._process = start(self._arguments(), log=self._log, environment=self._environment)

    def poll(self) -> int | None:
        """Return the exit status of a process that has ended since; what it had started ends too. None: it has not."""
        if self._process is None:
            return None
        with suppress(psutil.NoSuchProcess):
            self._family |= {*psutil.Process(self._process.pid).children(recursive=True)}
        status: int | None = self._process.poll()
        if status is not None:
            self._clear()
        return status

    def has_served(self) -> bool:
        """Return whether a server has said that it serves."""
        return self.is_running and _SERVES in self._written()

    def last_words(self) -> str:
        """Return the last line of its output."""
        lines = self._written().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return f"{lines[-1].removeprefix('agentrl: ')} (log: {self._log.name})"

    def interrupt(self) -> None:
        """Let it end as Ctrl-C would."""
        self.poll()
        if self._process is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """Wait for its end, and after a while end it."""
        end = time.monotonic() + _END_S
        while self.poll() is None and self.is_running:
            if time.monotonic() > end:
                self._process.kill()
            time.sleep(0.05)

    def _written(self) -> bytes:
        return Path(self._log.name).read_bytes()[self._begin :]

    def _clear(self) -> None:
        """End what it has started, in other sessions too, whatever it could do about that itself."""
        for process in self._family:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # of another process with this number there is none: psutil knows when it began
        psutil.wait_procs(self._family, timeout=_END_S)
        self._process.stdin.close()
        self._process, self._family = None, set()


def watch(
    servers: Sequence[Server], trainers: Member, *, max_restarts: int, say: Callable[[str], object] = lambda _: None
) -> None:
    """Keep servers up, and resume the trainers once these serve, until the run ends; then end everything.

    Raises:
        TrainingError: if the trainers fail, or a server cannot serve, more often than `max_restarts`.
        SystemExit: with 2 for a mistake, which a trainer has printed.
    """
    restarts = 0
    try:
        while True:
            for server in servers:
                _keep_up(server, max_restarts=max_restarts, say=say)
            if not trainers.is_running:
                if all(server.has_served() for server in servers):
                    trainers.start()
            elif (status := trainers.poll()) is not None:
                if status == 0:
                    return
                if status == USER_MISTAKE:
                    sys.exit(USER_MISTAKE)
                restarts += 1
                if restarts > max_restarts:
                    raise TrainingError(
                        f"the trainers ended {restarts} times (deployment.max_restarts: {max_restarts})"
                    )
                say(f"the trainers ended with status {status}: resuming ({restarts} of {max_restarts})")
            time.sleep(_POLL_S)
    finally:
        for member in (trainers, *servers):
            member.interrupt()
        for member in (trainers, *servers):
            member.end()


def _keep_up(server: Server, *, max_restarts: int, say: Callable[[str], object]) -> None:
    """Start a server that is due; note the end of one that has ended."""
    has_served = server.has_served()
    if (status := server.poll()) is not None:
        server.failures = 1 if has_served else server.failures + 1
        if not has_served and (status == USER_MISTAKE or server.failures > max_restarts):
            raise TrainingError(f"{server.name} does not start: {server.last_words()}")
        wait_s = min(_LONGEST_WAIT_S, 2.0 ** (server.failures - 1))
        server.next_start = time.monotonic() + wait_s
        say(f"{server.name} ended with status {status}: starting it again in {wait_s:g} s")
    if not server.is_running and time.monotonic() >= server.next_start:
        server.start()


class _Actor:
    """An actor that runs one process on its node, once. The process is interrupted if the actor ends, however that ends."""

    def __init__(self, name: str, log: Path, here: Path, environment: Mapping[str, str]) -> None:
        self._name = name
        self._log, self._here = log, here
        os.environ.update(environment)

    def start(self, arguments: Sequence[str], former: tuple[str, int] | None) -> tuple[str, int]:
        """Start the process, and return its address: the former one if that was on this node, as soon as it is free.

        Raises:
            ConfigError: if this node does not see the folders of the deployment.
        """
        import ray

        host: str = ray.util.get_node_ip_address()
        for folder in (self._here, self._log.parent):
            if not folder.is_dir():
                raise ConfigError(
                    f"--ray: node {host} does not see {folder}; the working directory and the run's folder (--run_dir) "
                    "must be on a file system that all nodes share"
                )
        os.chdir(self._here)
        port = _free_port(host, former[1] if former and former[0] == host else 0)
        own = {OWN_HOST: host, OWN_PORT: str(port)}
        words = [re.sub("|".join(own), lambda match: own[match[0]], word) for word in arguments]
        self._process = LocalMember(self._name, lambda: words, self._log.open("ab"))
        self._num_fetched = self._log.stat().st_size
        self._process.start()
        return host, port

    def call(self, method: str) -> Any:
        """Call a method of the process."""
        return getattr(self._process, method)()

    def fetch(self) -> bytes:
        """Return what the process has written since the last call."""
        with self._log.open("rb") as log:
            log.seek(self._num_fetched)
            written = log.read()
        self._num_fetched += len(written)
        return written


def _free_port(host: str, port: int) -> int:
    """Wait until a port is free, and return it; 0: return one that is."""
    end = time.monotonic() + _END_S
    while True:
        try:
            with socket.create_server((host, port)) as probe:
                found: int = probe.getsockname()[1]
                return found
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_S)


class RayMember(Server):
    """A process on a node of a Ray cluster. Each start makes an actor, which Ray places where there is room by then."""

    def __init__(
        self,
        name: str,
        log: Path,
        options: dict[str, Any],
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        echo: IO[bytes] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            name: for messages.
            log: file for its output, which all nodes see.
            options: those of its actors: what they need, and where.
            environment: further variables of its process.
            echo: file of this process to which its output is copied.
        """
        super().__init__(name)
        self.arguments: Sequence[str] = ()
        """Those of `agentrl`, at the next start."""
        self.address: tuple[str, int] | None = None
        """Host and port. None: it had no place yet."""
        self._log, self._echo = log, echo
        self._options, self._environment = options, dict(environment)
        self._actor: Any = None
        self._begins: Any = None
        self._has_served = False
        self._last_words = ""

    @property
    def is_running(self) -> bool:
        """Whether it was started, and its end has not been seen."""
        return self._actor is not None

    def start(self) -> None:
        """Ask Ray for a place, and start it there."""
        import ray

        self._has_served = False
        actor = ray.remote(_Actor).options(**self._options)
        self._actor = actor.remote(self.name, self._log, Path.cwd(), self._environment)
        self._begins = self._actor.start.remote(self.arguments, self.address)

    def has_begun(self, *, timeout_s: float | None = 0) -> bool:
        """Return whether it has found a place and was started there.

        Raises:
            ConfigError: if it cannot be started there.
        """
        import ray

        if not ray.wait([self._begins], timeout=timeout_s)[0]:
            return False
        try:
            self.address = ray.get(self._begins)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return True

    def poll(self) -> int | None:
        """Return the exit status if it has ended since; 1 if its actor or node was lost. None: it has not."""
        from ray.exceptions import RayActorError

        if not self.is_running:
            return None
        try:
            if not self.has_begun():
                return None
            status: int | None = self._call("poll")
            self._copy_output()
            if status is not None:
                self._last_words = self._call("last_words")
        except RayActorError as error:
            status, self._last_words = _LOST, str(error).partition("\n")[0]
        if status is not None:
            self._drop()
        return status

    def has_served(self) -> bool:
        """Return whether a server has said that it serves."""
        from ray.exceptions import RayActorError

        if self.is_running and not self._has_served:
            with suppress(RayActorError):  # which poll() reports
                self._has_served = self.has_begun() and self._call("has_served")
        return self.is_running and self._has_served

    def last_words(self) -> str:
        """Return the last line of its output, or why it was lost."""
        return self._last_words

    def interrupt(self) -> None:
        """Let it end as Ctrl-C would."""
        from ray.exceptions import RayActorError

        with suppress(RayActorError):
            if self.is_running and self.has_begun():
                self._call("interrupt")

    def end(self) -> None:
        """Wait for its end, and after a while end it."""
        from ray.exceptions import RayActorError

        with suppress(RayActorError):
            if self.is_running and self.has_begun():
                self._call("end")
                self._copy_output()
        self._drop()

    def _call(self, method: str) -> Any:
        import ray

        return ray.get(self._actor.call.remote(method))

    def _copy_output(self) -> None:
        import ray

        if self._echo is not None:
            self._echo.write(ray.get(self._actor.fetch.remote()))
            self._echo.flush()

    def _drop(self) -> None:
        import ray

        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None


class RayTrainers(Member):
    """The trainers of a run on one or more nodes, which end together, and whenever a server has another address."""

    def __init__(
        self,
        machines: Sequence[RayMember],
        servers: Sequence[RayMember],
        arguments: Callable[[Sequence[str], Sequence[str]], list[str]],
        *,
        num_processes: int,
        run_dir: Path,
    ) -> None:
        """Start nothing yet.

        Args:
            machines: the trainers of each node.
            servers: all servers.
            arguments: returns those of `agentrl`, from options of `agentrl launch` and the servers' addresses.
            num_processes: trainers in all.
            run_dir: folder of the run.
        """
        super().__init__("the trainers")
        self._machines, self._servers = machines, servers
        self._arguments, self._num = arguments, num_processes
        self._run_dir = run_dir
        self._addresses: list[str] = []
        self._statuses: list[int] = []

    @property
    def is_running(self) -> bool:
        """Whether any of them was started, and its end has not been seen."""
        return any(machine.is_running for machine in self._machines)

    def start(self) -> None:
        """Start the first node's, which the others meet at its address."""
        from ray.exceptions import RayActorError

        if self._run_dir.is_dir():
            with RunFolder(self._run_dir).lock(timeout_s=_END_S):
                pass  # what a lost actor ran ends by itself
        self._statuses, self._addresses = [], self._current_addresses()
        host, port = OWN_HOST, OWN_PORT
        for number, machine in enumerate(self._machines):
            where = ["--machines", str(len(self._machines)), "--machine", str(number), "--host", host, "--port", port]
            machine.arguments = self._arguments(["--processes", str(self._num), *where], self._addresses)
            machine.start()
            if number == 0:
                with suppress(RayActorError):  # which poll() reports
                    machine.has_begun(timeout_s=None)
                    host, port = map(str, machine.address or (host, port))

    def poll(self) -> int | None:
        """Return the exit status of the first that failed, when all have ended; one that fails ends the others."""
        self._statuses += [status for machine in self._machines if (status := machine.poll()) is not None]
        if any(self._statuses) or self._addresses != self._current_addresses():
            self.interrupt()
        if self.is_running or not self._statuses:
            return None
        return USER_MISTAKE if USER_MISTAKE in self._statuses else next(filter(None, self._statuses), 0)

    def interrupt(self) -> None:
        """Let all of them end as Ctrl-C would."""
        for machine in self._machines:
            machine.interrupt()

    def end(self) -> None:
        """Wait for their ends, and after a while end them."""
        for machine in self._machines:
            machine.end()

    def _current_addresses(self) -> list[str]:
        return ["{}:{}".format(*server.address) for server in self._servers if server.address is not None]
