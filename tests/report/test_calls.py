"""Lines of calls of an agent's session."""

from typing import Any

from agentrl.report.calls import dialect_of, ignored_by, lanes, relation, summary
from agentrl.report.terminal import Console, render
from agentrl.types import StopReason, Trajectory, Turn
from tests.support.records import record
from tests.support.records import turn as turn_record


def turn(call: str = "", parent: int | None = None, **extras: Any) -> Turn:
    return Turn(
        observation_ids=(1, 2, 3),
        extends=call in ("", "forks"),
        parent=parent,
        action_ids=(4, 5),
        behavior_logprobs=(-1.0, -1.0),
        versions=(0, 0),
        reward=0.0,
        extras={**({"call": call} if call else {}), **extras},
        observation=({"role": "user", "content": "q"},),
        message={"role": "assistant", "content": "a"},
    )


SESSION = (
    turn(ignored={"temperature": "0.3"}, dialect="chat, streamed"),
    turn(dialect="messages"),
    turn("forks", 0),
    turn("rewrites", 0, difference="message 1: a became b"),
    turn("root", difference="message 0: q became s"),
    turn(parent=3),
)


def test_a_call_is_in_the_line_of_the_one_that_it_follows() -> None:
    assert lanes(SESSION) == [0, 0, 0, 0, 1, 0]
    assert [relation(each, number) for number, each in enumerate(SESSION)] == [
        "begins a line",
        "continues turn 1",
        "forks from turn 1",
        "rewrites turn 1",
        "begins a line",
        "continues turn 4",
    ]


def test_a_summary_names_each_call_and_what_was_not_taken_over() -> None:
    trajectory = Trajectory(
        group_id="g",
        trajectory_id="t",
        env_id="agent",
        seed=0,
        turns=SESSION,
        stop_reason=StopReason.TERMINATED,
        metrics={"forked_calls": 1.0, "new_lines": 0.0},
    )
    assert list(summary(trajectory)) == [
        "call 1: begins a line, 3 tokens read, 2 sampled",
        "call 2: continues turn 1, 3 tokens read, 2 sampled",
        "call 3: forks from turn 1, 3 tokens read, 2 sampled",
        "call 4: rewrites turn 1, 3 tokens read, 2 sampled",
        "  first difference: message 1: a became b",
        "call 5: begins a line, 3 tokens read, 2 sampled",
        "  first difference: message 0: q became s",
        "call 6: continues turn 4, 3 tokens read, 2 sampled",
        "dialect: chat, streamed (1 call)",
        "dialect: messages (1 call)",
        "not taken over: temperature: 0.3 (call 1)",
        "6 calls: 2 continued, 1 forked, 1 rewritten, 2 lines; 18 tokens read, 12 sampled",
        "terminated: reward 0, forked_calls 1",
    ]


def test_extras_of_another_form_are_no_calls() -> None:
    odd = turn(call="", ignored=["x"], difference=3, dialect=["chat"])
    assert (ignored_by(odd), dialect_of(odd), relation(odd, 1)) == ({}, "", "continues turn 1")


def test_show_names_forks_and_rewrites() -> None:
    turns = [turn_record([{"role": "user", "content": "q"}], ["a"], [0.0]) for _ in range(2)]
    extras = {"call": "rewrites", "difference": "message 1: a became b"}
    shown = record(turns[0], turns[1].model_copy(update={"extras": extras, "extends": False}))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(render(shown))
    assert "[rewrites turn 1; message 1: a became b]" in captured.get()
