"""Write a function, try it on examples, hand it in: functions drawn from a seed, or of a bundled list."""

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from agentrl import Message, Prompt, ToolEnv, UserError, sandbox_config, tool, tool_call
from agentrl_envs.options import opening, prompt_form, share, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One call and what it returns."""

    arguments: list[Any]
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A function to write."""

    text: str
    """Description of it."""
    signature: str
    """`solve(xs)`."""
    solution: str
    """Python that defines it."""
    tests: list[Example]
    """The first few may be shown."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of a drawn function, in words, in Python, and carried out."""

    words: str
    code: str
    apply: Callable[[Any], Any]


def drawn(kind: str, split: str, *, num_steps: int, num_tests: int, rng: np.random.Generator) -> Problem:
    """Draw a problem of one half of all that there are: the checksum of its words says which half.

    Args:
        kind: `arithmetic`, of a number, or `lists`.
        split: `train` or `eval`.
        num_steps: what is to be done one after the other; `lists` have a last one beside them.
        num_tests: calls, among which at least three results differ.
        rng: source of both.
    """
    while True:
        steps = [_number_step(rng) if kind == "arithmetic" else _list_step(rng) for _ in range(num_steps)]
        steps += [] if kind == "arithmetic" else [_last_step(rng)]
        text = "; then ".join(step.words for step in steps)
        if zlib.crc32(text.encode()) % 2 != (split == "eval"):
            continue
        for _ in range(10):
            tests = [_test(kind, steps, rng) for _ in range(num_tests)]
            if len({json.dumps(test.expected) for test in tests}) >= min(3, num_tests):
                name = "n" if kind == "arithmetic" else "xs"
                lines = [
                    f"def solve({name}):",
                    *(f"    {name} = {step.code}" for step in steps),
                    f"    return {name}\n",
                ]
                what = "the number n" if kind == "arithmetic" else "the list xs of whole numbers"
                return Problem(
                    text=f"Take {what}: {text}. Return the result.",
                    signature=f"solve({name})",
                    solution="\n".join(lines),
                    tests=tests,
                )


@cache
def bundled(split: str) -> list[Problem]:
    """Return the bundled problems of a split: every fourth one is for evaluation."""
    text = (files("agentrl_envs") / "data" / "python_problems.json").read_text(encoding="utf-8")
    return [
        Problem(
            text=entry["text"],
            signature=entry["signature"],
            solution=entry["solution"],
            tests=[Example(arguments=arguments, expected=expected) for arguments, expected in entry["tests"]],
        )
        for number, entry in enumerate(json.loads(text))
        if (number % 4 == 3) == (split == "eval")
    ]


def _test(kind: str, steps: list[_Step], rng: np.random.Generator) -> Example:
    numbers = rng.integers(-20, 21, size=1 if kind == "arithmetic" else int(rng.integers(9))).tolist()
    value = given = numbers[0] if kind == "arithmetic" else numbers
    for step in steps:
        value = step.apply(value)
    return Example(arguments=[given], expected=value)


def _number_step(rng: np.random.Generator) -> _Step:
    k = int(rng.integers(2, 10))
    steps = (
        _Step(f"add {k}", f"n + {k}", lambda n: n + k),
        _Step(f"subtract {k}", f"n - {k}", lambda n: n - k),
        _Step(f"multiply by {k}", f"n * {k}", lambda n: n * k),
        _Step("square it", "n * n", lambda n: n * n),
    )
    return steps[int(rng.integers(len(steps)))]


def _list_step(rng: np.random.Generator) -> _Step:
    k = int(rng.integers(2, 10))
    steps = (
        _Step(f"add {k} to each", f"[x + {k} for x in xs]", lambda xs: [x + k for x in xs]),
        _Step(f"multiply each by {k}", f"[x * {k} for x in xs]", lambda xs: [x * k for x in xs]),
        _Step("square each", "[x * x for x in xs]", lambda xs: [x * x for x in xs]),
        _Step("keep the even ones", "[x for x in xs if x % 2 == 0]", lambda xs: [x for x in xs if x % 2 == 0]),
        _Step("keep the odd ones", "[x for x in xs if x % 2 == 1]", lambda xs: [x for x in xs if x % 2 == 1]),
        _Step(f"keep those above {k}", f"[x for x in xs if x > {k}]", lambda xs: [x for x in xs if x > k]),
        _Step(f"keep those below {k}", f"[x for x in xs if x < {k}]", lambda xs: [x for x in xs if x < k]),
        _Step("sort them", "sorted(xs)", sorted),
        _Step("reverse them", "xs[::-1]", lambda xs: xs[::-1]),
        _Step(f"take the first {k}", f"xs[:{k}]", lambda xs: xs[:k]),
        _Step("drop repeated ones", "list(dict.fromkeys(xs))", lambda xs: list(dict.fromkeys(xs))),
    )
    return steps[int(rng.integers(len(steps)))]


