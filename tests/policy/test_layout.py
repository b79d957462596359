"""Rows laid out together against the same rows one by one; which layout is exact for which model. `P` slots."""

import re
from collections.abc import Callable
from itertools import combinations
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.errors import ConfigError, TrainingError
from agentrl.models.auto_classes import freeze_towers
from agentrl.policy import layout as layout_module
from agentrl.policy.config import Layout
from agentrl.policy.layout import (
    _probe_rows,
    attending,
    choose_layout,
    hidden_states,
    lay_out,
    pack,
    probe_layout,
    probe_noise,
    recurrent,
)
from agentrl.policy.layout import tree_attention as tree_model
from agentrl.policy.layout.recurrent import Rows, can_continue, fork, mixers_of, num_computed
from agentrl.policy.layout.tree import IntArray, plan_tree
from agentrl.policy.layout.tree_attention import tree_attention
from agentrl.policy.model import checkpoint_layers
from tests.support.architectures import ARCHITECTURES, tiny_model
from tests.support.each import each
from tests.support.models import MODELS, SIZES, AllFloat64, branching_rows, in_float64, made, tiny
from tests.support.tiers import first_quick

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
GEMMA2: dict[str, Any] = {
    **SIZES,
    "head_dim": 8,
    "sliding_window": 20,
    "attn_logit_softcapping": 1.0,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}
