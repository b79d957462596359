"""Experts that vLLM chose, as it returns them. Names are those of vLLM 0.32.

`T` tokens, `F` layers, `X` experts chosen by a router.
"""

import base64
import io
import re
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from agentrl.errors import ConfigError, EngineError
from agentrl.models.moe import Experts, experts_of, routers_of


def routed_experts_arguments() -> dict[str, Any]:
    """Return the arguments of `EngineArgs` with which vLLM returns experts.

    Raises:
        ConfigError: without a GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "loss.routing_replay: vLLM returns the experts that it chose on a GPU only; set engine.name: transformers, or "
            "loss.routing_replay to trainer or none"
        )
    return {"enable_return_routed_experts": True}


class VLLMExperts(NamedTuple):
    """Packs the experts that vLLM returns for all layers, with experts or without."""

    experts: Experts
    layers: list[int]
    """Layers with experts."""

    @classmethod
    def for_model(cls, model: Any) -> Self | None:
        """Return the packer for a transformers model. None: it has no experts."""
        experts = experts_of(model)
        if experts is None:
            return None
        return cls(experts, [int(number) for r in routers_of(model) for number in re.findall(r"\.(\d+)\.", r.name)[:1]])

    def pack(self, chosen_TFX: npt.NDArray[Any] | None, *, num_tokens: int) -> bytes:
        """Return the packed experts of `num_tokens` tokens.

        Raises:
            EngineError: if vLLM returned none, or those of another model.
        """
        if chosen_TFX is None:
            raise EngineError(
                "vLLM does not return the experts that it chose, which loss.routing_replay: engine needs; start its server by "
                "`agentrl serve`, or with --enable-return-routed-experts"
            )
        try:
            if chosen_TFX.ndim != 3 or len(chosen_TFX) != num_tokens or chosen_TFX.shape[1] <= max(self.layers):
                raise ValueError(f"experts (tokens, layers, chosen) {chosen_TFX.shape} for {num_tokens} tokens")
            return self.experts.pack(chosen_TFX[:, self.layers])
        except ValueError as error:
            raise EngineError(f"vLLM runs another mixture of experts than the trainer: it returned {error}") from error

    def pack_npy(self, encoded: str | None, *, num_tokens: int) -> bytes:
        """Pack what a server sends: an npy file in base64; otherwise like `pack`."""
        array = None if encoded is None else np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
        return self.pack(array, num_tokens=num_tokens)
