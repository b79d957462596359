"""Train the default recipe, a calculator task, from Python: python examples/train_default.py"""

import math
import sys

import agentrl


def show(metrics: dict[str, float]) -> None:
    if metrics["step"] % 20 == 0:
        entropy = metrics.get("entropy", math.nan)  # a step in which nothing could be trained on has none
        print(f"step {metrics['step']:.0f}: reward {metrics['reward/mean']:.2f}, entropy {entropy:.2f}")


def main() -> None:
    run = agentrl.train("calculator", on_step=show, overrides=sys.argv[1:])
    first, last = run.metrics[0], run.metrics[-1]
    before, after = (row.get("eval/success", 0.0) for row in (first, last))
    print(f"solved before: {before:.1%}, after {last['step']:.0f} steps: {after:.1%}")
    worst = min((t for group in run.trajectories() for t in group.valid), key=lambda t: t.reward)
    print(
        f"the lowest reward of the last recorded step, {worst.reward:g}, went to {worst.trajectory_id}; look at it with"
    )
    print(f"agentrl show {run.path} --trajectory {worst.trajectory_id}")


if __name__ == "__main__":
    main()
