"""The pool under load: episodes per second, lag of the event loop, and what 20,000 episodes leave behind.

    python -m benchmarks.rollout_load [--live 1000] [--episodes 20000] [--observation 500] [--journal] [--huge 10000000]

A scripted engine, an environment with tools and three turns; so what is measured is agentrl itself: environments' threads,
messages, tokens. Memory, threads, open files and child processes are counted at each tenth of the way. Time of the processor
is counted too, for a turn: of all threads, and of the event loop's alone; other work on the machine does not count there.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from agentrl import ToolEnv, tool
from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.learn.metrics import process_metrics
from agentrl.rollout import EnvPlayer, EpisodeContext, Journal, RolloutConfig, RolloutPool, Tasks
from agentrl.testing import ScriptedEngine
from agentrl.types import Completion, FinishReason

GROUP = 8


class Counter(ToolEnv):
    """Ends after three calls of its tool, which say `observation` characters each; one in 100 episodes says `huge` ones."""

    max_tool_chars: ClassVar[int] = 10**9
    observation = huge = 0

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
        is_huge = self.huge and self.count == 1 and self.np_random.random() < 0.01
        return str(self.count).ljust(self.huge if is_huge else self.observation, "x")

    def answer(self, text: str) -> str:
        return "Use the tool."


def load(
    live: int, episodes: int, *, marks: int = 10, observation: int = 0, huge: int = 0, journal: Path | None = None
) -> list[dict[str, float]]:
    """Play so many episodes, `live` at once; return what was counted at each mark."""
    Counter.observation, Counter.huge = observation, huge
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
    pool = RolloutPool(
        player=EnvPlayer(Counter),
        context=EpisodeContext(engine=AtOnce(answer), renderer=renderer, config=config),
        tasks=Tasks(seed=0),
        journal=None if journal is None else Journal(journal),
    )
    pool.state_dict()  # from here on, what happens is written down
    rows: list[dict[str, float]] = []
    done = turns = 0
    begin, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
    lag_s = 0.0
    with asyncio.Runner() as runner:
        while done < episodes:
            groups = runner.run(pool.collect())
            done += sum(len(group.valid) for group in groups)
            turns += sum(len(trajectory.turns) for group in groups for trajectory in group.valid)
            lag_s = max(lag_s, pool.loop_lag_s)
            if done >= episodes * (len(rows) + 1) / marks:
                seconds = time.perf_counter() - begin
                row = {"episodes": done, "per_s": done / seconds, "turns_per_s": turns / seconds, "lag_s": lag_s}
                row["cpu_us_per_turn"] = 1e6 * (time.process_time() - cpu) / turns
                row["loop_us_per_turn"] = 1e6 * (time.thread_time() - own) / turns
                rows.append(row | process_metrics())
        runner.run(pool.stop())
        pool.close()
    return rows


class AtOnce(ScriptedEngine):
    """Gives its whole answer at once, and remembers no prompts: only the pool is measured."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__(lambda request_id, number: answer)
        num = len(answer)
        self._completion = Completion(
            token_ids=tuple(answer), logprobs=(-1.0,) * num, versions=(0,) * num, finish_reason=FinishReason.STOP
        )

    async def generate(self, prompt_ids: Any, sampling: Any, request_id: str) -> Completion:
        await self._may_run.wait()
        await asyncio.sleep(0)
        return self._completion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=20_000)
    parser.add_argument(
        "--observation", type=int, default=0, help="tokens (characters) of each answer of the environment"
    )
    parser.add_argument("--huge", type=int, default=0, help="characters of an answer in one of 100 episodes")
    parser.add_argument("--journal", action="store_true", help="write down what happens, as a run does")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        rows = load(
            options.live,
            options.episodes,
            observation=options.observation,
            huge=options.huge,
            journal=Path(folder) if options.journal else None,
        )
    columns = {
        "episodes": ("episodes", 0),
        "per_s": ("per s", 0),
        "turns_per_s": ("turns per s", 0),
        "lag_s": ("lag, s", 3),
        "cpu_us_per_turn": ("cpu, us/turn", 0),
        "loop_us_per_turn": ("loop, us/turn", 0),
        "process/memory_bytes": ("memory, B", 0),
        "process/threads": ("threads", 0),
        "process/open_files": ("files", 0),
        "process/children": ("children", 0),
    }
    print(*(f"{title:>13}" for title, _ in columns.values()))
    for row in rows:
        print(*(f"{row[name]:>13.{digits}f}" for name, (_, digits) in columns.items()))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
