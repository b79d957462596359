"""The metrics of the default recipe's first 20 steps, bit for bit: what a change of structure must leave as it is.

    python -m benchmarks.golden_metrics           compare with benchmarks/golden/default_recipe.jsonl; exit 1 where they differ
    python -m benchmarks.golden_metrics --write   keep those of today, after a change that is meant to change them

The recipe is trained as a user does, on one thread, and ended after step 20. Bits depend on the processor and the version
of torch, which the first line of the file names; on another machine nothing is compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "benchmarks" / "golden" / "default_recipe.jsonl"
STEPS = 20


def machine() -> dict[str, Any]:
    """Return what bits depend on: processors that can do the same add up in other orders."""
    facts = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    processor = " ".join(facts.get(name, "?") for name in ("vendor_id", "cpu family", "model"))
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "processor": processor}


def train() -> list[dict[str, float]]:
    """Return the rows of steps 0 to 20, without what depends on the machine's speed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "agentrl", "train", "examples/calculator.yaml", "--run_dir", f"{folder}/run"]
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
        )
        metrics = Path(folder) / "run" / "metrics.jsonl"
        try:
            while not (metrics.is_file() and metrics.read_bytes().count(b"\n") > STEPS):
                if process.poll() is not None:
                    sys.exit(f"agentrl train ended with exit status {process.returncode}")
                time.sleep(0.2)
            lines = metrics.read_bytes().splitlines()[: STEPS + 1]
        finally:
            process.kill()
            process.wait()
    return [{k: v for k, v in json.loads(line).items() if not is_of_the_machine(k)} for line in lines]


def is_of_the_machine(name: str) -> bool:
    return name.startswith(("time/", "process/")) or name.endswith("_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the metrics of today")
    options = parser.parse_args()
    if options.write:
        lines = [machine(), *train()]
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        print(f"written: {GOLDEN}")
        return
    made_on, *golden = map(json.loads, GOLDEN.read_bytes().splitlines())
    if made_on != machine():
        sys.exit(f"nothing compared: the golden metrics were made on {made_on}, and this is {machine()}")
    for expected, found in zip(golden, train(), strict=True):
        names = sorted(expected.keys() | found.keys())
        if differences := [name for name in names if expected.get(name) != found.get(name)]:
            shown = ", ".join(f"{name} {expected.get(name)} -> {found.get(name)}" for name in differences[:5])
            sys.exit(f"step {expected['step']:.0f}: {len(differences)} of {len(names)} metrics differ: {shown}")
    print(f"{STEPS} steps: bit for bit as before")


if __name__ == "__main__":
    main()
