"""Whether runs with `trust: fixed` are, bit for bit, those of the commit before trust regions were a field.

    python -m benchmarks.same_as_before [--before cb75f9f^] [--steps 30] [--recipes calculator frozen_lake]

Trains each of that commit's recipes in `examples/` twice, one process after the other: with its code, and with the code of
this working tree and `loss: {trust: fixed}, train: {target_kl: null}`. Told are how many values of metrics both rows
have (but for times and memory), which of them differ, whether the tokens of all recorded rollouts are the same, and
whether the trained weights are.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]


def train(code: Path, recipe: dict[str, Any], run: Path) -> None:
    """Train a recipe with the code of a folder."""
    file = run.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    paths = os.pathsep.join(str(code / folder) for folder in ("", "envs", "credit"))
    subprocess.run(
        [sys.executable, "-m", "agentrl", "train", str(file), "--run_dir", str(run)],
        cwd=run.parent,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def compare(one: Path, other: Path) -> str:
    """Return the columns of a row of the table."""
    num_values, differing = 0, Counter[str]()
    for left, right in zip(metrics(one), metrics(other), strict=True):
        for name in left.keys() & right.keys():
            if not name.startswith(("time/", "process/")):
                num_values += 1
                differing[name] += left[name] != right[name]
    names = ", ".join(f"{name} in {count} rows" for name, count in sorted(differing.items()) if count) or "none"
    tokens = "the same" if sampled(one) == sampled(other) else "differ"
    left, right = (load_file(max((run / "checkpoints").iterdir()) / "model.safetensors") for run in (one, other))
    same = left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    return f"{num_values:,} | {names} | {tokens} | {'the same' if same else 'differ'}"


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def sampled(run: Path) -> list[Any]:
    """Return the tokens of every turn of every recorded trajectory."""
    return [
        [turn["action_ids"] for turn in json.loads(line)["turns"]]
        for path in sorted((run / "rollouts").glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="cb75f9f^", help="the commit to compare with")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--recipes", nargs="+", default=["calculator", "frozen_lake"])
    options = parser.parse_args()
    archive = subprocess.run(["git", "archive", options.before], cwd=ROOT, capture_output=True, check=True).stdout
    print(
        "| recipe | steps | values of metrics | of them differ | recorded tokens | trained weights |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder, "before")
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(before, filter="data")
        for name in options.recipes:
            recipe = yaml.safe_load((before / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))
            recipe["train"]["steps"] = options.steps
            recipe["report"] = {"rollouts_every": 1}
            one, other = Path(folder, f"{name}-before"), Path(folder, f"{name}-now")
            train(before, recipe, one)
            recipe["loss"]["trust"], recipe["train"]["target_kl"] = "fixed", None
            train(ROOT, recipe, other)
            print(f"| {name} | {options.steps} | {compare(one, other)} |", flush=True)


if __name__ == "__main__":
    main()
