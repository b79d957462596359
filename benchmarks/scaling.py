"""What a step takes of each process as there are more of them: memory, bytes that are told, seconds.

    python -m benchmarks.scaling [--processes 1 2 4 8 16] [--groups 4] [--more 8 16 32] [--turns 16] [--minibatches 4]

Each process has groups of eight trajectories of its own, each turn 96 tokens of observation and 32 of action, and takes a step
with them as a run does: all tell the first of their groups, it assigns credit and deals each process its share of every
minibatch, all update (one layer of hidden size 16, so that the model takes nothing). Told are memory of a process's own
(`RssAnon`) above that before, of the first once the groups are there, and at the peak of the first and of the largest
of the others; seconds of the first; and the bytes that each sends to the first, and the first to each. Then the same of two
processes with `--more` groups each.

Then what it is of each token (least squares): of the first, of those of all processes and of its own; of another, of its
own. And what that says for larger machines (`--say`: processes, trajectories of each, tokens of each). Seconds of telling
there are those of a process that takes in as many bytes a second as the first did here (the median over the rows); the
network takes what it takes.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from transformers import Qwen3ForCausalLM

from agentrl import Trajectory, TrajectoryGroup, Turn, assign_credit, load_credit
from agentrl.distributed.processes import barrier, is_main, process_index, to_rank_zero
from agentrl.learn.config import LossConfig, TrainConfig
from agentrl.learn.learner import Learner
from agentrl.learn.policy_state import PolicyState
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import Policy, local_config
from agentrl.testing import make_group
from benchmarks.loading import Peak, own_memory
from tests.support.several import together

OBSERVATION, ACTION, MEMBERS = 96, 32, 8
IDS = (300, 2_000)
"""Token ids: none of the small integers of which Python keeps one each."""


def new_learner(num_minibatches: int) -> Learner:
    """Return a learner of a model that takes next to nothing."""
    sizes = LocalModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)
    config = TrainConfig(device="cpu", num_minibatches=num_minibatches, max_tokens_per_micro_batch=4096)
    policy = Policy(Qwen3ForCausalLM(local_config(sizes, vocab_size=IDS[1])), layout="tree")
    state = PolicyState(policy, accelerator=Accelerator(cpu=True), config=config)
    return Learner(state, loss=LossConfig(), config=config, temperature=1.0, seed=1)


def played(process: int, number: int, *, turns: int) -> TrajectoryGroup:
    """Return a group whose tokens are objects of their own, as those of an engine are."""
    group_id = f"{process}/{number}"
    rng = np.random.default_rng([process, number])

    def turn(old: Turn, *, is_last: bool) -> Turn:
        return replace(
            old,
            observation_ids=tuple(rng.integers(*IDS, OBSERVATION).tolist()),
            action_ids=tuple(rng.integers(*IDS, ACTION).tolist()),
            behavior_logprobs=tuple((-7.5 + 0.1 * rng.normal(size=ACTION)).tolist()),
            reward=float(rng.integers(2)) if is_last else 0.0,
            message={"role": "assistant", "content": "x" * 4 * ACTION},
        )

    group = make_group([[0.0] * turns] * MEMBERS, group_id=group_id, action_lengths=[[ACTION] * turns] * MEMBERS)
    members: list[Trajectory] = [
        replace(t, turns=tuple(turn(one, is_last=number == turns - 1) for number, one in enumerate(t.turns)))
        for t in group.trajectories
    ]
    return replace(group, trajectories=tuple(members))


class Taken(NamedTuple):
    """What a step takes of a process; memory and bytes in MB."""

    process: int
    gathered: float
    peak: float
    telling_s: float
    credit_s: float
    update_s: float
    told: float
    """To the first; and of the first to all others in turn."""


def step(num_groups: int, turns: int, num_minibatches: int) -> Taken:
    """Take a step as one of several processes."""
    learner = new_learner(num_minibatches)
    credit = load_credit({"scheme": "uniform"})
    own = [played(process_index(), number, turns=turns) for number in range(num_groups)]
    num_sent, send = 0, dist.send

    def counted(tensor: Tensor, *args: Any, **named: Any) -> None:
        nonlocal num_sent
        num_sent += tensor.nbytes
        send(tensor, *args, **named)

    barrier()
    before, start = own_memory(), time.monotonic()
    with Peak() as memory, patch.object(dist, "send", counted):
        groups = to_rank_zero(own)
        gathered, telling = own_memory() - before, time.monotonic() - start
        credits = assign_credit(credit, groups) if is_main() else []
        crediting = time.monotonic() - start - telling
        learner.update(groups, credits, version=1)
        updating = time.monotonic() - start - telling - crediting
    return Taken(process_index(), gathered, memory.most, telling, crediting, updating, num_sent / 1e6)


class Row(NamedTuple):
    """What a step takes of the first process, and at most of another."""

    processes: int
    own: int
    """Tokens of each process."""
    first: Taken
    other: Taken

    @classmethod
    def measured(cls, processes: int, groups: int, options: argparse.Namespace) -> "Row":
        first, *others = sorted(together(processes, step, groups, options.turns, options.minibatches))
        other = Taken(*(max(column) for column in zip(*(others or [first]), strict=True)))
        row = cls(processes, groups * MEMBERS * options.turns * (OBSERVATION + ACTION), first, other)
        memory = (
            f"{first.gathered:.0f} | {first.peak:.0f} | {other.peak:.0f}" if others else f"0 | {first.peak:.0f} | -"
        )
        seconds = f"{first.telling_s:.1f} | {first.credit_s:.1f} | {first.update_s:.1f}"
        told = f"{other.told:.2f} | {row.dealt:.2f}" if others else "- | -"
        print(f"| {processes} | {row.own:,} | {memory} | {seconds} | {told} |", flush=True)
        return row

    @property
    def dealt(self) -> float:
        """Of the first to each, in MB."""
        return self.first.told / max(1, self.processes - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--more", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--minibatches", type=int, default=TrainConfig().num_minibatches)
    parser.add_argument("--say", nargs="+", default=["8,128,32768", "64,16,32768", "512,16,32768"])
    options = parser.parse_args()
    print(
        "| processes | tokens of each | first: groups there, MB | first: peak, MB | others: peak, MB | telling, s | credit, s "
        "| update, s | each to the first, MB | the first to each, MB |"
    )
    print("|" + "---|" * 10)
    found = [Row.measured(count, options.groups, options) for count in options.processes]
    more = [Row.measured(2, groups, options) for groups in options.more]
    several = [row for row in (*found, *more) if row.processes > 1]
    known = np.array([(1, row.processes * row.own, row.own) for row in several])
    there, peak, of_other = (
        np.linalg.lstsq(known[:, columns], [1e6 * megabytes(row) for row in several])[0]
        for columns, megabytes in (
            ([0, 1], lambda row: row.first.gathered),
            ([0, 1, 2], lambda row: row.first.peak),
            ([0, 2], lambda row: row.other.peak),
        )
    )
    told = statistics.median(1e6 * row.other.told / row.own for row in several)
    dealt = statistics.median(1e6 * row.dealt / row.own for row in several)
    taken_in = [(row.processes - 1) * row.other.told / row.first.telling_s for row in several]
    rate = statistics.median(taken_in)
    print(
        f"\nOf each token of all processes the first has {there[1]:.0f} bytes once groups are there, and at its peak "
        f"{peak[1]:.0f} beside {peak[2]:.0f} of each of its own; of each of its own another has {of_other[1]:.0f} at its peak, "
        f"tells {told:.1f} and is dealt {dealt:.1f}. The first took in {rate:.0f} MB a second ({min(taken_in):.0f} to "
        f"{max(taken_in):.0f}).\n"
    )
    print(
        "| processes | trajectories of each | tokens of each | told to the first, GB | telling, s | dealt by it, GB "
        "| first: peak, GB | others: peak, GB |"
    )
    print("|" + "---|" * 8)
    for words in options.say:
        count, trajectories, length = map(int, words.split(","))
        each = trajectories * length
        gigabytes = [(count - 1) * each * size / 1e9 for size in (told, dealt)]
        peaks = f"{peak @ (1, count * each, each) / 1e9:.1f} | {of_other @ (1, each) / 1e9:.2f}"
        seconds = f"{1e3 * gigabytes[0] / rate:.0f}"
        print(
            f"| {count} | {trajectories} | {length:,} | {gigabytes[0]:.1f} | {seconds} | {gigabytes[1]:.1f} | {peaks} |"
        )


if __name__ == "__main__":
    main()
