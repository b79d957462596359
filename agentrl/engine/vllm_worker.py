"""What agentrl adds to vLLM's workers; loaded by vLLM, in whatever process they are."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agentrl.engine.weight_channel import Channel, address_towards

DRAWN = "agentrl_drawn"
"""Key of `SamplingParams.extra_args`: tokens at the end of the prompt that were drawn with this seed before."""
EXTENSION = "agentrl.engine.vllm_worker.WorkerExtension"
"""What vLLM's option `worker_extension_cls` is to name."""


class WorkerExtension:
    """Mixed into vLLM's worker; each method is called on every worker by `collective_rpc`."""

    model_runner: Any
    rank: int

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
        self, *, host: str, port: int, num_workers: int, is_gpu: bool, join_s: float, timeout_s: float
    ) -> None:
        """Replace the weights by what a trainer sends, which listens at an address."""
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
        self.begin_reload()
        try:
            self.reload_some(channel.receive())
        finally:
            channel.close()  # where we fail, the trainer hears of it by that
            self.end_reload()

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
