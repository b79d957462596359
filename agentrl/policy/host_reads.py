"""Scalars of a device that the host reads together: each read waits for all that was launched before it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce

import torch
from torch import Tensor

_Pending = list[tuple[Tensor, Callable[[float], None]]]

_PENDING: ContextVar[_Pending | None] = ContextVar("pending", default=None)
"""Scalars to be read at the end of `reading_together`. None: there is no such context."""


def read(scalar: Tensor, receive: Callable[[float], None]) -> None:
    """Call a function with the value of a scalar: now, or at the end of `reading_together`, in the order of the calls."""
    if (pending := _PENDING.get()) is None:
        receive(float(scalar.detach()))
    else:
        pending.append((scalar.detach(), receive))


def require(is_met: Tensor, error: Callable[[], Exception]) -> None:
    """Raise an error unless a condition is met: now, or at the end of `reading_together`."""

    def check(value: float) -> None:
        if not value:
            raise error()

    read(is_met, check)


@contextmanager
def reading_together() -> Iterator[None]:
    """Read all scalars of `read` and `require` at the end, at once. None is read if the context ends by an error."""
    pending: _Pending = []
    token = _PENDING.set(pending)
    try:
        yield
    finally:
        _PENDING.reset(token)
    if pending:
        scalars, receivers = zip(*pending, strict=True)
        dtype = reduce(torch.promote_types, (scalar.dtype for scalar in scalars), torch.float32)
        for receive, value in zip(receivers, torch.stack([each.to(dtype) for each in scalars]).tolist(), strict=True):
            receive(value)
