"""What a step takes of each process as there are more of them: memory, bytes that are told, seconds.

    python -m benchmarks.scaling [--processes 1 2 4 8 16] [--groups 4] [--turns 16] [--minibatches 4]

Each process has groups of eight trajectories of its own, each turn 96 tokens of observation and 32 of action, and takes a step
with them as a run does: all tell all of their groups, the first assigns credit, all update (one layer of hidden size 16,
so that the model takes nothing). Told are the largest of the processes: memory of its own (`RssAnon`) above that before, once
the groups are there and at its peak; seconds of each part; and the bytes that a process tells of its groups.

Then lines through memory over the tokens of all processes, where there are several, and what they say for larger machines
(`--say`: processes, trajectories of each, tokens of each). Seconds of telling there are those of a process with a core to
itself, which takes in as many bytes a second as a core did here (the median over the rows); the network takes what it takes.
"""

import argparse
import os
import pickle
import statistics
import time
from dataclasses import replace

import numpy as np
from accelerate import Accelerator
from transformers import Qwen3ForCausalLM

from agentrl import Trajectory, TrajectoryGroup, Turn, assign_credit, load_credit
from agentrl.distributed.processes import all_gather, barrier, from_rank_zero, process_index
from agentrl.learn.learner import Learner
from agentrl.learn.loss_config import LossConfig
from agentrl.learn.policy_state import PolicyState
from agentrl.learn.train_config import TrainConfig
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import Policy, local_config
from agentrl.testing import make_group
from benchmarks.loading import Peak, own_memory
from benchmarks.several import together

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


def step(options: argparse.Namespace) -> tuple[float, ...]:
    """Take a step as one of several processes; return memory in MB, seconds and bytes, as they are told."""
    learner = new_learner(options.minibatches)
    credit = load_credit({"scheme": "uniform"})
    own = [played(process_index(), number, turns=options.turns) for number in range(options.groups)]
    num_bytes = len(pickle.dumps(own))
    barrier()
    before, start = own_memory(), time.monotonic()
    with Peak() as memory:
        groups = all_gather(own)
        gathered, gathering = own_memory() - before, time.monotonic() - start
        credits = from_rank_zero(lambda: [assign_credit(credit, [group])[0] for group in groups])
        crediting = time.monotonic() - start - gathering
        learner.update(groups, credits, version=1)
        updating = time.monotonic() - start - gathering - crediting
    return gathered, memory.most, gathering, crediting, updating, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--minibatches", type=int, default=TrainConfig().num_minibatches)
    parser.add_argument("--say", nargs="+", default=["8,128,32768", "64,16,32768", "512,16,32768"])
    options = parser.parse_args()
    own = options.groups * MEMBERS * options.turns * (OBSERVATION + ACTION)
    print(f"{own} tokens of each process, {ACTION / (OBSERVATION + ACTION):.0%} of them of actions.\n")
    print("| processes | groups there, MB | peak, MB | telling, s | credit, s | update, s | told of each, MB |")
    print("|---|---|---|---|---|---|---|")
    found = []
    for count in options.processes:
        row = tuple(max(column) for column in zip(*together(count, step, options), strict=True))
        found.append(row)
        seconds = " | ".join(f"{second:.1f}" for second in row[2:5])
        print(f"| {count} | {row[0]:.0f} | {row[1]:.0f} | {seconds} | {row[5] / 1e6:.1f} |", flush=True)
    several = [(count * own, row) for count, row in zip(options.processes, found, strict=True) if count > 1]
    tokens, rows = np.array([size for size, _ in several]), np.array([row for _, row in several])
    there, peak = (np.polyfit(tokens, rows[:, which] * 1e6, 1) for which in (0, 1))
    told = rows[-1, 5] / own
    cores = len(os.sched_getaffinity(0))
    taken_in = [
        c * c * row[5] / row[2] / min(c, cores) for c, row in zip(options.processes, found, strict=True) if c > 1
    ]
    rate = statistics.median(taken_in)
    print(
        f"\nOf each token of all processes, where there are several, a process has {there[0]:.0f} bytes once groups are there "
        f"and {peak[0]:.0f} at its peak; {told:.1f} bytes of it are told. Each of {cores} cores took in {rate / 1e6:.0f} MB a "
        f"second ({min(taken_in) / 1e6:.0f} to {max(taken_in) / 1e6:.0f}).\n"
    )
    print("| processes | trajectories of each | tokens of each | told to a process, GB | telling, s | peak, GB |")
    print("|---|---|---|---|---|---|")
    for words in options.say:
        count, trajectories, length = map(int, words.split(","))
        everything = count * trajectories * length
        gigabytes, largest = everything * told / 1e9, np.polyval(peak, everything) / 1e9
        seconds = 1e9 * gigabytes / rate
        print(f"| {count} | {trajectories} | {length:,} | {gigabytes:.1f} | {seconds:.0f} | {largest:.1f} |")


if __name__ == "__main__":
    main()
