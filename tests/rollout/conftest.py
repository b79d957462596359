"""A tiny Qwen3 with random weights behind the real engine, and a renderer under which it ends its turns."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import make_local_model
from agentrl.rollout import RolloutPool
from tests.support.renderers import OftenStops, StartsAgain

NewEngine = Callable[..., TransformersEngine]
Opened = Callable[[RolloutPool], RolloutPool]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer([], vocab_size=261)


@pytest.fixture(scope="session")
def model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    sizes = LocalModelConfig(
        hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32, initializer_std=0.3
    )
    return make_local_model(sizes, tokenizer)


@pytest.fixture
def renderer(tokenizer: Any) -> ChatMLRenderer:
    return OftenStops(tokenizer)


@pytest.fixture
def forking_renderer(tokenizer: Any) -> ChatMLRenderer:
    return StartsAgain(tokenizer, word="again")


@pytest.fixture
def rarely_stopping_renderer(tokenizer: Any) -> ChatMLRenderer:
    return ChatMLRenderer(tokenizer)


@pytest.fixture
def new_engine(model: Any) -> NewEngine:
    def make(kind: type[TransformersEngine] = TransformersEngine, **config: Any) -> TransformersEngine:
        return kind(copy.deepcopy(model), TransformersConfig(**config))

    return make


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Close the pools that are given to it at the end of the test."""
    with ExitStack() as stack:
        yield lambda pool: stack.enter_context(closing(pool))


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an episode's second retry wait for a moment, not for a second."""
    monkeypatch.setattr("agentrl.rollout.pool._FIRST_WAIT_S", 0.02)
