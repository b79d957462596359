"""A user's own judge: its scores land where they belong, and whatever it does wrong is told in one message."""

import asyncio
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.errors import ConfigError, EngineError, TrainingError, UserError
from agentrl.learn.signals.turn_scores import load_judge, score_turns
from agentrl.types import StopReason, Trajectory, Turn
from tests.support.each import each
from tests.support.interrupts import run_with
from tests.support.signals import without_signals
from tests.support.threads import hang, wait_until

NOT_CALLABLE = [0.5]


def trajectory(number: int, *, num_turns: int = 2) -> Trajectory:
    turn = Turn(observation_ids=(1,), action_ids=(2,), behavior_logprobs=(-1.0,), versions=(0,), reward=0.0)
    return Trajectory(
        group_id="g",
        trajectory_id=f"g/{number}",
        env_id="e",
        seed=number,
        turns=tuple(replace(turn, reward=float(k)) for k in range(num_turns)),
        stop_reason=StopReason.TERMINATED,
    )


def scored(
    judge: Callable[[Trajectory], Any],
    trajectories: Sequence[Trajectory],
    *,
    timeout_s: float = 20.0,
    num_threads: int = 4,
    max_retries: int = 0,
) -> list[Trajectory]:
    return asyncio.run(
        score_turns(judge, trajectories, timeout_s=timeout_s, num_threads=num_threads, max_retries=max_retries)
    )


def by_hand(given: Trajectory) -> list[float]:
    return [100.0 * given.seed + 10 * k + turn.reward for k, turn in enumerate(given.turns)]


@each("num_threads", [1, 3, 50])
def test_each_turn_gets_its_own_score_in_whatever_order_the_judge_ends(num_threads: int) -> None:
    def judge(given: Trajectory) -> list[float]:
        time.sleep(0.01 * random.random())
        return by_hand(given)

    trajectories = [trajectory(number, num_turns=1 + number % 4) for number in range(9)]
    found = scored(judge, trajectories, num_threads=num_threads)
    assert [[turn.signals["turn_scores"] for turn in t.turns] for t in found] == [by_hand(t) for t in trajectories]
    assert [without_signals(t) for t in found] == trajectories


def test_a_coroutine_is_run_and_has_the_deadline_too() -> None:
    async def judge(given: Trajectory) -> list[float]:
        await asyncio.sleep(0.01 if given.seed else 3600)
        return by_hand(given)

    (found,) = scored(judge, [trajectory(1)])
    assert [turn.signals["turn_scores"] for turn in found.turns] == by_hand(trajectory(1))
    with pytest.raises(UserError, match=r"g/0.* 0\.5 s"):
        scored(judge, [trajectory(0)], timeout_s=0.5)


@each("scores", [[1, True], (0.5, np.float32(0.25)), np.array([3, 4]), range(2)])
def test_numbers_of_any_kind_become_floats(scores: Any) -> None:
    (found,) = scored(lambda _: scores, [trajectory(0)])
    assert [turn.signals["turn_scores"] for turn in found.turns] == [float(score) for score in scores]
    assert {type(turn.signals["turn_scores"]) for turn in found.turns} == {float}


def test_an_interrupted_update_waits_for_no_judge() -> None:
    begun, event = threading.Event(), threading.Event()

    def judge(_: Trajectory) -> list[float]:
        begun.set()
        hang()
        return []

    def interrupt() -> None:
        begun.wait(60)
        event.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(TrainingError, match="the update was interrupted"):
        run_with(event, lambda: scored(judge, [trajectory(n) for n in range(3)], timeout_s=600))
    thread.join()


def test_no_trajectories_need_no_judge() -> None:
    assert scored(lambda _: [], []) == []


def test_as_many_calls_as_threads_run_at_once_and_no_more() -> None:
    barrier = threading.Barrier(4)
    lock, running, peak = threading.Lock(), 0, 0

    def judge(given: Trajectory) -> list[float]:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        barrier.wait(timeout=60)  # broken, and so raising, unless four are inside together
        with lock:
            running -= 1
        return by_hand(given)

    trajectories = [trajectory(number) for number in range(8)]
    assert len(scored(judge, trajectories, num_threads=4)) == 8
    assert peak == 4


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "agentrl-env"}


@pytest.mark.parametrize("is_well", [True, False])
def test_threads_end_with_the_scoring(is_well: bool) -> None:
    before = threads()

    def judge(given: Trajectory) -> list[float]:
        assert threads() - before
        return by_hand(given) if is_well or given.seed else []

    if is_well:
        scored(judge, [trajectory(number) for number in range(6)])
    else:
        with pytest.raises(UserError):
            scored(judge, [trajectory(number) for number in range(6)])
    wait_until(lambda: threads() == before)


def raises(given: Trajectory) -> list[float]:
    raise LookupError("no rubric for this task")


def exits(given: Trajectory) -> list[float]:
    raise SystemExit(3)


def gives_up(given: Trajectory) -> list[float]:
    raise EngineError("no\nmodel\x1b[2J")


def asks_too_long(given: Trajectory) -> list[float]:
    raise TimeoutError("the judge's own backend")


SHAPE = "signals.judge, trajectory g/1: return one finite number, at most 1e+15 in size, for each of its 2 turns, got "


