"""The embedded engine: a transformers model with continuous batching and a cache kept from turn to turn.

`B` requests of a forward pass, `Q` query positions, `V` vocabulary, `D` hidden size.
"""

import copy
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from agentrl.engine.base import EngineContext, KeptBase, is_half
from agentrl.engine.batched import BatchedConfig, BatchedEngine, Request, check_weight
from agentrl.engine.transformers.cache import RECURRENT, RaggedCache, use_grouped_attention
from agentrl.errors import ConfigError, EngineError
from agentrl.models.logits import logit_map
from agentrl.models.moe import experts_of, recording
from agentrl.types import FinishReason

MAX_MASK = 2**23
"""Entries of an attention mask, rows x queries x cached positions, for the prompts that are computed together."""
SAMPLING_BYTES = 28
"""Bytes that `sample` holds per logit at most: three float32 numbers, including the logit itself, and two float64."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    """A row of the cache."""

    index: int
    owner: str | None = None
    """Conversation of the cached tokens."""
    cached_ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values the row holds."""
    experts: bytearray = field(default_factory=bytearray)
    """Packed experts of these tokens, if they are returned."""
    request: Request | None = None
    uniforms: list[float] = field(default_factory=list)
    """Random numbers of the request, one per token."""
    last_used: int = 0


def uniforms(seed: int, start: int, count: int) -> list[float]:
    """Draw one number in [0, 1) for each context position from `start` on.

    Each number depends on the seed and its position alone, so an interrupted completion continues with the same numbers.
    """
    blocks = np.random.Generator(np.random.Philox(key=seed, counter=start)).random((count, 4))  # 4 numbers a counter
    drawn: list[float] = blocks[:, 0].tolist()
    return drawn


class TransformersConfig(BatchedConfig):
    """Sampling in this process: continuous batching over a key-value cache, on CPU or GPU."""

    name: str = "transformers"

    def build(self, context: EngineContext) -> "TransformersEngine":
        """Return an engine on a copy of the model."""
        model = copy.deepcopy(context.model)
        for weight in model.parameters():
            if weight.is_meta:  # sharded; the weight sync comes before anything is sampled
                torch.utils.swap_tensors(
                    weight, nn.Parameter(torch.empty_like(weight, device="cpu"), weight.requires_grad)
                )
        model = model.to(context.device, context.dtype)
        return TransformersEngine(
            model,
            self.resolved(context),
            max_context_tokens=context.max_context_tokens,
            returns_experts=context.returns_experts,
            keeps_adapters=context.adapters is not None,
        )


