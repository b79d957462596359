"""Success of a pretrained chat model in every built-in environment before any training, read from the full prompt.

    python -m benchmarks.untrained --out FILE [--model smollm2] [--episodes 32] [--temperature 1] [--envs NAME ...]
    python -m benchmarks.untrained --out FILE --tell

One JSON line an environment; what is in FILE under the same settings is not played again. `--dialogues FOLDER` keeps what
was said. Turns that a limit cuts off are carried out (`rollout.cut_off: act`), so that each reward can be earned.
"""

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import agentrl
from agentrl.errors import UserError
from agentrl.rollout.evaluation import share_interval
from agentrl.types import FinishReason
from benchmarks.result_lines import append_line, read_lines

MAX_TURNS = {
    "calculator": 6,
    "corridor": 20,
    "customer_service": 12,
    "frozen_lake": 12,
    "key_door": 8,
    "negotiation": 9,
    "python_sandbox": 8,
    "repository": 8,
    "search": 8,
    "service_desk": 12,
    "shell": 8,
    "sokoban": 20,
    "sql_analyst": 8,
    "twenty_questions": 12,
    "wordle": 8,
}
"""Turns of an episode at most: about as many as the oracle takes, or a few more."""
_CODE = {"python_sandbox", "repository", "shell", "sql_analyst"}
_TOKENS, _CODE_TOKENS = 48, 128
"""Tokens of a turn at most."""


def settings(env: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a result depends on."""
    return {
        "env": env,
        "model": options.model,
        "episodes": options.episodes,
        "temperature": options.temperature,
        "max_turns": MAX_TURNS[env],
        "max_turn_tokens": _CODE_TOKENS if env in _CODE else _TOKENS,
    }


def measure(setting: dict[str, Any], engine: dict[str, Any], dialogues: Path | None) -> dict[str, Any]:
    """Play the evaluation tasks of an environment; return what came of it."""
    turns, tokens = setting["max_turns"], setting["max_turn_tokens"]
    begun = time.monotonic()
    found = agentrl.evaluate(
        env=setting["env"],
        model=setting["model"],
        engine=engine,
        rollout={
            "max_turns": turns,
            "max_turn_tokens": tokens,
            "max_episode_tokens": turns * tokens,
            "max_context_tokens": 6144,
            "max_live_episodes": 32,
            "cut_off": "act",
        },
        evaluation={"num_tasks": setting["episodes"], "temperature": setting["temperature"]},
        dialogues=None if dialogues is None else dialogues / f"{setting['env']}-{setting['temperature']:g}.jsonl",
    )
    played = [t for group in found.groups for t in group.valid]
    actions = [turn for t in played for turn in t.turns]
    solved = [
        [float(bool(t.metrics.get("success"))) for t in group.valid] for group in found.groups
    ]  # without an end: not
    interval = share_interval(solved)
    return {
        **setting,
        "success": sum(map(sum, solved)) / len(played),
        "interval": None if interval is None else [interval.low, interval.high],
        "reward": found.metrics["reward"],
        "turns": len(actions) / len(played),
        "calls": sum(map(_has_call, actions)) / len(actions),
        "sound_calls": sum(_has_call(turn) and not turn.extras.get("tool_errors") for turn in actions) / len(actions),
        "cut_off": sum(turn.finish_reason == FinishReason.LENGTH for turn in actions) / len(actions),
        "seconds": time.monotonic() - begun,
    }


def _has_call(turn: agentrl.Turn) -> bool:
    return bool(turn.message.get("tool_calls"))


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Return the results as a table in Markdown."""
    rows = [
        "| environment | episodes | success [95 %] | reward | turns | with a call | a sound one | cut off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in sorted(lines, key=lambda line: (line["temperature"], line["env"])):
        low, high = line["interval"]
        rows.append(
            f"| {line['env']} | {line['episodes']} | {line['success']:.2f} [{low:.2f}, {high:.2f}] | {line['reward']:.2f} | "
            f"{line['turns']:.1f} | {line['calls']:.0%} | {line['sound_calls']:.0%} | {line['cut_off']:.0%} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Play what is not in the file yet, or print what is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--envs", nargs="*", choices=MAX_TURNS, default=list(MAX_TURNS))
    parser.add_argument("--engine", default="auto")
    parser.add_argument(
        "--server", help="address of a vLLM server that `agentrl serve` has started, in place of --engine"
    )
    parser.add_argument("--dialogues", type=Path, help="folder for what was said")
    parser.add_argument("--tell", action="store_true", help="print the table of the file")
    options = parser.parse_args()
    engine: dict[str, Any] = {"name": options.engine}
    if options.server:
        engine = {"name": "vllm_server", "server": {"url": options.server}}
    for env in () if options.tell else options.envs:
        setting = settings(env, options)
        if any(setting.items() <= line.items() for line in read_lines(options.out)):
            continue
        try:
            append_line(options.out, measure(setting, engine, options.dialogues))
        except UserError as error:  # a package or a sandbox that it needs is missing
            print(f"{env}: {error}")
    print(table(read_lines(options.out)))


if __name__ == "__main__":
    main()
