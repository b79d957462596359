"""The warm-up, and its defaults by what is trained."""

from typing import Any

import pytest
import torch

from agentrl.chat import ChatMLRenderer, HistoryConfig
from agentrl.errors import ConfigError
from agentrl.learn.config import WarmupConfig
from agentrl.learn.warmup import _rate_factor, warm_up
from agentrl.policy.config import LoraSettings
from agentrl.policy.lora import add_lora
from agentrl.recipe.config import load_recipe
from agentrl.rollout.demonstrations import demonstrate
from agentrl.rollout.tasks import Tasks
from agentrl_envs.key_door import KeyDoor
from tests.support.each import each
from tests.support.played import TOKENIZER, new_policy

WHOLE = {"name_or_path": "a/b"}
ADAPTERS = {"name_or_path": "a/b", "lora": {"rank": 4}}


def test_the_rate_rises_and_falls_within_a_short_warm_up_and_as_ever_within_a_long_one() -> None:
    assert [_rate_factor(step, steps=20) for step in (0, 1, 15, 16, 19)] == [0.5, 1.0, 1.0, 0.8, 0.2]
    assert _rate_factor(0, steps=1) == 1.0
    for steps in (200, 300, 2000):  # of models made here: up over 20 steps, down over 50
        factors = [_rate_factor(step, steps=steps) for step in range(steps)]
        assert factors == [min(1.0, (step + 1) / 20, (steps - step) / 50) for step in range(steps)]


@pytest.mark.slow
@each("is_adapted", [False, True])
def test_it_makes_demonstrations_likely_by_what_is_trained_alone(is_adapted: bool) -> None:
    renderer, tasks = ChatMLRenderer(TOKENIZER), Tasks(seed=0)
    examples = [
        demonstrate(KeyDoor, renderer, task=tasks.train(k), skill=1.0, max_turns=8, view=HistoryConfig())
        for k in range(4)
    ]
    policy = new_policy()
    if is_adapted:
        add_lora(policy.model, LoraSettings(rank=4))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    losses: list[float] = []
    config = WarmupConfig(steps=12, batch_size=4, learning_rate=3e-2 if is_adapted else 1e-2)
    warm_up(policy, examples, config, seed=0, max_tokens=4096, on_step=lambda _, loss: losses.append(loss))
    assert losses[-1] < losses[0] - 0.5
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved) == is_adapted


@each(
    ("model", "warmup", "expected"),
    [
        ({}, {}, (0, 16, 2048, 1e-3)),
        ({}, {"steps": 3}, (3, 16, 2048, 1e-3)),
        (WHOLE, {}, (0, 8, 256, 2e-5)),
        (ADAPTERS, {"steps": 12}, (12, 8, 256, 2e-4)),
        (WHOLE, {"steps": 12, "learning_rate": 1e-5, "batch_size": 2}, (12, 2, 256, 1e-5)),
        (WHOLE, {"dialogues": "a.jsonl"}, (20, 8, 256, 2e-5)),
        (ADAPTERS, {"dialogues": "a.jsonl", "steps": 5}, (5, 8, 256, 2e-4)),
    ],
)
def test_its_defaults_follow_what_is_trained(
    model: dict[str, Any], warmup: dict[str, Any], expected: tuple[float, ...]
) -> None:
    found = load_recipe({"model": model, "warmup": warmup}).warmup
    assert (found.steps, found.batch_size, found.num_demonstrations, found.learning_rate) == pytest.approx(expected)


@each(
    ("model", "train", "rate"),
    [({}, {}, 3e-4), (WHOLE, {}, 1e-6), (ADAPTERS, {}, 1e-5), (WHOLE, {"learning_rate": 3e-4}, 3e-4)],
)
def test_a_pretrained_model_is_not_lost_to_a_rate_that_nobody_chose(
    model: dict[str, Any], train: dict[str, Any], rate: float
) -> None:
    recipe = load_recipe({"model": model, "train": train})
    assert recipe.train.learning_rate == pytest.approx(rate)
    assert load_recipe(recipe.model_dump(mode="json")) == recipe  # as a run's folder keeps it


def test_dialogues_that_nothing_would_read_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"warmup\.dialogues: a model made here .* set model\.name_or_path"):
        load_recipe({"warmup": {"dialogues": "a.jsonl", "steps": 3}})
    with pytest.raises(ConfigError, match=r"warmup\.dialogues: with warmup\.steps: 0 nothing reads them"):
        load_recipe({"model": WHOLE, "warmup": {"dialogues": "a.jsonl", "steps": 0}})
    read = {"model": WHOLE, "warmup": {"dialogues": "a.jsonl", "steps": 0}, "loss": {"nll": {"of": "demonstrations"}}}
    assert load_recipe(read).warmup.steps == 0
