"""What agentrl survives: hostile recipes, run folders, environments and models, and kills; tried for real and counted.

    OMP_NUM_THREADS=1 python -m benchmarks.reliability [--only CATEGORY ...] [--quick] [--write DOCUMENT]

Each case runs in a process of its own, forked from one that has imported everything, in a folder of its own. A case fails if it
ends in a traceback, a hang, a status other than 0 and 2 or more than one line a mistake, if a refusal changes anything, or if
an episode is lost or doubled. `--write` replaces the rows of the categories that ran in the table of a document.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.hostile.calls import try_calls
from benchmarks.hostile.cases import CaseCounts, warm_up
from benchmarks.hostile.environments import try_environments
from benchmarks.hostile.folders import try_folders
from benchmarks.hostile.kills import try_real_kills, try_simulated_kills
from benchmarks.hostile.outputs import try_outputs
from benchmarks.hostile.recipes import try_recipes
from benchmarks.hostile.troubles import try_troubles

MODULES = (
    "agentrl.cli", "agentrl.run.loop", "agentrl.run.doctor", "agentrl.report.advise", "agentrl.report.terminal",
    "agentrl_envs.key_door",
)  # fmt: skip
QUICK = {
    "recipes": 12, "folders": 40, "environments": 60, "outputs": 100, "calls": 200, "simulated kills": 30, "real kills": 10,
    "troubles": 6,
}  # fmt: skip
"""With `--quick`, every so many-th case."""
PROPERTIES = (
    "tests/chat", "tests/env", "tests/report", "tests/rollout", "tests/test_columns.py", "tests/test_hostile_files.py",
    "tests/test_hostile_values.py", "tests/test_plain_data.py",
)  # fmt: skip
"""Tests of what environments, models and files hold; those of `tests/learn` and `tests/credit` are about numbers."""
HEADER = (
    "| category | one case is | cases | what came of it | failed | date | minutes |\n|---|---|---|---|---|---|---|\n"
)
_EXAMPLES = re.compile(r"^(\S+::\S.*):$|^\s+- (\d+) passing, (\d+) failing,? and", re.MULTILINE)


def try_properties(folder: Path, every: int) -> CaseCounts:
    """Run the property-based tests of what enters from outside, with the nightly profile; count the examples of each."""
    tally = CaseCounts("an example of a property-based test")
    profile = "nightly" if every == 1 else "ci"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "hypothesis", "--timeout", "3600"]
    command += ["--hypothesis-show-statistics", *(PROPERTIES if every == 1 else PROPERTIES[-1:])]
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        env={**os.environ, "HYPOTHESIS_PROFILE": profile, "HYPOTHESIS_STORAGE_DIRECTORY": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    test = ""
    for name, passing, failing in _EXAMPLES.findall(done.stdout):
        if name:
            test = name
        else:
            tally.details[test] = tally.details.get(test, 0) + int(passing)
            tally.outcomes["held"] += int(passing)
            tally.outcomes["failed"] += int(failing)
    if done.returncode:
        told = [line[:300] for line in done.stdout.splitlines() if line.startswith(("E ", "FAILED "))]
        tally.add("pytest", "held", wrong="\n".join(told))
    return tally


CATEGORIES: dict[str, Callable[[Path, int], CaseCounts]] = {
    "recipes": try_recipes,
    "folders": try_folders,
    "environments": try_environments,
    "outputs": try_outputs,
    "calls": try_calls,
    "simulated kills": try_simulated_kills,
    "real kills": try_real_kills,
    "troubles": try_troubles,
    "properties": try_properties,
}


def measure(category: str, *, every: int = 1) -> CaseCounts:
    """Try a category; every so many-th case of it."""
    with tempfile.TemporaryDirectory(prefix="agentrl-reliability-") as folder:
        return CATEGORIES[category](Path(folder) / "cases", every)


def row(category: str, tally: CaseCounts, *, minutes: float) -> str:
    """Return a row of the table."""
    kinds = ", ".join(
        f"{count:,} {words}" for words, count in sorted(tally.outcomes.items()) if words != "failed" and count
    )
    failed = tally.outcomes["failed"]
    return f"| {category} | {tally.what} | {tally.tried:,} | {kinds} | {failed} | {time.strftime('%Y-%m-%d')} | {minutes:.0f} |"


def write(document: Path, rows: dict[str, str]) -> None:
    """Put rows into a document's table, between its markers, each behind the name of its category."""
    before, begin, rest = document.read_text(encoding="utf-8").partition("<!-- reliability -->\n")
    table, end, after = rest.partition("<!-- end -->")
    assert begin, f"{document} has no markers"
    assert end, f"{document} has no end marker"
    known = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()} | rows
    lines = "".join(f"{known[name]}\n" for name in CATEGORIES if name in known)
    document.write_text(f"{before}{begin}{HEADER}{lines}{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CATEGORIES), default=list(CATEGORIES))
    parser.add_argument("--quick", action="store_true", help="a sample of the cases")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="put the rows into its table")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # which warns of forks
    warm_up(MODULES)
    figures, rows = {}, {}
    for category in options.only:
        print(f"{category} ...", flush=True)
        begin = time.perf_counter()
        tally = measure(category, every=QUICK.get(category, 2) if options.quick else 1)
        rows[category] = row(category, tally, minutes=(time.perf_counter() - begin) / 60)
        figures[category] = {
            "tried": tally.tried,
            **tally.outcomes,
            "details": tally.details,
            "failures": tally.failures,
        }
    print(HEADER + "\n".join(rows.values()))
    if options.write:
        write(options.write, rows)
    print(json.dumps(figures))
    sys.exit(any(figure["failures"] for figure in figures.values()))


if __name__ == "__main__":
    main()
