"""Episodes of one sandboxed step of half a second, over two `agentrl env-serve` processes on this machine.

    python -m benchmarks.env_servers [--episodes 2000] [--workers 4] [--kill]

The environment is `shell`, whose commands run in bubblewrap. The model is a script that says one command, `sleep`, for as long
as makes the step last half a second when nothing else runs. A sandbox takes processor time to start: the workers must be so
few that the cores are not the limit. `--kill` kills one server when half of the episodes have ended.

Prints one JSON line: episodes a second, the rate that is possible (workers / .5 s), their ratio; the rate of as many episodes
at once in this process, a tenth of them, played just before (what the cores allow at the time); episodes that are missing,
failed or without the script's one turn, and those whose server was lost and which continued on the other.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.env import tool_call
from agentrl.env.make import EnvConfig
from agentrl.rollout import EnvPlayer, EpisodeContext, RolloutConfig, RolloutPool, Tasks
from agentrl.testing import ScriptedEngine

STEP_S = 0.5
SIZE = 8
ENV = EnvConfig(id="shell")


@contextmanager
def server(workers: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server; give its process and its address."""
    argv = [sys.executable, "-m", "agentrl", "env-serve", ENV.id, "--workers", str(workers), "--port", "0"]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        found = re.search(r"ws://\S+", process.stdout.readline())
        assert found, "it does not serve"
        try:
            yield process, found[0]
        finally:
            process.send_signal(signal.SIGTERM)


def sleep_s() -> float:
    """Return for how long a command must sleep so that a step lasts `STEP_S`."""
    env, took = ENV.make(), []
    for _ in range(5):
        env.reset(seed=0, options={"split": "train", "task_index": 0})
        begin = time.perf_counter()
        env.step(tool_call("shell", command="true"))
        took.append(time.perf_counter() - begin)
    env.close()
    return STEP_S - median(took)


def play(
    urls: Sequence[str], episodes: int, live: int, sleeping_s: float, on_half: threading.Event
) -> dict[str, float]:
    """Play all episodes; return their counts and seconds."""
    renderer = ChatMLRenderer(train_tokenizer([], vocab_size=261))
    said = renderer.encode(tool_call("shell", command=f"sleep {sleeping_s:.3f}"))
    sampled = 0

    def script(_: str, __: int) -> list[int]:
        nonlocal sampled
        sampled += 1
        if sampled >= episodes // 2:
            on_half.set()
        return list(said)

    config = RolloutConfig(
        num_groups=episodes // SIZE,
        group_size=SIZE,
        max_turns=1,
        max_turn_tokens=len(said),
        max_live_episodes=live,
        env_timeout_s=60.0,
    )
    pool = RolloutPool(
        player=EnvPlayer(ENV.model_copy(update={"servers": tuple(urls)}).make),
        context=EpisodeContext(engine=ScriptedEngine(script), renderer=renderer, config=config),
        tasks=Tasks(seed=0),
    )
    begin = time.perf_counter()
    groups = asyncio.run(pool.collect())
    seconds = time.perf_counter() - begin
    pool.close()
    played = [one for group in groups for one in group.trajectories]
    whole = [one for one in played if len(one.turns) == 1 and not one.failed]
    return {
        "seconds": round(seconds, 2),
        "episodes": len(played),
        "missing": episodes - len({one.trajectory_id for one in whole}),
        "sampled": sampled,
        "failed": pool.counts["failed_episodes"],
        "resumed": pool.counts["retries"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=4, help="of each server")
    parser.add_argument("--kill", action="store_true", help="kill one server in the middle")
    options = parser.parse_args()
    sleeping_s, on_half, workers = sleep_s(), threading.Event(), 2 * options.workers
    here = play([], max(SIZE, options.episodes // 10 // SIZE * SIZE), workers, sleeping_s, threading.Event())
    with ExitStack() as stack:
        servers = [stack.enter_context(server(options.workers)) for _ in range(2)]

        def kill() -> None:
            on_half.wait()
            servers[0][0].kill()

        if options.kill:
            threading.Thread(target=kill, daemon=True).start()
        # As in a run, in which most episodes wait for the model: while one is opened and closed, its worker plays another.
        row = play([url for _, url in servers], options.episodes, 4 * workers, sleeping_s, on_half)
    rate, possible = row["episodes"] / row["seconds"], workers / STEP_S
    here_rate = round(here["episodes"] / here["seconds"], 2)
    shown = {"workers": workers, "killed": options.kill, "sleep_s": round(sleeping_s, 3), "rate": round(rate, 2)}
    print(json.dumps({**shown, "possible": possible, "share": round(rate / possible, 3), "here": here_rate, **row}))


if __name__ == "__main__":
    main()
