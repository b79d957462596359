"""Time and memory of this working tree beside those of an earlier commit, interleaved.

    python -m benchmarks.before_after COMMIT [--repeats 5] [--only update]

Two workloads: the training step of `benchmarks.train_step` (row `shared_75`, five updates, the first not timed), and the
default recipe (20 steps without warm-up, after which versions would play other episodes: nothing is earned, so updates are
skipped, and the time is that of rollouts). Each runs in a process of its own, one commit after the other; printed are medians
over all repeats, and their ratio.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
UPDATE = """
import json, sys
from pathlib import Path
from benchmarks import train_step as bench

class Pipe:
    found: list[float] = []
    def recv(self): pass
    def send(self, value): self.found.append(value)

row = bench.ROWS["shared_75"]
groups, advantages = bench.make_groups(row)
settings = {"loss": bench.LOSS, "train": bench.TRAIN} if hasattr(bench, "LOSS") else {}  # the same, of each version
task = bench.Task(row=row, groups=groups, advantages=advantages, device="cpu", steps=5, batch_size=8, max_tokens=4096,
    gradient_checkpointing=False, folder=Path(sys.argv[1]), **settings)
bench.agentrl_side(task, Pipe())
*steps, mib = Pipe.found
print(json.dumps({"seconds": [step["seconds"] for step in steps[1:]], "mib": mib}))
"""
RECIPE = """
import json, resource, sys
from pathlib import Path
from agentrl.cli.entry import main

try:
    main(["train", "calculator", "--train.steps", "20", "--warmup.steps", "0", "--run_dir", sys.argv[1] + "/run"])
except SystemExit as end:
    assert not end.code, end.code
rows = [json.loads(line) for line in Path(sys.argv[1], "run", "metrics.jsonl").read_text().splitlines()]
print(json.dumps({"seconds": [row["time/step_s"] for row in rows if row["step"] > 1],
    "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def measure(code: Path, script: str) -> dict[str, Any]:
    """Run a script with the code of a folder, and return what it printed last."""
    paths = os.pathsep.join(str(code / folder) for folder in ("", "envs", "credit"))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", script, folder],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["update", "default recipe"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", options.commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        for name, script in (("update", UPDATE), ("default recipe", RECIPE)):
            if options.only not in (None, name):
                continue
            found: dict[Path, list[dict[str, Any]]] = {Path(folder): [], ROOT: []}
            for _ in range(options.repeats):
                for code, results in found.items():
                    results.append(measure(code, script))
            before, after = found.values()
            for unit in ("seconds", "mib"):
                one, other = (median(values(results, unit)) for results in (before, after))
                print(f"{name}: {unit} {one:.3f} before, {other:.3f} after, ratio {other / one:.3f}", flush=True)


def values(results: list[dict[str, Any]], unit: str) -> list[float]:
    found: list[float] = []
    for result in results:
        value = result[unit]
        found += value if isinstance(value, list) else [value]
    return found


if __name__ == "__main__":
    main()
