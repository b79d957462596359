"""The report of runs that go on: served on this machine, read again as their folders grow."""

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError
from agentrl.report.html.page import asset, page, safe_json
from agentrl.report.html.report import SCRIPTS, STYLES, report_data
from agentrl.report.html.runs import open_runs
from agentrl.report.html.store import RolloutStore

if TYPE_CHECKING:
    from starlette.applications import Starlette

HOST = "127.0.0.1"
_READ_S = 2.0
"""Seconds of reading rollouts for one answer at most; the next one continues."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class LiveRuns:
    """Content of the folders of runs; reads again what has changed."""

    def __init__(self, folders: Sequence[Path], *, defaults: Mapping[str, Any] | None = None) -> None:
        """Read recipes and metrics; `defaults` as for `write_report`.

        Raises:
            ConfigError: as `open_runs`.
        """
        self._folders, self._defaults = folders, defaults
        self._lock = Lock()
        self._store = RolloutStore()
        self._seen: object = None
        self._num_read = 0
        self._data: dict[str, Any] = {}
        self._texts: dict[Callable[[dict[str, Any]], str], str] = {}
        """Text of the data, by the function that wrote it."""
        open_runs(folders)

    def data(self) -> dict[str, Any]:
        """Return the data of the page; its `stamp` is another whenever something is."""
        with self._lock:
            return self._read()

    def text(self, write: Callable[[dict[str, Any]], str], *, stamp: int | None = None) -> str | None:
        """Return the data as a function writes it: once, however many ask. None: nothing is new since the data of a stamp."""
        with self._lock:
            known = self._num_read if self._seen is not None else None
            data = self._read()
            if stamp == known == self._num_read:
                return None
            if write not in self._texts:
                self._texts[write] = write(data)
            return self._texts[write]

    def _read(self) -> dict[str, Any]:
        """Read what is not read yet, and return all data."""
        seen = self._state()
        if self._seen is not None and seen == self._seen:
            return self._data
        runs = open_runs(self._folders)
        is_whole = self._store.read(runs, seconds=_READ_S)
        if seen != self._seen:
            self._num_read += 1
        self._seen = seen if is_whole else None
        self._texts = {}
        self._data = report_data(runs, self._store, defaults=self._defaults, is_live=True) | {"stamp": self._num_read}
        return self._data

    def block(self, number: int) -> bytes | None:
        """Return the rollouts of a block, compressed; None if there is none of this number."""
        block = self._store.blocks.get(number)
        return None if block is None else block.data

    def _state(self) -> object:
        """Return what is another once a file of the runs is."""
        watched = ("rollouts", "evaluations", "faults", "faults/*", "*.jsonl", "config.yaml")
        return [_stat(path) for folder in self._folders for pattern in watched for path in sorted(folder.glob(pattern))]


def application(live: LiveRuns) -> "Starlette":
    """Return the server of a page, which answers this machine's browsers alone.

    A page of another site cannot read it: it answers to the names of this machine only, whatever a name resolves to.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route

    def show_page(_: Request) -> Response:
        return HTMLResponse(live.text(_page), headers=_HEADERS)

    def show_news(request: Request) -> Response:
        news = live.text(safe_json, stamp=_number(request.query_params.get("stamp", "")))
        if news is None:
            return Response(status_code=204, headers=_HEADERS)
        return Response(news, media_type="application/json", headers=_HEADERS)

    def show_block(request: Request) -> Response:
        block = live.block(_number(request.path_params["number"]))
        if block is None:
            return Response(status_code=404, headers=_HEADERS)
        return Response(block, media_type="application/json", headers=_HEADERS | {"Content-Encoding": "gzip"})

    def show_error(_: Request, error: Exception) -> Response:
        """Answer where the folder is gone or damaged by now; it may be mended by the next request."""
        return PlainTextResponse(str(error), status_code=503, headers=_HEADERS)

    return Starlette(
        routes=[Route("/", show_page), Route("/data.json", show_news), Route("/blocks/{number}", show_block)],
        exception_handlers={ConfigError: show_error, OSError: show_error},
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
    )


def listen(port: int) -> socket.socket:
    """Return a socket of this machine alone; port 0 takes any that is free.

    Raises:
        ConfigError: if the port is taken, or is none.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
        found.listen()  # else two could bind, and the second would learn of it too late
    except (OSError, OverflowError) as error:
        found.close()
        raise ConfigError(
            f"--port: {port}: {error.strerror if isinstance(error, OSError) else error}; choose another, or 0"
        ) from error
    return found


def serve(live: LiveRuns, where: socket.socket) -> None:
    """Serve until interrupted.

    Raises:
        KeyboardInterrupt: at Ctrl-C.
    """
    import uvicorn

    config = uvicorn.Config(
        application(live), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    uvicorn.Server(config).run(sockets=[where])


def _page(data: dict[str, Any]) -> str:
    scripts, styles = [asset(name) for name in SCRIPTS], [asset(name) for name in STYLES]
    return "".join(page(title=data["title"], data=data, scripts=scripts, styles=styles, connects=True))


def _number(given: str) -> int:
    """Return a number that an address gives; -1 for what is none of ours."""
    return int(given) if re.fullmatch(r"[0-9]{1,15}", given) else -1


def _stat(path: Path) -> tuple[str, int, int]:
    try:
        found = path.stat()
    except OSError:  # it is gone by now
        return str(path), 0, 0
    return str(path), found.st_mtime_ns, found.st_size
