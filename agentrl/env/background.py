"""One event loop on a daemon thread, shared by all coroutine tools of a process."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any

_GRACE_S = 2.0
"""How long a cancelled coroutine may take to give way, in seconds."""


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, started at the first call."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agentrl-tools", daemon=True).start()
    if hasattr(os, "register_at_fork"):  # a forked process has the loop but not its thread: it needs one of its own
        os.register_at_fork(after_in_child=background_loop.cache_clear)
    return loop


def run_in_background(coroutine: Coroutine[Any, Any, Any], *, timeout_s: float) -> Any:
    """Run a coroutine on the background loop and wait for its result.

    Raises:
        TimeoutError: after `timeout_s` seconds; the coroutine is cancelled. One that blocks the loop is left behind
            with it, and the next call starts another loop.
    """

    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, timeout_s)

    future = asyncio.run_coroutine_threadsafe(bounded(), background_loop())
    try:
        return future.result(timeout_s + _GRACE_S)
    except TimeoutError:
        if not future.done():
            future.cancel()
            background_loop.cache_clear()
        raise
