"""What 1,000 episodes leave behind in which tools raise, hang and are killed: no process, thread, file or socket.

    python -m benchmarks.leaks [--episodes 1000] [--live 16]

Each turn calls a tool that, by chance, answers; raises; is a coroutine that misses its deadline; runs code in a sandbox that
never ends or prints without end; or blocks beyond the deadline of a step, so that the episode's thread is lost. Some episodes
raise in `start`. Each environment holds a file and a socket until it is closed. Counted after a few episodes, which make what
a process keeps (the event loop of coroutine tools), and after the last, once blocking calls have come back. The last line is
JSON.
"""

import argparse
import asyncio
import json
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from agentrl import ToolEnv, UserError, tool
from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.env.sandbox import sandbox_config
from agentrl.rollout import EpisodeContext, RolloutConfig, RolloutPool, Tasks
from agentrl.rollout.tasks import derive_seed
from agentrl.testing import ScriptedEngine

GROUP = 8
STEP_S = 1.0
SANDBOX: dict[str, Any] = {"timeout_s": 0.3, "max_output_bytes": 1000}
NEVER_ENDS = "while True: pass"
FLOODS = "while True: print('x' * 1000)"


class Troubled(ToolEnv):
    """Whatever can go wrong does, by the choice of the model."""

    tool_timeout_s: ClassVar[float] = 0.05
    sandboxes: ClassVar[dict[str, bool]] = {}
    """Those that can be had here."""

    def __init__(self) -> None:
        super().__init__()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the environment
        self._socket = socket.socket()

    def start(self, options: dict[str, Any]) -> str:
        if self.np_random.random() < 0.02:
            raise RuntimeError("the database is gone")
        return "Go on."

    @tool
    def fine(self) -> str:
        """Answer."""
        return "Fine."

    @tool
    def raises(self) -> str:
        """Raise."""
        raise OSError("the disk is full")

    @tool
    async def late(self) -> str:
        """Miss the deadline of a tool."""
        await asyncio.sleep(60)
        return "never"

    @tool
    def code(self, text: str, sandbox: str) -> str:
        """Run code."""
        with sandbox_config({"name": sandbox, **SANDBOX}).build() as box:
            return str(box.exec(text))

    @tool
    def block(self) -> str:
        """Block beyond the deadline of a step."""
        time.sleep(2 * STEP_S)
        return "never"

    @tool
    def stop(self) -> str:
        """End the task."""
        self.finish(success=True)
        return "Over."

    def answer(self, text: str) -> str:
        return "Use a tool."

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def counted() -> dict[str, int]:
    """Count what this process holds."""
    names, children = list[str](), list[str]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own
            names.append(os.readlink(entry))
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            children += (task / "children").read_text().split()
    return {
        "processes": len(children),
        "threads": threading.active_count(),
        "files": sum(not name.startswith("socket:") for name in names),
        "sockets": sum(name.startswith("socket:") for name in names),
        "temporary files": len(list(Path(tempfile.gettempdir()).iterdir())),
    }


def available() -> list[str]:
    """Return the sandboxes that run a process of their own and can be had here."""
    found = []
    for name in ("bubblewrap", "unsafe"):
        try:
            sandbox_config(name).build().close()
        except UserError as error:
            print(f"not tried: {error}")
        else:
            found.append(name)
    return found


def calls() -> list[tuple[int, str, dict[str, str]]]:
    """Return calls with their weights."""
    codes = [(text, name) for name in available() for text in (NEVER_ENDS, FLOODS)]
    return [
        (30, "fine", {}),
        (10, "raises", {}),
        (10, "late", {}),
        (1, "block", {}),
        (15, "stop", {}),
        *((2, "code", {"text": text, "sandbox": name}) for text, name in codes),
        (10, "code", {"text": NEVER_ENDS, "sandbox": "monty"}),
    ]


def play(episodes: int, live: int, *, seed: int) -> dict[str, Any]:
    """Play so many episodes; return what happened."""
    tokenizer = train_tokenizer([], vocab_size=261)
    renderer = ChatMLRenderer(tokenizer)
    weighed = [(name, arguments) for weight, name, arguments in calls() for _ in range(weight)]
    happened: Counter[str] = Counter()

    def script(request_id: str, number: int) -> list[int]:
        name, arguments = weighed[derive_seed(seed, request_id, number) % len(weighed)]
        happened[f"{name} {arguments.get('sandbox', '')}".strip()] += 1
        text = json.dumps({"name": name, "arguments": arguments})
        return [*tokenizer(f"<tool_call>\n{text}\n</tool_call>")["input_ids"], renderer.stop_token_ids[0]]

    config = RolloutConfig(
        mode="partial",
        num_groups=max(1, live // GROUP),
        group_size=GROUP,
        max_live_episodes=live,
        max_turns=6,
        max_context_tokens=8192,
        env_timeout_s=STEP_S,
        max_consecutive_failures=1000,
    )
    context = EpisodeContext(engine=ScriptedEngine(script), renderer=renderer, config=config)
    pool = RolloutPool(make_env=Troubled, context=context, tasks=Tasks(seed=seed))
    done, begin = 0, time.perf_counter()
    with asyncio.Runner() as runner:
        while done < episodes:
            done += sum(len(group.trajectories) for group in runner.run(pool.collect()))
        runner.run(pool.stop())
        pool.close()
    return {"episodes": done, "seconds": time.perf_counter() - begin, "calls": happened, "counts": dict(pool.counts)}


def wait_for(condition: Callable[[], bool], *, timeout_s: float) -> None:
    """Wait until something is so, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--live", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        play(2 * GROUP, options.live, seed=1)
        time.sleep(3 * STEP_S)
        before = counted()
        found = play(options.episodes, options.live, seed=0)
        wait_for(lambda: counted() == before, timeout_s=10 * STEP_S)
        after = counted()
    print(f"{found['episodes']} episodes in {found['seconds']:.0f} s; {found['counts']}")
    print(*(f"{name}: {count}" for name, count in found["calls"].most_common()), sep="\n")
    for name, count in before.items():
        print(f"{name:>16}: {count:>4} before, {after[name]:>4} after")
    print(json.dumps(found | {"before": before, "after": after}))


if __name__ == "__main__":
    main()
