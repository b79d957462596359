"""Cost of the endpoint: a call through openai's client above the engine's own time, and throughput against an environment.

    python -m benchmarks.endpoint_overhead [--sessions 64] [--turns 8] [--engine-seconds 2]

The sessions play the same dialogue at the same time, with an engine whose completions take a fixed time. The client is a
service in a process of its own, which begins its sessions one after the other, over the time of a completion. Before that it
plays the same sessions against a bare server in a third process, which answers the same text after the same time.
`bare_ms` is the median of such a call less that time: what openai's client, HTTP and the cores' queues take. `endpoint_ms` is
the same through the endpoint, less the engine's own time, and `above_engine_ms` their difference. `cpu_ms` is processor time
of the pool's process for a call, `env_cpu_ms` for a step of an environment. `throughput` is turns a second over those of the
environment.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
import uvicorn
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentrl.env.message_env import MessageEnv
from agentrl.rollout import EnvPlayer, Player
from agentrl.rollout.tasks import EnvTask
from agentrl.types import Completion, FinishReason, Message, Sampling
from benchmarks.endpoint_pools import RENDERER, MessageEngine, agent_player, open_pool, text
from tests.support.ports import free_port

ANSWER = "It is what it is, and that is all there is to it. " * 4
REPLY = {"role": "user", "content": "Say more about that, in other words than before. " * 4}


class TimedEngine(MessageEngine):
    """Says one answer at once after some time, and keeps how long that took."""

    def __init__(self, seconds: float) -> None:
        super().__init__(lambda _name, _prompt: text(ANSWER))
        self.durations: list[float] = []
        self._seconds, ids = seconds, RENDERER.encode(text(ANSWER))
        num = len(ids)
        self._completion = Completion(
            token_ids=ids, logprobs=(-1.0,) * num, versions=(0,) * num, finish_reason=FinishReason.STOP
        )

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        begin = time.perf_counter()
        await asyncio.sleep(self._seconds)
        self.durations.append(time.perf_counter() - begin)
        return self._completion


class Dialogue(MessageEnv):
    """The same dialogue as an environment."""

    def __init__(self, *, turns: int, stagger_s: float) -> None:
        super().__init__()
        self._turns, self._stagger_s = turns, stagger_s
        self._turn = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        super().reset(seed=seed)
        self._turn = 0
        time.sleep(random.uniform(0, self._stagger_s))
        return (REPLY,), {}

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        self._turn += 1
        return (REPLY,), 1.0, self._turn == self._turns, False, {}


def service(port: int) -> None:
    """Play dialogues that are posted, with one client of openai's."""
    client = AsyncOpenAI(base_url="http://127.0.0.1", api_key="key", max_retries=0)
    latencies: list[float] = []

    async def play(request: Request) -> JSONResponse:
        posted = await request.json()
        task, mine = posted["task"], client.with_options(base_url=posted["base_url"], api_key=posted["api_key"])
        await asyncio.sleep(random.uniform(0, task["stagger_s"]))
        messages: list[Any] = [REPLY]
        for _ in range(task["turns"]):
            begin = time.perf_counter()
            answer = await mine.chat.completions.create(model="policy", messages=messages)
            latencies.append(time.perf_counter() - begin)
            messages += [answer.choices[0].message, REPLY]
        return JSONResponse({"reward": 1.0})

    async def taken(_: Request) -> JSONResponse:
        found, latencies[:] = list(latencies), []
        return JSONResponse(found)

    routes = [Route("/play", play, methods=["POST"]), Route("/latencies", taken, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), port=port, log_level="error")


def bare(port: int, engine_seconds: float) -> None:
    """Answer as a model would, out of nothing."""

    async def answer(request: Request) -> JSONResponse:
        await request.json()
        await asyncio.sleep(engine_seconds)
        message = {"role": "assistant", "content": ANSWER}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})

    uvicorn.run(
        Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])]), port=port, log_level="error"
    )


@contextmanager
def running(server: str, *arguments: str) -> Iterator[str]:
    """Run a server of this file in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.endpoint_overhead", server, str(port), *arguments]
    process = subprocess.Popen(command)
    try:
        while process.poll() is None:
            try:
                httpx2.get(f"http://127.0.0.1:{port}/")
                break
            except httpx2.TransportError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def post_all(url: str, body: dict[str, Any], num: int) -> None:
    """Play sessions at the same time."""
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=num)) as client:
        await asyncio.gather(*(client.post(f"{url}/play", json=body) for _ in range(num)))


def play(player: Player, *, sessions: int, turns: int, engine_seconds: float) -> dict[str, float]:
    """Return how long it took."""
    engine = TimedEngine(engine_seconds)
    with open_pool(player, engine, max_live_episodes=sessions, num_groups=1, group_size=sessions) as (runner, pool):
        wall, cpu = time.perf_counter(), time.process_time()
        (group,) = runner.run(pool.play({"overhead/0": EnvTask(seed=0, index=0)}, group_size=sessions))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    num = sum(len(trajectory.turns) for trajectory in group.trajectories)
    assert num == sessions * turns, [trajectory.error for trajectory in group.trajectories if trajectory.error][:1]
    return {"a_second": num / wall, "cpu_ms": 1000 * cpu / num, "engine": statistics.median(engine.durations)}


def figures(*, sessions: int, turns: int, engine_seconds: float) -> dict[str, Any]:
    """Return the figures."""
    task = {"turns": turns, "stagger_s": engine_seconds}
    with running("--serve") as url, running("--bare", "--engine-seconds", str(engine_seconds)) as other:
        asyncio.run(post_all(url, {"task": task, "base_url": f"{other}/v1", "api_key": "key"}, sessions))
        alone = statistics.median(httpx2.post(f"{url}/latencies", timeout=600).json()) - engine_seconds
        agent = {"url": f"{url}/play", "tasks": {"tasks": [task], "eval_share": 0}}
        played = play(agent_player(agent), sessions=sessions, turns=turns, engine_seconds=engine_seconds)
        call = statistics.median(httpx2.post(f"{url}/latencies", timeout=600).json())
    in_env = play(
        EnvPlayer(lambda: Dialogue(turns=turns, stagger_s=engine_seconds)),
        sessions=sessions,
        turns=turns,
        engine_seconds=engine_seconds,
    )
    return {
        "sessions": sessions,
        "engine_ms": 1000 * engine_seconds,
        "above_engine_ms": round(1000 * (call - played["engine"] - alone), 2),
        "endpoint_ms": round(1000 * (call - played["engine"]), 2),
        "bare_ms": round(1000 * alone, 2),
        "cpu_ms": round(played["cpu_ms"], 2),
        "env_cpu_ms": round(in_env["cpu_ms"], 2),
        "throughput": round(played["a_second"] / in_env["a_second"], 3),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--engine-seconds", type=float, default=2.0)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        service(options.serve)
    elif options.bare:
        bare(options.bare, options.engine_seconds)
    else:
        found = figures(sessions=options.sessions, turns=options.turns, engine_seconds=options.engine_seconds)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
