"""What other programs that compute cost a training on a CPU, by how torch's threads wait for one another.

    python -m benchmarks.busy_core [--busy 0 1 2] [--repeats 3]

A short training of `examples/calculator.yaml` beside so many busy loops, in turn with threads that spin while they wait, as
OpenMP has it by default, that sleep at once, and that spin 1,000 times, as agentrl sets it; seconds of the whole command,
medians.
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "calculator.yaml"
OPTIONS = ("--train.steps", "4", "--warmup.steps", "60", "--evaluation.every", "0")
WAYS = {
    "spinning": {"OMP_WAIT_POLICY": ""},
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spinning shortly": {"GOMP_SPINCOUNT": "1000"},
}


def spin() -> None:
    while True:
        pass


def train(settings: dict[str, str]) -> float:
    """Train, and return the seconds it took."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "agentrl", "train", str(EXAMPLE), "--run_dir", f"{folder}/run", *OPTIONS],
            env=environment | settings,
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"| busy loops | {', s | '.join(WAYS)}, s |\n|---|---|---|---|")
    for busy in options.busy:
        loops = [multiprocessing.Process(target=spin, daemon=True) for _ in range(busy)]
        for loop in loops:
            loop.start()
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.repeats):
            for way, settings in WAYS.items():
                seconds[way].append(train(settings))
        for loop in loops:
            loop.kill()
        print(
            f"| {busy} | " + " | ".join(f"{statistics.median(found):.0f}" for found in seconds.values()) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
