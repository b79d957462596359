"""The engine of a process that only trains."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING

from agentrl.engine.base import KeptBase
from agentrl.errors import EngineError
from agentrl.types import Completion, Sampling

if TYPE_CHECKING:
    import torch


class IdleEngine:
    """Samples nothing: other processes' engines do."""

    def __init__(self) -> None:
        self.version = 0
        self.busy_s = 0.0

    def conversation(self, _request_id: str) -> AbstractContextManager[None]:
        """Keep nothing."""
        return nullcontext()

    async def generate(self, _prompt_ids: Sequence[int], _sampling: Sampling, _request_id: str) -> Completion:
        """Raise an EngineError."""
        raise EngineError("this process has no engine")

    async def pause(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""

    async def load_weights(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> None:
        """Let the weights pass, for putting each together takes every process."""
        for _ in named_tensors:
            pass
        self.version = version

    async def kept_base(self) -> KeptBase:
        """Need none."""
        return KeptBase.THERE

    async def load_adapters(
        self,
        changes: "Iterable[tuple[str, tuple[torch.Tensor, torch.Tensor]]]",
        base: "Iterable[tuple[str, torch.Tensor]] | None",
        version: int,
    ) -> None:
        """Let the weights pass."""
        for _ in chain(changes, base or ()):
            pass
        self.version = version

    async def close(self) -> None:
        """Do nothing."""
