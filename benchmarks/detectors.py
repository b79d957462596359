"""What a collapse shows itself by, and how early: rules over the metrics of each step, tried on runs of evidence.py.

    python -m benchmarks.detectors --evidence FILE [--watched | --collapse] [--begin 0] [--end N]

The runs are those of `key_door` without `target_kl`, in the order of the file: limits were chosen on the first 88. A run has
collapsed as `benchmarks/evidence.py` says. `found`: collapsed runs in which a rule holds at some step; `in time`: by the step
after the one whose update made the reward fall, so that the checkpoint before it is good; `false`: other runs in which it
holds. `samples` is `ratio/effective_samples`, `kl` is `kl/behavior`; the other names are those of evidence.py.

`--collapse` tries `health/collapse` instead, on the runs that noted success and the spread of rewards in each step, and
prints of each run that collapsed the step after which its success was gone, and the one that tells.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

from agentrl.learn.health import signs
from benchmarks.collapses import fall, last_good
from benchmarks.evidence import KEPT, Job, Result, has_collapsed, read_results

Steps = dict[str, list[float]]
"""Metrics, by step."""
Rule = Callable[[Steps, int], bool]
"""Whether it holds at a step, by its index."""


def below(metric: str, limit: float) -> tuple[str, Rule]:
    return f"{metric} below {limit:g}", lambda steps, k: steps[metric][k] < limit


def above(metric: str, limit: float) -> tuple[str, Rule]:
    return (
        f"{metric} above {limit:g}",
        lambda steps, k: metric in steps and steps[metric][k] > limit,
    )  # older runs lack some


def against_median(metric: str, times: float) -> tuple[str, Rule]:
    def holds(steps: Steps, k: int) -> bool:
        if k < 4:
            return False
        usual = median(steps[metric][:k])
        return steps[metric][k] > times * usual if times > 1 else steps[metric][k] < times * usual

    return f"{metric} {'above' if times > 1 else 'below'} {times:g} times its median", holds


def against_first(metric: str, times: float) -> tuple[str, Rule]:
    return f"{metric} below {times:g} of the first", lambda steps, k: steps[metric][k] < times * steps[metric][0]


def both(one: tuple[str, Rule], other: tuple[str, Rule]) -> tuple[str, Rule]:
    return f"{one[0]}, {other[0]}", lambda steps, k: one[1](steps, k) and other[1](steps, k)


RULES: list[tuple[str, Rule]] = [
    *(below("samples", limit) for limit in (0.7, 0.6, 0.5)),
    against_median("samples", 0.6),
    *(above("kl", limit) for limit in (0.01, 0.03, 0.05)),
    *(above("step_kl", limit) for limit in (0.2, 0.3, 0.5)),
    *(both(below("samples", limit), above("kl", 0.03)) for limit in (0.6, 0.5)),
    *(above("token_spread", limit) for limit in (0.1, 0.2, 0.3)),
    *(against_first("entropy", times) for times in (0.3, 0.1)),
    against_median("entropy", 2),
    *(above("one_sided", limit) for limit in (0.5, 0.7)),
    *(against_median("gradient", times) for times in (3, 6, 10)),
]
FROM_START = [above("start_kl", limit) for limit in (0.1, 0.3, 1.0, 3.0)]
"""Of runs that measure the divergence from the policy they began with (`--watched`)."""


def collapse(name: str, *, without: tuple[str, ...] = ()) -> tuple[str, Rule]:
    def holds(steps: Steps, k: int) -> bool:
        kept = {name: values for name, values in steps.items() if name not in without}
        return "collapse" in signs([{KEPT[name]: values[j] for name, values in kept.items()} for j in range(k + 1)])

    return name, holds


COLLAPSE = [collapse("health/collapse"), collapse("the same, of rewards alone", without=("success",))]
"""With `--collapse`."""


def first(result: Result, rule: Rule) -> int | None:
    """Return the step at which a rule first holds."""
    steps: Steps = result["steps"]
    return next((k + 1 for k in range(len(steps["kl"])) if rule(steps, k)), None)


def tell_collapse(known: dict[Job, Result]) -> None:
    noted = {job: result for job, result in known.items() if {"success", "reward_spread"} <= result["steps"].keys()}
    collapsed = {job: result for job, result in noted.items() if has_collapsed(result)}
    print(f"{len(noted)} runs, of which {len(collapsed)} collapsed\n")
    print("| rule | found | false |\n|---|---|---|")
    for name, rule in COLLAPSE:
        found, false = (
            sum(first(result, rule) is not None for job, result in noted.items() if (job in collapsed) is has)
            for has in (True, False)
        )
        print(f"| {name} | {found} of {len(collapsed)} | {false} of {len(noted) - len(collapsed)} |")
    for job, result in collapsed.items():
        told = [first(result, rule) for _, rule in COLLAPSE]
        gone = last_good(result["steps"]["success"])
        print(f"{job.ratio}, {job.credit}, {job.train}, seed {job.seed}: gone after step {gone}, told in step {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evidence", type=Path, required=True)
    parser.add_argument("--watched", action="store_true", help="only runs that measure the divergence from their start")
    parser.add_argument("--collapse", action="store_true", help="try health/collapse on the runs that noted success")
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--end", type=int)
    options = parser.parse_args()
    known = {
        job: result
        for job, result in read_results(options.evidence, is_any=True).items()
        if job.env == "key_door" and "kl" not in job.train
    }
    chosen = list(known.items())[options.begin : options.end]
    if options.collapse:
        tell_collapse(dict(chosen))
        return
    results = [result for job, result in chosen if not options.watched or job.ratio.endswith("watched")]
    collapsed = [result for result in results if has_collapsed(result)]
    print(f"{len(results)} runs, of which {len(collapsed)} collapsed\n")
    print("| rule | found | in time | false |\n|---|---|---|---|")
    told = {}
    for name, rule in [*RULES, *(FROM_START if options.watched else [])]:
        at = [first(result, rule) for result in collapsed]
        falls = [fall({**result, "rewards": result["steps"]["reward"]}) for result in collapsed]
        found = sum(step is not None for step in at)
        in_time = sum(
            step is not None and end is not None and step <= end + 1 for step, end in zip(at, falls, strict=True)
        )
        false = sum(first(result, rule) is not None for result in results if not has_collapsed(result))
        told[name] = (found, in_time, false)
        print(f"| {name} | {found} | {in_time} | {false} of {len(results) - len(collapsed)} |")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