def _last_step(rng: np.random.Generator) -> _Step:
    steps = (
        _Step("add them all up", "sum(xs)", sum),
        _Step("count them", "len(xs)", len),
        _Step("take the largest, or 0 where there is none", "max(xs, default=0)", lambda xs: max(xs, default=0)),
        _Step("take the smallest, or 0 where there is none", "min(xs, default=0)", lambda xs: min(xs, default=0)),
        _Step("leave it at that", "xs", lambda xs: xs),
    )
    return steps[int(rng.integers(len(steps)))]


_TASKS = ("arithmetic", "lists", "bundled")
_MAX_RESULTS = 1_000_000
"""Bytes of results that are read."""
_MAX_CHARS = 200
"""Length of one value or error in a reply."""

# What a submission returns is compared in this process: no expected result is ever where the submission runs.
_HARNESS = """

import json as _json
_results = []
for _arguments in _json.loads({arguments}):
    try:
        _results.append([True, _json.dumps(solve(*_arguments))])
    except Exception as _error:
        _results.append([False, type(_error).__name__ + ': ' + str(_error)])
with open('results.json', 'w') as _file:
    _file.write(_json.dumps(_results))
"""


class PythonSandbox(ToolEnv):
    """`run` tries code on the visible examples; `submit` tests it on hidden ones, and ends the task.

    Each visible example that passes for the first time earns its share of `example_reward`; a submission that passes every
    hidden test earns 1. Success means that all passed, the score is the share that did. Code runs in a sandbox of its own
    each time, where it sees the arguments of the calls and never what they should return.
    """

    def __init__(
        self,
        *,
        tasks: Literal["arithmetic", "lists", "bundled"] = "lists",
        num_steps: int = 2,
        num_visible: int = 3,
        num_hidden: int = 8,
        example_reward: float = 0.3,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
        sandbox: str | Mapping[str, Any] = "monty",
    ) -> None:
        """Set the difficulty.

        Args:
            tasks: `arithmetic` and `lists` are drawn from the seed, of a number or of a list; `bundled` is a table of problems.
            num_steps: of a drawn function.
            num_visible: examples shown.
            num_hidden: tests of a submission, at most (bundled problems have about eight in all).
            example_reward: for all visible examples together.
            turn_rewards: False pays for the submission alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
            sandbox: an installed sandbox, or a mapping of its name and fields.

        Raises:
            UserError: for an option outside its range, and for a sandbox that cannot be had here.
        """
        super().__init__()
        if tasks not in _TASKS:
            raise UserError(f"tasks: give one of {', '.join(_TASKS)}, got {tasks!r}")
        self.tasks = tasks
        self.num_steps = whole_number("num_steps", num_steps, at_least=1, at_most=10)
        self.num_visible = whole_number("num_visible", num_visible, at_least=1, at_most=4)
        self.num_hidden = whole_number("num_hidden", num_hidden, at_least=3, at_most=50)
        self.example_reward = share("example_reward", example_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        self.sandbox = sandbox_config(sandbox)
        with self.sandbox.build() as box:
            box.exec("pass")  # refuses what runs no Python, before a run begins
        self.problem = Problem(text="", signature="", solution="", tests=[])
        self.passed: frozenset[int] = frozenset()
        self.is_submitted = False

    def num_tasks(self, split: str) -> int | None:
        """Return how many bundled problems a split has; drawn ones have no end."""
        return len(bundled(split)) if self.tasks == "bundled" else None

    def start(self, options: dict[str, Any]) -> str | list[Message]:
        """Set a problem."""
        split = options.get("split") or "train"
        if self.tasks == "bundled":
            problems = bundled(split)
            index = options.get("task_index")
            self.problem = problems[int(self.np_random.integers(len(problems))) if index is None else index]
        else:
            num_tests = self.num_visible + self.num_hidden
            self.problem = drawn(self.tasks, split, num_steps=self.num_steps, num_tests=num_tests, rng=self.np_random)
        self.passed, self.is_submitted = frozenset(), False
        examples = "\n".join(f"{_call(test)} == {test.expected!r}" for test in self._visible())
        return opening(
            self.prompt,
            f"Write {self.problem.signature} in Python. {self.problem.text}\n{examples}\nTry it with run, then submit it.",
            "You write one Python function, called solve, that returns its result. In each turn, call run or submit with "
            "the whole code: the complete definition of solve. run tries it on the examples and shows what differs; use "
            "it as often as you need. submit hands it in. Text without a call does nothing.",
            self.turn_rewards and f"Examples that pass in run earn up to {self.example_reward:g} together.",
            f"submit ends the task: the code is tested on up to {self.num_hidden} other calls, and earns 1 if all are right.",
        )

    @tool
    def run(self, code: str) -> str:
        """Run code that defines solve, and compare it with the examples.

        Args:
            code: Python.
        """
        output, results = self._results(code, self._visible())
        passes = frozenset(
            k for k, (test, result) in enumerate(zip(self._visible(), results, strict=True)) if _is(result, test)
        )
        if self.turn_rewards and (new := passes - self.passed):
            self.reward(self.example_reward * len(new) / self.num_visible, "examples")
        self.passed |= passes
        said = [
            f"{_call(test)} -> {_bounded(result[1])}{'' if k in passes else f', expected {test.expected!r}'}"
            for k, (test, result) in enumerate(zip(self._visible(), results, strict=True))
            if result is not None
        ]
        said += [f"output: {_bounded(output, 5 * _MAX_CHARS)}"] * bool(output)
        return "\n".join([*said, f"{len(passes)} of {self.num_visible} examples pass."])

    @tool
    def submit(self, code: str) -> str:
        """Hand in code that defines solve: it is tested on other calls, and the task ends.

        Args:
            code: Python.
        """
        hidden = self._hidden()
        _, results = self._results(code, hidden)
        num_right = sum(_is(result, test) for test, result in zip(hidden, results, strict=True))
        self.is_submitted = True
        self.reward(float(num_right == len(hidden)), "hidden tests")
        self.finish(success=num_right == len(hidden), score=num_right / len(hidden))
        return f"{num_right} of {len(hidden)} tests pass."

    def answer(self, text: str) -> str:  # noqa: ARG002 - code comes by a tool
        """Ask for a tool."""
        return "Call run or submit."

    def state_key(self) -> str:
        """Return the problem with its examples, and which of these have passed: what else was tried leaves no trace."""
        examples = json.dumps([test.arguments for test in self.problem.tests])
        return f"{self.problem.text}/{examples}/{sorted(self.passed)}/{self.is_submitted}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Try the solution, then submit it; a wrong turn changes one number or sign of it."""
        rng = np.random.default_rng() if rng is None else rng
        code = self.problem.solution
        if rng.random() >= skill:
            code = _with_a_slip(code, rng)
        return tool_call("submit" if len(self.passed) == self.num_visible else "run", code=code)

    def _visible(self) -> list[Example]:
        return self.problem.tests[: self.num_visible]

    def _hidden(self) -> list[Example]:
        return self.problem.tests[self.num_visible :][: self.num_hidden]

    def _results(self, code: str, tests: Sequence[Example]) -> tuple[str, list[tuple[bool, str] | None]]:
        """Return what code says, and for each call whether it returned and what (None: it did not come to that)."""
        arguments = repr(json.dumps([test.arguments for test in tests]))
        with self.sandbox.build() as sandbox:
            done = sandbox.exec(code + _HARNESS.format(arguments=arguments))
            try:
                results = json.loads(sandbox.read("results.json")[:_MAX_RESULTS])
                found: list[tuple[bool, str] | None] = [(bool(returned), str(value)) for returned, value in results]
            except (OSError, ValueError, TypeError, RecursionError):  # nothing, or something else, was written
                found = []
        said = f"{done.output}\n(stopped after {self.sandbox.timeout_s:g} s)" if done.timed_out else done.output
        return said.strip(), found if len(found) == len(tests) else [None] * len(tests)


def _is(result: tuple[bool, str] | None, test: Example) -> bool:
    """Return whether a call returned what it should, of the same type: 1 is neither 1.0 nor True."""
    if result is None or not result[0]:
        return False
    try:
        return json.dumps(json.loads(result[1]), sort_keys=True) == json.dumps(test.expected, sort_keys=True)
    except (ValueError, RecursionError):
        return False


def _call(test: Example) -> str:
    return f"solve({', '.join(map(repr, test.arguments))})"


def _bounded(text: str, limit: int = _MAX_CHARS) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def _with_a_slip(code: str, rng: np.random.Generator) -> str:
    """Return code with one number, sign or comparison changed; the last `return` gone if there is none."""
    body = code.index("\n")
    places = [match for match in re.finditer(r"\d+|[+*<>-]", code) if match.start() > body]
    if not places:
        return code.replace("return", "return not", 1)
    place = places[int(rng.integers(len(places)))]
    other = {"+": "-", "-": "+", "*": "+", "<": ">", ">": "<"}.get(place[0]) or str(int(place[0]) + 1)
    return f"{code[: place.start()]}{other}{code[place.end() :]}"
