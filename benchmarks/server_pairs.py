"""A training process with a server, against two of each, apart and together: tokens a second that each server samples.

    python -m benchmarks.server_pairs [--rounds 2] [--steps 6]

Real servers of vLLM's build for CPUs, which `agentrl serve` starts, and `agentrl launch`; rollouts in mode `sync`, where
trainers wait while servers sample, with as many episodes for each server. Each pair has one core of this machine, whether it is
alone or not. *Together* the first of two processes has both servers, as by default, or each has one.
*Apart* are two runs that know nothing of one another: what they lose, the machine takes. `sampled` is the median
over steps of the tokens a second while rollouts are collected, for each server; `all` that over whole steps, with pushes.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from agentrl.report.folder import RunFolder
from benchmarks.server_kills import Side, serve
from tests.support.ports import free_port

LOCAL = {"hidden_size": 512, "num_layers": 12, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 1536}
ROLLOUT = {"group_size": 8, "max_turns": 2, "max_turn_tokens": 192, "max_context_tokens": 1024, "max_live_episodes": 64}


WAYS = {
    "one": [(0, 1, 1)],
    "two, apart": [(0, 1, 1), (1, 1, 1)],
    "two, together": [(0, 2, 1)],
    "two, together, one for each process": [(0, 2, 2)],
}
"""Runs at once: the first of their servers, how many pairs each has, and how many of its processes ask servers."""


@contextmanager
def on(cores: set[int]) -> Iterator[None]:
    """Let what is started have these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def rates_of(run: Path) -> list[float]:
    """Return the tokens a second that all servers of a run sampled: while rollouts are collected, and over whole steps."""
    rows = RunFolder.open(run).metrics()[2:]
    return [statistics.median(row[f"time/{what}"] for row in rows) for what in ("sampled_tokens_per_s", "tokens_per_s")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        recipe = {
            "env": {"id": "key_door"},
            "model": {"local": LOCAL},
            "engine": {"name": "vllm_server", "server": {"url": urls}},
            "rollout": {**ROLLOUT, "num_groups": 8},
            "train": {"steps": options.steps, "num_minibatches": 1, "device": "cpu", "checkpoint_every": 1000},
            "evaluation": {"every": 0},
        }
        file = here / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        servers = []
        for number, (core, url) in enumerate(zip(cores, urls, strict=True)):
            with on({core}):
                servers.append(serve(file, url, here / f"server-{number}.log"))
        try:
            for number in range(options.rounds):
                for way, runs in WAYS.items():
                    sides = []
                    for first, pairs, processes in runs:
                        run = here / f"run-{number}-{way}-{first}"
                        urls_of_run = yaml.safe_dump(urls[first : first + pairs], default_flow_style=True).strip()
                        words = ["--engine.server.url", urls_of_run, "--rollout.num_groups", str(4 * pairs)]
                        words += ["--engine.server.processes", str(processes)]
                        with on(set(cores[first : first + pairs])):
                            log = here / f"{run.name}.log"
                            sides.append(Side("launch", "--processes", pairs, file, "--run_dir", run, *words, log=log))
                    rates = []
                    for (first, pairs, _), side in zip(runs, sides, strict=True):
                        run = here / f"run-{number}-{way}-{first}"
                        if side.process.wait():
                            raise SystemExit((here / f"{run.name}.log").read_text(encoding="utf-8")[-3000:])
                        rates.append([rate / pairs for rate in rates_of(run)])
                    sampled, everything = (statistics.mean(column) for column in zip(*rates, strict=True))
                    found[way].append((sampled, everything))
        finally:
            for server in servers:
                server.kill()
    print("| pairs | sampled, tokens a second and server | all |\n|---|---|---|")
    for way, rates_ in found.items():
        medians = [statistics.median(column) for column in zip(*rates_, strict=True)]
        print(f"| {way} | {medians[0]:.0f} | {medians[1]:.0f} |")


if __name__ == "__main__":
    main()
