"""What families do to their logits behind the head, against their own logits."""

import asyncio
from typing import Any

import pytest
import torch
from transformers import CohereCompassTextConfig, FalconH1Config, Qwen3Config

from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.errors import ConfigError
from agentrl.models.logits import LogitMap, logit_map
from agentrl.policy.layout import check_head, lay_out
from agentrl.policy.model import Policy
from agentrl.types import Sampling
from tests.policy.test_layout import RECURRENT
from tests.support.models import SIZES, branching_rows, made

_WIDE = {**SIZES, "head_dim": 8, "initializer_range": 0.4}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {**_WIDE, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Cohere": ("Cohere", {**_WIDE, "logit_scale": 0.3}),
    "Cohere2": ("Cohere2", {**_WIDE, "logit_scale": 0.3, "sliding_window": 20}),
    "FalconH1": ("FalconH1", {**RECURRENT["FalconH1"], "lm_head_multiplier": 0.3}),
    "Gemma2": ("Gemma2", {**_GEMMA, "final_logit_softcapping": 2.0, "attn_logit_softcapping": None}),
    "Gemma3": ("Gemma3Text", {**_GEMMA, "final_logit_softcapping": 2.0}),
    "Gemma4": (
        "Gemma4Text",
        {**_GEMMA, "final_logit_softcapping": 2.0, "global_head_dim": 8, "hidden_size_per_layer_input": 0},
    ),
    "Granite": ("Granite", {**_WIDE, "logits_scaling": 3.0}),
    "GraniteMoe": ("GraniteMoe", {**_WIDE, **_EXPERTS, "logits_scaling": 3.0}),
    "GraniteMoeHybrid": ("GraniteMoeHybrid", {**RECURRENT["GraniteMoeHybrid"], "logits_scaling": 3.0}),
    "GraniteMoeShared": (
        "GraniteMoeShared",
        {**_WIDE, **_EXPERTS, "shared_intermediate_size": 32, "logits_scaling": 3.0},
    ),
    "HyperCLOVAX": ("HyperCLOVAX", {**_WIDE, "logits_scaling": 3.0}),
    "NanoChat": ("NanoChat", {**_WIDE, "final_logit_softcapping": 2.0}),
    "RecurrentGemma": ("RecurrentGemma", {**_WIDE, "logits_soft_cap": 2.0, "num_hidden_layers": 3}),
    "VaultGemma": ("VaultGemma", {**_GEMMA, "final_logit_softcapping": 2.0, "attn_logit_softcapping": None}),
}


def test_a_model_whose_head_is_more_than_a_matrix_is_refused() -> None:
    sizes = {name: size for name, size in _WIDE.items() if name not in ("num_key_value_heads", "head_dim")}
    model = made(
        "ModernBertDecoder", **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    )
    with pytest.raises(ConfigError, match="ModernBertDecoderForCausalLM computes more between its hidden states"):
        check_head(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_engine_read_the_logits_that_the_model_returns(family: str) -> None:
    name, sizes = FAMILIES[family]
    model = made(name, **sizes).eval()
    with torch.no_grad():  # logits of a size at which a cap and a factor are seen
        model.get_output_embeddings().weight.mul_(3)
    assert logit_map(model.config) != LogitMap()
    check_head(model)
    row = branching_rows()[-1]
    ids_1L = torch.from_numpy(row)[None]
    expected_LV = (model(input_ids=ids_1L, use_cache=False).logits[0] / 0.7).log_softmax(-1).detach()
    linear_LV = (
        model.get_output_embeddings()(model.base_model(input_ids=ids_1L).last_hidden_state[0]) / 0.7
    ).log_softmax(-1)
    assert (expected_LV - linear_LV).abs().max() > 0.1  # it makes a difference

    inputs, _ = lay_out([row], "padded")
    slot_T, target_T = torch.arange(len(row) - 1), torch.from_numpy(row[1:])
    logprobs_T, entropy_T = Policy(model)(inputs, slot_T, target_T, 0.7)
    torch.testing.assert_close(logprobs_T, expected_LV[slot_T, target_T], rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy_T, -(expected_LV.exp() * expected_LV).sum(-1)[:-1], rtol=0, atol=2e-5)

    if family in ("FalconH1", "RecurrentGemma"):  # which keep a state in their own way
        with pytest.raises(
            ConfigError, match=f"the transformers engine knows no layers of kind .*{model.config.model_type} has"
        ):
            TransformersEngine(model, max_context_tokens=64)
        return

    async def sample() -> tuple[int, float]:
        engine = TransformersEngine(model, max_context_tokens=64)
        done = await engine.generate(
            row.tolist(), Sampling(max_tokens=1, stop_token_ids=(), temperature=0.7, seed=1), "a"
        )
        await engine.close()
        return done.token_ids[0], done.logprobs[0]

    token, logprob = asyncio.run(sample())
    assert logprob == pytest.approx(float(expected_LV[-1, token]), abs=2e-5)


def test_a_model_that_changes_nothing_has_a_linear_head() -> None:
    for config in (Qwen3Config(), FalconH1Config(lm_head_multiplier=1.0)):
        assert logit_map(config) == LogitMap()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CohereCompassTextConfig(logit_scale=0.5), "cohere_compass_text changes its logits by {'logit_scale': 0.5}"),
        (Qwen3Config.from_dict({"logits_scaling": 2.0}), "qwen3 changes its logits by {'logits_scaling': 2.0}"),
    ],
)
def test_a_change_that_is_not_known_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="in a way that is not known here") as caught:
        logit_map(config, field="model.name_or_path")
    assert str(caught.value).startswith(f"model.name_or_path: {words}")
