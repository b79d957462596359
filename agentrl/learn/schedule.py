"""The learning rate's course over the minibatches of a run."""

import math
from functools import partial
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

ScheduleName = Literal["constant", "linear", "cosine"]


def make_schedule(name: ScheduleName, optimizer: Optimizer, *, num_warmup: int, num_minibatches: int) -> LambdaLR:
    """Make the schedule of a run of so many minibatches, of which the rate rises over the first."""
    return LambdaLR(optimizer, partial(rate_factor, name=name, num_warmup=num_warmup, num_minibatches=num_minibatches))


def rate_factor(minibatch: int, *, name: ScheduleName, num_warmup: int, num_minibatches: int) -> float:
    """Return what the learning rate of a minibatch, counted from 0, is multiplied by.

    A rise from 0 to 1 in a straight line; then 1, a straight line to 0, or half a cosine to 0. Numbers are those of
    `transformers.get_scheduler`, to the last bit; importing that takes seconds.
    """
    if minibatch < num_warmup:
        return minibatch / num_warmup
    if name == "constant":
        return 1.0
    progress = (minibatch - num_warmup) / max(1, num_minibatches - num_warmup)
    if name == "linear":
        return max(0.0, (num_minibatches - minibatch) / max(1, num_minibatches - num_warmup))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
