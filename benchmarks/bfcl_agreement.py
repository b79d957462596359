"""Agreement of the environment `bfcl` with BFCL's own checkers, on recorded episodes that are right and wrong.

    python -m benchmarks.bfcl_agreement [--episodes 1000] [--seed 0] [--category multi_turn]

An episode is the ground truth of a task, as it is or with one to three changes: a call is dropped, repeated or made of another
function, an argument is changed, renamed, dropped or of another type, two calls swap places, a turn stays empty. Calls come
one a message or all of a turn in one. The environment plays it; BFCL's checker gets the same calls as text, in objects of its
own. They agree if both or neither find it right. The table shows each kind of change; the last line is JSON, in which
`same_error` counts the wrong ones for which both name the same kind of error.
"""

import argparse
import copy
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

from agentrl import Message, tool_call
from agentrl_envs.adapters.bfcl import BFCL, Call, Task, expected_turns

Turns = list[list[Call]]
"""Calls by the user's turns."""
Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
SPLITS = ("train", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict of a checker."""

    is_right: bool
    error: str | None


def drop(turns: Turns, offered: Sequence[str], rng: np.random.Generator) -> None:
    turn, place = some_call(turns, rng)
    del turns[turn][place]


def repeat(turns: Turns, offered: Sequence[str], rng: np.random.Generator) -> None:
    turn, place = some_call(turns, rng)
    turns[int(rng.integers(len(turns)))].append(turns[turn][place])


def call_another(turns: Turns, offered: Sequence[str], rng: np.random.Generator) -> None:
    """Call a function that may take no arguments, or complains that it has none."""
    calls = turns[int(rng.integers(len(turns)))]
    calls.insert(
        int(rng.integers(len(calls) + 1)), Call(name=str(rng.choice([*offered, "no_such_tool"])), arguments={})
    )


def rename(turns: Turns, offered: Sequence[str], rng: np.random.Generator) -> None:
    turn, place = some_call(turns, rng)
    turns[turn][place] = Call(name=str(rng.choice(offered)), arguments=turns[turn][place].arguments)


def change(turns: Turns, offered: Sequence[str], rng: np.random.Generator) -> None:
    """Change an argument a little, or its type."""

    def other(value: Any) -> Any:
        if rng.random() < 0.3:
            return str(value) if not isinstance(value, str) else [value]
        if isinstance(value, bool):
            return not value
        if isinstance(value, int | float):
            return value + 1
        return f"{value}x" if isinstance(value, str) else value[:-1] if isinstance(value, list) else {}

    edit_argument(turns, rng, lambda name, value: {name: other(value)})


def drop_argument(turns: Turns, offered: Sequence[str], rng: np.random.Generator) -> None:
    edit_argument(turns, rng, lambda name, value: {})


def rename_argument(turns: Turns, offered: Sequence[str], rng: np.random.Generator) -> None:
    edit_argument(turns, rng, lambda name, value: {f"{name}_": value})


def swap(turns: Turns, offered: Sequence[str], rng: np.random.Generator) -> None:
    """Swap two calls, of one turn or of two."""
    (turn, place), (other_turn, other_place) = some_call(turns, rng), some_call(turns, rng)
    one, other = turns[turn][place], turns[other_turn][other_place]
    turns[turn][place], turns[other_turn][other_place] = other, one


def empty(turns: Turns, offered: Sequence[str], rng: np.random.Generator) -> None:
    turns[int(rng.integers(len(turns)))].clear()


CHANGES = (drop, repeat, call_another, rename, change, drop_argument, rename_argument, swap, empty)


def some_call(turns: Turns, rng: np.random.Generator) -> tuple[int, int]:
    places = [(turn, place) for turn, calls in enumerate(turns) for place in range(len(calls))]
    return places[int(rng.integers(len(places)))]


def edit_argument(turns: Turns, rng: np.random.Generator, edit: Callable[[str, Any], dict[str, Any]]) -> None:
    turn, place = some_call(turns, rng)
    call = turns[turn][place]
    if call.arguments:
        name = list(call.arguments)[int(rng.integers(len(call.arguments)))]
        edited = edit(name, copy.deepcopy(call.arguments[name]))
        kept = {key: value for key, value in call.arguments.items() if key != name}
        turns[turn][place] = Call(name=call.name, arguments=kept | edited)


def recorded(turns: Turns, rng: np.random.Generator) -> list[list[list[Call]]]:
    """Return calls by turn and message."""
    if rng.random() < 0.5 or max(map(len, turns)) > 20:
        return [[calls] if calls else [] for calls in turns]
    return [[[call] for call in calls] for calls in turns]


def by_environment(env: BFCL, options: dict[str, Any], episode: list[list[list[Call]]]) -> Verdict:
    env.reset(seed=0, options=options)
    info: dict[str, Any] = {}
    for messages in episode:
        actions: list[str | Message] = [*map(message_of, messages), "Done."]
        for action in actions:
            _, _, is_over, _, info = env.step(action)
            if is_over:
                return Verdict(is_right=info["success"], error=info.get("bfcl_error"))
    raise RuntimeError(f"{env.task.id}: the episode did not end")


def message_of(calls: Sequence[Call]) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [each for call in calls for each in tool_call(call.name, **call.arguments)["tool_calls"]],
    }


def by_bfcl(task: Task, episode: list[list[list[Call]]]) -> Verdict:
    texts = [[[text_of(call) for call in calls] for calls in messages] for messages in episode]
    found = multi_turn_checker(texts, task.answer, copy.deepcopy(task.row), task.category, "recorded")
    for name in [name for name in vars(multi_turn_utils) if name.endswith("_instance")]:
        delattr(multi_turn_utils, name)  # it keeps each episode's objects in its globals
    return Verdict(is_right=found["valid"], error=found.get("error_type"))


def text_of(call: Call) -> str:
    return f"{call.name}({','.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def change_calls(env: BFCL, rng: np.random.Generator) -> tuple[str, list[list[list[Call]]]]:
    """Return an episode of the task that has begun, and what was changed in it."""
    turns = [list(turn.calls) for turn in expected_turns(env.task)]
    offered = [tool["function"]["name"] for tool in env.tools]
    kinds = []
    for _ in range(int(rng.choice([0, 1, 2, 3], p=[0.25, 0.5, 0.15, 0.1]))):
        if any(turns):
            kinds.append(CHANGES[int(rng.integers(len(CHANGES)))])
            kinds[-1](turns, offered, rng)
    return "none" if not kinds else kinds[0].__name__ if len(kinds) == 1 else "several", recorded(turns, rng)


def compared(
    env: BFCL, options: dict[str, Any], episode: list[list[list[Call]]], seconds: Array | None = None
) -> tuple[Verdict, Verdict]:
    """Return the verdicts of the environment and of BFCL, and add up the seconds of both."""
    began = time.perf_counter()
    ours = by_environment(env, options, copy.deepcopy(episode))
    between = time.perf_counter()
    theirs = by_bfcl(env.task, episode)
    if seconds is not None:
        seconds += between - began, time.perf_counter() - between
    return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--category", default="multi_turn")
    arguments = parser.parse_args()
    env, rng = BFCL(category=arguments.category), np.random.default_rng(arguments.seed)
    places = [(split, index) for split in SPLITS for index in range(env.num_tasks(split))]
    counts: dict[str, Counter[str]] = {}
    seconds = np.zeros(2)
    for number in range(arguments.episodes):
        if number % len(places) == 0:
            order = rng.permutation(len(places))
        split, index = places[order[number % len(places)]]
        options = {"split": split, "task_index": index}
        env.reset(seed=0, options=options)
        kind, episode = change_calls(env, rng)
        ours, theirs = compared(env, options, episode, seconds)
        counts.setdefault(kind, Counter()).update(
            episodes=1,
            right=theirs.is_right,
            agreed=ours.is_right == theirs.is_right,
            same_error=ours.error == theirs.error and theirs.error is not None,
        )
        if ours != theirs:
            print(f"{env.task.id}, {kind}: {ours}, BFCL {theirs}")
    total = sum(counts.values(), Counter())
    print("| change | episodes | right, says BFCL | agreed | same kind of error |\n|---|---|---|---|---|")
    for kind, each in [*sorted(counts.items()), ("all", total)]:
        print(f"| {kind} | {each['episodes']} | {each['right']} | {each['agreed']} | {each['same_error']} |")
    print(
        json.dumps(
            {
                "episodes": total["episodes"],
                "agreed": total["agreed"],
                "right": total["right"],
                "wrong": total["episodes"] - total["right"],
                "same_error": total["same_error"],
                "environment_ms": round(1000 * seconds[0] / total["episodes"], 2),
                "bfcl_ms": round(1000 * seconds[1] / total["episodes"], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
