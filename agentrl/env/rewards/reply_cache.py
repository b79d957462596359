"""Replies kept on disk, in a SQLite file that several processes may share."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agentrl.errors import UserError

T = TypeVar("T")

_MAX_LOCK_WAIT_S = 20.0
"""How long to wait for others that write."""
_STEP_S = 0.05


class ReplyCache:
    """Texts by key. Each call opens the file for itself, so that it may come from any event loop, and from after a fork."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()

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
