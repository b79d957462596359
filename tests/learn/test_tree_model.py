"""Transformers models on a tree against the same models on one row after another."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from agentrl.learn import tree_model
from agentrl.learn.tree import IntArray, plan_tree
from agentrl.learn.tree_attention import TreeLayout, tree_attention
from agentrl.learn.tree_model import TreeError, probe_tree, tree_attention_of, tree_hidden, why_not

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2_SIZES = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 8}),
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 20}),
    "gemma3": (
        "Gemma3Text",
        {**SIZES, "head_dim": 8, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt2": (
        "GPT2",
        {**GPT2_SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 1, "bos_token_id": 1},
    ),
}
"""Family and sizes; the rows below are up to 90 tokens long, so that windows of 20 cut them."""


def tiny(name: str, *, init: float = 0.2, **changes: Any) -> Any:
    family, sizes = MODELS[name]
    return made(family, initializer_range=init, **sizes | changes)


def made(family: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**sizes))


def in_float64(model: Any) -> Any:
    """The model with nothing left that computes in float32 between float64 layers."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
    return model.double()


def branching_rows() -> list[IntArray]:
    """Forks at several depths, of forks, a row that another continues, a row twice, and one that shares nothing."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(97, size=length) for length in (90, 80, 70, 60, 30, 30, 25)]
    for row, (source, fork) in zip(rows[1:], [(0, 40), (1, 60), (0, 10), (0, 30), (4, 30), (0, 0)], strict=True):
        row[:fork] = rows[source][:fork]
    return rows


def next_logprobs(model: Any, hidden_LD: Tensor, ids_L: IntArray) -> Tensor:
    logprobs_LV: Tensor = model.get_output_embeddings()(hidden_LD[:-1]).log_softmax(-1)
    return logprobs_LV.gather(1, torch.from_numpy(ids_L[1:])[:, None])[:, 0]


def tree_logprobs(model: Any, rows: list[IntArray]) -> list[Tensor]:
    tree = plan_tree(rows)
    hidden_ND = tree_hidden(model, tree)
    paths = [tree.index(np.full(len(ids), r), np.arange(len(ids))) for r, ids in enumerate(rows)]
    return [next_logprobs(model, hidden_ND[path], ids) for path, ids in zip(paths, rows, strict=True)]


def row_logprobs(model: Any, rows: list[IntArray]) -> list[Tensor]:
    states = [model.base_model(input_ids=torch.from_numpy(ids)[None], use_cache=False) for ids in rows]
    return [next_logprobs(model, state.last_hidden_state[0], ids) for state, ids in zip(states, rows, strict=True)]


def with_gradients(model: Any, logprobs: list[Tensor]) -> dict[str, Tensor]:
    """Log-probabilities, and gradients of a sum of them with random weights."""
    values = torch.cat(logprobs)
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad((values * weights.to(values)).sum(), list(parameters.values()))
    return {"logprobs": values.detach(), **dict(zip(parameters, gradients, strict=True))}


def largest_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference within a tensor, over the largest entry of the expected one."""
    return max(float((got[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected)


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_gradients_equal_those_of_separate_rows(name: str) -> None:
    model, rows = tiny(name), branching_rows()
    got = with_gradients(model, tree_logprobs(model, rows))
    assert largest_error(got, with_gradients(model, row_logprobs(model, rows))) < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "gpt2"])
def test_in_float64_they_are_equal_to_rounding(name: str) -> None:
    # Not so the routers of Qwen3-MoE and the norms of Gemma 3, which compute in float32 whatever they are given.
    model, rows = in_float64(tiny(name)), branching_rows()
    got = with_gradients(model, tree_logprobs(model, rows))
    assert got["logprobs"].dtype == torch.float64
    assert largest_error(got, with_gradients(model, row_logprobs(model, rows))) < 1e-9


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_under_autocast_the_difference_is_rounding_to_bfloat16(name: str) -> None:
    model, rows = tiny(name, init=0.05), branching_rows()
    exact = with_gradients(model, row_logprobs(model, rows))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        on_tree, by_row = (with_gradients(model, run(model, rows)) for run in (tree_logprobs, row_logprobs))
    assert 0 < largest_error(on_tree, exact) < 1.5 * largest_error(by_row, exact) < 0.1


def test_gradient_checkpointing_runs_layers_again_along_the_tree() -> None:
    model, rows = tiny("qwen3"), branching_rows()
    expected = with_gradients(model, tree_logprobs(model, rows))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    with pytest.raises(TreeError, match=r"put forward and backward into `with tree_attention_of\(model\):`"):
        tree_hidden(model, plan_tree(rows))
    with tree_attention_of(model):
        assert largest_error(with_gradients(model, tree_logprobs(model, rows)), expected) < 1e-5
    with torch.no_grad():  # nothing will run again
        torch.testing.assert_close(torch.cat(tree_logprobs(model, rows)), expected["logprobs"])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_attends_as_before_afterwards(attention: str) -> None:
    model = tiny("qwen3", attn_implementation=attention)
    ids = torch.arange(20)[None]
    before = model(ids).logits
    tree_hidden(model, plan_tree(branching_rows()))
    assert model.config._attn_implementation == attention
    with pytest.raises(IndexError), tree_attention_of(model):
        tree_hidden(model, plan_tree([np.array([97])]))
    assert model.config._attn_implementation == attention
    assert torch.equal(model(ids).logits, before)


def test_without_a_tree_nothing_is_computed() -> None:
    model = tiny("qwen3")
    with tree_attention_of(model), pytest.raises(TreeError, match="was called without a tree"):
        model(torch.arange(20)[None])


@pytest.mark.parametrize("init", [0.02, 0.2])
@pytest.mark.parametrize("name", MODELS)
def test_the_probe_accepts_models_that_run_on_a_tree(name: str, init: float) -> None:
    model = tiny(name, init=init).train()
    assert probe_tree(model) < 1e-5
    assert model.training
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("wrong", [None, 21])
def test_the_probe_sees_a_wrong_window(wrong: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any, window: int | None, **kwargs: Any) -> Tensor:
        assert window == 20
        return tree_attention(*args, window=wrong, **kwargs)

    monkeypatch.setattr(tree_model, "tree_attention", attend)
    assert probe_tree(tiny("mistral", init=0.02)) > 1e-2


def test_the_probe_does_not_take_nan_for_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_model, "tree_attention", lambda *args, **kwargs: args[0] * torch.nan)
    assert probe_tree(tiny("qwen3")) == float("inf")


