"""What agentrl adds to vLLM's workers; loaded by vLLM, in whatever process they are."""

from typing import Any

import torch

DRAWN = "agentrl_drawn"
"""Key of `SamplingParams.extra_args`: tokens at the end of the prompt that were drawn with this seed before."""
EXTENSION = "agentrl.engine.vllm_worker.WorkerExtension"
"""What vLLM's option `worker_extension_cls` is to name."""


class WorkerExtension:
    """Mixed into vLLM's worker; each method is called on every worker by `collective_rpc`."""

    model_runner: Any

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

    def forget_kernels(self) -> None:
        """Drop what experts' layers on a CPU have packed, before a reload: it would be packed again from packed weights."""
        if self.model_runner.device.type != "cpu":
            return
        for module in self.model_runner.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None