@each(
    ("judge", "words"),
    [
        (raises, "signals.judge, trajectory g/1 raised LookupError: no rubric for this task (test_judge.py:{line})"),
        (exits, "signals.judge, trajectory g/1 raised SystemExit: 3 (test_judge.py:{line})"),
        (gives_up, r"signals.judge, trajectory g/1 raised EngineError: no model\x1b[2J (test_judge.py:{line})"),
        (
            asks_too_long,
            "signals.judge, trajectory g/1 raised TimeoutError: the judge's own backend (test_judge.py:{line})",
        ),
        (lambda _: [1.0], f"{SHAPE}list [1.0]"),
        (lambda _: [1.0, 2.0, 3.0], f"{SHAPE}list [1.0, 2.0, 3.0]"),
        (lambda _: [[1.0, 2.0]], f"{SHAPE}list [[1.0, 2.0]]"),
        (lambda _: 0.5, f"{SHAPE}float 0.5"),
        (lambda _: None, f"{SHAPE}NoneType None"),
        (lambda _: [1.0, math.nan], f"{SHAPE}list [1.0, nan]"),
        (lambda _: [-math.inf, 1.0], f"{SHAPE}list [-inf, 1.0]"),
        (lambda _: [1.0, -2e15], f"{SHAPE}list [1.0, -2000000000000000.0]"),
        (lambda _: [1.0, None], f"{SHAPE}list [1.0, None]"),
        (lambda _: ["good", "bad"], f"{SHAPE}list ['good', 'bad']"),
        (lambda _: {"scores": 1}, f"{SHAPE}dict {{'scores': 1}}"),
        (lambda _: [[1.0], [1.0, 2.0]], f"{SHAPE}list [[1.0], [1.0, 2.0]]"),
    ],
)
def test_a_bad_judge_is_one_error_that_names_the_trajectory_and_what_it_did(
    judge: Callable[[Trajectory], Any], words: str
) -> None:
    def second_is_bad(given: Trajectory) -> Any:
        return judge(given) if given.seed == 1 else by_hand(given)

    with pytest.raises(UserError) as caught:
        scored(second_is_bad, [trajectory(number) for number in range(3)])
    line = judge.__code__.co_firstlineno + 1
    assert str(caught.value) == words.replace("{line}", str(line))


def test_a_judge_gets_a_copy() -> None:
    def rewrites(given: Trajectory) -> list[float]:
        given.turns[0].message["content"] = "rewritten"
        return by_hand(given)

    one = trajectory(0)
    one = replace(one, turns=tuple(replace(turn, message={"role": "assistant", "content": "a"}) for turn in one.turns))
    (found,) = scored(rewrites, [one])
    assert [turn.message["content"] for turn in (*one.turns, *found.turns)] == ["a"] * 4


def test_a_judge_that_hangs_is_given_up_at_its_deadline() -> None:
    def second_hangs(given: Trajectory) -> list[float]:
        if given.seed == 1:
            hang()
        return by_hand(given)

    with pytest.raises(UserError) as caught:
        scored(second_hangs, [trajectory(number) for number in range(3)], timeout_s=2.0)
    assert str(caught.value) == "signals.judge, trajectory g/1: no score within signals.judge_timeout_s: 2 s"


def test_a_judge_that_fails_now_and_then_is_asked_again() -> None:
    asked: Counter[int] = Counter()

    def moody(given: Trajectory) -> list[float]:
        asked[given.seed] += 1
        if asked[given.seed] == 1 and given.seed % 2:
            raise ConnectionError("429")
        if asked[given.seed] == 2 and given.seed == 3:
            hang()
        return by_hand(given)

    trajectories = [trajectory(number) for number in range(5)]
    found = scored(moody, trajectories, timeout_s=2.0, max_retries=2)
    assert [[turn.signals["turn_scores"] for turn in t.turns] for t in found] == [by_hand(t) for t in trajectories]
    assert asked == {0: 1, 1: 2, 2: 1, 3: 3, 4: 1}
    asked.clear()
    with pytest.raises(UserError, match=r"trajectory g/3: no score within"):
        scored(moody, trajectories, timeout_s=2.0, max_retries=1)


def test_a_judge_is_asked_no_more_once_it_has_failed() -> None:
    asked: list[int] = []

    def judge(given: Trajectory) -> list[float]:
        asked.append(given.seed)
        raise LookupError

    with pytest.raises(UserError, match=r"signals\.judge, trajectory"):
        scored(judge, [trajectory(number) for number in range(40)], num_threads=2)
    assert len(asked) <= 2


def generated(given: Trajectory) -> Iterator[float]:
    yield from by_hand(given)


def test_a_generator_is_no_list_of_numbers() -> None:
    with pytest.raises(
        UserError, match=r"trajectory g/1: return one finite number, .* for each of its 2 turns, got generator"
    ):
        scored(generated, [trajectory(1)])


def test_a_judge_is_found_by_its_name() -> None:
    found = load_judge(f"{__name__}:by_hand")
    assert found is by_hand


@each(
    ("name", "words"),
    [
        ("no_such_module_at_all:judge", r"signals\.judge: cannot import 'no_such_module_at_all' of 'no_such_module"),
        (
            f"{__name__}:by_hnad",
            r"signals\.judge: module 'tests\.learn\.test_judge' has no 'by_hnad'\. Did you mean 'by_",
        ),
        (f"{__name__}:NOT_CALLABLE", r"signals\.judge: '.*:NOT_CALLABLE' is \[0\.5\], not a function of a trajectory"),
        ("by_hand", r"signals\.judge: 'by_hand' lacks its attribute"),
    ],
)
def test_a_name_that_leads_to_no_function_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_judge(name)
