"""Learners of a tiny model."""

import copy
from typing import Any, Literal

import torch
from accelerate import Accelerator

from agentrl.chat import train_tokenizer
from agentrl.learn.config import LossConfig, TrainConfig
from agentrl.learn.learner import Learner
from agentrl.learn.policy_state import PolicyState
from agentrl.policy.config import Layout, LocalModelConfig, LoraSettings
from agentrl.policy.lora import add_lora
from agentrl.policy.model import Policy, make_local_model
from tests.support.models import in_float64

TOKENIZER = train_tokenizer([], vocab_size=261)
TINY = LocalModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)


def make_learner(
    *,
    model: Any = None,
    loss: LossConfig | None = None,
    layout: Layout = "tree",
    has_reference: bool = False,
    is_double: bool = False,
    lora: LoraSettings | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    autocast: bool = False,
    learner_class: type[Learner] = Learner,
    **train: Any,
) -> Learner:
    """Make a learner; by itself with plain GSPO's loss, and updates as the optimizer makes them."""
    torch.manual_seed(0)
    model = model or make_local_model(TINY, TOKENIZER)
    if lora is not None:
        add_lora(model, lora)
    policy = Policy((in_float64(model) if is_double else model).to(device), layout=layout)
    config = TrainConfig(
        device="cpu" if device == "cpu" else "auto",
        **{"learning_rate": 1e-2, "target_kl": None, **train},
    )
    reference = copy.deepcopy(policy) if has_reference else None
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if autocast else "no")
    state = PolicyState(policy, accelerator=accelerator, config=config, reference=reference)
    return learner_class(state, loss=loss or LossConfig(trust="fixed"), config=config, temperature=1.0, seed=1)


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in learner.state.weights()])
