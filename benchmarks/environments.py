"""What the built-in environments ask: success of an oracle, a random and a constant policy, and episodes per second.

    OMP_NUM_THREADS=1 python -m benchmarks.environments [--only NAME ...] [--write]
    python -m benchmarks.environments --page NAME ...

The first prints a table, and with `--write` puts it into benchmarks/results/environments.md (with `--only`, these rows
alone). The second writes the sample episode into docs/environments/NAME.md: the oracle's, of the first setting, with seed 0.

The page of an environment may say with which settings it is measured, in a line of its own; `{}` where there is none:

    <!-- measured: [{"options": {"num_boxes": 12}, "oracle": 0.9, "max_turns": 30, "episodes": 50}] -->

`options` of the environment; `oracle`, the share that its oracle solves at least (default 0.95); `max_turns` of an episode
(64); `episodes` of each policy (200). The constant policy is the best of several that each repeat one action, in a quarter
of the episodes; `random` calls random tools with arguments of the right types, taken from the dialogue. Episodes per
second of a core's time: one process, one thread, the environment reset again and again and the oracle playing, its own time
included. The last line printed is JSON.
"""

import argparse
import json
import os
import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tests.support.baselines import oracle, play, random_action
from tests.support.built_in import (
    PAGES,
    ROOT,
    Setting,
    built_in,
    constant_success,
    make,
    sample_episode,
    settings,
    success,
)

INDEX = ROOT / "benchmarks" / "results" / "environments.md"
_BEGIN, _END = "<!-- episode -->\n", "<!-- end -->"
_TABLE = "<!-- table -->\n"
_HEAD = "| environment | options | oracle | random | constant | turns | episodes/s |\n" + "|---" * 7 + "|\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of one environment with one setting."""

    name: str
    options: dict[str, Any]
    oracle: float
    """Share of episodes solved, as are the next two."""
    random: float
    constant: float
    turns: float
    """Mean of the oracle's episodes."""
    per_second: float
    """Episodes of the oracle."""

    def line(self) -> str:
        options = ", ".join(f"`{name}: {json.dumps(value)}`" for name, value in self.options.items()) or "default"
        shares = " | ".join(f"{share:.1%}" for share in (self.oracle, self.random, self.constant))
        return (
            f"| [{self.name}](../../docs/environments/{self.name}.md) | {options} | {shares} | {self.turns:.1f} "
            f"| {float(f'{self.per_second:.2g}'):,.0f} |"
        )


def measure(name: str, setting: Setting) -> Row:
    env = make(name, setting.options)
    limits = {"episodes": setting.episodes, "max_turns": setting.max_turns}
    rng, turns, solved = np.random.default_rng(0), [], []
    play(env, oracle, seed=setting.episodes, max_turns=setting.max_turns, rng=rng)  # what is read once is no episode's
    begin = _core_seconds()
    for seed in range(setting.episodes):
        played = play(env, oracle, seed=seed, max_turns=setting.max_turns, rng=rng)
        turns.append(len(played.rewards))
        solved.append(played.success)
    seconds = _core_seconds() - begin
    row = Row(
        name=name,
        options=setting.options,
        oracle=statistics.mean(solved),
        random=success(env, random_action, **limits),
        constant=constant_success(env, **limits),
        turns=statistics.mean(turns),
        per_second=setting.episodes / seconds,
    )
    env.close()
    return row


def _core_seconds() -> float:
    """Return the processor time of this process and of those that it started, which a busy machine does not change."""
    return sum(os.times()[:4])


def write_page(name: str) -> None:
    """Put the sample episode into the environment's page, between its markers."""
    page = PAGES / f"{name}.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise SystemExit(
            f"{page}: write a line {_BEGIN.strip()} and a line {_END} where the sample episode is to stand"
        )
    page.write_text(before + begin + sample_episode(name) + end + after, encoding="utf-8")


def write_table(rows: Iterable[Row]) -> None:
    """Put rows into the table, in the place of those of the same environments."""
    text = INDEX.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_TABLE)
    old, end, after = rest.partition(_END)
    lines: dict[str, list[str]] = {}
    for line in old.splitlines():
        if said := re.match(r"\| \[(\w+)\]", line):
            lines.setdefault(said[1], []).append(line)
    new: dict[str, list[str]] = {}
    for row in rows:
        new.setdefault(row.name, []).append(row.line())
    table = _HEAD + "".join(f"{line}\n" for _, of_name in sorted((lines | new).items()) for line in of_name)
    INDEX.write_text(before + begin + table + end + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(built_in()), default=list(built_in()))
    parser.add_argument("--write", action="store_true", help="put the rows into benchmarks/results/environments.md")
    parser.add_argument(
        "--page", nargs="+", choices=list(built_in()), help="write sample episodes, and measure nothing"
    )
    options = parser.parse_args()
    if options.page:
        for name in options.page:
            write_page(name)
        return
    rows = []
    print(_HEAD, end="")
    for name in options.only:
        for setting in settings(name):
            rows.append(measure(name, setting))
            print(rows[-1].line(), flush=True)
    if options.write:
        write_table(rows)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
