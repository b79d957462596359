"""The pool under load: episodes per second, lag of the event loop, and what 20,000 episodes leave behind.

    python -m benchmarks.rollout_load [--live 1000] [--episodes 20000]

A scripted engine, an environment with tools and three turns; so what is measured is agentrl itself: environments' threads,
messages, tokens. Memory, threads, open files and child processes are counted at each tenth of the way.
"""

import argparse
import asyncio
import json
import time
from typing import Any

from agentrl import ToolEnv, tool
from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.learn.metrics import process_metrics
from agentrl.rollout import RolloutConfig, RolloutPool
from agentrl.testing import ScriptedEngine

GROUP = 8


class Counter(ToolEnv):
    """Ends after three calls of its tool."""

    def start(self, options: dict[str, Any]) -> str:
        self.count = 0
        return "Count to three."

    @tool
    def up(self) -> str:
        """Count on."""
        self.count += 1
        if self.count == 3:
            self.reward(float(self.np_random.random()))
            self.finish()
        return str(self.count)

    def answer(self, text: str) -> str:
        return "Use the tool."


def load(live: int, episodes: int, *, marks: int = 10) -> list[dict[str, float]]:
    """Play so many episodes, `live` at once; return what was counted at each mark."""
    tokenizer = train_tokenizer([], vocab_size=261)
    renderer = ChatMLRenderer(tokenizer)
    call = '<tool_call>\n{"name": "up", "arguments": {}}\n</tool_call>'
    answer = [*tokenizer(call)["input_ids"], renderer.stop_token_ids[0]]
    config = RolloutConfig(
        mode="partial",
        num_groups=max(1, live // GROUP // 2),
        group_size=GROUP,
        max_live_episodes=live,
        max_turns=4,
        max_turn_tokens=256,
        max_context_tokens=4096,
    )
    pool = RolloutPool(make_env=Counter, engine=Forgetful(answer), renderer=renderer, config=config, seed=0)
    rows: list[dict[str, float]] = []
    done = 0
    begin = time.perf_counter()
    lag_s = 0.0
    with asyncio.Runner() as runner:
        while done < episodes:
            groups = runner.run(pool.collect())
            done += sum(len(group.valid) for group in groups)
            lag_s = max(lag_s, pool.loop_lag_s)
            if done >= episodes * (len(rows) + 1) / marks:
                rate = done / (time.perf_counter() - begin)
                rows.append({"episodes": done, "per_s": rate, "lag_s": lag_s} | process_metrics())
        runner.run(pool.stop())
        pool.close()
    return rows


class Forgetful(ScriptedEngine):
    """Remembers no prompts: they would be what grows."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__(lambda request_id, number: answer)

    async def generate(self, prompt_ids: Any, sampling: Any, request_id: str) -> Any:
        try:
            return await super().generate(prompt_ids, sampling, request_id)
        finally:
            self.prompts.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=20_000)
    options = parser.parse_args()
    rows = load(options.live, options.episodes)
    print(f"{'episodes':>9} {'per s':>7} {'lag, s':>7} {'memory, MB':>11} {'threads':>8} {'files':>6} {'children':>9}")
    for row in rows:
        print(
            f"{row['episodes']:>9.0f} {row['per_s']:>7.0f} {row['lag_s']:>7.3f} {row['process/memory_bytes'] / 1e6:>11.0f} "
            f"{row['process/threads']:>8.0f} {row['process/open_files']:>6.0f} {row['process/children']:>9.0f}"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
