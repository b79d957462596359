"""Rewards for the tasks of colors.jsonl: agentrl train examples/tasks.yaml, from the folder above this one."""

from typing import Any


def named(completion: str, answer: str) -> float:
    words = completion.lower().strip(" .").split()
    if words == [answer]:
        return 1.0
    return 0.3 if answer in words else 0.0


def brief(completion: str, task: dict[str, Any], **kwargs: Any) -> float:
    num_extra = len(completion.split()) - len(task["answer"].split())
    return -min(1.0, 0.1 * max(0, num_extra))
