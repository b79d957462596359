"""A reward for mathematical equality, computed in processes of its own: what a model writes can keep sympy busy for ever."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentrl.data.plain import abbreviated
from agentrl.env.subprocesses import WorkerPool
from agentrl.errors import UserError

_pool = WorkerPool(Path(__file__).with_name("math_worker.py"), purpose="the reward math")


def math(
    completion: str, answer: Any, info: dict[str, Any], *, timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0
) -> float:
    r"""Return 1 if the answer is mathematically equal to the right one, as `math-verify` sees it; else 0.

    It reads LaTeX (`$...$`, `\boxed{...}`) and plain expressions anywhere in the text: numbers, fractions, sets, intervals,
    equations, matrices. What cannot be decided within `timeout_s` seconds or 2 GiB of memory earns 0, and is counted in
    the metric `episode/math_undecided`.

    Args:
        completion: what was answered.
        answer: the right one, as LaTeX (with or without `$`) or as a number.
        info: gets the count.
        timeout_s: deadline, in seconds.

    Raises:
        ValueError: if the right answer is no mathematics, which is a fault of the table.
    """
    info.setdefault("math_undecided", 0.0)
    if completion.strip() == str(answer).strip():
        return 1.0
    if find_spec("math_verify") is None:
        raise UserError("the reward math needs math-verify: pip install 'agentrl[math]'")
    result = _pool.ask({"answer": str(answer), "completion": completion, "timeout_s": timeout_s})
    info["math_undecided"] += float(result is None)
    if result == "no mathematics":
        raise ValueError(f"the right answer {abbreviated(answer)} is no mathematics; use exact_match")
    return float(result == "equal")
