import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from agentrl.env.rewards import math_reward
from agentrl.env.rewards.math_reward import math
from agentrl.env.subprocesses import MAX_WORKERS
from tests.support.each import each

pytestmark = pytest.mark.process


def graded(completion: str, answer: Any, **options: Any) -> tuple[float, float]:
    info: dict[str, Any] = {}
    return math(completion, answer, info, **options), info["math_undecided"]


@each(
    ("completion", "answer", "reward"),
    [
        (r"The answer is $\frac{1}{2}$", "0.5", 1),
        (r"so \boxed{1+2x}", "2x+1", 1),
        ("I say 72.", 72, 1),
        ("I say 71.", 72, 0),
        (r"$\{3,4\}$", r"\{4,3\}", 1),
        ("1/2", r"\frac{1}{2}", 1),
        (r"$1{,}234$", "1234", 1),
        ("no idea", "3", 0),
        ("", "3", 0),
        ("(1,2]", "(1,2]", 1),
        (r"2\pi", "2", 0),
        ("5!", "5", 0),
        ("5!", "120", 1),
        (r"\dfrac{\sqrt3}{2}.", r"\frac{\sqrt{3}}{2}", 1),
        ("(x-1)(x+2)", "(x+2)(x-1)", 1),
        (r"3\frac{1}{2}", "3.5", 1),
        ("\u22125", "-5", 1),
        ("x = 5", "5", 1),
        (r"\$18", r"\$18", 1),
        ("A: 42", "42", 1),
        ("42 (6*7)", "42", 1),
        ("48/2 = 24; 48+24 = 72", "72", 1),
        ("1 000", "1000", 1),
        ("- 3", "3", 1),
        ("(1,2)", "(1,2)", 1),
    ],
)
def test_it_sees_what_is_equal(completion: str, answer: Any, reward: float) -> None:
    assert graded(completion, answer) == (reward, 0)


@pytest.mark.slow
def test_what_takes_too_long_or_too_much_is_undecided_and_the_next_is_answered() -> None:
    for hostile in ("$9^{9^{9^{9}}}$", "$" + "(" * 5000 + "1" + ")" * 5000 + "$"):
        begin = time.monotonic()
        assert graded(hostile, "5", timeout_s=2.0) == (0, 1)
        assert time.monotonic() - begin < 60  # of which the start of a worker may be most
    assert graded("$4+1$", "5") == (1, 0)


def test_many_threads_ask_and_few_processes_answer() -> None:
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda k: graded(f"${k}+1$", str(k + 1 + k % 2)), range(64)))
    assert found == [(float(k % 2 == 0), 0.0) for k in range(64)]
    ours = [child for child in psutil.Process().children() if "math_worker" in " ".join(child.cmdline())]
    assert 1 <= len(ours) <= MAX_WORKERS
    math_reward._pool.close()
    psutil.wait_procs(ours, timeout=30)
    assert not any(child.is_running() for child in ours)


def test_a_fork_asks_processes_of_its_own() -> None:
    assert graded("$1+1$", "2") == (1, 0)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, b"%d" % len(math_reward._pool._idle))
        os._exit(0)
    assert os.read(reading, 9) == b"0"
    os.wait()
    assert len(math_reward._pool._idle) >= 1


def test_a_right_answer_that_is_no_mathematics_is_a_fault_of_the_table() -> None:
    with pytest.raises(ValueError, match=r"the right answer str '\?' is no mathematics; use exact_match"):
        graded("3", "?")
