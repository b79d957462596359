"""TRL's own losses, as a reference.

Its trainers import packages that the tests do without, so the code of their losses is read from its source, and run on a
trainer that has settings and nothing else.
"""

import ast
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_GRPO, _GMPO = ("trainer/grpo_trainer.py", "GRPOTrainer"), ("experimental/gmpo/gmpo_trainer.py", "GMPOTrainer")
"""File and class of each trainer."""
_CORRECTION = "self.use_vllm and self.vllm_importance_sampling_correction"
"""The condition under which the engine's mismatch is corrected."""
_IMPORTS = {"torch": torch, "math": math, "Any": Any, "nanmin": torch.min, "nanmax": torch.max}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Padded:
    """Trajectories side by side: (B, T) each."""

    policy_BT: Tensor
    old_BT: Tensor
    """Log-probabilities of the ratio's denominator."""
    behavior_BT: Tensor
    reference_BT: Tensor
    entropy_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor
    """1 for a token, 0 for padding."""


def is_installed() -> bool:
    """Return whether TRL is there."""
    return find_spec("trl") is not None


def trl_loss(batch: Padded, *, trainer: tuple[str, str] = _GRPO, **settings: Any) -> Tensor:
    """Return the loss that a trainer of TRL computes, with these settings, for advantages of whole trajectories."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(batch.policy_BT.dtype)  # numbers such as SAPO's temperature are tensors of it
    try:
        found: Tensor = _method("_compute_loss", trainer)(_trainer(batch, **settings), None, _inputs(batch, settings))
    finally:
        torch.set_default_dtype(before)
    return found


def gmpo_loss(batch: Padded, **settings: Any) -> Tensor:
    """Return the loss of TRL's `GMPOTrainer`; `epsilon_low` and `epsilon_high` are bounds of log-ratios."""
    return trl_loss(batch, trainer=_GMPO, **settings)


def _trainer(batch: Padded, **settings: Any) -> SimpleNamespace:
    of_args = ("use_bias_correction_kl",)
    args = SimpleNamespace(
        delta=None,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        **{"use_bias_correction_kl": False, **{key: settings[key] for key in of_args if key in settings}},
    )
    trainer = SimpleNamespace(
        args=args,
        model=SimpleNamespace(training=False),  # no accumulation of gradients
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda found, reduction: found, gather=lambda found: found, sync_gradients=False
        ),
        get_off_policy_mask=_method("get_off_policy_mask", _GRPO),
        get_gamma_weights=_method("get_gamma_weights", _GRPO),
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.policy_BT, batch.entropy_BT, None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        loss_type="grpo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.0,
        max_completion_length=None,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        off_policy_mask_threshold=None,
        entropy_coef=0.0,
        use_adaptive_entropy=False,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=None,
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=None,
        current_gradient_accumulation_steps=1,
    )
    vars(trainer).update({key: value for key, value in settings.items() if key not in of_args})
    trainer._entropy_bonus_enabled = trainer.entropy_coef != 0
    return trainer


def _inputs(batch: Padded, settings: dict[str, Any]) -> dict[str, Tensor]:
    ids_BT = torch.zeros_like(batch.mask_BT, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids_BT[:, :0],
        "prompt_mask": ids_BT[:, :0],
        "completion_ids": ids_BT,
        "completion_mask": batch.mask_BT,
        "advantages": batch.advantages_BT[:, 0],
        "old_per_token_logps": batch.old_BT,
        "sampling_per_token_logps": batch.behavior_BT,
        "ref_per_token_logps": batch.reference_BT,
        "num_items_in_batch": batch.mask_BT.sum(),
    }
    if settings.get("use_vllm"):
        weigh = _importance_sampling_ratio()
        inputs["importance_sampling_ratio"] = weigh(
            _trainer(batch, **settings), batch.mask_BT, None, batch.old_BT, batch.behavior_BT
        )
    return inputs


def _methods(path: str, name: str) -> dict[str, ast.FunctionDef]:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0], path).read_text(encoding="utf-8")
    (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


@cache
def _method(name: str, trainer: tuple[str, str]) -> Callable[..., Any]:
    return _compiled(_methods(*trainer)[name])


@cache
def _importance_sampling_ratio() -> Callable[..., Tensor]:
    """Return the lines of `GRPOTrainer` that correct the mismatch of engine and trainer, as a function."""
    scoring = _methods(*_GRPO)["_generate_and_score_completions"]
    result = "vllm_importance_sampling_ratio"
    (lines,) = (
        node.body
        for node in ast.walk(scoring)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == _CORRECTION
        and any(f"{result} = torch.exp" in ast.unparse(line) for line in node.body)
    )
    head = "def weigh(self, completion_mask, tool_mask, old_per_token_logps, sampling_per_token_logps): pass"
    (function,) = ast.parse(head).body
    assert isinstance(function, ast.FunctionDef)
    function.body = [*lines, *ast.parse(f"def f(): return {result}").body[0].body]  # type: ignore[attr-defined]
    return _compiled(function)


def _compiled(function: ast.FunctionDef) -> Callable[..., Any]:
    namespace: dict[str, Any] = dict(_IMPORTS)
    function.decorator_list = [
        one for one in function.decorator_list if ast.unparse(one) != "staticmethod"
    ]  # called without a trainer
    module = ast.fix_missing_locations(ast.Module([function], type_ignores=[]))
    exec(compile(module, "trl", "exec"), namespace)
    found: Callable[..., Any] = namespace[function.name]
    return found
