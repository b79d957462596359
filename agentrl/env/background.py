"""One event loop on a daemon thread, shared by all coroutine tools of a process."""

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, started at the first call."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agentrl-tools", daemon=True).start()
    return loop


def run_in_background(coroutine: Coroutine[Any, Any, Any], *, timeout_s: float) -> Any:
    """Run a coroutine on the background loop and wait for its result.

    Raises:
        TimeoutError: after `timeout_s` seconds; the coroutine is cancelled.
    """

    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, timeout_s)

    return asyncio.run_coroutine_threadsafe(bounded(), background_loop()).result()
