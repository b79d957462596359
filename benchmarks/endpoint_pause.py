"""A client that waits through a pause of the engine: is anything sampled twice, and does the client notice?

    python -m benchmarks.endpoint_pause [--pause 120] [--read-timeout 2]

Episodes of two calls are played by openai's client with a short read timeout, in mode `partial`. Those of every second group
are in the middle of an action when the first `collect` returns; then the pool's loop stands still for the pause, and new
weights are loaded. `samples_a_call` counts actions begun for each call of a client, `retries` and `errors` those of the
client, `spanning` the actions with tokens of both versions. `silent` is the same without signs of life, in a pause of four
timeouts.
"""

import argparse
import json
import time
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from agentrl.agent.session import AgentSession
from agentrl.types import Message
from benchmarks.endpoint_pools import MessageEngine, agent_player, open_pool, text

GROUP_SIZE = 2
NUM_STEPS = 4
LONG = 20_000
"""Characters of an answer that is under way whenever the first group is done: one a round of the event loop."""


async def solve(task: dict[str, Any], session: AgentSession) -> dict[str, float]:
    """Make two calls, and report how they went."""
    counts = {"reward": 1.0, "calls": 0.0, "retries": 0.0, "errors": 0.0}
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    async with AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, timeout=task["read_timeout_s"]
    ) as client:
        for _ in range(2):
            counts["calls"] += 1
            try:
                raw = await client.chat.completions.with_raw_response.create(model="policy", messages=messages)
            except OpenAIError:
                counts["errors"] += 1
                continue
            counts["retries"] += raw.retries_taken
            message = raw.parse().choices[0].message
            messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "again"}]
    return counts


def say(name: str, prompt: str) -> Message:
    """Say much in every second group."""
    return text("a" * (LONG if int(name.split("/")[1]) % 2 else 10))


def figures(*, pause_s: float, read_timeout_s: float, heartbeat_s: float) -> dict[str, Any]:
    """Return the figures of a run with one long pause."""
    engine = MessageEngine(say)
    agent = {
        "run": "benchmarks.endpoint_pause:solve",
        "tasks": {"tasks": [{"question": "?", "read_timeout_s": read_timeout_s}], "eval_share": 0},
        "heartbeat_s": heartbeat_s,
    }
    rollout: dict[str, Any] = {
        "mode": "partial",
        "num_groups": 1,
        "group_size": GROUP_SIZE,
        "max_turn_tokens": 2 * LONG,
    }
    groups = []
    with open_pool(agent_player(agent), engine, **rollout) as (runner, pool):
        for step in range(NUM_STEPS):
            groups += runner.run(pool.collect())
            if not step:
                time.sleep(pause_s)  # the loop stands still, as it does in an update
            runner.run(engine.load_weights((), engine.version + 1))
    played = [trajectory for group in groups for trajectory in group.trajectories]
    counts = {name: int(sum(t.metrics[name] for t in played)) for name in ("calls", "retries", "errors")}
    begun = sum(engine.begun[trajectory.trajectory_id] for trajectory in played)
    return {
        "episodes": len(played),
        "calls": counts["calls"],
        "samples_a_call": begun / counts["calls"],
        "retries": counts["retries"],
        "errors": counts["errors"],
        "spanning": sum(len(set(turn.versions)) > 1 for t in played for turn in t.turns),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pause", type=float, default=120.0)
    parser.add_argument("--read-timeout", type=float, default=2.0)
    options = parser.parse_args()
    timeout_s = options.read_timeout
    head = {"pause_s": options.pause, "read_timeout_s": timeout_s}
    found = figures(pause_s=options.pause, read_timeout_s=timeout_s, heartbeat_s=timeout_s / 4)
    silent = figures(pause_s=4 * timeout_s, read_timeout_s=timeout_s, heartbeat_s=1000.0)
    print(json.dumps(head | found | {"silent": silent}))


if __name__ == "__main__":
    main()
