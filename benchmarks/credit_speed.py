"""How long each credit scheme takes for 1,024 trajectories of 20 turns of 200 tokens, on one core.

python benchmarks/credit_speed.py [--group_sizes 8 1024] [--repeats 5]

The bound for schemes without a critic is 0.5 s. Timed is `assign_credit`, checks included; medians, schemes interleaved.
"""

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from agentrl import Need, TrajectoryGroup, assign_credit, load_credit
from agentrl.credit import installed_credit
from agentrl.testing import make_group

NUM_TRAJECTORIES, NUM_TURNS, NUM_TOKENS = 1024, 20, 200


def make_batch(group_size: int) -> list[TrajectoryGroup]:
    """Make groups whose turns visit states that some siblings share, with all that a scheme may read."""
    rng = np.random.default_rng(0)
    shape = (group_size, NUM_TURNS)
    groups = []
    for g in range(NUM_TRAJECTORIES // group_size):
        states = rng.integers(0, 3 * NUM_TURNS, size=shape)
        numbers = rng.normal(size=shape).tolist()
        groups.append(
            make_group(
                (rng.random(shape) < 0.1).astype(float).tolist(),
                state_keys=[[f"state {s}" for s in row] for row in states.tolist()],
                action_keys=[[f"action {a}" for a in row] for row in rng.integers(0, 4, size=shape).tolist()],
                action_lengths=[[NUM_TOKENS] * NUM_TURNS] * group_size,
                values=numbers,
                teacher_logprobs=(-np.abs(numbers)).tolist(),
                hindsight_logprobs=(-np.abs(numbers)).tolist(),
                answer_logprobs=(-np.abs(numbers)).tolist(),
                turn_scores=numbers,
                branch_rewards=[[((a,), (0.0, a)) for a in row] for row in numbers],
                group_id=f"g{g}",
            )
        )
    return groups


def seconds(scheme: str, groups: Sequence[TrajectoryGroup]) -> float:
    begin = time.perf_counter()
    assign_credit(load_credit({"scheme": scheme}), groups)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group_sizes", type=int, nargs="+", default=[8, NUM_TRAJECTORIES])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    schemes = {name: needs for name, needs in installed_credit().items() if needs is not None}
    batches = [make_batch(size) for size in options.group_sizes]
    times: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in schemes}
    for _ in range(options.repeats):
        for name in schemes:
            for column, groups in zip(times[name], batches, strict=True):
                column.append(seconds(name, groups))
    print(f"seconds for {NUM_TRAJECTORIES} trajectories of {NUM_TURNS} turns of {NUM_TOKENS} tokens, by group size")
    print(f"{'scheme':18} {'critic':>6} " + " ".join(f"{size:>8}" for size in options.group_sizes))
    figures = {}
    for name, needs in schemes.items():
        medians = [median(column) for column in times[name]]
        figures[name] = dict(zip(map(str, options.group_sizes), medians, strict=True))
        has_critic = "yes" if Need.VALUES in needs else "no"
        print(f"{name:18} {has_critic:>6} " + " ".join(f"{value:8.3f}" for value in medians))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
