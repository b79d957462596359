"""Routers of transformers models: recorded, replayed and compared.

`J` routers, `P` slots of a pass, `X` experts chosen at a slot, `E` experts to choose from.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from agentrl.errors import TrainingError
from agentrl.models.moe import UNKNOWN, Experts, changed_share, experts_of, recording, replaying, routers_of
from agentrl.policy.config import Layout
from agentrl.policy.layout import attending, hidden_states, lay_out
from agentrl.policy.layout.tree import IntArray
from tests.support.each import each
from tests.support.models import SIZES

EXPERTS = {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
DEEPSEEK = {
    **EXPERTS,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "first_k_dense_replace": 0,
    "n_group": 4,
    "topk_group": 3,  # as many as experts at a place
}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_unnormalised": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False}),
    "olmoe": ("Olmoe", EXPERTS),
    "mixtral": ("Mixtral", LOCAL),
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    "glm4_moe": ("Glm4Moe", {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 0}),
    "gpt_oss": ("GptOss", {**LOCAL, "head_dim": 8}),
    "granite": ("GraniteMoe", LOCAL),
}


def tiny(name: str, **changes: Any) -> Any:
    family, sizes = MODELS[name]
    return made(family, **sizes | changes)


def made(family: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "initializer_range": 0.2, "pad_token_id": 0, **sizes})
    return transformers.AutoModelForCausalLM.from_config(config).train()


def rows_of_tokens() -> list[IntArray]:
    """Forks at two depths, and a row that shares nothing."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(97, size=length) for length in (40, 30, 20, 25)]
    rows[1][:20] = rows[0][:20]
    rows[2][:10] = rows[0][:10]
    return rows


def run(model: Any, layout: Layout = "padded") -> Tensor:
    return hidden_states(model, lay_out(rows_of_tokens(), layout)[0])


NUM_SLOTS = 4 * 40
"""Of the padded layout."""


def random_experts(num_routers: int = 2, num_slots: int = NUM_SLOTS) -> Tensor:
    """Three of eight experts, at random, in random order."""
    return torch.rand(num_routers, num_slots, 8, generator=torch.Generator().manual_seed(1)).topk(3).indices


