"""HTTP requests that are one call: one request is one sample, whatever a client's retries do. Pure: no sockets.

SDKs send a request again after a timeout, and mark it (`x-stainless-retry-count`). Two equal requests that are not marked
may both be meant: a program may ask for two samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count


class Arrival(StrEnum):
    """Treatment of a request."""

    NEW = "new"
    """Sample."""
    JOINED = "joined"
    """Wait for the sample that is under way."""
    AGAIN = "again"
    """Hand out an answer that was sampled before."""


@dataclass(slots=True, eq=False)
class Request:
    """A request that is sampled once. It changes."""

    number: int
    digest: str
    end: str
    """Digest of the whole prompt."""
    sockets: int = 1
    """Connections on which the client waits."""
    is_finished: bool = False
    """It has its answer."""
    is_delivered: bool = False
    """The answer was written whole to a connection that stayed open."""
    is_read: bool = False
    """A later prompt goes on after this one: the client has its answer, or has done without."""


@dataclass(slots=True)
class Requests:
    """The requests of one session. It grows."""

    _by_digest: dict[str, list[Request]] = field(default_factory=dict)
    _by_end: dict[str, list[Request]] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=count)

    def arrive(self, digest: str, path: Sequence[str], *, is_retry: bool) -> tuple[Arrival, Request]:
        """Return how a request is treated, and the request that is sampled for it.

        Args:
            digest: of the request.
            path: digests of the beginnings of its prompt.
            is_retry: the client says that it has sent the request before.
        """
        for end in path[:-1]:
            for request in self._by_end.get(end, ()):
                request.is_read = True
        same = self._by_digest.setdefault(digest, [])
        for request in same:
            if not request.is_delivered and (is_retry or not request.sockets):
                request.sockets += 1
                return (Arrival.AGAIN if request.is_finished else Arrival.JOINED), request
        if is_retry and same and not same[-1].is_read:  # delivered, as far as this side knows
            same[-1].sockets += 1
            return Arrival.AGAIN, same[-1]
        request = Request(next(self._numbers), digest, path[-1])
        same.append(request)
        self._by_end.setdefault(path[-1], []).append(request)
        return Arrival.NEW, request

    def undelivered(self) -> list[Request]:
        """Return the requests whose answer no client has."""
        return [each for same in self._by_digest.values() for each in same if not (each.is_delivered or each.is_read)]
