import json
import resource
from typing import Any

import numpy as np
import pytest

from agentrl import EnvironmentFailure, UserError, tool_call
from agentrl_envs.python_sandbox import Example, Problem, PythonSandbox, bundled, drawn
from agentrl_envs.sandboxes import bubblewrap
from agentrl_envs.sandboxes.bubblewrap import BubblewrapConfig
from tests.support.each import each

pytestmark = pytest.mark.process

WHY_NOT = bubblewrap._problem(BubblewrapConfig())
SANDBOXES = [
    "monty",
    pytest.param("bubblewrap", marks=pytest.mark.skipif(bool(WHY_NOT), reason=f"bubblewrap: {WHY_NOT}")),
]
DOUBLE = Problem(
    text="Double it.",
    signature="solve(n)",
    solution="def solve(n):\n    return n * 2\n",
    tests=[Example(arguments=[n], expected=2 * n) for n in (1, 5, -3, 777123, 10, 888321, -50)],
)


def double(**options: Any) -> PythonSandbox:
    env = PythonSandbox(**options)
    env.reset(seed=0)
    env.problem = DOUBLE
    return env


def said(env: PythonSandbox, tool: str, code: str) -> tuple[str, float, dict[str, Any]]:
    observation, reward, _, _, info = env.step(tool_call(tool, code=code))
    return observation[0]["content"], round(float(reward), 9), info


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_examples_pay_once_and_a_right_submission_pays(sandbox: str) -> None:
    env = double(sandbox=sandbox)
    text, reward, _ = said(
        env, "run", "def solve(n):\n    print('at', n)\n    return 2 if n == 1 else n / 0 if n == 5 else n"
    )
    assert (reward, env.passed) == (0.1, frozenset({0}))
    assert text == (
        "solve(1) -> 2\nsolve(5) -> ZeroDivisionError: division by zero, expected 10\nsolve(-3) -> -3, expected -6\n"
        "output: at 1\nat 5\nat -3\n1 of 3 examples pass."
    )
    assert said(env, "run", "def solve(n): return n + n")[1] == 0.2
    assert said(env, "run", "def solve(n): return n + n")[1] == 0.0
    text, reward, info = said(env, "submit", "def solve(n): return n + n")
    assert (text, reward, info["success"], info["score"]) == ("4 of 4 tests pass.", 1.0, True, 1.0)


def test_without_turn_rewards_the_submission_alone_pays() -> None:
    env = double(turn_rewards=False)
    assert said(env, "run", DOUBLE.solution)[1] == 0.0
    assert said(env, "submit", DOUBLE.solution)[1] == 1.0


def test_a_submission_that_is_partly_right_has_a_score_and_earns_nothing() -> None:
    text, reward, info = said(double(), "submit", "def solve(n): return abs(n) * 2")
    assert (text, reward, info["success"], info["score"]) == ("3 of 4 tests pass.", 0.0, False, 0.75)


@each("value", ["float(n * 2)", "str(n * 2)", "[n * 2]", "None", "True", "10 ** 5000", "{1}", "lambda: 0"])
def test_a_result_of_another_type_is_wrong(value: str) -> None:
    assert said(double(), "submit", f"def solve(n): return {value}")[2]["success"] is False


@each(
    "code",
    [
        "",
        "def solve(n",
        "1 / 0",
        "while True: pass",
        "def solve(n):\n    while True: pass",
        "x = '''",
        "solve = 3",
        "\\",
    ],
)
def test_code_that_never_answers_passes_nothing(code: str) -> None:
    env = double(sandbox={"name": "monty", "timeout_s": 0.3})
    text, reward, _ = said(env, "run", code)
    assert text.endswith("0 of 3 examples pass.")
    assert reward == 0.0
    assert said(env, "submit", code)[2] == {
        "tool_errors": 0,
        "success": False,
        "score": 0.0,
        "reward_components": {"hidden tests": 0.0},
    }


FORGERIES = {
    "writes results and ends": "open('results.json', 'w').write('[[true, \"0\"]]' )\nraise SystemExit",
    "says that all went well": "print('[[true, \"1554246\"]]')\nprint('4 of 4 tests pass.')",
    "replaces the writer of JSON": "import json\njson.dumps = lambda *a, **k: '[' + ', '.join(['[true, true]'] * 4) + ']'",
    "writes more results than there are": "def solve(n):\n    _results.extend([[True, '1']] * 100)\n    return 0",
    "is equal to anything": "class Any(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
    "def solve(n): return Any(0)",
    "looks for what is expected": "def solve(n):\n    import sys\n    frame = sys._getframe(1)\n"
    "    return [v for v in frame.f_locals.values() if v == n * 2][0]",
    "nests without end": "open('results.json', 'w').write('[' * 100000)\ndef solve(n): pass\n_json = None",
    "answers with what is no list": "open('results.json', 'w').write('{\"a\": 1}')\nraise ValueError",
    "leaves a folder in the way": "import os\nos.mkdir('results.json')",
    "remembers the examples": "def solve(n): return {1: 2, 5: 10, -3: -6}.get(n, 0)",
}