def gradients(model: Any, hidden_PD: Tensor) -> dict[str, Tensor]:
    """Of a sum of hidden states with random weights."""
    model.zero_grad()
    (hidden_PD * torch.randn(hidden_PD.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return {
        name: weight.grad.clone() for name, weight in model.base_model.named_parameters() if weight.grad is not None
    }


def changed_weights(model: Any, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator)


@each("name", MODELS)
def test_recorded_and_replayed_experts_give_the_same_states_and_gradients_bit_for_bit(name: str) -> None:
    model = tiny(name)
    free_PD = run(model)
    free = gradients(model, free_PD)
    with recording(model) as passes:
        recorded_PD = run(model)
    with replaying(model, passes[0]) as own:
        replayed_PD = run(model)
    assert torch.equal(recorded_PD, free_PD)
    assert torch.equal(replayed_PD, free_PD)
    replayed = gradients(model, replayed_PD)
    assert [name for name, gradient in free.items() if not torch.equal(gradient, replayed[name])] == []
    assert torch.equal(own[0], passes[0])


def test_under_autocast_a_replay_is_exact_as_well() -> None:
    model = tiny("qwen3_moe")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with recording(model) as passes:
            free_PD = run(model)
        with replaying(model, passes[0]):
            assert torch.equal(run(model), free_PD)


def softmax(router: Any, logits_PE: Tensor, experts_PX: Tensor) -> Tensor:
    return logits_PE.softmax(-1).gather(1, experts_PX)


def normalised_softmax(router: Any, logits_PE: Tensor, experts_PX: Tensor) -> Tensor:
    return logits_PE.gather(1, experts_PX).softmax(-1)  # what is left of the softmax over all experts, over its sum


def scaled_sigmoid(router: Any, logits_PE: Tensor, experts_PX: Tensor) -> Tensor:
    scores_PX = logits_PE.sigmoid().gather(1, experts_PX)
    factor: float = router.routed_scaling_factor
    return factor * scores_PX / scores_PX.sum(-1, keepdim=True)


@each(
    ("name", "formula"),
    [
        ("qwen3_moe", normalised_softmax),
        ("qwen3_moe_unnormalised", softmax),
        ("olmoe", softmax),
        ("mixtral", normalised_softmax),
        ("deepseek_v2", softmax),
        ("deepseek_v3", scaled_sigmoid),
        ("glm4_moe", scaled_sigmoid),
        ("gpt_oss", normalised_softmax),
        ("granite", normalised_softmax),
    ],
)
def test_given_experts_are_weighed_by_the_scores_of_the_present_router(
    name: str, formula: Callable[[Any, Tensor, Tensor], Tensor]
) -> None:
    model, given_JPX = tiny(name), random_experts()
    seen: list[tuple[Tensor, ...]] = []
    for router in routers_of(model):
        experts = model.get_submodule(router.name.rpartition(".")[0]).experts
        experts.register_forward_pre_hook(lambda module, args: seen.append(args))
    with replaying(model, given_JPX):
        run(model)
    for router, (input_PD, experts_PX, weights_PX), given_PX in zip(routers_of(model), seen, given_JPX, strict=True):
        assert torch.equal(experts_PX, given_PX)
        matrix_ED = next(weight for weight in router.module.parameters() if weight.ndim == 2)
        logits_PE = input_PD.reshape(NUM_SLOTS, -1) @ matrix_ED.T + getattr(router.module, "bias", 0)
        torch.testing.assert_close(weights_PX, formula(router.module, logits_PE, given_PX), rtol=1e-5, atol=1e-6)


@each("name", ["qwen3_moe", "qwen3_moe_unnormalised"])
def test_after_an_update_the_layer_is_the_sum_over_the_recorded_experts_in_value_and_gradient(name: str) -> None:
    model = tiny(name, num_hidden_layers=1)
    with recording(model) as passes, torch.no_grad():
        run(model)
    changed_weights(model)
    layer = model.model.layers[0].mlp
    states: dict[str, Tensor] = {}
    layer.register_forward_hook(lambda module, args, output: states.update(input=args[0], output=output))
    with replaying(model, passes[0]) as own:
        run(model)
    assert 0.1 < float(changed_share(passes[0], own[0]).mean()) < 0.9  # the update moved what routers choose

    input_PD, output_PD = (state.flatten(0, 1) for state in (states["input"], states["output"]))
    gate_ED, up_EDD, down_EDD = layer.gate.weight, layer.experts.gate_up_proj, layer.experts.down_proj
    expected_PD = []
    for x_D, experts_X in zip(input_PD, passes[0][0].tolist(), strict=True):
        weights_E = (gate_ED @ x_D).softmax(-1)
        total = sum(weights_E[e] for e in experts_X) if name == "qwen3_moe" else 1
        inner = [(up_EDD[e] @ x_D).chunk(2) for e in experts_X]
        outputs = [down_EDD[e] @ (torch.nn.functional.silu(a) * b) for e, (a, b) in zip(experts_X, inner, strict=True)]
        expected_PD.append(sum(weights_E[e] / total * out for e, out in zip(experts_X, outputs, strict=True)))
    torch.testing.assert_close(output_PD, torch.stack(expected_PD), rtol=1e-5, atol=1e-5)
    upstream_PD = torch.randn(output_PD.shape, generator=torch.Generator().manual_seed(4))
    wanted = [gate_ED, up_EDD, down_EDD, states["input"]]
    got = torch.autograd.grad((output_PD * upstream_PD).sum(), wanted)
    expected = torch.autograd.grad((torch.stack(expected_PD) * upstream_PD).sum(), wanted)
    for gradient, by_hand in zip(got, expected, strict=True):
        torch.testing.assert_close(gradient, by_hand, rtol=1e-5, atol=1e-5 * float(by_hand.abs().max()))


@each("use_reentrant", [False, True])
@each("layout", ["padded", "tree"])
def test_layers_that_gradient_checkpointing_runs_again_replay_as_well(layout: Layout, use_reentrant: bool) -> None:
    model = tiny("qwen3_moe")
    num_slots = len(run(model, layout))
    given_JPX = random_experts(num_slots=num_slots)
    with replaying(model, given_JPX):
        expected = gradients(model, run(model, layout))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    with attending(model, layout), replaying(model, given_JPX) as own:
        got = gradients(model, run(model, layout))
    assert len(calls) == 2
    assert len(own) == 1  # what runs again is no pass
    assert [name for name, gradient in expected.items() if not torch.equal(gradient, got[name])] == []


def test_a_backward_pass_outside_of_the_context_is_refused_under_gradient_checkpointing() -> None:
    model = tiny("qwen3_moe")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with replaying(model, random_experts()):
        hidden_PD = run(model)
    with pytest.raises(CheckpointError):
        gradients(model, hidden_PD)


def test_each_pass_is_recorded_and_routers_choose_among_themselves_what_is_recorded() -> None:
    model = tiny("qwen3_moe", num_experts=300).eval()
    inputs: list[Tensor] = []
    for router in routers_of(model):
        router.module.register_forward_pre_hook(lambda module, args: inputs.append(args[0] @ module.weight.T))
    with recording(model) as passes, torch.no_grad():
        run(model)
        model(torch.arange(7)[None])
    assert [tuple(experts.shape) for experts in passes] == [(2, NUM_SLOTS, 3), (2, 7, 3)]
    expected = [logits.flatten(0, -2).topk(3).indices.tolist() for logits in inputs]
    assert [experts.tolist() for one in passes for experts in one] == expected


def test_what_routers_would_have_chosen_themselves_depends_on_what_was_replayed_below() -> None:
    model = tiny("qwen3_moe")
    with recording(model) as passes:
        run(model)
    with replaying(model, random_experts()) as own:
        run(model)
    assert torch.equal(own[0][0], passes[0][0])  # the first router sees the same states
    assert not torch.equal(own[0][1], passes[0][1])


@each("layout", ["tree", "packed"])
def test_tokens_choose_and_replay_the_same_experts_in_every_layout(layout: Layout) -> None:
    model, rows = tiny("qwen3_moe").eval(), rows_of_tokens()
    row_T = np.concatenate([np.full(len(row), number) for number, row in enumerate(rows)])
    position_T = np.concatenate([np.arange(len(row)) for row in rows])
    (padded, padded_index), (inputs, index) = lay_out(rows, "padded"), lay_out(rows, layout)
    padded_T, slot_T = (torch.from_numpy(find(row_T, position_T)) for find in (padded_index, index))
    with torch.no_grad():
        with recording(model) as passes:
            hidden_states(model, padded)
            hidden_states(model, inputs)
        assert torch.equal(passes[0][:, padded_T], passes[1][:, slot_T])
        given_JPX = random_experts(num_slots=passes[1].shape[1])
        given_padded_JPX = torch.zeros(2, NUM_SLOTS, 3, dtype=torch.int64)
        given_padded_JPX[:, padded_T] = given_JPX[:, slot_T]
        with replaying(model, given_JPX):
            got_TD = hidden_states(model, inputs)[slot_T]
        with replaying(model, given_padded_JPX):
            expected_TD = hidden_states(model, padded)[padded_T]
    torch.testing.assert_close(got_TD, expected_TD, rtol=1e-5, atol=1e-5)


def test_the_share_of_changed_experts_by_hand() -> None:
    before_JPX = torch.tensor([[[0, 1], [0, 1], [0, 1]], [[2, 3], [2, 3], [2, 3]]])
    after_JPX = torch.tensor([[[1, 0], [0, 2], [2, 3]], [[2, 3], [2, 3], [3, 4]]])
    # First place: the same sets. Second: one of two experts of one of two routers. Third: two of two, and one of two.
    assert changed_share(before_JPX, after_JPX).tolist() == [0, 0.25, 0.75]
    assert changed_share(before_JPX, after_JPX, slots_Q=torch.tensor([2, 0, 2])).tolist() == [0.75, 0, 0.75]
    assert changed_share(before_JPX, before_JPX.to(torch.int16)).tolist() == [0, 0, 0]


def test_the_share_of_changed_experts_is_that_of_sets() -> None:
    before_JPX, after_JPX = random_experts(4, 50), random_experts(8, 50)[4:]
    sets = [
        [[set(experts_X.tolist()) for experts_X in of_router] for of_router in both] for both in (before_JPX, after_JPX)
    ]
    expected = [np.mean([1 - len(sets[0][r][p] & sets[1][r][p]) / 3 for r in range(4)]) for p in range(50)]
    assert changed_share(before_JPX, after_JPX).numpy() == pytest.approx(np.array(expected), rel=1e-12)


def test_recordings_of_other_slots_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"got \(2, 5, 3\) and \(2, 6, 3\)"):
        changed_share(random_experts(2, 5), random_experts(2, 6))


def test_routers_stand_in_the_order_of_layers_and_a_layer_without_experts_has_none() -> None:
    model = tiny("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[1])
    assert [router.name for router in routers_of(model)] == [f"model.layers.{layer}.mlp.gate" for layer in (0, 2, 3)]
    assert {router.num_experts for router in routers_of(model)} == {8}


def test_a_dense_model_has_no_routers_and_nothing_to_record() -> None:
    model = made("Qwen3", head_dim=8)
    with recording(model) as passes:
        run(model)
    assert (routers_of(model), passes) == ([], [])
    with (
        pytest.raises(TrainingError, match="Qwen3ForCausalLM has 0 routers, got experts of 2"),
        replaying(model, random_experts()),
    ):
        pass


@each(
    ("family", "sizes", "words"),
    [
        ("JetMoe", {"kv_channels": 8, **LOCAL}, r"self_attention \(JetMoeAttention\) has experts, but no `gate` or"),
        ("LongcatFlash", {"num_layers": 1, **DEEPSEEK}, r"layers.0.mlp \(LongcatFlashMoE\) has experts, but no"),
        ("Phimoe", {**LOCAL, "num_experts_per_tok": 2}, r"router \(PhimoeTopKRouter\) chose 0 times in one pass"),
        (
            "HunYuanMoEV1",
            {"head_dim": 8, "num_experts": 8, "moe_topk": [1, 2]},
            r"of different shape .*\[\(160, 1\), \(160, 2\)\]",
        ),
    ],
)
def test_routers_that_are_not_understood_are_refused(family: str, sizes: dict[str, Any], words: str) -> None:
    model = made(family, **sizes).eval()
    with pytest.raises(TrainingError, match=words), recording(model), torch.no_grad():
        run(model)


def test_scores_without_the_groups_that_are_struck_out_are_recorded_but_not_replayed() -> None:
    model = tiny("deepseek_v2", topk_method="group_limited_greedy").eval()
    with recording(model) as passes, torch.no_grad():
        run(model)
    with (
        pytest.raises(TrainingError, match=r"gate chooses among scores.*group_limited_greedy"),
        replaying(model, passes[0]),
    ):
        pass


@each(
    ("experts_JPX", "words"),
    [
        (random_experts(3), "Qwen3MoeForCausalLM has 2 routers, got experts of 3"),
        (random_experts()[0], r"expected integer experts \(J, P, X\), got torch.int64 \(160, 3\)"),
        (random_experts().float(), "expected integer experts .*, got torch.float32"),
        (random_experts()[:, 1:], r"layers.0.mlp.gate chooses .* \(160, 3\), got \(159, 3\) to replay"),
        (random_experts()[:, :, 1:], r"layers.0.mlp.gate chooses .* \(160, 3\), got \(160, 2\) to replay"),
    ],
)
def test_experts_of_another_model_or_pass_are_refused(experts_JPX: Tensor, words: str) -> None:
    model = tiny("qwen3_moe")
    with pytest.raises(TrainingError, match=words), replaying(model, experts_JPX):
        run(model)


def test_the_model_routes_as_before_afterwards_also_after_an_error() -> None:
    model = tiny("qwen3_moe")
    before_PD = run(model)
    with pytest.raises(TrainingError), replaying(model, random_experts(num_slots=3)):
        run(model)
    assert torch.equal(run(model), before_PD)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not model.base_model._forward_hooks
    assert not model.base_model._forward_pre_hooks
    assert torch.arange(8.0)[None].topk(3).indices.tolist() == [[7, 6, 5]]  # no mode is left behind


def test_contexts_may_be_nested() -> None:
    model, given_JPX = tiny("qwen3_moe"), random_experts()
    with recording(model) as outer:
        with replaying(model, given_JPX) as own, recording(model) as inner:
            run(model)
        run(model)
    assert torch.equal(own[0], inner[0])
    assert torch.equal(outer[0], given_JPX)
    assert torch.equal(outer[1][0], own[0][0])
    assert not torch.equal(outer[1][1], own[0][1])


@each("name", MODELS)
def test_the_experts_of_a_model_are_those_that_it_chooses_among(name: str) -> None:
    model = tiny(name)
    with recording(model) as passes, torch.no_grad():
        run(model)
    num_routers, _, num_chosen = passes[0].shape
    assert experts_of(model) == Experts(num_routers, num_chosen, 8)


def test_a_dense_model_has_no_experts_and_layers_that_choose_differently_are_refused() -> None:
    assert experts_of(made("Qwen3")) is None
    with pytest.raises(
        TrainingError, match=r"HunYuanMoEV1ForCausalLM chooses num_experts_per_tok: \[1, 2\] of \[8\] experts"
    ):
        experts_of(made("HunYuanMoEV1", head_dim=8, num_experts=8, moe_topk=[1, 2]))


@each(("num_experts", "num_bytes"), [(8, 6), (256, 6), (257, 12)])
def test_experts_are_packed_and_unpacked(num_experts: int, num_bytes: int) -> None:
    experts = Experts(2, 3, num_experts)
    chosen_NJX = np.random.default_rng(0).integers(num_experts, size=(5, 2, 3))
    chosen_NJX[0, 0] = num_experts - 1
    packed = experts.pack(chosen_NJX)
    assert (experts.num_bytes, len(packed)) == (num_bytes, 5 * num_bytes)
    assert np.array_equal(experts.unpack(packed), chosen_NJX)
    for wrong, words in (
        (chosen_NJX[:, 1:], r"experts \(tokens, routers, chosen\) \(5, 1, 3\), expected \(tokens, 2, 3\)"),
        (np.full((1, 2, 3), num_experts), f"experts from {num_experts} to {num_experts}, expected from 0 to"),
        (np.full((1, 2, 3), -1), "experts from -1 to -1, expected from 0 to"),
    ):
        with pytest.raises(ValueError, match=words):
            experts.pack(wrong)


def test_a_slot_whose_experts_are_not_known_takes_its_own() -> None:
    model, given_JPX = tiny("qwen3_moe"), random_experts()
    with recording(model) as passes, torch.no_grad():
        run(model)
    given_JPX[:, ::2] = passes[0][:, ::2].to(given_JPX)
    with replaying(model, given_JPX):
        expected_PD = run(model)
    given_JPX[0, ::2] = UNKNOWN  # in the first layer, before which nothing has changed
    with replaying(model, given_JPX):
        assert torch.equal(run(model), expected_PD)
