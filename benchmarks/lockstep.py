"""Free running against the default of a GPU and against lockstep, where environments take longer than a decoding step.

    python -m benchmarks.lockstep [--episodes 128] [--live 32] [--repeats 3]

A tiny random model on the transformers engine stands for a GPU: its steps take milliseconds. Episodes of six turns, a tool of
20 ms, of .6 s in one call of ten. Prints one JSON line: for each way the seconds and the share of them in which the engine
decoded, as medians, and the default's seconds in units of free running.
"""

import argparse
import asyncio
import json
import time
from statistics import median
from typing import Any

import torch

from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.env import MessageEnv
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import make_local_model
from agentrl.rollout import EnvPlayer, EpisodeContext, RolloutConfig, RolloutPool, Tasks
from agentrl.types import Message
from benchmarks.partial_rollouts import TOKENIZER, OftenStops

TURNS, SIZE = 6, 8
TOOL_S, SLOW_S, SLOW_SHARE = 0.02, 0.6, 0.1


class Tool(MessageEnv):
    """Takes `TOOL_S` for a step, and `SLOW_S` for one in ten."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        super().reset(seed=seed)
        self.left = TURNS
        return ({"role": "user", "content": "go"},), {}

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        time.sleep(SLOW_S if self.np_random.random() < SLOW_SHARE else TOOL_S)
        self.left -= 1
        return ({"role": "user", "content": "on"},), 1.0, self.left == 0, False, {}


def collect(episodes: int, live: int, *, lockstep: bool) -> tuple[float, float]:
    """Play one step; return its seconds, and the share of them in which the engine decoded."""
    torch.manual_seed(0)
    config = RolloutConfig(
        num_groups=episodes // SIZE, group_size=SIZE, max_turns=TURNS, max_turn_tokens=64, max_live_episodes=live
    )
    engine = TransformersEngine(make_local_model(LocalModelConfig(), TOKENIZER), TransformersConfig(lockstep=lockstep))
    pool = RolloutPool(
        player=EnvPlayer(Tool),
        context=EpisodeContext(engine=engine, renderer=OftenStops(TOKENIZER), config=config),
        tasks=Tasks(seed=0),
    )
    with asyncio.Runner() as runner:
        begin = time.perf_counter()
        runner.run(pool.collect())
        seconds = time.perf_counter() - begin
        pool.close()
        runner.run(engine.close())
    return seconds, engine.busy_s / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--live", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ways = {"free": False, "default": RolloutConfig().repeats_exactly("cuda"), "lockstep": True}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, lockstep in ways.items():
            found[name].append(collect(options.episodes, options.live, lockstep=lockstep))
    row: dict[str, Any] = {
        name: {"seconds": round(median(s for s, _ in runs), 2), "busy": round(median(b for _, b in runs), 2)}
        for name, runs in found.items()
    }
    print(json.dumps(row | {"default_over_free": round(row["default"]["seconds"] / row["free"]["seconds"], 2)}))


if __name__ == "__main__":
    main()
