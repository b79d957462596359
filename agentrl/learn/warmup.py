"""A short supervised phase on demonstrations, so that a model knows the form of its answers before it is rewarded for any.

`T` demonstrated tokens of a pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch

from agentrl.learn.config import WarmupConfig
from agentrl.learn.plan import Planner
from agentrl.learn.tokens import TokenBatch, rows_of
from agentrl.policy.layout import attending
from agentrl.policy.model import Policy
from agentrl.rollout import derive_seed
from agentrl.rollout.demonstrations import Demonstration


def warm_up(
    policy: Policy,
    examples: list[Demonstration],
    config: WarmupConfig,
    *,
    seed: int,
    max_tokens: int,
    on_step: Callable[[int, float], None] = lambda _step, _loss: None,
) -> float:
    """Minimise the mean negative log-likelihood of the demonstrated actions; return the last step's.

    Args:
        policy: trained in place.
        examples: demonstrations.
        config: steps, batch size, learning rate.
        seed: order of the demonstrations.
        max_tokens: budget of a micro-batch.
        on_step: called with the step and its loss.
    """
    planner = Planner.for_policy(policy, max_tokens=max_tokens, device=next(policy.parameters()).device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate_factor, steps=config.steps))
    rng = np.random.default_rng(derive_seed(seed, "warm-up"))
    order: list[int] = []
    loss_value = float("nan")
    policy.train()
    for step in range(config.steps):
        while len(order) < config.batch_size:
            order += rng.permutation(len(examples)).tolist()
        chosen, order = [examples[i] for i in order[: config.batch_size]], order[config.batch_size :]
        tokens = demonstrated_tokens(chosen)
        weight = 1 / len(tokens)
        loss_value = 0.0
        for micro in planner.micro_batches(tokens):
            with attending(policy.model, policy.layout), policy.rounding():
                logprobs_T, _ = policy(micro.inputs, micro.slot_T, micro.target_T, 1.0)
                loss: Any = -(weight * logprobs_T).sum()
                loss.backward()
            loss_value += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        on_step(step + 1, loss_value)
    return loss_value


def _rate_factor(step: int, *, steps: int) -> float:
    """Return the factor of the learning rate of a step, counted from 0.

    Full rate for most of the way: copying from the context is learned late and at once, and a rate that falls early stops
    short of it.
    """
    return min(1.0, (step + 1) / min(20, ceil(steps / 10)), (steps - step) / min(50, ceil(steps / 4)))


def demonstrated_tokens(examples: Sequence[Demonstration]) -> TokenBatch:
    """Lay out demonstrations, with the tokens of all their actions."""
    rows = [rows_of(demonstration.turns) for demonstration in examples]
    return TokenBatch.from_rows(rows, group_ids=["demonstration"] * len(rows))


def draw_demonstrations(examples: Sequence[Demonstration], *, num: int, seed: int) -> list[Demonstration]:
    """Return so many of the demonstrations, or all if there are fewer, drawn by a seed."""
    chosen = np.random.default_rng(seed).choice(len(examples), size=min(num, len(examples)), replace=False)
    return [examples[index] for index in chosen]
