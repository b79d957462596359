"""How long the test suite takes, and whether it passes beside programs that keep all cores busy.

    python -m benchmarks.suite --out FILE [--busy 0] [--beside WORDS] [--passes 1] [--workers 3] [--target test]

Runs a tier (`make test`, `test-quick` or `test-full`) so often, one pass after the other, beside so many loops that only
compute; `--beside` says what else keeps the cores busy. What each pass printed is appended to FILE as a line of JSON, with the
commit; the table of all lines is printed.
`processor minutes` are those of all processes that were waited for: killed servers of vLLM are not in it.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.busy_core import spin

ROOT = Path(__file__).resolve().parents[1]
_COUNTS = re.compile(r"^=+ (.*) in [\d.]+s", re.MULTILINE)
_NOT_PASSED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def one_pass(*, target: str, busy: int, beside: str, workers: int) -> dict[str, Any]:
    """Run the suite once, and return what it said."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loops = [multiprocessing.Process(target=spin, daemon=True) for _ in range(busy)]
    for loop in loops:
        loop.start()
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(["make", target, f"WORKERS={workers}"], cwd=ROOT, capture_output=True, text=True, check=False)
    minutes = (time.perf_counter() - begin) / 60
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = (now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime) / 60
    for loop in loops:
        loop.kill()
    counts = _COUNTS.findall(done.stdout)
    return {
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "target": target,
        "cores": os.cpu_count(),
        "busy": busy,
        "beside": beside,
        "workers": workers,
        "minutes": round(minutes, 1),
        "processor minutes": round(processor, 1),
        "status": done.returncode,
        "counts": counts[-1] if counts else done.stderr[-500:],
        "not passed": sorted(set(_NOT_PASSED.findall(done.stdout))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON line each; appended to")
    parser.add_argument("--busy", type=int, default=0, help="loops that only compute")
    parser.add_argument("--beside", default="", help="what else runs meanwhile, for the record")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--target", choices=["test", "test-quick", "test-full"], default="test", help="the tier")
    options = parser.parse_args()
    for _ in range(options.passes):
        found = one_pass(target=options.target, busy=options.busy, beside=options.beside, workers=options.workers)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    print(
        "| date | commit | tier | cores | busy loops | beside | workers | minutes | of a processor | outcome | not passed |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for line in options.out.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        found.setdefault("target", "test")  # lines from before the tiers
        names = (
            "date",
            "commit",
            "target",
            "cores",
            "busy",
            "beside",
            "workers",
            "minutes",
            "processor minutes",
            "counts",
        )
        print(f"| {' | '.join(str(found.get(name, '')) for name in names)} | {', '.join(found['not passed'])} |")


if __name__ == "__main__":
    main()
