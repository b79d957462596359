import ast
import importlib.util
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from agentrl import EnvironmentFailure, UserError
from agentrl.testing import check_env

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install 'agentrl[reasoning-gym]'")

import sympy

from agentrl_envs.adapters.reasoning_gym import ReasoningGym
from agentrl_envs.adapters.reasoning_gym_worker import OWN_TEXTS, read_expression
from tests.support.each import each

READERS = [
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
]
"""Data sets whose scorers give an answer to `eval` or `parse_expr`."""


@pytest.mark.slow
@pytest.mark.process
@each("dataset", ["chain_sum", "list_functions", "pool_matrix"])  # two draw from global generators
def test_its_tasks_keep_the_contract(dataset: str) -> None:
    check_env(ReasoningGym, seeds=range(50), dataset=dataset)


@pytest.mark.slow
@pytest.mark.process
@each("dataset", ["chain_sum", "countdown", "word_sorting"])
def test_the_oracle_solves_every_task(dataset: str) -> None:
    env = ReasoningGym(dataset=dataset)
    for seed in range(10):
        env.reset(seed=seed)
        _, reward, terminated, _, info = env.step(env.oracle())
        assert (terminated, info["success"]) == (True, True), f"seed {seed}: {reward}"


def test_a_mixture_of_data_sets_is_one_too() -> None:
    parts = [{"name": "chain_sum", "weight": 2}, {"name": "countdown", "config": {"max_numbers": 4}}]
    env = ReasoningGym(dataset="composite", config={"datasets": parts})
    questions = set()
    for seed in range(20):
        questions.add(env.reset(seed=seed)[0][0]["content"][:5])
        assert env.step(env.oracle())[4]["success"]
    assert len(questions) > 1


@each(
    ("parts", "message"),
    [
        (None, "at least one dataset"),
        (["chain_sum"], "dictionary update sequence"),
        ([{"name": "chain_sum", "weigth": 2}], "weigth"),
        ([{"name": "no_such"}], "no_such"),
    ],
)
def test_a_mixture_of_what_is_none_is_refused(parts: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"config: .*{message}"):
        ReasoningGym(dataset="composite", config={"datasets": parts})


def test_what_is_tagged_is_the_answer() -> None:
    env = ReasoningGym(dataset="chain_sum")
    for text, reward in (("I think {}", None), ("<answer>{}</answer>, not <answer>0.5</answer>", 0.0), ("{}", 1.0)):
        env.reset(seed=1)
        got = env.step(text.format(env.gold_answer()))[1]
        assert got == reward if reward is not None else got < 1.0


def test_train_and_eval_never_share_a_question() -> None:
    env = ReasoningGym(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    asked = {}
    for split in ("train", "eval"):
        asked[split] = {env.reset(seed=s, options={"split": split})[0][0]["content"] for s in range(150)}
    assert not asked["train"] & asked["eval"]


def test_seeds_that_lie_close_ask_different_questions() -> None:
    env = ReasoningGym(dataset="chain_sum", config={"min_terms": 5, "min_digits": 4})
    assert len({env.reset(seed=s)[0][0]["content"] for s in range(100)}) == 100


def test_an_answer_that_the_scorer_cannot_read_is_wrong_and_counted() -> None:
    env = ReasoningGym(dataset="prime_factorization")
    env.reset(seed=0)
    _, reward, _, _, info = env.step("two")
    assert (reward, info["success"], info["scorer_errors"]) == (0.0, False, 1)


def test_a_scorer_that_fails_at_the_right_answer_too_fails_the_episode() -> None:
    env = ReasoningGym(dataset="prime_factorization")
    env.reset(seed=0)
    env.entry["answer"] = "?"
    with pytest.raises(
        EnvironmentFailure, match="the scorer of prime_factorization fails at the right answer too: ValueError"
    ):
        env.step("two")


@pytest.mark.slow
@pytest.mark.process
@each("dataset", READERS)
def test_nothing_of_an_answer_is_run(dataset: str, tmp_path: Path) -> None:
    env = ReasoningGym(dataset=dataset)
    mkdir = f"__import__('os').mkdir({str(tmp_path / 'made')!r})"
    for text in (
        mkdir,
        f"[{mkdir} for _ in [1]]",
        f"(lambda: {mkdir})()",
        f"f'{{{mkdir}}}'",
        f"eval({mkdir!r})",
        f"parse_expr({mkdir!r})",
        f"sympify({mkdir!r})",
        f"sqrt({mkdir!r})",
        f"{mkdir}!",
        f"2 {mkdir}",
        mkdir.replace("import", "\uff49mport"),  # as Python reads it, the same name
    ):
        env.reset(seed=1)
        assert env.step(f"<answer>{text}</answer>")[1] < 0.1, text
        assert not (tmp_path / "made").exists(), text


@pytest.mark.slow
@pytest.mark.process
@each("dataset", READERS)
def test_right_answers_are_still_right(dataset: str) -> None:
    env = ReasoningGym(dataset=dataset)
    for seed in range(20):
        env.reset(seed=seed)
        assert env.step(env.oracle())[1] == 1.0, f"seed {seed}: {env.gold_answer()}"


@each(
    "text",
    [
        "49*(85 - 1)/14 - 42 - 73",
        "-9*x**8/10 + 1.5*x + C",
        "2*(-10*x - 10)**(3/2)/3",
        "exp(x)*sin(2*x) - log(x) + atan(x)/pi + sqrt(2)*E",
        "3*Integral(x**3*cos(3*x), x)",
        "7//2 + 7 % 4 - +2",
    ],
)
def test_arithmetic_is_read_as_sympy_reads_it(text: str) -> None:
    variables = {"x": sympy.Symbol("x"), "C": sympy.Symbol("C")}
    assert read_expression(text, local_dict=variables) == sympy.parse_expr(text, local_dict=variables)


@each(
    "text",
    [
        "x.func",
        "x[0]",
        "'x'",
        "__import__",
        "__import__(x)",
        "eval(x)",
        "Symbol(x)",
        "sqrt(*x)",
        "sqrt(x, evaluate=y)",
        "sqrt('x')",
        "sqrt(x)(y)",
        "lambda: x",
        "[x for x in y]",
        "(y := x)",
        "x if y else z",
        "x < y",
        "x and y",
        "x ^ y",
        "~x",
        "not x",
        "True",
        "None",
        "...",
        "3j",
        "x, y",
        "{x}",
        "f'{x}'",
    ],
)
def test_all_but_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="an answer cannot hold"):
        read_expression(text)


