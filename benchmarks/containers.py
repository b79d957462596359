"""What stays on a machine after many episodes in containers: nothing.

    python -m benchmarks.containers [--episodes 1000] [--program podman] [--threads 2] [--write]

Episodes of `shell` in the sandbox `container`, played by the oracle; every tenth leaves a process behind that leads its own
session, every fiftieth hangs until it is killed. Before and after, it counts containers, volumes, processes, mounts, control
groups, the bytes of the program's storage, and the descriptors and threads of this process. The image is made from this
machine's files. The last line printed is JSON; `--write` puts it into `benchmarks/results`.
"""

import argparse
import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from agentrl import Sandbox
from agentrl_envs.sandboxes.container import ContainerConfig
from agentrl_envs.shell import Shell
from tests.support.containers import container

RESULTS = Path(__file__).parent / "results"


def counts(program: str) -> dict[str, int]:
    """Count what could stay."""
    driver = {"podman": "{{.Store.GraphRoot}}", "docker": "{{.DockerRootDir}}"}[program]
    storage = _output(program, "info", "--format", driver).strip()
    groups = [folder for _, folders, _ in os.walk("/sys/fs/cgroup") for folder in folders if len(folder) > 60]
    return {
        "containers": len(_output(program, "ps", "--all", "--quiet").split()),
        "volumes": len(_output(program, "volume", "ls", "--quiet").split()),
        "processes": sum(
            process.info["name"] in ("conmon", "runc", "crun") or process.info["cmdline"] == ["sleep", "600"]
            for process in psutil.process_iter(["name", "cmdline"])
        ),
        "mounts": len(Path("/proc/mounts").read_text(encoding="utf-8").splitlines()),
        "control groups": len(groups),
        "storage bytes": int(_output("du", "-sb", storage).split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def play(env: Shell, number: int) -> tuple[bool, list[float]]:
    """Play an episode; return whether it was solved, and the seconds of each command."""
    env.reset(seed=number)
    assert env.box is not None
    seconds = []
    if number % 10 == 0:
        seconds.append(_run(env.box, "setsid sleep 600 & true"))
    if number % 50 == 0:
        _run(env.box, "sleep 600")
    info: dict[str, Any] = {}
    is_over = False
    while not is_over:
        begin = time.perf_counter()
        _, _, is_over, _, info = env.step(env.oracle())
        seconds += [time.perf_counter() - begin] * (not is_over)
    return bool(info["success"]), seconds


def _run(box: Sandbox, command: str) -> float:
    begin = time.perf_counter()
    box.exec(command, language="sh")
    return time.perf_counter() - begin


def measure(config: ContainerConfig, *, episodes: int, threads: int) -> dict[str, Any]:
    local = threading.local()

    def play_one(number: int) -> tuple[bool, list[float]]:
        if not hasattr(local, "env"):
            local.env = Shell(num_jobs=1, sandbox=config.model_dump())
        return play(local.env, number)

    program = config.program or "podman"
    play_one(episodes)  # what is made once is there
    before, begin = counts(program), time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        played = list(pool.map(play_one, range(episodes)))
    took, after = time.perf_counter() - begin, counts(program)
    seconds = [one for _, of_episode in played for one in of_episode]
    return {
        "program": _output(program, "--version").strip(),
        "machine": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "episodes": episodes,
        "solved": sum(solved for solved, _ in played),
        "killed": len(range(0, episodes, 50)),
        "seconds": round(took, 1),
        "exec_median_s": round(statistics.median(seconds), 3),
        "exec_max_s": round(max(seconds), 3),
        "left": {name: after[name] - before[name] for name in before},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--program", choices=["podman", "docker"], default="podman")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/DATE-containers.md")
    options = parser.parse_args()
    config = container(program=options.program)
    found = measure(config, episodes=options.episodes, threads=options.threads)
    if options.write:
        day = dt.date.today()
        left = "\n".join(f"| {name} | {number:,} |" for name, number in found["left"].items())
        text = (
            f"# {day}: what {options.episodes:,} episodes in containers leave\n\n`python -m benchmarks.containers`: episodes "
            f"of `shell`, played by the oracle, {options.threads} at a time, with {found['program']}; {found['killed']} "
            f"commands hung until they were killed. {found['solved']:,} were solved. One command took "
            f"{found['exec_median_s']} s (median; the longest {found['exec_max_s']} s) on a shared machine.\n\n"
            f"| after, less before | |\n|---|---|\n{left}\n\n```json\n{json.dumps(found)}\n```\n"
        )
        (RESULTS / f"{day}-containers.md").write_text(text, encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