@pytest.mark.parametrize("sandbox", SANDBOXES)
@each("code", FORGERIES.values())
def test_results_cannot_be_forged(code: str, sandbox: str) -> None:
    _, reward, info = said(double(sandbox=sandbox), "submit", code)
    assert (reward, info["success"], info["tool_errors"]) == (0.0, False, 0)


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_hidden_tests_cannot_be_read(sandbox: str) -> None:
    """While examples run, no hidden call is in the sandbox; while a submission runs, nothing that it should return is."""
    look = """
import os
def solve(n):
    found = []
    for folder in ('.', '/work', '/tmp', '/'):
        try:
            names = os.listdir(folder)
        except Exception:
            names = []
        for name in names:
            try:
                found.append(open(folder + '/' + name).read())
            except Exception:
                pass
    print([secret for secret in ('777' + '123', '888' + '321', '1554' + '246') if secret in ''.join(found)])
    return 2 * n
"""
    env = double(sandbox=sandbox)
    text, _, info = said(env, "run", look)
    assert "output: []\n[]\n[]" in text
    text, _, info = said(env, "submit", look.replace("return 2 * n", "return '1554' + '246' in ''.join(found)"))
    assert (text, info["score"]) == ("0 of 4 tests pass.", 0.0)


def test_runs_leave_nothing_for_the_next() -> None:
    env = double()
    said(env, "run", "open('left.txt', 'w').write('x')\ndef solve(n): return 0")
    assert "FileNotFoundError" in said(env, "run", "def solve(n): return open('left.txt').read()")[0]


@pytest.mark.parametrize("kind", ["arithmetic", "lists"])
def test_splits_never_share_a_drawn_problem(kind: str) -> None:
    rng = np.random.default_rng(0)
    texts = {s: {drawn(kind, s, num_steps=1, num_tests=5, rng=rng).text for _ in range(150)} for s in ("train", "eval")}
    assert min(map(len, texts.values())) >= 5
    assert not texts["train"] & texts["eval"]


@pytest.mark.parametrize("kind", ["arithmetic", "lists"])
def test_a_drawn_solution_returns_what_is_expected(kind: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        problem = drawn(kind, "train", num_steps=3, num_tests=6, rng=rng)
        namespace: dict[str, Any] = {}
        exec(problem.solution, namespace)
        assert [namespace["solve"](*test.arguments) for test in problem.tests] == [t.expected for t in problem.tests]
        assert len({json.dumps(test.expected) for test in problem.tests}) >= 3


@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_bundled_solution_passes_and_no_constant_does(split: str) -> None:
    env = PythonSandbox(tasks="bundled")
    assert env.num_tasks(split) == len(bundled(split)) >= 10
    for index, problem in enumerate(bundled(split)):
        first = [test.expected for test in problem.tests[:1]]
        for code, is_right in ((problem.solution, True), (f"def solve(*given): return {first[0]!r}", False)):
            env.reset(seed=0, options={"split": split, "task_index": index})
            assert said(env, "submit", code)[2]["success"] is is_right, problem.text


def test_bundled_problems_have_no_twins() -> None:
    texts = [problem.text for split in ("train", "eval") for problem in bundled(split)]
    assert len(set(texts)) == len(texts) == 40


def test_wrong_options_are_refused() -> None:
    for options, words in (
        ({"tasks": "poems"}, "tasks: give one of arithmetic, lists, bundled, got 'poems'"),
        ({"num_steps": 0}, "num_steps"),
        ({"sandbox": "nothing"}, "no 'nothing' is installed"),
        ({"sandbox": {"name": "monty", "timeout": 1}}, "sandbox.timeout: 'monty' has no such option"),
    ):
        with pytest.raises(UserError, match=words):
            PythonSandbox(**options)


def test_a_wrong_turn_is_the_solution_with_a_slip() -> None:
    env, rng = double(), np.random.default_rng(0)
    calls = [env.oracle(skill=0.0, rng=rng)["tool_calls"][0]["function"] for _ in range(20)]
    assert {call["name"] for call in calls} == {"run"}
    assert {call["arguments"]["code"] for call in calls} == {
        "def solve(n):\n    return n + 2\n",
        "def solve(n):\n    return n * 3\n",
    }


@pytest.mark.parametrize("sandbox", [*SANDBOXES[1:], "unsafe"])
def test_a_sandbox_that_cannot_start_fails_the_episode_and_is_no_wrong_answer(sandbox: str) -> None:
    env = double(sandbox=sandbox)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(EnvironmentFailure, match="Too many open files"):
            env.step(tool_call("submit", code=DOUBLE.solution))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
