"""Partial rollouts against sync ones where a few episodes are long: trajectories per second of sampling time.

    python benchmarks/partial_rollouts.py [--steps 12] [--repeats 3]

A tiny random model on the transformers engine; one task in ten takes ten times as many turns as the others. Each step takes
the same number of groups and pushes weights; the two modes take turns. What was handed out is counted, with its lengths. A
push makes the engine compute interrupted contexts again, which is what partial rollouts cost where cores are never idle.
"""

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import torch

from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.env import MessageEnv
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import make_local_model
from agentrl.rollout import EnvPlayer, EpisodeContext, RolloutConfig, RolloutPool, Tasks
from agentrl.types import Message

SHORT, LONG, GROUPS, SIZE = 2, 20, 8, 8
LATENCIES_S = (0.0, 0.02, 0.1, 0.3)
"""Seconds that an environment takes for a step: a calculation, a local tool, a request to a service, a slower one."""
TOKENIZER = train_tokenizer([], vocab_size=261)


class Tail(MessageEnv):
    """Takes `SHORT` turns, or `LONG` for every tenth seed, and a while for each."""

    latency_s = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        self.left = LONG if seed % 10 == 0 else SHORT
        return ({"role": "user", "content": "go"},), {}

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        time.sleep(self.latency_s)
        self.left -= 1
        return ({"role": "user", "content": "on"},), 1.0, self.left == 0, False, {}


class OftenStops(ChatMLRenderer):
    """Every eighth token ends a turn: random weights sample the one end token too rarely."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(sorted({self._end_id, *range(5, 261, 8)}))


def sample(mode: str, steps: int, seed: int, *, latency_s: float) -> dict[str, Any]:
    """Take `steps` steps after two that fill the places; return rate and lengths."""
    torch.manual_seed(0)
    Tail.latency_s = latency_s
    model = make_local_model(LocalModelConfig(), TOKENIZER)
    engine = TransformersEngine(model, TransformersConfig(max_batch_size=64, lockstep=False))
    config = RolloutConfig.model_validate(
        {
            "mode": mode,
            "num_groups": GROUPS,
            "group_size": SIZE,
            "max_turns": 2 * LONG,
            "max_turn_tokens": 64,
            "max_episode_tokens": 4096,
            "max_live_episodes": GROUPS * SIZE,
        }
    )
    pool = RolloutPool(
        player=EnvPlayer(Tail),
        context=EpisodeContext(engine=engine, renderer=OftenStops(TOKENIZER), config=config),
        tasks=Tasks(seed=seed),
    )
    weights = list(engine._model.state_dict().items())
    lengths: list[int] = []
    seconds = 0.0
    with asyncio.Runner() as runner:
        for step in range(2 + steps):
            begin = time.perf_counter()
            groups = runner.run(pool.collect())
            if step >= 2:
                seconds += time.perf_counter() - begin
                lengths += [len(t.turns) for group in groups for t in group.valid]
            runner.run(engine.load_weights(weights, step + 1))
        runner.run(pool.stop())
        pool.close()
    return {"rate": len(lengths) / seconds, "long": sum(n == LONG for n in lengths) / len(lengths), "num": len(lengths)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = []
    print(
        f"{'a step takes':>12} {'sync':>7} {'partial':>8} {'ratio':>6} {'long: sync':>11} {'partial':>8}   (trajectories/s)"
    )
    for latency_s in LATENCIES_S:
        found: dict[str, list[dict[str, Any]]] = {"sync": [], "partial": []}
        for repeat in range(options.repeats):
            for mode, results in found.items():
                results.append(sample(mode, options.steps, repeat, latency_s=latency_s))
        rate = {mode: statistics.median(r["rate"] for r in results) for mode, results in found.items()}
        long = {mode: statistics.fmean(r["long"] for r in results) for mode, results in found.items()}
        ratio = statistics.median(p["rate"] / s["rate"] for s, p in zip(*found.values(), strict=True))
        print(
            f"{1000 * latency_s:>9.0f} ms {rate['sync']:>7.1f} {rate['partial']:>8.1f} {ratio:>6.2f} {long['sync']:>11.1%} "
            f"{long['partial']:>8.1%}"
        )
        rows.append({"latency_s": latency_s, "rate": rate, "ratio": ratio, "long": long})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
