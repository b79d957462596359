"""Real clients, unmodified, as agents of a pool: are the tokens that are trained on those that were sampled?

    python -m benchmarks.endpoint_clients [--only CLIENT ...] [--python VENV/bin/python] [--npm FOLDER/node_modules/.bin]

Each client of `benchmarks/endpoint_wires.py` plays an episode by `agent.command`, against an engine that says what the client
needs. The SDKs live in an environment that the script makes with `tests/support/agents/requirements.txt`, in the user's cache;
those of npm are left out without `--npm`. `identical` counts clients of whom each turn has the context and the tokens of one
completion of the engine, each completion is a turn, and each call is related to the calls before as a person found it.
`masked` counts tokens that were sampled and that the loss does not select.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.rollout.tasks import EnvTask
from agentrl.types import Message, Trajectory, parent_of
from benchmarks.endpoint_pools import MessageEngine, agent_player, decode, num_trained, open_pool, sampled, text
from benchmarks.endpoint_wires import AGENTS, CLIENTS, QUESTIONS, ROOT, Client

REQUIREMENTS = AGENTS / "requirements.txt"
OPENCODE = re.compile(r"\{url\}/v1")
CODEX = '-c model_provider=own -c model_providers.own.base_url=\\"$OPENAI_BASE_URL\\"'
VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DISABLE_TELEMETRY": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
}


def python_with(packages: Sequence[str] = ()) -> Path:
    """Return the interpreter of an environment with these of the required packages; by default with all."""
    lines = [line for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    wanted = [line for line in lines if not packages or re.split(r"[\[=]", line)[0] in packages]
    digest = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "agentrl" / f"clients-{digest}"
    if not (folder / "complete").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        command = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *wanted,
        ]
        subprocess.run(command, check=True)
        (folder / "complete").touch()
    return folder / "bin" / "python"


class Says:
    """What the engine says to one client: its answers in turn, and words to whatever is no part of its task."""

    def __init__(self, answers: Sequence[Message]) -> None:
        self._left: defaultdict[str, list[Message]] = defaultdict(lambda: list(answers))

    def __call__(self, name: str, prompt: str) -> Message:
        left = self._left[name.partition("#")[0]]
        tools = set(re.findall(r"\n(\w+)\(", prompt))
        is_title = not tools and any("tool_calls" in each for each in left)
        if not left or is_title or QUESTIONS[0] not in prompt:
            return text("Arithmetic")
        says = left.pop(0)
        calls = [each for each in says.get("tool_calls", ()) if each["function"]["name"] in tools][:1]
        return {**says, "tool_calls": calls} if calls else {k: v for k, v in says.items() if k != "tool_calls"}


def command_of(client: Client, *, python: Path, npm: Path | None) -> list[str]:
    """Return what runs a client: one program, or several by a shell."""
    lines = []
    for first, *rest in client.commands:
        program = [str(python), str(AGENTS / first)] if first.endswith(".py") else [str((npm or Path()) / first)]
        words = shlex.join([*program, *rest])
        lines.append(words.replace(" exec ", f" exec {CODEX} ", 1) if first == "codex" else words)
    return ["sh", "-c", " && ".join(f"{line} < /dev/null" for line in lines)]


def files_of(client: Client, folder: Path) -> None:
    """Write the files of a client's home folder; the address comes from the environment."""
    for name, content in client.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(OPENCODE.sub("{env:OPENAI_BASE_URL}", content).replace('"key"', '"{env:OPENAI_API_KEY}"'))


def relations(trajectory: Trajectory) -> list[str]:
    """Return how each turn is related to the turns before it, as a wire names it."""
    found = []
    for number, turn in enumerate(trajectory.turns):
        kind = turn.extras.get("call", "continues" if number else "root")
        found.append(kind if kind == "root" else f"{kind} {parent_of(turn, number)}")
    return found


def until_stop(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return what counts of an answer: smolagents' CodeAgent asks for no token after the one that completes `</code>`."""
    before, stop, _ = decode(ids).partition("</code>")
    return ids[: len((before + stop).encode())] if stop else ids  # a token a byte


def play(client: Client, *, python: Path, npm: Path | None = None) -> dict[str, Any]:
    """Return what came of episodes that a client plays."""
    engine, warnings = MessageEngine(Says(client.answers)), list[str]()
    with tempfile.TemporaryDirectory() as name:
        files_of(client, Path(name))
        agent = {
            "command": command_of(client, python=python, npm=npm),
            "check": ["true"],
            "files": name,
            "variables": VARIABLES,
            "tasks": {"tasks": [{"question": "?"}], "eval_share": 0},
            "timeout_s": 120,
        }
        player = agent_player(agent, on_warning=warnings.append)
        with open_pool(player, engine, max_retries=0) as (runner, pool):
            (group,) = runner.run(pool.play({"clients/0": EnvTask(seed=0, index=0)}, group_size=1))
    (trajectory,) = group.trajectories
    said = sorted((prompt, until_stop(completion.token_ids)) for prompt, completion in engine.said)
    related = relations(trajectory)
    return {
        "identical": said == sampled(trajectory) and related == list(client.relations),
        "turns": len(trajectory.turns),
        "calls": len(said),
        "masked": sum(len(ids) for _, ids in said) - num_trained([trajectory]),
        "error": trajectory.error,
        "related": related,
        "ignored": warnings,
    }


def figures(names: Sequence[str], *, python: Path, npm: Path | None = None) -> dict[str, Any]:
    """Return the figures of some clients."""
    played = {}
    for name in names:
        played[name] = play(CLIENTS[name], python=python, npm=npm)
        print(name, json.dumps(played[name]), file=sys.stderr, flush=True)
    return {
        "clients": len(played),
        "packages": len({CLIENTS[name].package for name in played}),
        "identical": sum(each["identical"] for each in played.values()),
        "turns": sum(each["turns"] for each in played.values()),
        "calls": sum(each["calls"] for each in played.values()),
        "masked": sum(each["masked"] for each in played.values()),
        "wrong": {name: each for name, each in played.items() if not each["identical"] or each["masked"]},
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*CLIENTS])
    parser.add_argument("--python", type=Path, help="interpreter of an environment that has the SDKs")
    parser.add_argument("--npm", type=Path, help="folder of the programs of npm")
    options = parser.parse_args()
    of_npm = [name for name, client in CLIENTS.items() if not client.commands[0][0].endswith(".py")]
    names = options.only or [name for name in CLIENTS if options.npm or name not in of_npm]
    print(json.dumps(figures(names, python=options.python or python_with(), npm=options.npm)))


if __name__ == "__main__":
    main()
