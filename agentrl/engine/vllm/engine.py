"""vLLM in this process: its engine, stepped by a thread of its own. Names are those of vLLM 0.32."""

import asyncio
import copy
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from pydantic import Field, ValidationError

from agentrl.engine.base import Adapters, Engine, EngineContext, KeptBase, merging_refused
from agentrl.engine.batched import BatchedConfig, BatchedEngine, Request
from agentrl.engine.vllm.common import (
    ADAPTER,
    CHANGES_LOGPROBS,
    FINISH_REASONS,
    HOW_TO_INSTALL,
    LOGPROBS_MODE,
    MIN_TEMPERATURE,
    adapter_arguments,
    check_reloadable,
    engine_arguments,
    executor_arguments,
    is_installed,
    parse_dtype,
    sampled_logprobs,
    sampling_fields,
)
from agentrl.engine.vllm.experts import VLLMExperts, routed_experts_arguments
from agentrl.engine.vllm.weights import Changes, ServedModel, Weight, changes_in_buckets, find_ties, in_buckets
from agentrl.errors import ConfigError, EngineError
from agentrl.types import Completion, FinishReason, Sampling

_T = TypeVar("_T")
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # keep the engine's core in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # else 18 s of compiling at the first request
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer needs the cores too
}


class VLLMConfig(BatchedConfig):
    """Sampling by vLLM in this process."""

    name: str = "vllm"
    sleep: bool = False
    """Free GPU memory while the policy is updated: keys and values are dropped, and the weights too if a sync brings all of
    them; else they move to the host and back."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, such as gpu_memory_utilization."""

    @property
    def overrides(self) -> dict[str, Any]:
        """Arguments of vLLM that change what it computes."""
        return {f"engine.vllm.{name}": value for name, value in self.vllm.items() if name in CHANGES_LOGPROBS}

    def build(self, context: EngineContext) -> Engine:
        """Return an engine for the model's architecture.

        Raises:
            ConfigError: if vLLM cannot run the model, or does not support the run's way of sampling.
        """
        if self.sleep and context.samples_during_update:
            raise ConfigError(
                "engine.sleep: rollout.mode: async samples while the policy is updated; set engine.sleep to false"
            )
        if (mode := self.vllm.get("logprobs_mode", LOGPROBS_MODE)) != LOGPROBS_MODE:
            raise ConfigError(
                f"engine.vllm.logprobs_mode: {mode} are not the log-probabilities of what is sampled, which training needs; "
                "remove it"
            )
        check_reloadable(context.model.config)
        return VLLMEngine(
            context.model,
            self.resolved(context),
            dtype=context.dtype,
            max_tokens=context.max_context_tokens,
            returns_experts=context.returns_experts,
            adapters=context.adapters,
            num_processes=context.shard.num_processes,
        )


class _Step(NamedTuple):
    """Result of a step of vLLM."""

    outputs: list[tuple[Request, Any]]
    """Requests that ended, with vLLM's outputs."""
    refused: list[tuple[Request, Exception]]


