"""The contract of environments, over many seeds: `check_env` on every built-in environment and on those of the adapters.

    OMP_NUM_THREADS=1 python -m benchmarks.contract --out FILE [--seeds 50] [--only NAME ...]
    python -m benchmarks.contract --out FILE --report benchmarks/results/DATE-contract.md

The first checks one after the other, appends a line of JSON to FILE for each, and leaves out those that are there already
with as many seeds. The second writes the table. OpenEnv and verifiers run in Pythons of their own, which
AGENTRL_OPENENV_PYTHON and AGENTRL_VERIFIERS_PYTHON name; without them, and where a library is not installed, a row says so.
The last line printed is JSON.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import CheckError, UserError
from agentrl.testing import check_env
from tests.support.built_in import ROOT, built_in, settings
from tests.support.ports import free_port

SUPPORT = ROOT / "tests" / "support"
GAMES = (
    *("TowerOfHanoi", "GuessTheNumber", "Mastermind", "Minesweeper", "LightsOut", "FifteenPuzzle", "Bandit"),
    "Blackjack",
)
MCP_TOOLS = ["add", "fail", "data", "only_data", "picture"]
_TIMEOUT_S = 120.0
"""Of each call: a game of TextWorld is made when it is first played, and the machine may be busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked."""

    name: str
    of: str
    """As a recipe names it."""
    options: dict[str, Any] = field(default_factory=dict)
    serving: AbstractContextManager[dict[str, Any]] = nullcontext({})  # noqa: RUF009 - it keeps nothing
    """What it needs to be there meanwhile; gives further options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of it."""

    name: str
    options: dict[str, Any]
    seeds: int
    seconds: float
    result: str
    """`passes`, `not checked: ...`, or what is wrong with it."""
    found: tuple[str, ...] = ()
    """What `check_env` says of it."""

    def line(self) -> str:
        options = ", ".join(f"`{name}: {json.dumps(value)}`" for name, value in self.options.items())
        return f"| {self.name} | {options} | {self.seeds} | {self.seconds:.1f} | {self.result} |"


def subjects() -> Iterator[Subject]:
    """Yield all environments: each built-in one with the first of its settings, then the adapters'."""
    for name, cls in built_in().items():
        yield Subject(name=name, of=cls, options=settings(name)[0].options)
    colors = {"tasks": "examples/colors.jsonl", "prompt": "question", "answer": "answer"}
    yield Subject(name="tasks", of="tasks", options=colors | {"rewards": ["exact_match"]})
    for env_id in ("Taxi-v4", "FrozenLake-v1", "CliffWalking-v1", "Blackjack-v1"):
        yield Subject(name="gymnasium", of="gymnasium", options={"id": env_id})
    for dataset in ("chain_sum", "countdown", "list_functions", "pool_matrix"):
        yield Subject(name="reasoning_gym", of="reasoning_gym", options={"dataset": dataset})
    for game in GAMES:
        yield Subject(name="textarena", of="textarena", options={"game": f"{game}-v0"})
    for category in ("multi_turn", "single_turn", "live"):
        yield Subject(name="bfcl", of="bfcl", options={"category": category})
    rooms = {"num_rooms": 2, "num_objects": 4, "quest_length": 2, "num_games": 40, "num_eval_games": 10}
    yield Subject(name="textworld", of="textworld", options=rooms, serving=_folder())
    yield Subject(name="mcp", of="tests.envs.adapters.test_mcp:Sums", serving=_mcp_server())
    yield Subject(name="openenv", of="openenv", serving=_openenv_server())
    yield Subject(name="verifiers", of="verifiers", options={"taskset": "verifiers-sums"}, serving=_verifiers())


@contextmanager
def _folder() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        yield {"folder": folder}


