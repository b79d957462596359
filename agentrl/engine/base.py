"""Interfaces of engines: `EngineConfig` builds an `Engine`; episodes see only its `Sampler` part."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

from agentrl.errors import ConfigError, EngineError
from agentrl.recipe.plugin import Plugin, Seam
from agentrl.types import Completion, Sampling, TaskShard

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters in training."""

    rank: int
    layers: tuple[str, ...]
    """Names of the layers that they change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Parts from which an engine is built, besides its own section of the recipe."""

    model: Any
    """The transformers model in training, which stays the trainer's: an engine copies it, or reads its configuration and the
    names and shapes of its weights. The first weight sync comes when the run begins."""
    device: "torch.device"
    """Device of the trainer."""
    dtype: "torch.dtype"
    """Dtype in which the engine computes."""
    shard: TaskShard
    """Training tasks that this rank samples."""
    handover: Path
    """Folder for weights on their way to another process; removed with the run."""
    max_context_tokens: int
    """Longest context, prompt and completion together."""
    max_live_episodes: int
    """Largest number of conversations at once."""
    repeats_exactly: bool
    """Samples must not depend on the timing of environments, so that the run repeats bit for bit."""
    samples_during_update: bool
    """The engine samples while the policy is updated."""
    keeps_cache: bool = False
    """Requests continue over weight syncs with the cache that they have (`FreezableEngine`)."""
    returns_experts: bool = False
    """Completions carry the experts chosen by the routers of a mixture (`Completion.experts`)."""
    adapters: Adapters | None = None
    """Adapters that a half-precision engine keeps apart from the weights (`AdapterEngine`): merged into them, most of a young
    adapter is rounded away. None: it gets merged weights."""


