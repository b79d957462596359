"""Bracketed arithmetic with a calculator that does one operation at a time."""

import operator
import re
from typing import Any, Literal, TypeAlias

import numpy as np

from agentrl import Message, Prompt, ToolEnv, tool, tool_call
from agentrl_envs.options import opening, prompt_form, share, whole_number

Expression: TypeAlias = "int | tuple[Expression, str, Expression]"
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator(ToolEnv):
    """`((3+4)*2)=?`: compute the innermost brackets with `calc`, then theirs, and answer with the number alone.

    A call of an operation as it stands in the expression, with both operands known, earns `turn_reward` and replaces
    that operation by its value wherever it stands; any other call returns its true result and earns nothing. The last
    number of the first turn without a call is the answer: it ends the task and earns 1 if it is right.
    """

    def __init__(
        self,
        *,
        num_operations: int = 2,
        max_operand: int = 9,
        turn_reward: float = 0.2,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
    ) -> None:
        """Set the difficulty.

        Args:
            num_operations: operations in the expression.
            max_operand: largest number in it; the smallest is 1.
            turn_reward: reward of a right call.
            turn_rewards: False pays for the final answer alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
        """
        super().__init__()
        self.num_operations = whole_number("num_operations", num_operations, at_least=1, at_most=100)
        self.max_operand = whole_number("max_operand", max_operand, at_least=1, at_most=10**9)
        self.turn_reward = share("turn_reward", turn_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        self.question: Expression = 0
        self.expression: Expression = 0
        self.is_answered = False

    def start(self, options: dict[str, Any]) -> str | list[Message]:  # noqa: ARG002 - the task follows from the seed alone
        """Draw an expression."""
        self.question = self.expression = self._draw(self.num_operations)
        self.is_answered = False
        return opening(
            self.prompt,
            f"{_text(self.expression)}=?",
            "You work out an expression in brackets, one operation at a time. In each turn, call calc for one operation whose "
            "two operands are known numbers; innermost brackets come first. You get its result, which takes the place of that "
            "operation in the expression. When the value of the whole expression is known, answer without a call: write that "
            "number and nothing else.",
            self.turn_rewards and f"Each call of an operation of the expression earns {self.turn_reward:g}.",
            "The right number earns 1. The first answer without a call ends the task.",
        )

    @tool
    def calc(self, a: int, op: Literal["+", "-", "*"], b: int) -> str:
        """Compute one operation.

        Args:
            a: left operand.
            op: operation.
            b: right operand.
        """
        if (a, op, b) in _reducible(self.expression):
            self.expression = _reduced(self.expression, (a, op, b))
            if self.turn_rewards:
                self.reward(self.turn_reward, "call")
        return str(_OPERATIONS[op](a, b))

    def answer(self, text: str) -> None:
        """Take the last number as the answer."""
        is_right = re.findall(r"-?[0-9]+", text)[-1:] == [str(_value(self.expression))]
        self.is_answered = True
        self.reward(float(is_right), "answer")
        self.finish(success=is_right)

    def gold_answer(self) -> str:
        """Return the value of the expression."""
        return str(_value(self.question))

    def state_key(self) -> str:
        """Return the expression as far as it is computed."""
        return "answered" if self.is_answered else _text(self.expression)

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Compute the first operation that can be, then answer.

        A wrong turn takes the right numbers with another operation, or answers with a number of the question: mistakes
        that leave a policy something to learn, while showing it how calls and answers are written.
        """
        rng = np.random.default_rng() if rng is None else rng
        ready = _reducible(self.expression)
        is_right = rng.random() < skill
        if not ready:
            others = [n for n in _numbers(self.question) if n != self.expression] or [_value(self.expression) + 1]
            answer = self.expression if is_right else others[int(rng.integers(len(others)))]
            return {"role": "assistant", "content": str(answer)}
        if is_right:
            return _call(ready[0])
        a, _, b = ready[0]
        wrong = [(a, op, b) for op in _OPERATIONS if (a, op, b) not in ready] or [(_value(a) + 1, "+", b)]
        return _call(wrong[int(rng.integers(len(wrong)))])

    def _draw(self, num_operations: int) -> Expression:
        if num_operations == 0:
            return int(self.np_random.integers(1, self.max_operand, endpoint=True))
        num_left = int(self.np_random.integers(num_operations))
        op = list(_OPERATIONS)[int(self.np_random.integers(len(_OPERATIONS)))]
        return (self._draw(num_left), op, self._draw(num_operations - 1 - num_left))


def _call(operation: tuple[Expression, str, Expression]) -> Message:
    a, op, b = operation
    return tool_call("calc", a=a, op=op, b=b)


def _text(expression: Expression) -> str:
    if isinstance(expression, int):
        return str(expression)
    left, op, right = expression
    return f"({_text(left)}{op}{_text(right)})"


def _value(expression: Expression) -> int:
    if isinstance(expression, int):
        return expression
    left, op, right = expression
    return int(_OPERATIONS[op](_value(left), _value(right)))


def _numbers(expression: Expression) -> list[int]:
    """List the numbers in an expression, from left to right."""
    if isinstance(expression, int):
        return [expression]
    return _numbers(expression[0]) + _numbers(expression[2])


def _reducible(expression: Expression) -> list[tuple[Expression, str, Expression]]:
    """List the operations whose operands are both numbers, from left to right."""
    if isinstance(expression, int):
        return []
    left, _, right = expression
    if isinstance(left, int) and isinstance(right, int):
        return [expression]
    return _reducible(left) + _reducible(right)


def _reduced(expression: Expression, operation: Expression) -> Expression:
    """Return the expression with every occurrence of an operation replaced by its value."""
    if isinstance(expression, int):
        return expression
    if expression == operation:
        return _value(operation)
    left, op, right = expression
    return (_reduced(left, operation), op, _reduced(right, operation))
