"""Rewards for the length of an answer."""

from typing import Annotated, Literal

from pydantic import Field

from agentrl.errors import UserError

Length = Annotated[int, Field(gt=0)]


def overlong(
    completion: str, *, max_length: Length, buffer: Length, unit: Literal["words", "characters"] = "words"
) -> float:
    """Return DAPO's soft punishment of long answers: 0 up to `max_length - buffer`, from there down to -1 at `max_length`.

        R(y) = 0                                       where |y| <= max_length - buffer
               (max_length - buffer - |y|) / buffer    where |y| <= max_length
               -1                                      beyond

    arXiv 2503.14476, equation 13. There |y| counts tokens; here words (what stands between spaces) or characters, because an
    environment never sees a token. And there an answer that the sampling limit cuts off is punished as any other; here nothing
    grades it, and it earns 0: leave `rollout.max_turn_tokens` well above `max_length`.

    Args:
        completion: what was answered.
        max_length: from which on an answer earns -1.
        buffer: length over which the punishment grows.
        unit: of both.
    """
    if buffer > max_length:
        raise UserError(f"overlong: buffer: {buffer} is more than max_length: {max_length}; lower it")
    length = len(completion) if unit == "characters" else len(completion.split())
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))
