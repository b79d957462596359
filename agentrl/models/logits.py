"""Scales and caps that model families apply to their logits behind the head."""

from dataclasses import dataclass
from typing import Any

import torch

from agentrl.errors import ConfigError

_FACTORS = {
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), "logit_scale"),
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
}
"""Field by which each family, by its name in transformers, multiplies its logits."""
_DIVISORS = dict.fromkeys(
    ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), "logits_scaling"
)
"""Field by which it divides them."""
_CAPS = {
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "nanochat", "vaultgemma"),
        "final_logit_softcapping",
    ),
    "recurrent_gemma": "logits_soft_cap",
}
"""Field that bounds them."""
_FIELDS = (
    *("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"),
    *("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
)


@dataclass(frozen=True, slots=True)
class LogitMap:
    """z = cap * tanh(factor * x / cap) for the head's output x; without a cap z = factor * x."""

    factor: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits that the model's softmax reads."""
        scaled = logits if self.factor == 1 else logits * self.factor
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


def logit_map(config: Any, *, field: str = "model.name_or_path") -> LogitMap:
    """Return the map that a model applies to its logits, from its configuration.

    Raises:
        ConfigError: for a change that is not known here.
    """
    text, family = config.get_text_config(), config.model_type
    known = {table[family] for table in (_FACTORS, _DIVISORS, _CAPS) if family in table}
    changes = {name: value for name in _FIELDS if (value := getattr(text, name, None)) not in (None, 1)}
    if unknown := {name: value for name, value in changes.items() if name not in known}:
        raise ConfigError(f"{field}: {family} changes its logits by {unknown}, in a way that is not known here")
    factor, divisor, cap = (changes.get(table.get(family, "")) for table in (_FACTORS, _DIVISORS, _CAPS))
    return LogitMap(factor=(factor or 1.0) / (divisor or 1.0), cap=cap)