def test_rows_of_the_probe_are_longer_than_a_window_that_cuts_rows() -> None:
    lengths = []
    for window, max_tokens in ((None, 8192), (20, 8192), (100, 8192), (100, 101), (100, 100), (1000, 8192)):
        config = tiny("mistral", sliding_window=window).config
        lengths.append([len(row) for row in tree_model._probe_rows(config, max_tokens, 0)])
    assert [row[0] for row in lengths] == [48, 48, 124, 124, 48, 256]  # the model has 256 positions


@pytest.mark.parametrize("seed", range(5))
def test_the_probe_branches_at_two_depths(seed: int) -> None:
    tree = plan_tree(tree_model._probe_rows(transformers.Qwen3Config(vocab_size=2), 8192, seed))
    assert sorted((tree.stop_S - tree.start_S).tolist()) == [11, 16, 16, 16, 27]
    assert sorted(tree.depth_N[tree.start_S].tolist()) == [0, 16, 16, 32, 32]


HYBRID = {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        (
            "Mamba2",
            {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 8},
            "is recurrent",
        ),
        ("Qwen3Next", {**HYBRID, "shared_expert_intermediate_size": 16}, "is recurrent"),
        ("Lfm2", {**SIZES, "layer_types": ["conv", "full_attention"]}, "has layers of type conv"),
        ("Bloom", {"vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 4}, "has an attention of its own"),
        ("Gemma2", {**SIZES, "head_dim": 8}, "needs softcap"),
    ],
)
def test_the_probe_refuses_models_that_cannot_take_a_tree(
    family: str, sizes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = made(family, **sizes)
    before = model.config._attn_implementation
    with caplog.at_level(logging.INFO):
        assert probe_tree(model) == float("inf")
    assert words in caplog.text
    assert model.config._attn_implementation == before


def test_a_recurrent_model_that_hides_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Lfm2", **SIZES, layer_types=["conv", "full_attention"], initializer_range=0.08)
    assert why_not(model) is not None
    monkeypatch.setattr(tree_model, "why_not", lambda model: None)
    assert probe_tree(model) > 1e-2


@pytest.mark.parametrize(
    ("mask", "extra", "words"),
    [
        (torch.zeros(1, 1, 3, 3), {}, "needs attention_mask"),
        (None, {"is_causal": False}, "needs is_causal=False"),
        (None, {"s_aux": torch.zeros(2)}, "needs s_aux"),
    ],
)
def test_attention_that_does_more_than_look_up_the_tree_is_refused(
    mask: Tensor | None, extra: dict[str, Any], words: str
) -> None:
    states = torch.zeros(1, 2, 3, 4)
    layout = TreeLayout(plan_tree([np.arange(3)]))
    with pytest.raises(TreeError, match=f"Identity {words}, which attention along a tree lacks"):
        tree_model._attend(nn.Identity(), states, states, states, mask, agentrl_tree=layout, **extra)


def test_a_window_of_the_module_counts_where_none_is_passed() -> None:
    query, key, value = torch.randn(3, 1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    layout = TreeLayout(plan_tree([np.arange(9)]))
    module = nn.Identity()
    module.sliding_window = 2  # type: ignore[assignment]
    got, _ = tree_model._attend(module, query, key, value, None, scaling=0.5, agentrl_tree=layout)
    narrow = tree_attention(query[0], key[0], value[0], layout, scale=0.5, window=2)
    assert torch.equal(got[0].transpose(0, 1), narrow)


def test_dropout_is_refused() -> None:
    model = tiny("gpt2", attn_pdrop=0.1).train()
    with pytest.raises(TreeError, match="GPT2Attention needs dropout"):
        tree_hidden(model, plan_tree(branching_rows()))
