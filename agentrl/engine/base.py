"""The seam of sampling.

How long to wait before what failed is tried again.

The engine of a process that only trains.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from agentrl.errors import EngineError
from agentrl.recipe.plugin import Plugin, Seam
from agentrl.types import Completion, Sampling, TaskShard

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What an engine is made of, beside its own fields of the recipe."""

    model: Any
    """The transformers model in training. It stays the trainer's: an engine copies it, or reads its configuration and the
    names and shapes of its weights, which are pushed when the run begins."""
    device: "torch.device"
    """Of the trainer."""
    dtype: "torch.dtype"
    """In which the engine computes."""
    shard: TaskShard
    """What this process samples, and its number among those that do."""
    handover: Path
    """A folder for weights on their way to another process; removed with the run."""
    max_context_tokens: int
    """Longest context, prompt and completion together."""
    repeats_exactly: bool
    """The run is to repeat bit for bit: what is sampled may not depend on the timing of environments."""
    samples_during_update: bool
    """The engine samples while the policy is updated."""
    returns_experts: bool = False
    """Completions carry the experts that the routers of a mixture chose (`Completion.experts`)."""


class EngineConfig(Plugin):
    """What samples the rollouts; the fields of the engine that it names stand beside the name."""

    seam = Seam("agentrl.engines", "engine", "name")

    name: str = "auto"
    """An installed engine, or `module:Class` of an `EngineConfig`. `transformers`: in this process, continuous
    batching over a key-value cache, on CPU or GPU. `vllm`: vLLM in this process. `vllm_server`: vLLM in another,
    see `server`. `auto`: `vllm` where it is installed and there is one training process, on a GPU (expected to be
    faster) and on a CPU from 10 million parameters on (measured); else `transformers`."""

    @property
    def is_deterministic(self) -> bool:
        """True where the engine samples the same again after a kill, as long as it is asked for the same."""
        return False

    def num_sampling(self, num_processes: int) -> int:
        """Return how many of so many training processes have an engine: the first ones.

        Raises:
            ConfigError: where there are engines for more.
        """
        return num_processes

    def for_process(self, index: int) -> Self:  # noqa: ARG002 - those of most engines are alike
        """Return the fields of one process's engine."""
        return self

    @abstractmethod
    def build(self, context: EngineContext) -> "Engine":
        """Return the engine of a process.

        Raises:
            ConfigError: where it cannot be had.
        """
        raise NotImplementedError


class Sampler(Protocol):
    """Samples completions: what an episode knows of an engine.

    Every completion's log-probabilities are those of the distribution that was sampled: full support, temperature
    applied. An episode is one conversation: each of its prompts begins with the previous prompt and completion, so an
    engine can keep what it has computed.
    """

    def conversation(self, request_id: str) -> AbstractContextManager[None]:
        """Keep what was computed for this id between its requests; at exit forget it."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample after `prompt_ids` until a stop token or the budget; one request at a time for each id.

        Raises:
            EngineError: when the engine cannot; with the engine's own words.
        """


class Engine(Sampler, Protocol):
    """A sampler whose weights can be replaced."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""

    @property
    def busy_s(self) -> float:
        """Seconds spent computing since the engine was made."""

    async def pause(self) -> None:
        """Return every running request as it stands, with finish_reason `aborted`, and hold those that come."""

    async def resume(self) -> None:
        """Sample again."""

    async def load_weights(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> None:
        """Replace the weights; nothing computed under earlier ones serves a later request.

        Raises:
            EngineError: while requests are running, or when names or shapes are not the model's. After the latter the
                weights may be replaced in part: load them again.
        """

    async def close(self) -> None:
        """Release what the engine holds; requests that still wait, and later ones, get an EngineError."""


@runtime_checkable
class ReplicatedEngine(Engine, Protocol):
    """An engine with several copies of the weights."""

    async def generate_on_each(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> list[Completion]:
        """Return what each of the copies samples; otherwise as `generate`."""


class KeptBase(IntEnum):
    """Whether an engine has the weights that adapters change, so that a push need not bring them."""

    IMPOSSIBLE = 0
    """It takes merged weights alone."""
    MISSING = 1
    """It keeps those that come with the next push of adapters."""
    THERE = 2


@runtime_checkable
class AdapterEngine(Engine, Protocol):
    """An engine that can keep the weights of the model, and take low-rank changes of them."""

    async def kept_base(self) -> KeptBase:
        """Tell what the next push of adapters must bring."""

    async def load_adapters(
        self,
        changes: "Iterable[tuple[str, tuple[torch.Tensor, torch.Tensor]]]",
        base: "Iterable[tuple[str, torch.Tensor]] | None",
        version: int,
    ) -> None:
        """Replace the weights by those of the model plus changes of some; otherwise as `load_weights`.

        Args:
            changes: by the weight's name, two matrices whose product is added to it.
            base: all weights of the model, to be kept. None: those that are kept.
            version: of the policy.
        """


LONGEST_WAIT_S = 60.0
"""Waits double up to this."""


def retry_wait_s(number: int, *, first_s: float) -> float:
    """Return the wait number 0, 1, 2, ... of a row of retries, in seconds."""
    return min(first_s * 2.0 ** min(number, 60), LONGEST_WAIT_S)


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
