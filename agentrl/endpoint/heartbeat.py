"""Signs of life for a client that waits for an answer, so that its read timeout does not fire."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Send

JSON = "application/json"
EVENTS = "text/event-stream"
_BEATS = {JSON: b" ", EVENTS: b": waiting\n\n"}
"""Bytes that a client reads over before an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, or a refusal, as it is sent."""

    body: bytes
    media: str = JSON
    status: int = 200

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers; SDKs retry a refusal unless a header forbids it."""
        more = {"x-should-retry": "false"} if self.status >= 400 else {"cache-control": "no-cache"}
        return {"content-type": self.media} | more


async def deliver(
    work: "asyncio.Future[Any]",
    reply: Callable[[bool], Reply | None],
    *,
    media: str,
    heartbeat_s: float,
    receive: Receive,
    send: Send,
) -> bool:
    """Send an answer as soon as the work is done, and heartbeats until then.

    Args:
        work: continues if the client leaves.
        reply: returns the answer of the finished work, given whether heartbeats were sent: status 200 stands then. None
            cuts the connection.
        media: content type of an answer.
        heartbeat_s: seconds of silence before each heartbeat.
        receive: receives from the client, whose body has been read.
        send: sends to the client.

    Returns:
        Whether the answer was written whole to a connection that stayed open.
    """
    gone = asyncio.ensure_future(_disconnect(receive))
    has_begun = False
    try:
        while not (await asyncio.wait((work, gone), timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            if not has_begun:
                await send(_start(Reply(body=b"", media=media)))
            has_begun = True
            await send(_body(_BEATS[media]))
        if gone.done() or (found := reply(has_begun)) is None:
            return False
        if not has_begun:
            await send(_start(found, {"content-length": str(len(found.body))}))
        await send(_body(found.body))
        await asyncio.sleep(0)  # a lost connection is known by then
        if gone.done():
            return False
        await send(_body(b"", is_last=True))
        return True
    finally:
        gone.cancel()


async def _disconnect(receive: Receive) -> None:
    """Wait until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(reply: Reply, more: dict[str, str] | None = None) -> dict[str, Any]:
    headers = [(name.encode(), value.encode()) for name, value in (reply.headers | (more or {})).items()]
    return {"type": "http.response.start", "status": reply.status, "headers": headers}


def _body(body: bytes, *, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}
