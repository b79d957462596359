"""What agentrl adds to vLLM's workers; loaded by vLLM, in whatever process they are."""

import logging
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agentrl.engine.weight_channel import Channel, address_towards

DRAWN = "agentrl_drawn"
"""Key of `SamplingParams.extra_args`: tokens at the end of the prompt that were drawn with this seed before."""
EXTENSION = "agentrl.engine.vllm_worker.WorkerExtension"
"""What vLLM's option `worker_extension_cls` is to name."""
LEFT, RIGHT = ".agentrl_left", ".agentrl_right"
"""Ends of the names of two matrices whose product is added to a weight."""


class WorkerExtension:
    """Mixed into vLLM's worker; each method is called on every worker by `collective_rpc`."""

    model_runner: Any
    rank: int
    agentrl_base: tuple[str, list[tuple[str, torch.Tensor]]] | None = None
    """The weights that adapters change, in this machine's memory, and by what name the trainer knows them."""

    def draw_where_left_off(self) -> None:
        """Let a request that continues an interrupted one draw the random numbers that come next there.

        On a CPU, vLLM gives each request a generator of its own and takes one number from it at every token
        (`TopKTopPSampler.forward_cpu`), so a resubmitted request would repeat the first ones. The model runner for GPUs
        draws by seed and position, and needs nothing. Asked twice, it is done once.
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
                drawn = (getattr(new.sampling_params, "extra_args", None) or {}).get(DRAWN, 0)
                if generator is not None and drawn:
                    torch.randint(0, 2**31, (drawn,), generator=generator, dtype=torch.long)
            return result

        runner._update_states = update_and_skip

    def receive_weights(
        self,
        *,
        host: str,
        port: int,
        num_workers: int,
        is_gpu: bool,
        join_s: float,
        timeout_s: float,
        base: str | None,
        brings_base: bool,
    ) -> None:
        """Replace the weights by what a trainer sends, which listens at an address.

        With a name of a `base` changes come first, and are added to the weights that follow or, where it brings none, that
        were kept from the push which brought them.
        """
        if base is not None and not brings_base and (self.agentrl_base is None or self.agentrl_base[0] != base):
            raise RuntimeError(
                "there are no weights here to which adapters could be added: the server was started again"
            )
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=join_s))
        store.set(str(1 + self.rank), "")  # it waits for us there
        device = self.model_runner.device if is_gpu else torch.device("cpu")
        channel = Channel(
            store,
            rank=1 + self.rank,
            size=1 + num_workers,
            device=device,
            address=address_towards(host, port),
            timeout_s=timeout_s,
        )
        try:
            self.replace_weights(channel.receive(), base=base, brings_base=brings_base)
        finally:
            channel.close()  # where we fail, the trainer hears of it by that

    def read_weights(self, *, paths: list[str], ties: dict[str, str]) -> None:
        """Replace the weights by those of files; a weight is loaded under the names that are tied to it as well."""

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for path in paths:
                for name, tensor in load_file(path).items():
                    yield name, tensor
                    yield from ((tied, tensor) for tied, other in ties.items() if other == name)

        self.replace_weights(read(), base=None, brings_base=False)

    def replace_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, base: str | None, brings_base: bool
    ) -> None:
        """Load all weights, or those that adapters change; see `receive_weights`."""
        if base is None or brings_base:
            self.agentrl_base = None
        if self.agentrl_base is None or any(".experts." in name for name, _ in self.agentrl_base[1]):
            self.forget_kernels()
        self.begin_reload()
        try:
            self.reload_some(weights if base is None else self.adapt(weights, base))
        finally:
            self.end_reload()

    def adapt(self, received: Iterable[tuple[str, torch.Tensor]], base: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights with what is added to them; keep those that are needed for other changes, under a name."""
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
            # vLLM puts some weights together, such as those of query, key and value: they are loaded again together.
            parts = parts or tuple({name.rsplit(".", 3)[0] + "." for name in matrices})
            if name.startswith(parts):
                kept.append((name, tensor.cpu()))
            yield name, adapted(name, tensor)
        if kept:
            self.agentrl_base = base, kept
            return
        assert self.agentrl_base is not None, "see `receive_weights`"
        for name, tensor in self.agentrl_base[1]:
            yield name, adapted(name, tensor)

    def begin_reload(self) -> None:
        """Let the model take other weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model_runner.get_model())

    def reload_some(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take some of them."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.model_runner.vllm_config):
            self.model_runner.get_model().load_weights(weights)

    def end_reload(self) -> None:
        """Put the model together again; where weights are missing it has some of before, and can take others."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        runner = self.model_runner
        # Of layers that keep what they had it warns, each time: adapters change some alone.
        vllm_log = logging.getLogger(finalize_layerwise_reload.__module__)
        vllm_log.setLevel(logging.ERROR)
        with set_current_vllm_config(runner.vllm_config):
            finalize_layerwise_reload(runner.get_model(), runner.model_config)

    def forget_kernels(self) -> None:
        """Drop what experts' layers on a CPU have packed, before a reload: it would be packed again from packed weights."""
        if self.model_runner.device.type != "cpu":
            return
        for module in self.model_runner.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None
