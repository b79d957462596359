"""Compiled layers of a tiny Qwen3: the same losses and gradients, and how many graphs that takes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from agentrl.credit import Credit
from agentrl.errors import ConfigError
from agentrl.learn.config import TrainConfig
from agentrl.learn.learner import Gradient
from agentrl.policy.config import Layout, LocalModelConfig
from agentrl.policy.model import compile_layers, make_local_model
from tests.support.each import each
from tests.support.learners import TOKENIZER, make_learner
from tests.support.trajectories import some_groups

GROUPS = some_groups([4, 4, 4])
RNG = np.random.default_rng(0)
CREDITS = [[Credit.from_tokens(t, RNG.normal(size=t.num_action_tokens)) for t in g.trajectories] for g in GROUPS]
TWO_LAYERS = LocalModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=32)
CPU = torch.device("cpu")


def a_model() -> Any:
    torch.manual_seed(0)
    return make_local_model(TWO_LAYERS, TOKENIZER)


def gradients(
    layout: Layout, backend: str | None, *, max_tokens: int, checkpointing: bool, **options: Any
) -> tuple[Gradient, torch.Tensor]:
    """Return what one minibatch gives, on layers that are compiled by a backend; None: not compiled."""
    model = a_model()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    options |= {"num_minibatches": 1, "max_tokens_per_micro_batch": max_tokens}
    learner = make_learner(model=model, layout=layout, **options)
    if backend is not None:
        compile_layers(learner.state.policy.model, CPU, backend=backend)
    learner.state.wrapped.train()
    plan = learner.plan(learner.draw(GROUPS, CREDITS, version=1)[0])
    anchors = learner._current_anchors(plan)
    gradient = learner.add_gradients(plan, anchors, version=1)
    found = [weight.grad for weight in learner.state.policy.parameters()]
    return gradient, torch.cat([weight.flatten() for weight in found if weight is not None])


@pytest.fixture(autouse=True)
def may_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch compile, which vLLM in the process of the tests turns off, in a precision of each test's own."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@each(
    ("layout", "checkpointing", "graphs", "breaks"),
    [("packed", True, 6, 0), ("padded", False, 4, 0), ("tree", False, 8, 4), ("tree", True, 10, 5)],
)
def test_a_layer_is_one_graph_for_each_kind_of_pass(
    layout: Layout, checkpointing: bool, graphs: int, breaks: int
) -> None:
    expected, gradient_W = gradients(layout, None, max_tokens=60, checkpointing=checkpointing)
    torch._dynamo.reset()
    counters.clear()
    found, compiled_W = gradients(layout, "aot_eager", max_tokens=60, checkpointing=checkpointing)
    assert found.stats.loss == pytest.approx(expected.stats.loss, rel=1e-6)
    torch.testing.assert_close(compiled_W, gradient_W, rtol=1e-5, atol=1e-7)
    # Both layers share their graphs: with a gradient and without, for one line and for several (a tree has one line, and
    # its attention lies between graphs of the layer and of its part around it), more in passes that run again.
    assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (graphs, breaks)


@pytest.mark.slow
def test_layers_are_compiled_once_for_all_copies_of_their_weights() -> None:
    options: dict[str, Any] = {"precision": "bfloat16", "autocast": True, "bfloat16_copy": True, "checkpointing": True}
    expected, gradient_W = gradients("packed", None, max_tokens=60, **options)
    torch._dynamo.reset()
    counters.clear()
    found, compiled_W = gradients("packed", "aot_eager", max_tokens=60, **options)
    assert found.stats.loss == pytest.approx(expected.stats.loss, abs=1e-3)
    assert (compiled_W - gradient_W).norm() < 0.02 * gradient_W.norm()
    assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (4, 0)


@pytest.mark.slow
def test_inductor_computes_the_same() -> None:
    expected, gradient_W = gradients("packed", None, max_tokens=10_000, checkpointing=False)
    torch._dynamo.reset()
    found, compiled_W = gradients("packed", "inductor", max_tokens=10_000, checkpointing=False)
    assert found.stats.loss == pytest.approx(expected.stats.loss, rel=1e-5)
    torch.testing.assert_close(compiled_W, gradient_W, rtol=1e-4, atol=1e-6)


def test_weights_keep_their_names_and_what_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    names = list(model.state_dict())
    compile_layers(model, CPU)
    assert list(model.state_dict()) == names

    def none_here() -> str:
        raise InvalidCxxCompiler

    with monkeypatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # as by vLLM in the process, after torch was imported
        with pytest.raises(ConfigError, match=r"TORCHDYNAMO_DISABLE .* engine\.name to vllm_server"):
            compile_layers(a_model(), CPU)
    with monkeypatch.context() as patch:
        patch.setattr(cpp_builder, "get_cpp_compiler", none_here)
        with pytest.raises(ConfigError, match=r"install a C\+\+ compiler .*, or set it to none"):
            compile_layers(a_model(), CPU)
    unnamed = torch.nn.Linear(2, 2)
    unnamed._no_split_modules = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"train\.compile: Linear does not name its layers"):
        compile_layers(unnamed, CPU)
    with pytest.raises(ValueError, match="compile: layers and sharding: full"):
        TrainConfig(compile="layers", sharding="full")
