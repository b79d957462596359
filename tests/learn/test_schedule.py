from typing import get_args

import torch
from transformers import get_scheduler

from agentrl.learn.config import ScheduleName, make_schedule
from tests.support.each import each


@each("num_warmup", [0, 1, 7])
@each("name", get_args(ScheduleName))
def test_rates_are_those_of_transformers_to_the_last_bit(name: ScheduleName, num_warmup: int) -> None:
    ours, theirs = (torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=3e-4) for _ in range(2))
    found = make_schedule(name, ours, num_warmup=num_warmup, num_minibatches=40)
    expected = get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        theirs,
        num_warmup_steps=num_warmup,
        num_training_steps=40,
    )
    for _ in range(40):
        assert found.get_last_lr() == expected.get_last_lr()
        for optimizer, schedule in ((ours, found), (theirs, expected)):
            optimizer.step()
            schedule.step()
    assert found.get_last_lr() == [3e-4 if name == "constant" else 0.0]