@contextmanager
def _mcp_server() -> Iterator[dict[str, Any]]:
    """Let one process serve all environments, and keep it from ending between two of them."""
    from tests.envs.adapters.test_mcp import Sums

    server = [sys.executable, str(SUPPORT / "mcp_server.py"), "stdio"]
    options: dict[str, Any] = {"server": server, "server_lives": "process", "tool_names": MCP_TOOLS}
    keeper = Sums(**options)
    keeper.reset(seed=0)
    try:
        yield options
    finally:
        keeper.close()


@contextmanager
def _openenv_server() -> Iterator[dict[str, Any]]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    server = subprocess.Popen(
        [_python("AGENTRL_OPENENV_PYTHON"), SUPPORT / "openenv_server.py", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/schema", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield {"url": url}
    finally:
        server.kill()
        server.wait()


@contextmanager
def _verifiers() -> Iterator[dict[str, Any]]:
    """Let one worker serve all environments."""
    from agentrl_envs.adapters.verifiers import Verifiers

    os.environ["PYTHONPATH"] = str(SUPPORT / "verifiers_taskset")
    options: dict[str, Any] = {"python": _python("AGENTRL_VERIFIERS_PYTHON"), "start_timeout_s": 300.0}
    keeper = Verifiers(taskset="verifiers-sums", **options)
    try:
        yield options
    finally:
        keeper.close()


def _python(name: str) -> str:
    if name not in os.environ:
        raise UserError(f"{name} names no Python")
    return os.environ[name]


def check(subject: Subject, num_seeds: int) -> Row:
    """Check one environment; what is wrong with it is a row too."""
    begin = time.monotonic()
    found: tuple[str, ...] = ()
    try:
        with subject.serving as further:
            begin = time.monotonic()
            given = subject.options | further
            found = check_env(subject.of, seeds=range(num_seeds), timeout_s=_TIMEOUT_S, **given).lines
            result = "passes"
    except CheckError as error:
        result = str(error).replace("\n", "; ")
    except (UserError, ImportError) as error:
        result = f"not checked: {error}"
    seconds = time.monotonic() - begin
    return Row(name=subject.name, options=subject.options, seeds=num_seeds, seconds=seconds, result=result, found=found)


def read_rows(out: Path, num_seeds: int) -> list[Row]:
    """Return the newest row of each environment that was checked with so many seeds, in the order of `subjects`."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    rows = {_key(row.name, row.options): row for row in (Row(**json.loads(line)) for line in lines)}
    known = [_key(subject.name, subject.options) for subject in subjects()]
    return [rows[key] for key in known if key in rows and rows[key].seeds == num_seeds]


def _key(name: str, options: dict[str, Any]) -> str:
    return json.dumps([name, options], sort_keys=True)


def report(rows: Sequence[Row], path: Path) -> None:
    """Write the table."""
    passed = [row for row in rows if row.result == "passes"]
    own = {row.name for row in passed if row.name in built_in()}
    sources = {row.name for row in passed} - own - {"tasks"}
    path.write_text(
        f"# {re.sub('-contract', '', path.stem)}: the contract over {rows[0].seeds} seeds\n\n"
        "`python -m benchmarks.contract`: `check_env` on every built-in environment and on those of the adapters, one after\n"
        f"the other. {len(own)} built-in environments and {len(sources)} adapters pass. Seconds are of a busy "
        "machine's clock.\n\n"
        "| environment | options | seeds | seconds | result |\n|---|---|---|---|---|\n"
        + "".join(f"{row.line()}\n" for row in rows),
        encoding="utf-8",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON line each; appended to")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="environments, by their names")
    parser.add_argument("--report", type=Path, help="write the table of what FILE has, and check nothing")
    options = parser.parse_args()
    known = {_key(row.name, row.options) for row in read_rows(options.out, options.seeds) if row.result == "passes"}
    for subject in subjects() if options.report is None else ():
        if (options.only is None or subject.name in options.only) and _key(subject.name, subject.options) not in known:
            row = check(subject, options.seeds)
            print(row.line(), flush=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    rows = read_rows(options.out, options.seeds)
    if options.report is not None:
        report(rows, options.report)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
