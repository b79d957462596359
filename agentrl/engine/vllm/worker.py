"""Extension of vLLM's workers, loaded by vLLM in their processes. Names are those of vLLM 0.32."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentrl.engine.vllm.common import BACKEND, DRAWN
from agentrl.engine.vllm.weights import LEFT, RIGHT, Channel, address_towards


class WorkerExtension:
    """Mixin of vLLM's worker, whose methods `collective_rpc` calls on every worker."""

    model_runner: Any
    weight_transfer_engine: Any
    finish_weight_update: Callable[[], None]

    def continue_random_numbers(self) -> None:
        """Make a request that continues an interrupted one draw the next random numbers of that one.

        On a CPU, vLLM gives each request a generator of its own and takes one number from it at every token
        (`TopKTopPSampler.forward_cpu`), so a resubmitted request would repeat the first ones. The model runner for GPUs
        draws by seed and position, and needs nothing. A second call does nothing.
        """
        runner = self.model_runner
        if runner.device.type != "cpu" or hasattr(runner, "agentrl_skips"):
            return
        runner.agentrl_skips = True
        update_states = runner._update_states

        def update_and_skip(scheduler_output: Any) -> Any:
            result = update_states(scheduler_output)
            for new in scheduler_output.scheduled_new_reqs:
                generator = runner.requests[new.req_id].generator
                drawn = (getattr(new.sampling_params, "extra_args", None) or {}).get(DRAWN)
                # An error here would end the server, and a huge number its memory.
                if generator is not None and isinstance(drawn, int) and 0 < drawn <= len(new.prompt_token_ids or ()):
                    torch.randint(0, 2**31, (drawn,), generator=generator, dtype=torch.long)
            return result

        runner._update_states = update_and_skip

    def read_weights(self, *, paths: list[str], ties: dict[str, str]) -> None:
        """Replace the weights by those of files; load each weight under the names tied to it as well."""

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for path in paths:
                for name, tensor in load_file(path).items():
                    yield name, tensor
                    yield from ((tied, tensor) for tied, other in ties.items() if other == name)

        self.weight_transfer_engine.load(read(), Update(base=None, brings_base=False))

    def end_open_update(self) -> None:
        """End an update left open by a killed trainer, which would block the next one."""
        with suppress(RuntimeError):  # there is none
            self.finish_weight_update()

    def begin_reload(self) -> None:
        """Prepare the model for other weights."""
        initialize_layerwise_reload(self.model_runner.get_model())

    def reload_some(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load some weights."""
        with set_current_vllm_config(self.model_runner.vllm_config):
            self.model_runner.get_model().load_weights(weights)

    def end_reload(self) -> None:
        """Finish the reload; the model keeps its earlier weights for those that are missing."""
        with set_current_vllm_config(self.model_runner.vllm_config):
            _finalize(self.model_runner.get_model(), self.model_runner.model_config)

    def keep_adapter(self, *, path: str, matrices: dict[str, torch.Tensor]) -> None:
        """Keep an adapter, to be loaded by this path."""
        _keep_adapter(self.model_runner.get_model(), path, matrices)

    def forget_kernels(self) -> None:
        """Drop the packed weights of experts' layers on a CPU before a reload, which would pack them twice."""
        _forget_kernels(self.model_runner.get_model())


class KeptAdapter(NamedTuple):
    """An adapter in this process's memory, which vLLM would read from a folder."""

    path: str
    matrices: dict[str, torch.Tensor]
    """Two for each weight, named by `LEFT` and `RIGHT`."""


@dataclass(kw_only=True)
class Rendezvous(WeightTransferInitInfo):
    """Address at which a trainer waits for all workers, and how long each side waits for the other."""

    host: str
    port: int
    num_workers: int
    is_gpu: bool
    join_s: float
    timeout_s: float


@dataclass(kw_only=True)
class Update(WeightTransferUpdateInfo):
    """Contents of the channel.

    With the name of a `base`, changes come first; they are added to the weights that follow, or else to those kept under that
    name. As an `adapter` they stay apart from these weights.
    """

    base: str | None
    brings_base: bool
    adapter: str | None = None
    """Path by which vLLM loads the changes as an adapter. None: they are added to the weights."""


class ChannelTransferEngine(WeightTransferEngine[Rendezvous, Update]):
    """Backend of vLLM's weight transfer that receives a policy's weights from a `Channel`, on CPUs and GPUs.

    Each update needs a rendezvous before it and ends its channel, so that a killed trainer leaves nothing behind. The whole
    reload happens within `receive_weights`, whatever happens to the trainer meanwhile.
    """

    init_info_cls = Rendezvous
    update_info_cls = Update
    supports_draft_weight_update = False
    base: tuple[str, list[tuple[str, torch.Tensor]]] | None = None
    """Weights that adapters change, in this machine's memory, and the trainer's name for them."""
    _channel: Channel | None = None

    def init_transfer_engine(self, init_info: Rendezvous) -> None:
        """Connect with a trainer."""
        self.shutdown()
        timeout = timedelta(seconds=init_info.join_s)
        store = TCPStore(init_info.host, init_info.port, is_master=False, timeout=timeout)
        rank = 1 + self.parallel_config.rank
        store.set(str(rank), "")  # the trainer waits for this key
        self._channel = Channel(
            store,
            rank=rank,
            size=1 + init_info.num_workers,
            device=self.device if init_info.is_gpu else torch.device("cpu"),
            address=address_towards(init_info.host, init_info.port),
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Do nothing: see `receive_weights`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights, and wait until they are on the device."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Replace the weights by those that the trainer sends."""
        if self._channel is None:
            raise RuntimeError("an update of weights needs a rendezvous with the trainer before it")
        try:
            self.load(self._channel.receive(), update_info)
        finally:
            self.shutdown()  # a closed channel shows the trainer that this side failed

    def finish_weight_update(self) -> None:
        """Do nothing: see `receive_weights`."""

    def shutdown(self) -> None:
        """Close the channel to the trainer."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def load(self, received: Iterable[tuple[str, torch.Tensor]], update: Update) -> None:
        """Load all weights, or only those that adapters change."""
        if update.base is None or update.brings_base:
            self.base = None
        elif self.base is None or self.base[0] != update.base:
            raise RuntimeError(
                "there are no weights here to which adapters could be added: the server was started again"
            )
        if update.adapter is not None:
            received = self._split_adapter(received, update.adapter)
            if not update.brings_base:
                deque(received, maxlen=0)
                return
        if self.base is None or any(".experts." in name for name, _ in self.base[1]):
            _forget_kernels(self.model)
        initialize_layerwise_reload(self.model)
        with set_current_vllm_config(self.vllm_config):
            try:
                is_merged = update.base is not None and update.adapter is None
                self.model.load_weights(self._adapt(received, str(update.base)) if is_merged else received)
            finally:
                _finalize(self.model, self.model_config)
        if update.base is not None and update.adapter is not None:
            self.base = update.base, []

    def _split_adapter(
        self, received: Iterable[tuple[str, torch.Tensor]], path: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Keep changes as an adapter, to be loaded by a path; yield the weights."""
        matrices: dict[str, torch.Tensor] = {}
        for name, tensor in received:
            if name.endswith((LEFT, RIGHT)):
                matrices[name] = tensor
            else:
                yield name, tensor
        _keep_adapter(self.model, path, matrices)

    def _adapt(self, received: Iterable[tuple[str, torch.Tensor]], base: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights with their changes added; keep the weights that later changes need."""
        matrices: dict[str, torch.Tensor] = {}

        def adapted(name: str, weight: torch.Tensor) -> torch.Tensor:
            if name + LEFT not in matrices:
                return weight
            left, right = matrices[name + LEFT], matrices[name + RIGHT]
            return (weight.to(left.device) + left @ right).to(weight.dtype)

        kept: list[tuple[str, torch.Tensor]] = []
        parts: tuple[str, ...] = ()
        for name, tensor in received:
            if name.endswith((LEFT, RIGHT)):
                matrices[name] = tensor
                continue
            # vLLM merges some weights, such as query, key and value, which must be reloaded together.
            parts = parts or tuple({name.rsplit(".", 3)[0] + "." for name in matrices})
            if name.startswith(parts):
                kept.append((name, tensor.cpu()))
            yield name, adapted(name, tensor)
        if kept:
            self.base = base, kept
            return
        assert self.base is not None, "see `load`"
        for name, tensor in self.base[1]:
            yield name, adapted(name, tensor)


def _finalize(model: torch.nn.Module, model_config: Any) -> None:
    # It warns about layers that keep their weights, each time: adapters change only some.
    logging.getLogger(finalize_layerwise_reload.__module__).setLevel(logging.ERROR)
    finalize_layerwise_reload(model, model_config)


def _forget_kernels(model: torch.nn.Module) -> None:
    if next(model.parameters()).device.type != "cpu":
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _keep_adapter(model: Any, path: str, matrices: dict[str, torch.Tensor]) -> None:
    # Copies: the trainer's change, and a bucket's memory is used again.
    copies = {name: matrix.to("cpu", copy=True) for name, matrix in matrices.items()}
    model.agentrl_adapter = KeptAdapter(path, copies)


def _load_adapter(manager: Any, request: Any) -> Any:
    """Return vLLM's form of the kept adapter if a request names its path, else of one in a folder.

    Raises:
        ValueError: if vLLM has no LoRA layer for some weight: it would leave out the change without a word.
    """
    layers = manager._adapter_manager
    kept: KeptAdapter | None = getattr(layers.model, "agentrl_adapter", None)
    if kept is None or kept.path != request.lora_path:
        return _load_from_folder(manager, request)
    tensors = {
        f"base_model.model.{name.removesuffix(end).removesuffix('.weight')}.lora_{letter}.weight": matrix
        for name, matrix in kept.matrices.items()
        for end, letter in ((LEFT, "B"), (RIGHT, "A"))
        if name.endswith(end)
    }
    rank = max(len(matrix) for name, matrix in kept.matrices.items() if name.endswith(RIGHT))
    mapper = getattr(layers.model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        request.lora_int_id,
        tensors,
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # the scale is in the matrices
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    known = set(layers.modules).union(*layers.packed_modules.values())
    if unknown := sorted(lora.loras.keys() - known):
        raise ValueError(
            f"it keeps no adapter of {unknown[0]!r} apart from the weights; leave it out of model.lora.target_modules, or set "
            "engine.name: transformers or model.lora.merge: true"
        )
    return lora


@torch.library.custom_op("agentrl::add_product", mutates_args=())
def _add_product(change: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # An operator of its own: compiled, the sum might be rounded before the change is added.
    return torch.addmm(change, inputs, weight.T)


@_add_product.register_fake
def _(change: torch.Tensor, _inputs: torch.Tensor, _weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(change)


def _apply_once_rounded(layer: Any, inputs: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the output of a LoRA layer, rounded once as the trainer's.

    vLLM adds the adapter's output to one that is rounded already: of a young adapter nearly nothing would be left.
    """
    if not isinstance(layer._get_quant_method(), UnquantizedLinearMethod):
        outputs: torch.Tensor = _apply_twice_rounded(layer, inputs, bias)
        return outputs
    weight, flat = layer.base_layer.weight, inputs.flatten(0, -2)
    change = torch.zeros((flat.shape[0], weight.shape[0]), dtype=flat.dtype, device=flat.device)
    layer._apply_lora_to_output(flat, change)
    product: torch.Tensor = _add_product(change, flat, weight)
    return (product if bias is None else product + bias).view(*inputs.shape[:-1], -1)


def _keep_weight(method: Any, layer: Any) -> None:
    """Process a loaded weight; on a CPU keep it as it is for `_apply_once_rounded`, which cannot read a packed one."""
    config = get_current_vllm_config_or_none()
    if config is not None and config.lora_config is not None:
        layer._cpu_skip_gemm_dispatch = True
    _process(method, layer)


_process = UnquantizedLinearMethod.process_weights_after_loading
UnquantizedLinearMethod.process_weights_after_loading = _keep_weight
_apply_twice_rounded = BaseLinearLayerWithLoRA._apply_sync
BaseLinearLayerWithLoRA._apply_sync = _apply_once_rounded
_load_from_folder = WorkerLoRAManager._load_adapter
WorkerLoRAManager._load_adapter = _load_adapter
WeightTransferEngineFactory.register_engine(BACKEND, ChannelTransferEngine)