class EngineConfig(Plugin):
    """The engine that samples rollouts; its own fields stand beside its name."""

    seam = Seam("agentrl.engines", "engine", "name")

    name: str = "auto"
    """An installed engine, or `module:Class` of an `EngineConfig`. `transformers`: in this process, continuous
    batching over a key-value cache, on CPU or GPU. `vllm`: vLLM in this process. `vllm_server`: vLLM in another,
    see `server`. `auto`: `vllm` if it is installed and there is one training process, on a GPU (expected to be
    faster) and on a CPU from 10 million parameters on (measured); else `transformers`."""

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields of the recipe that may make the engine compute something else than the trainer, and their values."""
        return {}

    @property
    def is_deterministic(self) -> bool:
        """True if the engine repeats its samples after a kill, for the same requests."""
        return False

    def num_sampling(self, num_processes: int, *, num_groups: int) -> int:  # noqa: ARG002 - engines that ranks share need it
        """Return the number of ranks that sample the groups of a step, which are the first ones."""
        return num_processes

    def for_process(self, index: int) -> Self:  # noqa: ARG002 - most engines ignore it
        """Return the fields of the engine with an index."""
        return self

    @abstractmethod
    def build(self, context: EngineContext) -> "Engine":
        """Return the engine of this rank.

        Raises:
            ConfigError: if it cannot be built.
        """
        raise NotImplementedError


class Sampler(Protocol):
    """The part of an engine that episodes use.

    Log-probabilities of completions are those of the sampled distribution: full support, temperature applied. An episode
    is one conversation: each prompt begins with the previous prompt and completion, so an engine can cache its prefix.
    """

    def conversation(self, request_id: str) -> AbstractContextManager[None]:
        """Keep the cache of this id between its requests; drop it at exit."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample after `prompt_ids` up to a stop token or `max_tokens`; one request at a time per id.

        Raises:
            EngineError: when the engine cannot, with its own message.
        """


class Engine(Sampler, Protocol):
    """A sampler whose weights can be replaced."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""

    @property
    def busy_s(self) -> float:
        """Seconds spent computing so far."""

    async def pause(self) -> None:
        """Return every running request with what it has, with finish_reason `aborted`; hold new requests."""

    async def resume(self) -> None:
        """Sample again."""

    async def load_weights(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> None:
        """Replace the weights and drop every cache computed with earlier ones.

        Raises:
            EngineError: while requests are running, or if names or shapes are not the model's. In the latter case the weights
                may be replaced in part: load them again.
        """

    async def close(self) -> None:
        """Release all resources; pending and later requests get an EngineError."""


@runtime_checkable
class ReplicatedEngine(Engine, Protocol):
    """An engine with several copies of the weights."""

    async def generate_on_each(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> list[Completion]:
        """Return one completion from each copy; otherwise like `generate`."""


class CopyState(NamedTuple):
    """State of a copy of the weights after a weight sync."""

    lost: str | None = None
    """Reason why nothing can be sampled from it. None: it has the weights."""
    has_adapter: bool = False
    """It samples with an adapter beside its weights."""


@runtime_checkable
class SharedEngine(Engine, Protocol):
    """An engine whose copies of the weights several ranks sample from. One rank syncs them; on the others it follows."""

    @property
    def syncs(self) -> bool:
        """True on the rank that replaces the weights; on the others `load_weights` and `load_adapters` send nothing."""

    def copies(self) -> dict[str, CopyState]:
        """Return the state of each copy, by name."""

    async def follow(self, copies: Mapping[str, CopyState], version: int) -> None:
        """Take over the states after a weight sync: leave out lost copies, and sample from the others as `version`."""


@runtime_checkable
class FreezableEngine(Engine, Protocol):
    """An engine whose running requests can continue over a weight sync."""

    async def freeze(self) -> None:
        """Stop sampling. At `resume` running requests continue, with the weights of then and the cache that they have."""


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that gives memory back while it is paused."""

    async def sleep(self) -> None:
        """Pause, and drop the weights: all of them are loaded before `resume`."""


class KeptBase(IntEnum):
    """State of an engine's copy of the weights that adapters change, which a weight sync need not send again."""

    IMPOSSIBLE = 0
    """The engine takes merged weights only."""
    MISSING = 1
    """The engine keeps the ones that the next sync of adapters sends."""
    THERE = 2
    """The engine has them."""


@runtime_checkable
class AdapterEngine(Engine, Protocol):
    """An engine that can keep the weights of the model and take low-rank changes of them.

    In half precision it adds the changes to what layers compute, not to their weights.
    """

    async def kept_base(self) -> KeptBase:
        """Return whether the next sync of adapters must send the model's weights too.

        Raises:
            ConfigError: if adapters must stay apart (`EngineContext.adapters`), and cannot.
        """

    async def load_adapters(
        self,
        changes: "Iterable[tuple[str, tuple[torch.Tensor, torch.Tensor]]]",
        base: "Iterable[tuple[str, torch.Tensor]] | None",
        version: int,
    ) -> None:
        """Replace the weights by those of the model plus low-rank changes; otherwise like `load_weights`.

        Args:
            changes: by weight name, two matrices whose product is added to the weight.
            base: all weights of the model, to be kept. None: the kept ones.
            version: policy version.
        """


_ROUTERS = (".gate.weight", ".router.weight")
"""Name suffixes of routers' weights: vLLM keeps some in single precision."""


def sent_dtype(name: str, tensor: "torch.Tensor", dtype: "torch.dtype | None") -> "torch.dtype":
    """Return the dtype in which a weight is sent to an engine of a dtype; None: it is not known.

    Matrices are sent in the engine's dtype, to which it would round them itself. Vectors, some of which it keeps in single
    precision, and routers keep their dtype.
    """
    is_rounded = tensor.is_floating_point() and tensor.ndim > 1 and not name.endswith(_ROUTERS)
    return dtype if is_rounded and dtype is not None else tensor.dtype


def is_half(dtype: "torch.dtype") -> bool:
    """Return whether a dtype has half precision."""
    return dtype.itemsize < 4


def merging_refused(reason: str) -> ConfigError:
    """Return the error of an engine that cannot keep adapters apart from weights in half precision."""
    return ConfigError(
        f"model.lora: {reason}, and merged in half precision most of a young adapter is rounded away. Set engine.name: "
        "transformers, or train.precision: float32; or set model.lora.merge: true to accept the loss"
    )


LONGEST_WAIT_S = 60.0
"""Upper limit of the doubling waits."""


def retry_wait_s(number: int, *, first_s: float) -> float:
    """Return the wait before retry `number` (0, 1, 2, ...), in seconds: doubling, at most a minute."""
    return min(first_s * 2.0 ** min(number, 60), LONGEST_WAIT_S)


class IdleEngine:
    """Engine of a rank that only trains: it samples nothing."""

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

    async def freeze(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""

    async def load_weights(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> None:
        """Consume the weights: gathering each one takes every rank."""
        for _ in named_tensors:
            pass
        self.version = version

    async def kept_base(self) -> KeptBase:
        """Need no weights."""
        return KeptBase.THERE

    async def load_adapters(
        self,
        changes: "Iterable[tuple[str, tuple[torch.Tensor, torch.Tensor]]]",
        base: "Iterable[tuple[str, torch.Tensor]] | None",
        version: int,
    ) -> None:
        """Consume the weights."""
        for _ in chain(changes, base or ()):
            pass
        self.version = version

    async def close(self) -> None:
        """Do nothing."""
