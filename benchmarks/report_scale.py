"""How a large report opens in a browser: seconds and memory of a page of many long rollouts.

    python -m benchmarks.report_scale [--trajectories 10000] [--turns 20] [--tokens 24]

Rollouts of random words, with all columns that a run records, are written as a run's folder, and that as a report, which
Chromium (Debian's, without a window) opens from the disk. Compared first: the page lists all rollouts, and the one that is
opened says what was recorded. `ready` is when the page has drawn its overview and takes input; `rollout` is from a click on
the tab to the tokens of the first rollout; memory is that of the page's process (resident, with what it shares with others)
and of its JavaScript heap after that, and of a blank page's process, in MB.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from agentrl.report.folder import RunFolder
from agentrl.report.html import write_report
from tests.support.browser import browser, until

GROUP_SIZE, ROLLOUTS_OF_A_STEP = 8, 100
MB = 1e6


def words(rng: random.Random) -> list[str]:
    """Return a vocabulary, in which common words are short."""
    letters = "etaoinshrdlu"
    return [" " + "".join(rng.choices(letters, k=2 + rank // 400)) for rank in range(4000)]


def lines(
    rng: random.Random, vocabulary: list[str], options: argparse.Namespace, *, step: int, num: int
) -> Iterator[str]:
    """Yield the records of a step."""
    weights = list(accumulate(1 / (rank + 3) for rank in range(len(vocabulary))))
    size = options.tokens
    for number in range(num):
        group = f"train/{step:06d}-{number // GROUP_SIZE:03d}"
        turns = []
        for turn in range(options.turns):
            pieces = rng.choices(vocabulary, cum_weights=weights, k=size)
            read = "".join(rng.choices(vocabulary, cum_weights=weights, k=size))
            advantage = round(rng.gauss(0, 1), 6)
            turns.append(
                {
                    "observation": [{"role": "user" if turn == 0 else "tool", "content": read}],
                    "message": {"role": "assistant", "content": "".join(pieces)},
                    "observation_ids": [1] * size,
                    "extends": True,
                    "action_ids": [1] * size,
                    "action_pieces": pieces,
                    "behavior_logprobs": [round(-rng.expovariate(2), 6) for _ in range(size)],
                    "versions": [step] * size,
                    "advantages": [advantage] * size,
                    "keep": [True] * size,
                    "reward": 0.0,
                    "state_key": None,
                    "next_state_key": None,
                    "action_key": None,
                    "finish_reason": "stop",
                    "extras": {},
                    "trained": {
                        "ratio": [round(rng.gauss(1, 1e-3), 6)] * size,
                        "entropy": [round(rng.expovariate(1), 6) for _ in range(size)],
                        "clipped": [float(rng.random() < 0.1)] * size,
                    },
                }
            )
        yield json.dumps(
            {
                "step": step,
                "group_id": group,
                "trajectory_id": f"{group}/{number % GROUP_SIZE}",
                "env_id": "words",
                "seed": 1,
                "stop_reason": "terminated",
                "truncated": False,
                "reward": round(rng.random(), 3),
                "metrics": {"success": float(rng.random() < 0.5)},
                "error": None,
                "turns": turns,
            }
        )


def make_run(path: Path, options: argparse.Namespace) -> RunFolder:
    """Write a run's folder."""
    rng = random.Random(0)
    vocabulary = words(rng)
    folder = RunFolder.create(path, {"seed": 0, "env": {"id": "words"}, "credit": {"scheme": "uniform"}})
    names = [f"theme{number // 8}/metric{number % 8}" for number in range(80)] + ["reward/mean", "entropy"]
    num_steps = -(-options.trajectories // ROLLOUTS_OF_A_STEP)
    with (path / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, 10 * num_steps + 1):
            file.write(json.dumps({"step": float(step)} | {name: rng.random() for name in names}) + "\n")
    (path / "rollouts").mkdir()
    left = options.trajectories
    for index in range(num_steps):
        step, num = 10 * (index + 1), min(left, ROLLOUTS_OF_A_STEP)
        text = "\n".join(lines(rng, vocabulary, options, step=step, num=num)) + "\n"
        (path / "rollouts" / f"step-{step:06d}.jsonl").write_text(text, encoding="utf-8")
        left -= num
    return folder


def renderer_mb(found: Any) -> float:
    """Return the resident memory of the largest page's process."""
    processes = psutil.Process().children(recursive=True)
    pages = [process for process in processes if any("--type=renderer" in part for part in process.cmdline())]
    return float(max(process.memory_info().rss for process in pages)) / MB


def open_once(found: Any, page_file: Path, folder: RunFolder, *, num: int) -> dict[str, float]:
    """Open the page in a window of its own; return its figures."""
    context = found.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.goto("about:blank")
    blank_mb = renderer_mb(found)
    begin = time.perf_counter()
    page.goto(page_file.as_uri(), wait_until="commit")
    until(page, "performance.getEntriesByName('ready').length > 0")
    waited_s = time.perf_counter() - begin
    ready_s = page.evaluate("performance.getEntriesByName('ready')[0].startTime / 1000")
    begin = time.perf_counter()
    page.click("#tab-rollouts")
    page.wait_for_selector(".tokens")
    rollout_s = time.perf_counter() - begin
    session = context.new_cdp_session(page)
    session.send("Performance.enable")
    heap = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    memory_mb = renderer_mb(found)
    assert page.evaluate("pageData().rollouts.length") == num
    identity = page.inner_text(".pane h2")
    said = page.evaluate("[...document.querySelectorAll('.token')].map((each) => each.textContent)")
    path = next(path for path in folder.rollouts() if f"-{identity.split('/')[1].partition('-')[0]}." in path.name)
    record = next(row for row in map(json.loads, path.read_text().splitlines()) if row["trajectory_id"] == identity)
    assert said == [piece for turn in record["turns"] for piece in turn["action_pieces"]], "another text"
    begin = time.perf_counter()
    for _ in range(10):
        page.keyboard.press("j")
        page.wait_for_timeout(0)
    next_s = (time.perf_counter() - begin) / 10
    context.close()
    return {
        "ready_s": ready_s,
        "waited_s": waited_s,
        "rollout_s": rollout_s,
        "next_s": next_s,
        "heap_mb": heap["JSHeapUsedSize"] / MB,
        "memory_mb": memory_mb,
        "blank_mb": blank_mb,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=24, help="sampled in a turn; the model reads as many")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as top:
        folder = make_run(Path(top) / "run", options)
        begin = time.perf_counter()
        page_file = write_report([folder.path], Path(top) / "report.html")
        write_s = time.perf_counter() - begin
        found = []
        for _ in range(options.repeats):
            with browser() as each:
                found.append(open_once(each, page_file, folder, num=options.trajectories))
        recorded_mb = sum(path.stat().st_size for path in folder.rollouts()) / MB
        figures = {name: round(median(row[name] for row in found), 3) for name in found[0]}
        figures |= {
            "write_s": round(write_s, 1),
            "page_mb": round(page_file.stat().st_size / MB, 1),
            "recorded_mb": round(recorded_mb, 1),
        }
    print(
        f"{options.trajectories} rollouts of {options.turns} turns of {options.tokens} tokens, median of {options.repeats}"
    )
    for name, value in figures.items():
        print(f"{name:12} {value:10.3f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