class VLLMEngine(BatchedEngine):
    """Engine on vLLM's scheduler, whose prefix cache serves the turns of a conversation.

    One thread makes all calls into vLLM, which keeps the event loop free.
    """

    def __init__(
        self,
        model: Any,
        config: VLLMConfig | None = None,
        *,
        max_tokens: int,
        dtype: torch.dtype | None = None,
        returns_experts: bool = False,
        adapters: Adapters | None = None,
        num_processes: int = 1,
    ) -> None:
        """Build a transformers causal language model in vLLM, with random weights: load some before sampling.

        Args:
            model: the transformers model, of which the configuration and the weights' names and shapes are read.
            config: fields of the engine.
            max_tokens: longest context, prompt and completion together.
            dtype: dtype of vLLM's weights. None: the model's.
            returns_experts: completions carry the experts of a mixture; on a GPU only.
            adapters: adapters to keep apart from weights in half precision.
            num_processes: number of ranks, all of which build an engine at once.

        Raises:
            ConfigError: if vLLM is not installed, cannot run this model, cannot return its experts here, cannot keep its
                adapters apart, or would run on several GPUs in each of several ranks.
        """
        vocab_size: int = model.config.get_text_config().vocab_size
        super().__init__(config := config or VLLMConfig(), vocab_size=vocab_size)
        self._sleeps = config.sleep
        self._arguments = executor_arguments(num_processes, config.vllm) | config.vllm
        self.dtype = parse_dtype(config.vllm.get("dtype", dtype), model)
        self._num_processes = num_processes
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="agentrl-vllm")
        self._model = ServedModel(
            shapes={name: tensor.to("meta") for name, tensor in model.state_dict().items()},
            vocab_size=vocab_size,
            dtype=self.dtype,
            ties=find_ties(model),
        )
        self._experts = VLLMExperts.for_model(model) if returns_experts else None
        self._adapter_arguments = adapter_arguments(adapters, self.dtype, model=model)
        self._has_base = False
        """vLLM has the weights that adapters change."""
        self._is_loading = False
        self._is_half_loaded = False
        self._is_empty = False
        """The weights were dropped."""
        # Used by the thread only:
        self._is_asleep = False
        self._running: dict[str, Request] = {}
        """Requests that vLLM has, by its ids for them."""
        self._ended: list[tuple[Request, Any]] = []
        self._number = 0
        self._adapter: Any = None
        """vLLM's request for the adapter of which it samples. None: there is none."""
        try:
            self._llm = self._executor.submit(self._build, model, max_tokens).result()
        except BaseException:
            self._executor.shutdown(wait=True)
            raise

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample after `prompt_ids`; see `Engine.generate`."""
        if self._is_half_loaded and not self._is_loading:
            raise EngineError(f"request {request_id}: the last weight sync failed half-way: sync again")
        return await super().generate(prompt_ids, sampling, request_id)

    async def pause(self) -> None:
        """Return running requests with what they have; hold those without a sampled token."""
        await self._pause(level=1)

    async def sleep(self) -> None:
        """Pause until a weight sync, which brings all weights unless adapters are kept apart; see `SleepingEngine`."""
        self._is_empty = self._sleeps and not self._adapter_arguments
        await self._pause(level=2 if self._is_empty else 1)

    async def _pause(self, *, level: int) -> None:
        if self._is_closed:
            raise EngineError("pause: the engine is closed")
        self._is_paused = True
        for request, output in await self._call(self._abort_all):
            self._settle(request, output)
        if self._sleeps:
            await self._call(self._fall_asleep, level)

    async def resume(self) -> None:
        """Sample again."""
        if self._is_empty:
            raise EngineError("resume: the weights were dropped for a weight sync; load some first")
        if self._sleeps:
            await self._call(self._wake_up)
        await super().resume()

    async def load_weights(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", version: int) -> None:
        """Replace all weights, by the names of transformers' `state_dict`, and drop every cached key and value."""
        await self._replace(in_buckets(named_tensors, self._model), None, version)
        self._has_base = False

    async def kept_base(self) -> KeptBase:
        """Return whether the next sync of adapters must send the model's weights too; see `AdapterEngine`."""
        if not self._adapter_arguments:
            return KeptBase.IMPOSSIBLE
        return KeptBase.THERE if self._has_base else KeptBase.MISSING

    async def load_adapters(
        self, changes: Changes, base: "Iterable[tuple[str, torch.Tensor]] | None", version: int
    ) -> None:
        """Let vLLM's LoRA layers add low-rank changes of weights; see `AdapterEngine`."""
        buckets = changes_in_buckets(changes, self._model)
        matrices = {name: weight.tensor for bucket in buckets for weight in bucket for name in weight.names}
        await self._replace(None if base is None else in_buckets(base, self._model), matrices, version)
        self._has_base = True

    async def _replace(
        self, buckets: Iterator[list[Weight]] | None, matrices: dict[str, torch.Tensor] | None, version: int
    ) -> None:
        """Replace weights, if there are any, and the adapter, and drop every cached key and value."""
        self._check_loadable()
        if buckets is not None:
            buckets = chain([next(buckets)], buckets)  # errors in the first bucket come before vLLM is touched
        self._is_half_loaded = self._is_loading = True
        try:
            await self._load(self._wake_weights)
            if buckets is not None:
                self._has_base = False
                await self._load(self._begin_reload)
                try:
                    for bucket in buckets:
                        await self._load(self._reload, bucket)
                finally:
                    await self._load(self._end_reload)
            await self._load(self._replace_adapter, matrices, version)
            await self._load(self._end_replacing, version)
            self._is_half_loaded = self._is_empty = False
            self._version = version
        finally:
            self._is_loading = False
            if self._is_half_loaded:
                self._fail(EngineError("a weight sync failed half-way: sync again"))
            self._kick()

    async def _load(self, step: Callable[..., None], *arguments: Any) -> None:
        try:
            await self._call(step, *arguments)
        except Exception as error:
            raise EngineError(f"vLLM could not load the weights: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Release the model and the cache."""
        await super().close()
        if self._llm is not None:
            await self._call(self._shut_down)
            self._executor.shutdown(wait=True)

    @property
    def _name(self) -> str:
        return "vLLM"

    def _can_step(self) -> bool:
        return not self._is_loading and super()._can_step()

    async def _advance(self, waiting: list[Request]) -> None:
        for request in waiting:
            self._waiting.remove(request)
        step = await self._call(self._step_once, waiting)
        for request, error in step.refused:
            self._inside.pop(request.request_id, None)
            if not request.future.done():
                request.future.set_exception(EngineError(f"request {request.request_id}: vLLM refused it: {error}"))
        for request, output in step.outputs:
            self._settle(request, output)

    def _withdraw(self, request: Request) -> None:
        if not self._is_closed:
            self._executor.submit(self._abort, request)

    def _fail(self, failure: EngineError) -> None:
        """Fail every request, and drop it in vLLM."""
        super()._fail(failure)
        if not self._is_closed:
            self._executor.submit(self._abort_all)

    def _end_conversation(self, request_id: str) -> None:
        """Do nothing: vLLM's cache evicts what was used longest ago."""

    def _settle(self, request: Request, output: Any) -> None:
        """Answer a request, or hold it if it was interrupted before its first token."""
        if self._inside.get(request.request_id) is not request:
            return  # withdrawn
        completion = output.outputs[0]
        reason = FINISH_REASONS.get(completion.finish_reason)
        if reason is FinishReason.ABORTED and not completion.token_ids:
            self._waiting.append(request)
            return
        logprobs = [e[token].logprob for e, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        if reason is None or not all(map(math.isfinite, logprobs)):
            words = "it sampled from a distribution that is not one: its weights are not finite"
            words = f"it ended by {completion.finish_reason!r}" if reason is None else words
            self._inside.pop(request.request_id)
            request.future.set_exception(EngineError(f"request {request.request_id}: vLLM failed: {words}"))
            return
        request.token_ids = list(completion.token_ids)
        request.logprobs = sampled_logprobs(logprobs, request.sampling)
        request.versions = [self._version] * len(request.token_ids)
        request.num_cached_tokens = output.num_cached_tokens or 0
        if self._experts is not None:
            request.experts = self._experts.pack(completion.routed_experts, num_tokens=request.num_routed_tokens)
        self._answered(request, reason)

    async def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run a function on the thread of vLLM."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    # The methods below run on that thread.

    def _build(self, model: Any, max_tokens: int) -> Any:
        if not is_installed():
            raise ConfigError(f"engine.name: vLLM is not installed; {HOW_TO_INSTALL}, or set engine.name: transformers")
        with _as_it_was(), tempfile.TemporaryDirectory(prefix="agentrl-vllm-") as folder:
            is_cpu = not torch.cuda.is_available()
            for name, value in (_ENVIRONMENT | (_CPU_ENVIRONMENT if is_cpu else {})).items():
                os.environ.setdefault(name, value)
            try:
                from vllm.engine.arg_utils import EngineArgs
                from vllm.triton_utils import dispatcher
                from vllm.v1.engine.llm_engine import LLMEngine
            except ImportError as error:
                raise ConfigError(f"engine.name: vLLM is installed but cannot be imported: {error}") from error
            # On a CPU it searches all loaded modules for kernels, and an object of numba's has no dictionary.
            dispatcher.vars = lambda value: found if isinstance(found := vars(value), Mapping) else {}
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]  # unset for a model that was not loaded
            config.save_pretrained(folder)
            arguments = engine_arguments(is_cpu=is_cpu) | {
                "model": folder,
                "load_format": "dummy",  # a weight sync comes before sampling
                "dtype": str(self.dtype).removeprefix("torch."),
                "max_model_len": max_tokens,
                "max_num_seqs": self._max_batch_size,
                "max_num_batched_tokens": max(self._config.max_prefill_tokens, max_tokens),
                "disable_log_stats": True,
                **self._adapter_arguments,
            }
            if self._experts is not None:
                arguments |= routed_experts_arguments()
            if not is_cpu:
                arguments |= {"gpu_memory_utilization": 0.4}  # the rest is the trainer's
                arguments |= {"enable_sleep_mode": self._sleeps}  # a CPU would refuse it
            try:
                llm = LLMEngine.from_engine_args(EngineArgs(**arguments | self._arguments))
                llm.collective_rpc("continue_random_numbers")
            except (TypeError, ValueError, RuntimeError) as error:
                words = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                if self._adapter_arguments and "LoRA" in str(words):
                    raise merging_refused(
                        f"vLLM cannot keep adapters of this model apart from its weights ({str(words).rstrip('.')})"
                    ) from error
                raise ConfigError(
                    f"engine.name: 'vllm' cannot run this model: {str(words).rstrip('.')}. Set engine.name: transformers"
                ) from error
        return llm

    def _step_once(self, waiting: list[Request]) -> _Step:
        refused: list[tuple[Request, Exception]] = []
        for request in waiting:
            try:
                self._add(request)
            except Exception as error:  # noqa: BLE001 - other requests are not affected
                refused.append((request, error))
        if self._llm.has_unfinished_requests():
            self._llm.step()
        return _Step(self._take_ended(), refused)

    def _add(self, request: Request) -> None:
        from vllm.inputs import TokensPrompt

        if 0 < request.sampling.temperature < MIN_TEMPERATURE:
            raise ValueError(f"it samples at no temperature between 0 and {MIN_TEMPERATURE}")
        self._number += 1
        prompt = TokensPrompt(prompt_token_ids=request.prompt_ids)
        vllm_id = self._llm.add_request(
            f"{request.request_id}:{self._number}", prompt, _params(request.sampling), lora_request=self._adapter
        )
        self._running[vllm_id] = request
        # A state without a queue reports nothing when its request is aborted.
        self._llm.output_processor.request_states[vllm_id].queue = _Mailbox(vllm_id, self._put)

    def _put(self, vllm_id: str, output: Any) -> None:
        if vllm_id in self._running:
            self._ended.append((self._running.pop(vllm_id), output))

    def _abort(self, request: Request) -> None:
        for vllm_id in [key for key, running in self._running.items() if running is request]:
            del self._running[vllm_id]
            self._llm.abort_request([vllm_id], internal=True)

    def _abort_all(self) -> list[tuple[Request, Any]]:
        self._llm.abort_request(list(self._llm.output_processor.request_states), internal=True)
        return self._take_ended()

    def _take_ended(self) -> list[tuple[Request, Any]]:
        ended, self._ended[:] = list(self._ended), []
        return ended

    def _fall_asleep(self, level: int) -> None:
        if not self._is_asleep:
            self._llm.sleep(level=level)
            self._is_asleep = True

    def _wake_up(self) -> None:
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False

    def _wake_weights(self) -> None:
        if self._is_asleep:
            self._llm.wake_up(["weights"])

    def _begin_reload(self) -> None:
        self._llm.collective_rpc("forget_kernels")
        self._llm.collective_rpc("begin_reload")

    def _reload(self, bucket: Sequence[Weight]) -> None:
        weights = [(name, weight.tensor) for weight in bucket for name in weight.names]
        self._llm.collective_rpc("reload_some", kwargs={"weights": weights})

    def _end_reload(self) -> None:
        self._llm.collective_rpc("end_reload")

    def _replace_adapter(self, matrices: dict[str, torch.Tensor] | None, version: int) -> None:
        from vllm.lora.request import LoRARequest

        if matrices is None:
            self._adapter = None
            return
        path = f"agentrl:{version}"
        self._llm.collective_rpc("keep_adapter", kwargs={"path": path, "matrices": matrices})
        self._llm.add_lora(LoRARequest(ADAPTER, 1, path, load_inplace=True))
        self._adapter = LoRARequest(ADAPTER, 1, path)

    def _end_replacing(self, version: int) -> None:
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.set_weight_version(str(version))

    def _shut_down(self) -> None:
        self._wake_up()  # sleeping memory is not freed
        llm, self._llm = self._llm, None
        with nullcontext() if self._num_processes == 1 else _ranks_kept():
            llm.engine_core.shutdown()


class _Mailbox(NamedTuple):
    """Queue of a request that delivers its last output, also if it was aborted."""

    vllm_id: str
    deliver: Callable[[str, Any], None]

    def put(self, output: Any) -> None:
        self.deliver(self.vllm_id, output)


def _params(sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(**sampling_fields(sampling), output_kind=RequestOutputKind.FINAL_ONLY)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Undo what building a vLLM engine changes: it seeds every random generator and replaces `set_num_threads`."""
    set_num_threads = torch.set_num_threads
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _ranks_kept() -> Iterator[None]:
    """Keep the process group of the ranks, which vLLM would destroy with its own groups."""
    from vllm.distributed import parallel_state

    destroy = parallel_state.destroy_distributed_environment
    parallel_state.destroy_distributed_environment = lambda: None
    try:
        yield
    finally:
        parallel_state.destroy_distributed_environment = destroy