LFM2: dict[str, Any] = {**SIZES, "layer_types": ["conv", "full_attention"], "initializer_range": 0.08}
MAMBA2 = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 8}
_STATES = {"mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
RECURRENT: dict[str, dict[str, Any]] = {
    "Lfm2": LFM2,
    "Mamba2": MAMBA2,
    "Qwen3_5Text": {**SIZES, **ARCHITECTURES["Qwen3.5"][1], "head_dim": 8, "initializer_range": 0.2},
    "Qwen3Next": {
        **SIZES,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "NemotronH": {
        **SIZES,
        "head_dim": 8,
        "hybrid_override_pattern": "M*-M",
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "FalconH1": {**SIZES, **_STATES, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_n_groups": 1},
    "Bamba": {**SIZES, **_STATES, "attn_layer_indices": [1], "mamba_n_heads": 8},
    "GraniteMoeHybrid": {
        **SIZES,
        **_STATES,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "Jamba": {**SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4},
}
"""Models with recurrent layers: alone, between layers of attention, and beside attention in one layer."""
NOT_SO = {("Mamba2", "tree"): "does not run so: .*takes no position_ids"}


def paths(rows: list[IntArray], index: Callable[[IntArray, IntArray], IntArray]) -> list[IntArray]:
    """Places of the tokens of each row."""
    return [index(np.full(len(ids), r), np.arange(len(ids))) for r, ids in enumerate(rows)]


def next_logprobs(model: Any, hidden_LD: Tensor, ids_L: IntArray) -> Tensor:
    logprobs_LV: Tensor = model.get_output_embeddings()(hidden_LD[:-1]).log_softmax(-1)
    return logprobs_LV.gather(1, torch.from_numpy(ids_L[1:])[:, None])[:, 0]


def logprobs(model: Any, rows: list[IntArray], layout: Layout) -> list[Tensor]:
    inputs, index = lay_out(rows, layout)
    hidden_PD = hidden_states(model, inputs)
    return [next_logprobs(model, hidden_PD[path], ids) for path, ids in zip(paths(rows, index), rows, strict=True)]


def row_logprobs(model: Any, rows: list[IntArray]) -> list[Tensor]:
    states = [model.base_model(input_ids=torch.from_numpy(ids)[None], use_cache=False) for ids in rows]
    return [next_logprobs(model, state.last_hidden_state[0], ids) for state, ids in zip(states, rows, strict=True)]


def with_gradients(model: Any, logprobs: list[Tensor]) -> dict[str, Tensor]:
    """Log-probabilities, and gradients of a sum of them with random weights."""
    values = torch.cat(logprobs)
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad((values * weights.to(values)).sum(), list(parameters.values()))
    return {"logprobs": values.detach(), **dict(zip(parameters, gradients, strict=True))}


def largest_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference within a tensor, over the largest entry of the expected one."""
    return max(float((got[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected)


def float64_error(model: Any, layout: Layout) -> float:
    """Largest error of log-probabilities and gradients in float64, against those of separate rows."""
    model.double().set_experts_implementation("eager")  # the grouped product of experts has no float64
    rows = branching_rows()
    with AllFloat64():
        got = with_gradients(model, logprobs(model, rows, layout))
        expected = with_gradients(model, row_logprobs(model, rows))
    assert all(tensor.dtype == torch.float64 for tensor in got.values())
    return largest_error(got, expected)


@given(rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6))
def test_every_token_of_a_row_is_found_at_its_place_with_its_position(rows: list[list[int]]) -> None:
    for layout in LAYOUTS:
        inputs, index = lay_out([np.array(row) for row in rows], layout)
        columns_BL = torch.arange(inputs.ids_BL.shape[1]).expand(inputs.ids_BL.shape)
        positions_BL = columns_BL if inputs.positions_BL is None else inputs.positions_BL
        for row, path in zip(rows, paths([np.array(row) for row in rows], index), strict=True):
            assert inputs.ids_BL.flatten()[path].tolist() == row
            assert positions_BL.flatten()[path].tolist() == list(range(len(row)))


@each(
    ("layout", "ids", "positions"),
    [
        ("tree", [[1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2, 2, 3, 4, 0]]),
        ("packed", [[1, 2, 4, 5, 6], [1, 2, 3, 7, 0]], [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]),
        ("padded", [[1, 2, 3, 0, 0], [1, 2, 4, 5, 6], [7, 0, 0, 0, 0]], None),
    ],
)
def test_three_rows_laid_out_by_hand(layout: Layout, ids: list[list[int]], positions: list[list[int]] | None) -> None:
    inputs, _ = lay_out([np.array([1, 2, 3]), np.array([1, 2, 4, 5, 6]), np.array([7])], layout)
    assert inputs.ids_BL.tolist() == ids
    assert (None if inputs.positions_BL is None else inputs.positions_BL.tolist()) == positions


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_packed_lines_are_no_wider_than_the_longest_row_and_no_two_of_them_fit_into_one(lengths: list[int]) -> None:
    lines = pack(lengths)
    widths = [sum(lengths[number] for number in line) for line in lines]
    assert sorted(number for line in lines for number in line) == list(range(len(lengths)))
    assert max(widths) == max(lengths)
    assert all(one + other > max(lengths) for one, other in combinations(widths, 2))


@each("layout", LAYOUTS)
@each("name", MODELS)
def test_logprobs_and_gradients_equal_those_of_separate_rows(name: str, layout: Layout) -> None:
    model, rows = tiny(name), branching_rows()
    got = with_gradients(model, logprobs(model, rows, layout))
    assert largest_error(got, with_gradients(model, row_logprobs(model, rows))) < 1e-5


@pytest.mark.slow
@each("layout", LAYOUTS)
@each("name", MODELS)
def test_in_float64_they_are_equal_to_rounding(name: str, layout: Layout) -> None:
    assert float64_error(tiny(name), layout) < 1e-9


def test_packed_rows_are_exact_where_scores_are_capped() -> None:
    model, rows = made("Gemma2", **GEMMA2), branching_rows()
    expected = with_gradients(model, row_logprobs(model, rows))
    assert largest_error(with_gradients(model, logprobs(model, rows, "packed")), expected) < 1e-5
    uncapped = made("Gemma2", **GEMMA2 | {"attn_logit_softcapping": None})
    assert largest_error(with_gradients(uncapped, row_logprobs(uncapped, rows)), expected) > 1e-2


@each("layout", ["tree", "packed"])
@each("name", ["qwen3", "gpt2"])
def test_under_autocast_the_difference_is_rounding_to_bfloat16(name: str, layout: Layout) -> None:
    model, rows = tiny(name, init=0.05), branching_rows()
    exact = with_gradients(model, row_logprobs(model, rows))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        together = with_gradients(model, logprobs(model, rows, layout))
        by_row = with_gradients(model, row_logprobs(model, rows))
    assert 0 < largest_error(together, exact) < 1.5 * largest_error(by_row, exact) < 0.1


@each("layout", LAYOUTS)
def test_gradient_checkpointing_runs_layers_again_as_they_ran_before(layout: Layout) -> None:
    model, rows = tiny("qwen3"), branching_rows()
    expected = with_gradients(model, logprobs(model, rows, layout))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    with attending(model, layout):
        assert largest_error(with_gradients(model, logprobs(model, rows, layout)), expected) < 1e-5
    with torch.no_grad():  # nothing will run again
        torch.testing.assert_close(torch.cat(logprobs(model, rows, layout)), expected["logprobs"])


@each(("every", "num_again"), [(1, 5), (2, 3), (4, 2), (9, 1)])
def test_every_nth_layer_is_computed_again_with_equal_gradients(every: int, num_again: int) -> None:
    model, rows, calls = tiny("qwen3", num_hidden_layers=5), branching_rows(), list[int]()
    model.train()
    for layer in model.base_model.layers:
        layer.self_attn.register_forward_hook(lambda module, *_: calls.append(module.layer_idx))
    with attending(model, "tree"):
        expected = with_gradients(model, logprobs(model, rows, "tree"))
        assert calls == [0, 1, 2, 3, 4]
        checkpoint_layers(model, every)
        assert largest_error(with_gradients(model, logprobs(model, rows, "tree")), expected) < 1e-5
    assert sorted(calls[10:]) == [*range(0, 5, every)]
    assert len(calls[10:]) == num_again


@pytest.mark.parametrize("layout", ["tree", "packed"])
def test_gradient_checkpointing_outside_of_the_attention_of_a_layout_is_refused(layout: Layout) -> None:
    model = tiny("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    with pytest.raises(TrainingError, match=r"put forward and backward into `with attending\(model, layout\):`"):
        logprobs(model, branching_rows(), layout)


@each(
    ("layout", "attention", "expected"),
    [
        ("tree", "sdpa", "agentrl_tree"),
        ("packed", "sdpa", "agentrl_packed"),
        ("packed", "eager", "eager"),
        ("padded", "sdpa", "sdpa"),
    ],
)
def test_a_layout_sets_the_attention_that_it_needs_and_takes_it_back(
    layout: Layout, attention: str, expected: str
) -> None:
    model = tiny("qwen3", attn_implementation=attention)
    with attending(model, layout):
        assert model.config._attn_implementation == expected
    assert model.config._attn_implementation == attention


@each("layout", LAYOUTS)
@each("name", MODELS)
def test_a_pass_of_which_nothing_is_read_gives_every_weight_a_gradient_of_zero(name: str, layout: Layout) -> None:
    model = tiny(name)
    hidden_PD = hidden_states(model, lay_out([np.zeros(1, dtype=np.int64)], layout)[0])
    model.get_output_embeddings()(hidden_PD[:0]).sum().backward()
    for weight, parameter in model.named_parameters():
        assert parameter.grad is not None, weight  # of experts, too, to which no token went
        assert not parameter.grad.any(), weight


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_what_stands_in_the_padding_changes_nothing(layout: Layout) -> None:
    model, rows = tiny("qwen3"), branching_rows()
    inputs, index = lay_out(rows, layout)
    before_PD = hidden_states(model, inputs)
    slots = np.concatenate(paths(rows, index))
    padding = np.setdiff1d(np.arange(len(before_PD)), slots)
    assert len(padding) > 0
    inputs.ids_BL.flatten()[padding] = 7
    after_PD = hidden_states(model, inputs)
    assert torch.equal(after_PD[slots], before_PD[slots])
    assert not torch.equal(after_PD[padding], before_PD[padding])


@each("name", MODELS)
def test_a_tree_is_chosen_wherever_it_is_exact(name: str) -> None:
    assert choose_layout(tiny(name), "auto") == ("tree", None)


@pytest.mark.slow
@each("name", ARCHITECTURES)
def test_of_each_architecture_the_layout_that_is_chosen_is_exact(name: str) -> None:
    model = tiny_model(name, vocab_size=97, initializer_range=0.2)
    freeze_towers(model)
    layout, message = choose_layout(model, "auto")
    assert (layout, message) == ("tree", None)
    assert float64_error(model, layout) < 1e-9
    if name != "gpt-oss":  # which transformers masks without a look at positions
        assert float64_error(model, "packed") < 1e-9


def test_rows_are_packed_where_a_tree_lacks_what_the_model_needs() -> None:
    assert choose_layout(made("Gemma2", **GEMMA2), "auto") == (
        "packed",
        "train.layout: rows are packed, since not tree: Gemma2ForCausalLM does not run so: Gemma2Attention needs softcap, "
        "which attention along a tree lacks",
    )


@pytest.mark.parametrize("layout", first_quick(["tree", "packed"]))
@pytest.mark.parametrize("family", first_quick(RECURRENT, num=2))
def test_the_recurrent_parts_of_a_model_see_rows_one_by_one(family: str, layout: Layout) -> None:
    if (family, layout) in NOT_SO:
        with pytest.raises(
            ConfigError, match=rf"^train\.layout: {layout}: {family}ForCausalLM {NOT_SO[family, layout]}"
        ):
            choose_layout(made(family, **RECURRENT[family]), layout)
        return
    assert choose_layout(made(family, **RECURRENT[family]), layout) == (layout, None)
    assert float64_error(made(family, **RECURRENT[family]), layout) < 1e-9


def forking_rows() -> list[IntArray]:
    """Rows of which four share 40 tokens, two of these 70 more, and one nothing; what is left is short or long."""
    rng = np.random.default_rng(5)
    system, turn = rng.integers(97, size=40), rng.integers(97, size=70)
    ends = [rng.integers(97, size=length) for length in (1, 30, 9, 50, 20)]
    for place, end in enumerate(ends):
        end[0] = place  # where they part
    begins = [[system, turn], [system, turn], [system], [system], []]
    return [np.concatenate([*begin, end]) for begin, end in zip(begins, ends, strict=True)]


@pytest.mark.parametrize("layout", ["tree", "packed"])
def test_layers_that_run_again_see_the_rows_of_their_own_pass(layout: Layout) -> None:
    model = in_float64(made("Lfm2", **LFM2))
    rows = forking_rows()  # the first two have a trunk
    expected = with_gradients(model, row_logprobs(model, rows))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with attending(model, layout):
        found = [logprobs(model, part, layout) for part in (rows[:2], rows[2:])]
        got = with_gradients(model, [*found[0], *found[1]])
    assert largest_error(got, expected) < 1e-9


def test_a_recurrent_part_that_needs_more_than_hidden_states_leaves_rows_padded() -> None:
    sizes = {**SIZES, "block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 32}
    assert choose_layout(made("RecurrentGemma", **sizes), "auto")[0] == "padded"


def test_a_recurrent_part_that_returns_more_than_hidden_states_leaves_rows_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made("Lfm2", **LFM2)
    mixer = mixers_of(model)[0][1]
    plain = mixer.forward
    monkeypatch.setattr(mixer, "forward", lambda hidden_states, **_: (plain(hidden_states), None))
    for layout in ("tree", "packed"):
        gap, why = probe_layout(model, layout)
        assert gap == float("inf")
        assert "returns more than hidden states" in why


def test_what_text_does_not_go_through_is_no_recurrent_part_of_a_model() -> None:
    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = torch.nn.Conv1d(4, 4, 3)

        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states

    model = tiny("qwen3")
    model.sound = torch.nn.ModuleList([Tower()])
    assert mixers_of(model) == []
    assert choose_layout(model, "auto") == ("tree", None)


def computed(model: Any) -> list[int]:
    """Slots that each call of a recurrent part computes from now on; of the first one."""
    (_, mixer), *_ = mixers_of(model)
    plain, found = mixer.forward, list[int]()

    def counted(hidden_states: Tensor, **named: Any) -> Any:
        found.append(hidden_states.shape[0] * hidden_states.shape[1])
        return plain(hidden_states, **named)

    mixer.forward = counted
    return found


@pytest.mark.slow
@each("family", [family for family in RECURRENT if family != "Mamba2"])
def test_recurrent_parts_compute_once_what_rows_share(family: str) -> None:
    model = made(family, **RECURRENT[family])
    model.double().set_experts_implementation("eager")
    rows, goes_on = forking_rows(), family != "Jamba"  # whose kernel begins with no state
    with AllFloat64():
        expected = with_gradients(model, row_logprobs(model, rows))
        found = computed(model)
        got = with_gradients(model, logprobs(model, rows, "tree"))
    assert largest_error(got, expected) < 1e-9
    inputs, _ = lay_out(rows, "tree")
    calls = [40, 70, 5 * 50] if goes_on else [5 * 140]
    assert found == calls
    assert num_computed(inputs.paths, continues=can_continue(model)) == sum(calls)


@given(rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8), data=st.data())
def test_trunks_and_what_is_left_are_the_rows(rows: list[list[int]], data: st.DataObject) -> None:
    paths = lay_out([np.array(row) for row in rows], "tree")[0].paths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "_LEAST_SAVED", data.draw(st.integers(1, 9)))
        trunks, left = fork(paths, continues=True)
    whole = [(), *[()] * len(trunks)]
    for number, (path_W, parent) in enumerate(trunks):
        assert -1 <= parent < number
        assert len(path_W) > 1
        whole[number] = (*(whole[parent] if parent >= 0 else ()), *path_W.tolist())
    found = [(*(whole[parent] if parent >= 0 else ()), *path_W.tolist()) for path_W, parent in left]
    wanted = {tuple(path.tolist()) for path in paths}
    assert sorted(found) == sorted(
        path for path in wanted if not any(other[: len(path)] == path != other for other in wanted)
    )
    assert all(len(path_W) for path_W, _ in left)
    shared = sum(len(path_W) for path_W, _ in trunks) + sum(len(path_W) for path_W, _ in left)
    assert shared <= sum(map(len, found))


def test_rows_that_begin_others_are_not_computed_twice() -> None:
    rows = [np.array(row) for row in ([1, 2], [1, 2, 3], [1, 2, 3], [1, 4], [5])]
    cases: list[tuple[Layout, Any]] = [("tree", [[0, 1, 2], [0, 3, 0], [4, 0, 0]]), ("packed", None)]
    for layout, slots in cases:
        inputs, _ = lay_out(rows, layout)
        found = Rows.from_paths(inputs.paths, inputs.ids_BL, continues=False)
        assert slots is None or sorted(found.slot_RW.tolist()) == slots
        for path in inputs.paths:  # each slot is read from a row that holds it
            assert found.slot_RW.flatten()[found.read_BL.flatten()[path]].tolist() == path.tolist()


@pytest.mark.parametrize("family", ["Lfm2", "Qwen3_5Text"])
def test_what_leaks_from_row_to_row_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = RECURRENT[family]
    monkeypatch.setattr(layout_module, "see_rows", lambda model: False)
    for layout in ("tree", "packed"):
        assert probe_layout(made(family, **sizes), layout)[0] > 1e-2
    monkeypatch.setattr(tree_model, "mixers_of", lambda model: [])
    assert choose_layout(made(family, **sizes), "auto")[0] == "padded"


@pytest.mark.parametrize(("layout", "words"), [("tree", "needs softcap"), ("padded", "")])
def test_a_wanted_layout_that_is_not_exact_is_refused_with_the_reason(layout: Layout, words: str) -> None:
    if layout == "padded":
        assert choose_layout(made("Gemma2", **GEMMA2), layout) == (layout, None)
        return
    with pytest.raises(ConfigError, match=rf"^train\.layout: {layout}: Gemma2ForCausalLM .*{words}.*set it to auto$"):
        choose_layout(made("Gemma2", **GEMMA2), layout)


@each("layout", LAYOUTS)
def test_a_wanted_layout_that_is_exact_is_taken(layout: Layout) -> None:
    assert choose_layout(tiny("qwen3"), layout) == (layout, None)


def test_packed_rows_of_attention_that_leaks_between_them_are_refused_by_name() -> None:
    model = tiny_model("gpt-oss", vocab_size=97, initializer_range=0.2)
    with pytest.raises(ConfigError, match=r"^train\.layout: packed: GptOssForCausalLM .*set it to auto$"):
        choose_layout(model, "packed")


@pytest.mark.slow
@each("name", ARCHITECTURES)
def test_in_bfloat16_what_leaks_is_further_off_than_rounding(name: str) -> None:
    model = tiny_model(name, vocab_size=97, initializer_range=0.2)
    freeze_towers(model)
    leaking = {"gpt-oss": ("packed",)}.get(name, ())
    for layout in ("tree", "packed"):
        noise, _ = probe_noise(model, layout)
        assert noise > 2 if layout in leaking else noise < 1.6, layout


@pytest.mark.parametrize("half", [False, True])
def test_a_kernel_of_bfloat16_that_is_wrong_is_passed_over(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tree_attention

    def attend(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = real(query, *args, **kwargs)
        return out.roll(1, dims=1) if query.dtype == torch.bfloat16 else out

    monkeypatch.setattr(tree_model, "tree_attention", attend)
    layout, message = choose_layout(tiny("llama"), "auto", half=half)
    if not half:
        assert (layout, message) == ("tree", None)
        return
    assert layout == "packed"
    assert message is not None
    assert re.search(
        r"not tree: LlamaForCausalLM in bfloat16 is \d+\.\d times as far from float32 so as row by row$", message
    )


def test_of_attention_that_has_no_float32_rows_are_padded() -> None:
    model = tiny("qwen3")
    model.config._attn_implementation = "flash_attention_2"  # which only a machine with its kernels can set by itself
    why = "model.attention: flash_attention_2 has no float32, in which layouts are proven; leave "
    warning = f"train.layout: rows are padded, since {why}it out to have them as a tree"
    assert choose_layout(model, "auto") == ("padded", warning)
    assert choose_layout(model, "padded") == ("padded", None)
    with pytest.raises(
        ConfigError, match=rf"^train\.layout: packed: {why}model\.attention out, or set train\.layout to padded$"
    ):
        choose_layout(model, "packed")


def test_padded_rows_need_no_proof() -> None:
    assert choose_layout(None, "padded") == ("padded", None)


@pytest.mark.slow
@each("init", [0.02, 0.2])
@each("name", MODELS)
def test_the_probe_accepts_what_is_exact_and_leaves_no_trace(name: str, init: float) -> None:
    model = tiny(name, init=init).train()
    for layout in LAYOUTS:
        assert probe_layout(model, layout)[0] < 1e-5
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("wrong", [None, 21])
def test_the_probe_sees_a_wrong_window(wrong: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any, window: int | None, **kwargs: Any) -> Tensor:
        assert window == 20
        return tree_attention(*args, window=wrong, **kwargs)

    monkeypatch.setattr(tree_model, "tree_attention", attend)
    assert probe_layout(tiny("mistral", init=0.02), "tree")[0] > 1e-2


def doubled_gradient(number: int) -> Callable[..., Tensor]:
    """Attention that is right but for the gradient in the query (0), the key (1) or the value (2)."""

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        states = list(args)
        states[number] = 2 * states[number] - states[number].detach()
        return tree_attention(*states, **kwargs)

    return attend


@pytest.mark.slow
@each("number", [0, 1, 2])
@each("name", ["qwen3", "llama", "gpt2"])
def test_the_probe_sees_a_wrong_gradient(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_model, "tree_attention", doubled_gradient(number))
    model = tiny(name)
    assert probe_layout(model, "tree")[0] > 1e-2
    assert choose_layout(model, "auto")[0] == "packed"
    assert probe_layout(model.requires_grad_(False), "tree")[0] < 1e-5  # log-probabilities are right


@pytest.mark.parametrize("number", [1, 2])
def test_the_probe_sees_a_wrong_gradient_in_a_model_of_one_layer(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_model, "tree_attention", doubled_gradient(number))
    assert probe_layout(tiny("qwen3", num_hidden_layers=1), "tree")[0] > 1e-2


def test_the_probe_sees_a_wrong_gradient_where_only_matrices_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_model, "tree_attention", doubled_gradient(2))
    model = tiny("qwen3")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 2)  # as adapters are
    assert probe_layout(model, "tree")[0] > 1e-2


def test_the_probe_does_not_take_nan_for_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_model, "tree_attention", lambda *args, **kwargs: args[0] * torch.nan)
    assert probe_layout(tiny("qwen3"), "tree")[0] == float("inf")


def test_a_kernel_that_fails_is_passed_over_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(tree_model, "tree_attention", attend)
    model = tiny("qwen3").train()
    assert probe_layout(model, "tree") == (float("inf"), "Qwen3ForCausalLM does not run so: out of shared memory")
    layout, message = choose_layout(model, "auto")
    assert layout == "packed"
    assert message is not None
    assert message.endswith("since not tree: Qwen3ForCausalLM does not run so: out of shared memory")
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_rows_of_the_probe_are_longer_than_a_window_that_cuts_rows() -> None:
    lengths = []
    for window, max_tokens in ((None, 8192), (20, 8192), (100, 8192), (100, 101), (100, 100), (1000, 8192)):
        config = tiny("mistral", sliding_window=window).config
        lengths.append([len(row) for row in _probe_rows(config, max_tokens, seed=0)])
    assert [row[0] for row in lengths] == [48, 48, 124, 124, 48, 256]  # the model has 256 positions
    long = transformers.Qwen3Config(vocab_size=2)
    assert [len(row) for row in _probe_rows(long, 8192, seed=0, least=416)] == [416, 411, 411, 138, 138]


@each("seed", range(5))
def test_the_probe_branches_at_two_depths_and_packs_two_rows_into_one(seed: int) -> None:
    rows = _probe_rows(transformers.Qwen3Config(vocab_size=2), 8192, seed=seed)
    assert pack([len(row) for row in rows]) == [[0], [1], [2], [3, 4]]
    tree = plan_tree(rows[:3])
    assert sorted((tree.stop_S - tree.start_S).tolist()) == [11, 16, 16, 16, 27]
    assert sorted(tree.depth_P[tree.start_S].tolist()) == [0, 16, 16, 32, 32]


@each(
    ("family", "sizes", "words"),
    [
        ("Mamba2", MAMBA2, "takes no position_ids"),
        ("Rwkv", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}, "has an attention of its own"),
        ("Bloom", {"vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 4}, "has an attention of its own"),
        ("Gemma2", GEMMA2, "needs softcap"),
    ],
)
def test_the_probe_refuses_models_that_cannot_take_a_tree(family: str, sizes: dict[str, Any], words: str) -> None:
    model = made(family, **sizes)
    before = model.config._attn_implementation
    gap, why = probe_layout(model, "tree")
    assert gap == float("inf")
    assert words in why
    assert model.config._attn_implementation == before
