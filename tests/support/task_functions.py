"""Rewards and tools as a user writes them, here and for other trainers."""

import asyncio
from typing import Any

from agentrl import tool


def shares_letters(completion: str, answer: str) -> float:
    return len(set(completion) & set(answer)) / len(set(answer))


async def waits(completion: str, answer: str, **kwargs: Any) -> float:
    await asyncio.sleep(0.01)
    return float(completion == answer)


async def hangs(completion: str) -> float:
    await asyncio.sleep(3600)
    return 1.0


def as_trl_has_it(prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any) -> list[float | None]:
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]


def of_one_column(completion: str, difficulty: int) -> float | None:
    return None if difficulty > 1 else 1.0


def tells(completion: str, info: dict[str, Any]) -> float:
    info["letters"] = len(completion)
    return 0.0


def spoils(completion: str, task: dict[str, Any], messages: list[Any]) -> float:
    task.clear()
    messages.clear()
    return 0.0


def counts_messages(messages: list[dict[str, Any]]) -> float:
    return float(len(messages))


def fails(completion: str) -> float:
    raise RuntimeError("the judge is ill")


def no_number(completion: str) -> float:
    return float("nan")


def no_reward(text: str) -> float:
    return 1.0


@tool
def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: to look up.
    """
    return {"cat": "an animal"}.get(word, "unknown")


@tool
async def think(seconds: int) -> str:
    """Wait."""
    await asyncio.sleep(0)
    return f"waited {seconds}"


def unmarked(word: str) -> str:
    """Look a word up."""
    return word