@pytest.mark.slow
@pytest.mark.process
def test_an_answer_that_takes_too_long_is_wrong_and_the_next_is_scored() -> None:
    env = ReasoningGym(dataset="countdown")
    env.reset(seed=1)
    _, reward, _, _, info = env.step("<answer>9**9**9**9</answer>")
    assert (reward, info["scorer_errors"]) == (0.0, 1)
    env.reset(seed=1)
    assert env.step(env.oracle())[1] == 1.0


def test_windows_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "setitimer")
    with pytest.raises(UserError, match=r"^reasoning_gym ends what takes too long by a timer .*: train in WSL$"):
        ReasoningGym(dataset="chain_sum")


@pytest.mark.slow
@pytest.mark.process
def test_all_of_reasoning_gym_that_runs_text_is_known() -> None:
    """A module that is missing here is new: see whether its scorer gives the call what a model says."""
    spec = importlib.util.find_spec("reasoning_gym")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    found: dict[str, set[str]] = {}
    for file in folder.rglob("*.py"):
        module = ".".join(file.relative_to(folder).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            is_builtin = isinstance(node, ast.Name) and name in {"eval", "exec", "compile", "__import__"}
            if is_builtin or name in {
                "parse_expr",
                "sympify",
                "nsimplify",
                "lambdify",
                "import_module",
                "system",
                "Popen",
            }:
                found.setdefault(name, set()).add(module)
    own = {name.removeprefix("reasoning_gym.") for name in OWN_TEXTS}
    literals = {"binary_matrix", "number_sorting", "spiral_matrix", "string_insertion"}
    assert found == {
        "eval": {f"algorithmic.{name}" for name in literals} | {"games.n_queens"} | own,
        "parse_expr": {
            "algebra.intermediate_integration",
            "algebra.polynomial_multiplication",
            "algebra.simple_integration",
            "games.countdown",
            "games.puzzle24",
            "logic.propositional_logic",  # its own, which splits text
        },
        "exec": {"code.codeio"},  # of its programs, for the right answer
    }


def test_the_global_random_numbers_stay_as_they_are() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    env = ReasoningGym(dataset="pool_matrix")
    env.reset(seed=0)
    env.step("x")
    assert random.random() == expected


@each(
    ("options", "words"),
    [
        ({"dataset": "no_such"}, "dataset: reasoning-gym has no 'no_such'; it has ab, acre"),
        ({"dataset": "chain_sum", "config": {"seed": 1}}, "config: seed follows from the task's seed"),
        ({"dataset": "chain_sum", "config": {"terms": 1}}, "config: .*unexpected keyword argument 'terms'"),
        ({"dataset": "chain_sum", "config": {"min_terms": 9, "max_terms": 2}}, "config: "),
    ],
)
def test_what_it_does_not_have_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ReasoningGym(**options)
