"""Evaluate the newest weights of a run: python examples/evaluate_checkpoint.py [RUN]

Without a name, the run in runs/ that was begun last.
"""

import sys
from pathlib import Path

import agentrl


def main() -> None:
    folder, overrides = None, sys.argv[1:]
    if overrides and not overrides[0].startswith("--"):
        folder, *overrides = overrides
    if folder is None:
        runs = sorted(Path("runs").glob("*/config.yaml"), key=lambda file: file.stat().st_mtime)
        if not runs:
            sys.exit("there is no run in runs/ yet; begin with python examples/custom_env.py")
        folder = str(runs[-1].parent)
    found = agentrl.evaluate(folder, evaluation={"samples": 2, "pass_at": (1, 2)}, overrides=overrides)
    for name, value in found.metrics.items():
        print(f"{name}: {value:.3f}")
    failed = [group for group in found.groups if all(not t.metrics.get("success") for t in group.valid)]
    print(f"{len(failed)} of {len(found.groups)} tasks were never solved; the first of them:")
    for trajectory in [t for group in failed for t in group.valid][:1]:
        for turn in trajectory.turns:
            for message in (*turn.observation, turn.message):
                print(f"  {message['role']}: {message.get('content')} {message.get('tool_calls') or ''}")


if __name__ == "__main__":
    main()
