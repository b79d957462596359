"""A checkpoint of which each process reads its part is the one that a single process reads whole."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from agentrl.distributed.processes import num_processes
from agentrl.engine.base import EngineContext
from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.learn.config import TrainConfig
from agentrl.learn.policy_state import PolicyState
from agentrl.models.auto_classes import fix_frequencies, freeze_towers
from agentrl.policy.config import LoraSettings
from agentrl.policy.layout import choose_layout, lay_out
from agentrl.policy.lora import add_lora
from agentrl.policy.model import Policy, load_pretrained
from agentrl.policy.sharded_checkpoint import load_sharded, small_like
from agentrl.types import Sampling, TaskShard
from tests.distributed.test_processes import together
from tests.support.architectures import ARCHITECTURES, tiny_model
from tests.support.models import SIZES, made, tiny
from tests.support.played import TOKENIZER
from tests.support.tiers import first_quick

ROW = np.arange(5, 40)
LORA = LoraSettings(rank=2)
LAYERS = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
MODELS: dict[str, Any] = {
    **{name: lambda name=name: tiny_model(name, vocab_size=261) for name in ARCHITECTURES},
    "mixture": lambda: tiny("qwen3_moe", vocab_size=261),  # whose file has a tensor for each expert
    "GPT-2": lambda: made("GPT2", vocab_size=261, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "LFM2": lambda: made("Lfm2", **SIZES | LAYERS | {"vocab_size": 261}),
}


WITH_FOUR_EXPERTS = ("mixture", "gpt-oss", "GLM-4 MoE")


def checkpoint(name: str, folder: Path) -> Path:
    MODELS[name]().save_pretrained(folder / name)
    TOKENIZER.save_pretrained(folder / name)
    return folder / name


def new_policy(model: Any, shares: dict[str, Tensor], lora: LoraSettings | None) -> Policy:
    """The policy as a run makes it."""
    fix_frequencies(model, 128)
    freeze_towers(model)
    if lora is not None:
        add_lora(model, lora)
        torch.manual_seed(3)
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data.normal_(std=0.1)
    return Policy(model, sharded_checkpoint=shares)


def seen(policy: Policy, *, sharding: str, replicas: int = 1) -> tuple[Tensor, dict[str, Tensor], Tensor, bool]:
    """Log-probabilities of a row, the weights, the gradients that can be, and whether the reference agrees."""
    config = TrainConfig.model_validate({"device": "cpu", "sharding": sharding, "replicas": replicas})
    state = PolicyState(policy, accelerator=Accelerator(cpu=True), config=config, reference=copy.deepcopy(policy))
    inputs, index = lay_out([ROW], "padded")
    slot_T = torch.from_numpy(index(np.zeros_like(ROW[1:]), np.arange(len(ROW) - 1)))
    assert state.reference is not None
    of_policy, of_reference = (
        module(inputs, slot_T, torch.from_numpy(ROW[1:]), 1.0)[0] for module in (policy, state.reference)
    )
    of_policy.sum().backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    gradient = torch.cat([g.flatten() for g in whole])
    weights = {name: weight.clone() for name, weight in state.weights()}
    return of_policy.detach(), weights, gradient, bool((of_policy == of_reference).all())


def in_parts(folder: Path, names: list[str], lora: LoraSettings | None, replicas: int = 1) -> dict[str, Any]:
    Accelerator(cpu=True)
    found = {}
    for name in names:
        model, _, shares = load_sharded(str(folder / name), num_shards=num_processes() // replicas)
        has_all_experts = num_processes() == 2 or name not in WITH_FOUR_EXPERTS
        assert all(weight.is_meta == has_all_experts == bool(shares) for weight in model.parameters())
        found[name] = seen(new_policy(model, shares, lora), sharding="full", replicas=replicas)
    return found


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("num_processes", "lora", "replicas"),
    first_quick([(2, LORA, 1), (2, None, 1), (3, None, 1), (4, LORA, 2)]),
    ids=str,
)
def test_parts_are_of_the_whole(num_processes: int, lora: LoraSettings | None, replicas: int, tmp_path: Path) -> None:
    names = [name for name in MODELS if lora is None or name in ("Qwen3", "GPT-2", "Gemma 3 with images")]
    expected = {}
    for name in names:
        model, _ = load_pretrained(str(checkpoint(name, tmp_path)))
        expected[name] = seen(new_policy(model, {}, lora), sharding="none")
    for found in together(num_processes, tmp_path, in_parts, tmp_path, names, lora, replicas):
        for name in names:
            (logprobs_T, weights, gradient, agrees), (logprobs, own, of_one, _) = found[name], expected[name]
            assert agrees, name
            torch.testing.assert_close(logprobs_T, logprobs, rtol=1e-4, atol=1e-5, msg=name)
            torch.testing.assert_close(gradient, of_one, rtol=1e-3, atol=1e-4, msg=name)
            assert weights.keys() == own.keys()
            assert all(torch.equal(weights[key], own[key]) for key in own), name


def deep(name: str) -> Any:
    """A model of six layers; the last are of another kind where there are several."""
    changes: dict[str, Any] = {"num_hidden_layers": 6, "vocab_size": 261}
    if kinds := ARCHITECTURES[name][1].get("layer_types"):
        changes["layer_types"] = [kind for kind in dict.fromkeys(kinds) for _ in range(3)]
    if name == "GLM-4 MoE":
        changes["first_k_dense_replace"] = 3
    return tiny_model(name, **changes)


@pytest.mark.parametrize("name", first_quick(ARCHITECTURES, num=3))
def test_a_small_model_of_the_kind_tells_the_layout(name: str) -> None:
    model = deep(name)
    freeze_towers(model)
    expected, _ = choose_layout(model, "auto", max_tokens=128)
    before = torch.get_rng_state()
    small = small_like(model.to("meta"), torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert choose_layout(small, "auto", max_tokens=128)[0] == expected
    assert sum(p.numel() for p in small.parameters()) < 0.8 * sum(p.numel() for p in model.parameters())
    assert {type(module) for module in small.modules()} >= {type(module) for module in model.modules()}


def test_an_engine_has_room_for_weights_that_are_pushed(tmp_path: Path) -> None:
    whole = MODELS["Qwen3"]()
    context = EngineContext(
        model=copy.deepcopy(whole).to("meta"),
        device=torch.device("cpu"),
        dtype=torch.float32,
        shard=TaskShard(1),
        handover=tmp_path,
        max_context_tokens=64,
        max_live_episodes=8,
        repeats_exactly=True,
        samples_during_update=False,
    )
    for name, buffer in whole.named_buffers():
        owner, _, key = name.rpartition(".")
        setattr(context.model.get_submodule(owner), key, buffer)

    async def sampled(engine: TransformersEngine) -> tuple[int, ...]:
        await engine.load_weights(whole.state_dict().items(), 1)
        await engine.resume()
        sampling = Sampling(max_tokens=8, stop_token_ids=(), seed=3)
        with engine.conversation("one"):
            return (await engine.generate((5, 6, 7), sampling, "one")).token_ids

    found = asyncio.run(sampled(TransformersConfig().build(context)))
    assert found == asyncio.run(sampled(TransformersEngine(copy.deepcopy(whole))))
