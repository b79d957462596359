"""The process that scores answers of reasoning-gym: a question a line, an answer a line, until nothing more is asked.

Scorers of reasoning-gym give what a model says to `eval`, or to sympy's `parse_expr`, which is `eval` as well. Here it is
read without being run: as literals, or as arithmetic whose every part is on a list.
"""

import ast
import base64
import json
import operator
import os
import pickle
import random
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

_MEMORY = 2 * 2**30
OWN_TEXTS = {
    "reasoning_gym.arithmetic.basic_arithmetic",
    "reasoning_gym.arithmetic.bitwise_arithmetic",
    "reasoning_gym.arithmetic.gsm_symbolic.generators_00_49",
    "reasoning_gym.arithmetic.gsm_symbolic.generators_50_99",
}
"""Modules that call `eval` on what they have made themselves, never on an answer. All others read literals in its place."""
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_CONSTANTS = {"E", "I", "pi"}
_FUNCTIONS = {"Abs", "Integral", "exp", "ln", "log", "sqrt"} | {
    f"{inverse}{name}{hyperbolic}"
    for name in ("sin", "cos", "tan", "cot", "sec", "csc")
    for inverse in ("", "a")
    for hyperbolic in ("", "h")
}
"""Functions of sympy, computed of its own objects. An integral is one of the right answers where sympy finds none."""


def read_expression(text: str, local_dict: Mapping[str, Any] | None = None, **_: Any) -> Any:
    """Return arithmetic as sympy's objects, in the place of its `parse_expr`; nothing of the text is run.

    Raises:
        SyntaxError: for what Python cannot read.
        ValueError: for all but numbers, names, operators and calls of elementary functions.
    """
    import sympy

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                return sympy.Integer(number)
            case ast.Constant(value=float() as number):
                return sympy.Float(repr(number))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(operand))
            case ast.Name(id=name) if local_dict and name in local_dict:
                return local_dict[name]
            case ast.Name(id=name) if not name.startswith("_"):
                return getattr(sympy, name) if name in _CONSTANTS else sympy.Symbol(name)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
                return getattr(sympy, name)(*[value(argument) for argument in arguments])
        raise ValueError(f"an answer cannot hold {type(node).__name__}")

    return value(ast.parse(text.strip(), mode="eval").body)


def read_without_running() -> None:
    """Import reasoning-gym so that nothing in it runs an answer."""
    import sympy
    from sympy.parsing import sympy_parser

    # Before it is imported: some of its modules take the function itself. What sympy reads by `sympify` goes there too.
    sympy.parse_expr = sympy_parser.parse_expr = read_expression
    import reasoning_gym  # noqa: F401 - its modules are changed below

    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and name not in OWN_TEXTS:
            vars(module)["eval"] = ast.literal_eval


def main() -> None:
    """Answer `{"score": ...}`, or `{"error": ...}` where the scorer raises, to each question."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each takes of the memory
    answers, sys.stdout = sys.stdout, sys.stderr  # scorers may print
    read_without_running()
    import numpy as np
    import reasoning_gym

    with suppress(ValueError, OSError):  # macOS has none
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))

    @lru_cache(maxsize=8)
    def scorer(made_of: bytes) -> Any:
        name, size, config = pickle.loads(made_of)
        return reasoning_gym.create_dataset(name, seed=0, size=size, **config)

    for line in sys.stdin.buffer:
        question = json.loads(line)
        data_set = scorer(base64.b64decode(question["data_set"]))
        entry = pickle.loads(base64.b64decode(question["entry"]))
        random.seed(0)
        np.random.seed(0)
        # Nobody handles this signal, so that it ends the process, whatever that computes.
        signal.setitimer(signal.ITIMER_REAL, question["timeout_s"])
        try:
            answer: dict[str, Any] = {"score": float(data_set.score_answer(question["answer"], entry))}
        except Exception as error:  # noqa: BLE001 - a stranger's scorer may raise anything
            answer = {"error": repr(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