class TransformersEngine(BatchedEngine):
    """Decodes all running requests together, one token at a time, and refills a row as soon as it is free.

    Rows have lengths of their own, so different turns of different episodes decode together. A conversation keeps its row
    between turns: a later prompt computes only its new tokens.
    """

    def __init__(
        self,
        model: Any,
        config: TransformersConfig | None = None,
        *,
        max_context_tokens: int | None = None,
        returns_experts: bool = False,
        keeps_adapters: bool = False,
    ) -> None:
        """Take ownership of a transformers causal language model.

        Args:
            model: model to sample from.
            config: fields of the engine.
            max_context_tokens: longest context, which bounds the cache.
            returns_experts: completions carry the experts of a mixture.
            keeps_adapters: keep adapters apart from weights in half precision.
        """
        vocab_size: int = model.get_input_embeddings().num_embeddings
        super().__init__(config or TransformersConfig(), vocab_size=vocab_size)
        self._layer_types = _layer_types(model)
        self._is_recurrent = not RECURRENT.isdisjoint(self._layer_types)
        self._model = model.eval()
        self._map_logits = logit_map(model.config)
        use_grouped_attention(model)
        self._device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._keeps_adapters = keeps_adapters and is_half(model.dtype)
        self._has_base = False
        self._adapted: list[nn.Module] = []
        """Layers that compute with an adapter."""
        self._rows = [_Row(index=i) for i in range(self._max_batch_size)]
        self._max_context_tokens = max_context_tokens
        self._experts = experts_of(model) if returns_experts else None
        """None: experts are not returned."""
        self._recording = ExitStack()
        self._recorded = self._recording.enter_context(recording(model) if self._experts else nullcontext([]))
        """Experts of the last forward pass."""
        self._forget()

    async def pause(self) -> None:
        """Return running requests with what they have; hold waiting ones."""
        self._is_paused = True
        for row in self._rows:
            if row.request is not None:
                self._finish(row, FinishReason.ABORTED)

    async def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy weights into the model, by the names of its `state_dict`, and drop every cached key and value."""
        self._begin_loading()
        self._has_base = False
        self._copy(named_tensors)
        self._version = version

    async def kept_base(self) -> KeptBase:
        """Return whether the next sync of adapters must send the model's weights too; see `AdapterEngine`."""
        if not self._keeps_adapters:
            return KeptBase.IMPOSSIBLE
        return KeptBase.THERE if self._has_base else KeptBase.MISSING

    async def load_adapters(
        self,
        changes: Iterable[tuple[str, tuple[torch.Tensor, torch.Tensor]]],
        base: Iterable[tuple[str, torch.Tensor]] | None,
        version: int,
    ) -> None:
        """Add low-rank changes of weights to what layers compute; see `AdapterEngine`."""
        self._begin_loading()
        for name, (left, right) in changes:
            check_weight(name, torch.empty(left.shape[0], right.shape[1], device="meta"), self._model.state_dict())
            layer = self._model.get_submodule(name.rpartition(".")[0])
            # Most layers keep their weights as (out, in), GPT-2's as (in, out).
            first, second = (left, right) if isinstance(layer, Conv1D) else (right.T, left.T)
            layer.forward = partial(
                _forward_adapted, layer, first.to(self._device, self.dtype), second.to(self._device, self.dtype)
            )
            self._adapted.append(layer)
        if base is not None:
            self._has_base = False
            self._copy(base)
            self._has_base = True
        self._version = version

    def _begin_loading(self) -> None:
        """Drop adapters and cache; first, because weights that are refused half-way have changed the model too."""
        self._check_loadable()
        self._forget()
        while self._adapted:
            del self._adapted.pop().forward

    def _copy(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        own: dict[str, torch.Tensor] = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in named_tensors:
                check_weight(name, tensor, own)
                own[name].copy_(tensor)

    async def close(self) -> None:
        """Drop the model and the cache."""
        await super().close()
        self._recording.close()
        self._model = None

    @property
    def _name(self) -> str:
        return "the transformers engine"

    async def _advance(self, waiting: list[Request]) -> None:
        self._admit(waiting)
        running = [row for row in self._rows if row.request is not None]
        if running:
            self._forward(running)

    def _withdraw(self, request: Request) -> None:
        for row in self._rows:
            if row.request is request:
                row.request = None
                if request.request_id not in self._open:
                    self._release(row)

    def _end_conversation(self, request_id: str) -> None:
        for row in self._rows:
            if row.owner == request_id and row.request is None:
                self._release(row)

    def _fail(self, failure: EngineError) -> None:
        """Fail every request and drop the cache: an interrupted pass leaves keys and values half written."""
        super()._fail(failure)
        for row in self._rows:
            row.request = None
        self._forget()

    def _forget(self) -> None:
        """Replace the cache by an empty one."""
        self._cache = RaggedCache(len(self._rows), self._layer_types, max_length=self._max_context_tokens)
        for row in self._rows:
            self._release(row)

    @staticmethod
    def _release(row: _Row) -> None:
        row.owner = None
        row.cached_ids = []
        row.experts = bytearray()

    def _admit(self, waiting: list[Request]) -> None:
        """Give waiting requests a row, and compute their prompts in batches that fit the prefill budget."""
        admitted: list[_Row] = []
        twins: list[tuple[_Row, _Row]] = []  # rows whose prompt another one computes, as in a group's first turn
        first_by_prompt: dict[tuple[int, ...], _Row] = {}
        for request in waiting:
            row = self._find_row(request)
            if row is None:
                break
            self._waiting.remove(request)
            known = _common_prefix(row.cached_ids, request.prompt_ids) if row.owner == request.request_id else 0
            known = min(known, len(request.prompt_ids) - 1)
            if self._is_recurrent and known < len(row.cached_ids):
                known = 0  # a state cannot be rewound
            del row.experts[self._size_of(known) :]
            row.cached_ids = row.cached_ids[:known]
            request.num_cached_tokens = len(row.cached_ids)
            row.owner = request.request_id
            row.request = request
            row.last_used = self._step
            row.uniforms = uniforms(request.sampling.seed, len(request.prompt_ids), request.sampling.max_tokens)
            first = row if known else first_by_prompt.setdefault(tuple(request.prompt_ids), row)
            if first is row or self._is_recurrent or self._experts is not None:
                admitted.append(row)
            else:
                twins.append((row, first))
        admitted.sort(key=lambda row: (len(_missing_ids(row)), row.index))
        while admitted:
            num_queries, length = len(_missing_ids(admitted[-1])), max(map(_length, admitted))
            count = min(self._config.max_prefill_tokens // num_queries, MAX_MASK // (num_queries * length))
            if self._is_recurrent:  # a state would consume padding
                count = min(count, sum(len(_missing_ids(row)) == num_queries for row in admitted))
            batch, admitted = admitted[-max(1, count) :], admitted[: -max(1, count)]
            if count < 1:  # a long prompt, alone
                self._prefill(*batch)
            self._forward(batch)
        for row, first in twins:
            assert row.request is not None
            row.cached_ids = row.request.prompt_ids[:-1]
            row.request.num_cached_tokens = len(row.cached_ids)
            self._cache.copy(first.index, row.index, len(row.cached_ids))
        if twins:
            self._forward([row for row, _ in twins])

    @torch.inference_mode()
    def _prefill(self, row: _Row) -> None:
        """Compute all but the last chunk of a long prompt; the mask of a chunk has at most `MAX_MASK` entries."""
        self._cache.reserve(_length(row))
        num_queries = max(1, MAX_MASK // _length(row))
        while len(missing := _missing_ids(row)) > num_queries:
            self._compute([row], [missing[:num_queries]])

    def _find_row(self, request: Request) -> _Row | None:
        """Return the conversation's own row, else a free one, else the least recently used idle one."""
        idle = [row for row in self._rows if row.request is None]
        for row in idle:
            if row.owner == request.request_id:
                return row
        # Free rows in order of their index: earlier samples must not affect how later requests are batched.
        return min(idle, key=lambda row: (row.last_used if row.owner else -1, row.index), default=None)

    @torch.inference_mode()
    def _forward(self, rows: list[_Row]) -> None:
        """Compute each row's uncached tokens, and sample one token per row."""
        missing = [_missing_ids(row) for row in rows]
        hidden_BQD = self._compute(rows, missing)
        last_B = torch.tensor([len(ids) - 1 for ids in missing], device=self._device)
        hidden_BD = hidden_BQD[torch.arange(len(rows), device=self._device), last_B]
        logits_BV = self._map_logits(self._model.get_output_embeddings()(hidden_BD))
        requests = [row.request for row in rows if row.request is not None]
        tokens, logprobs = sample(
            logits_BV,
            temperatures=[r.sampling.temperature for r in requests],
            uniforms=[row.uniforms[len(r.token_ids)] for row, r in zip(rows, requests, strict=True)],
        )
        for row, request, token, logprob in zip(rows, requests, tokens, logprobs, strict=True):
            row.last_used = self._step
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self._version)
            if token in request.sampling.stop_token_ids:
                self._finish(row, FinishReason.STOP)
            elif len(request.token_ids) == request.sampling.max_tokens:
                self._finish(row, FinishReason.LENGTH)

    def _compute(self, rows: list[_Row], ids: list[list[int]]) -> torch.Tensor:
        """Append tokens to each row's cache, and return their hidden states [B, Q, D]."""
        num_queries = max(map(len, ids))
        inputs_BQ = torch.tensor([new + [0] * (num_queries - len(new)) for new in ids], device=self._device)
        selection = self._cache.select(
            [row.index for row in rows],
            [len(row.cached_ids) for row in rows],
            num_queries,
            device=self._device,
            dtype=self._model.dtype,
        )
        output = self._model.base_model(input_ids=inputs_BQ, past_key_values=self._cache, use_cache=True, **selection)
        for row, new in zip(rows, ids, strict=True):
            row.cached_ids.extend(new)
        if self._experts is not None:
            packed = self._experts.pack(self._recorded.pop().transpose(0, 1).cpu().numpy())
            for number, (row, new) in enumerate(zip(rows, ids, strict=True)):
                start = self._size_of(number * num_queries)
                row.experts += packed[start : start + self._size_of(len(new))]
        hidden_BQD: torch.Tensor = output.last_hidden_state
        return hidden_BQD

    def _size_of(self, num_tokens: int) -> int:
        """Return the packed size of the experts of `num_tokens` tokens, in bytes."""
        return 0 if self._experts is None else self._experts.num_bytes * num_tokens

    def _finish(self, row: _Row, reason: FinishReason) -> None:
        request, row.request = row.request, None
        assert request is not None
        request.experts = bytes(row.experts[self._size_of(request.sampling.experts_from) :])
        if request.request_id not in self._open:
            self._release(row)
        self._answered(request, reason)


def sample(
    logits_BV: torch.Tensor, *, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample one token per row from the full support by inverting the cumulative distribution.

    Args:
        logits_BV: unscaled scores.
        temperatures: divisor of each row's logits; 0 takes the most probable token, with log-probability 0.
        uniforms: one number in [0, 1) per row.

    Returns:
        token ids, and their natural-log probabilities under the scaled distribution.

    Raises:
        EngineError: if a row's scores are no distribution.
    """
    device = logits_BV.device
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    temperatures_B = torch.tensor(temperatures, device=device, dtype=logits_BV.dtype)
    is_greedy_B = temperatures_B == 0
    scaled_BV = logits_BV / torch.where(is_greedy_B, 1.0, temperatures_B)[:, None]
    logprobs_BV = scaled_BV.log_softmax(-1)
    # In float64, so that the last of 150,000 steps is as exact as the first.
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    if not cumulative_BV[:, -1].isfinite().all():
        raise EngineError("it sampled from a distribution that is not one: its weights are not finite")
    targets_B = torch.tensor(uniforms, device=device, dtype=torch.float64) * cumulative_BV[:, -1]
    tokens_B = torch.searchsorted(cumulative_BV, targets_B[:, None], right=True).squeeze(1)
    tokens_B = torch.where(is_greedy_B, scaled_BV.argmax(-1), tokens_B)
    logprobs_B = logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)
    return tokens_B.tolist(), torch.where(is_greedy_B, 0.0, logprobs_B).tolist()


def _forward_adapted(layer: Any, first_IZ: torch.Tensor, second_ZO: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return a layer's output with a low-rank change of its weight, rounded once, as the trainer computes it."""
    flat_RI = inputs.flatten(0, -2)
    weight_IO = layer.weight if isinstance(layer, Conv1D) else layer.weight.T
    flat_RO = torch.addmm(flat_RI @ first_IZ @ second_ZO, flat_RI, weight_IO)
    outputs: torch.Tensor = flat_RO if layer.bias is None else flat_RO + layer.bias
    return outputs.view(*inputs.shape[:-1], -1)


def _length(row: _Row) -> int:
    """Return the number of tokens that the row's cache will hold."""
    return len(row.cached_ids) + len(_missing_ids(row))


def _missing_ids(row: _Row) -> list[int]:
    request = row.request
    assert request is not None
    done = len(row.cached_ids) - len(request.prompt_ids)
    return request.token_ids[done:] if done >= 0 else request.prompt_ids[len(row.cached_ids) :] + request.token_ids


def _common_prefix(left: list[int], right: list[int]) -> int:
    num = min(len(left), len(right))
    if left[:num] == right[:num]:
        return num
    return next(i for i in range(num) if left[i] != right[i])


def _layer_types(model: Any) -> list[str]:
    """Return the kinds of a model's layers if some are recurrent, else an empty list.

    Raises:
        ConfigError: for a model that would be sampled incorrectly.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    default = "full_attention" if window is None else "sliding_attention"
    kinds = list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [default])
    known = RECURRENT | {"full_attention", "sliding_attention"}
    if getattr(config, "number_of_conv_states", 1) > 1:
        known -= RECURRENT
    if unknown := set(kinds) - known:
        raise ConfigError(
            f"engine.name: the transformers engine knows no layers of kind {', '.join(sorted(unknown))}, which "
            f"{config.model_type} has; choose another model, or set engine.name: vllm"
        )
    if "sliding_attention" in kinds and not model._can_set_attn_implementation():
        raise ConfigError(
            f"engine.name: the transformers engine cannot give the attention of {config.model_type} its sliding window of "
            f"{window}; choose another model, or set engine.name: vllm"
        )
    return [] if RECURRENT.isdisjoint(kinds) else kinds
