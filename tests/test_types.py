import json
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agentrl.types import (
    FinishReason,
    StopReason,
    TokenIds,
    Trajectory,
    TrajectoryGroup,
    Turn,
    Turns,
    chains_of,
    context_of,
    lengthen,
    path_to,
    shorten,
    valid_trajectories,
)
from tests.support.each import each


def turn(*action_ids: int, extends: bool = True, reward: float = 0.0) -> Turn:
    zeros = (0,) * len(action_ids)
    return Turn(
        observation_ids=(1,),
        extends=extends,
        action_ids=action_ids,
        behavior_logprobs=zeros,
        versions=zeros,
        reward=reward,
    )


def trajectory(*turns: Turn, **changes: Any) -> Trajectory:
    blank = Trajectory(
        group_id="g", trajectory_id="g/0", env_id="e", seed=0, turns=turns, stop_reason=StopReason.TERMINATED
    )
    return replace(blank, **changes)


@each("field", ["behavior_logprobs", "versions", "values"])
def test_what_belongs_to_tokens_has_one_number_for_each_action_token(field: str) -> None:
    changes: Any = {"signals": {"turn_scores": 0.5, field: (0, 0)}} if field == "values" else {field: (0, 0)}
    with pytest.raises(ValueError, match=f"3 action tokens needs as many {field}, got 2"):
        replace(turn(1, 2, 3), **changes)


@given(st.lists(st.integers(-(2**62), 2**62) | st.integers(250, 300), max_size=20))
def test_an_unpickled_turn_is_the_same_and_shares_its_numbers(ids: list[int]) -> None:
    logprobs = tuple(-0.5 * number for number in range(len(ids)))
    turn = Turn(
        observation_ids=(5000, *ids), action_ids=tuple(ids), behavior_logprobs=logprobs, versions=tuple(ids), reward=1.0
    )
    turn = replace(turn, extras={"n": 3}, signals={"values": logprobs}, finish_reason=FinishReason.LENGTH)
    found = pickle.loads(pickle.dumps([turn, turn.observation_ids]))[0]
    assert found == turn
    again = pickle.loads(pickle.dumps(turn))
    assert found.observation_ids[0] is again.observation_ids[0]
    assert isinstance(found.action_ids, tuple)


def test_a_turn_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        turn(1).reward = 2.0  # type: ignore[misc]


def test_a_trajectory_sums_its_turns() -> None:
    played = trajectory(turn(1, 2, reward=0.5), turn(), turn(3, reward=-2.0))
    assert played.reward == -1.5
    assert played.num_action_tokens == 3
    assert (trajectory().reward, trajectory().num_action_tokens) == (0, 0)


@each(
    ("extends", "lengths"),
    [
        ([], []),
        ([True], [1]),
        ([True, True, True], [3]),
        ([True, False, True], [1, 2]),
        ([True, True, False, False, True], [2, 1, 2]),
        ([False, True], [2]),  # the first turn begins a context whatever it says
        ([False, False], [1, 1]),
    ],
)
def test_a_segment_ends_where_history_was_rewritten(extends: list[bool], lengths: list[int]) -> None:
    turns = tuple(turn(k, extends=flag) for k, flag in enumerate(extends))
    segments = list(trajectory(*turns).segments())
    assert [len(segment) for segment in segments] == lengths
    assert sum(segments, ()) == turns


def test_a_turn_lies_in_the_segment_of_its_parent_unless_another_does_already() -> None:
    #         0 -- 2 -- 5      1 -- 3 (a second agent)       4 forks from 0, 6 rewrites what 2 had, 7 goes on from 4
    parents = [None, None, 0, 1, 0, 2, 2, 4]
    rewrites = {0, 1, 6}
    turns = [replace(turn(k, extends=k not in rewrites), parent=parent) for k, parent in enumerate(parents)]
    assert chains_of(turns) == [[0, 2, 5], [1, 3], [4, 7], [6]]
    assert [segment[0].action_ids for segment in trajectory(*turns).segments()] == [(0,), (1,), (4,), (6,)]
    assert [path_to(turns, number) for number in (5, 3, 7, 6)] == [[0, 2, 5], [1, 3], [0, 4, 7], [6]]
    assert context_of(turns, 7) == (1, 0, 1, 4, 1)  # each observation is the token 1


@each("parent", [-1, 1, 2, 9])
def test_a_parent_that_is_no_earlier_turn_is_refused(parent: int) -> None:
    turns = (turn(1), replace(turn(2), parent=parent))
    with pytest.raises(ValueError, match=f"^turn 1 has the parent {parent}; a parent is an earlier turn"):
        chains_of(turns)
    with pytest.raises(ValidationError, match=f"turn 1 has the parent {parent}"):
        TURNS.validate_python([TypeAdapter(Turn).dump_python(each, mode="json") for each in turns])


@given(st.lists(st.booleans(), max_size=12))
def test_segments_hold_every_turn_once_in_order(extends: list[bool]) -> None:
    turns = tuple(turn(k, extends=flag) for k, flag in enumerate(extends))
    segments = list(trajectory(*turns).segments())
    assert sum(segments, ()) == turns
    assert all(segments)
    assert [segment[0].extends for segment in segments[1:]] == [False] * (len(segments) - 1)
    assert all(later.extends for segment in segments for later in segment[1:])


def test_only_faults_and_episodes_without_a_score_or_a_turn_leave_the_statistics() -> None:
    failed = {reason for reason in StopReason if reason.failed}
    assert failed == {StopReason.ENV_ERROR, StopReason.ENGINE_ERROR, StopReason.UNSCORED}
    assert {reason for reason in StopReason if reason.is_fault} == failed - {StopReason.UNSCORED}
    members = tuple(
        trajectory(turn(1), trajectory_id=f"g/{i}", stop_reason=reason) for i, reason in enumerate(StopReason)
    )
    first_prompt_too_long = trajectory(trajectory_id="g/99", stop_reason=StopReason.CONTEXT_OVERFLOW)
    assert first_prompt_too_long.failed
    group = TrajectoryGroup(group_id="g", trajectories=(*members, first_prompt_too_long))
    assert [t.stop_reason for t in group.valid] == [reason for reason in StopReason if not reason.failed]
    assert valid_trajectories([group, group]) == [*group.valid, *group.valid]
    assert [t.failed for t in members] == [reason.failed for reason in StopReason]


@each(
    ("rewards", "alike"), [([], True), ([0, 0], True), ([0.1 + 0.2, 0.3], True), ([-1, 1], False), ([1, 1.001], False)]
)
def test_a_group_earned_alike_but_for_rounding_and_failures(rewards: list[float], alike: bool) -> None:
    members = tuple(trajectory(turn(1, reward=reward)) for reward in rewards)
    failed = trajectory(turn(1, reward=7), stop_reason=StopReason.ENV_ERROR)
    assert TrajectoryGroup(group_id="g", trajectories=(*members, failed)).zero_spread == alike


TURNS = TypeAdapter(Turns)


@st.composite
def dialogues(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Turns of which some follow an earlier one, rewrite the end of their history, or forget it."""
    turns: list[Turn] = []
    contexts: list[tuple[int, ...]] = []
    """After each turn."""
    for number, extends in enumerate(draw(st.lists(st.booleans(), max_size=6))):
        new = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple))
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        context = contexts[number - 1 if parent is None else parent] if number else ()
        kept = 0 if extends else draw(st.integers(0, len(context)))
        filled = draw(st.sampled_from([(), (7,) * 3000]))  # longer than what is compared at once
        observation_ids = context[:kept] + filled + new
        turns.append(replace(turn(1, 2, extends=extends), observation_ids=observation_ids, parent=parent))
        contexts.append((context if extends else ()) + observation_ids + (1, 2))
    for number, context in enumerate(contexts):
        assert (*context_of(turns, number), 1, 2) == context
    return tuple(turns)


@given(turns=dialogues())
def test_turns_come_out_of_a_file_as_they_were(turns: tuple[Turn, ...]) -> None:
    rows = json.loads(json.dumps(TURNS.dump_python(turns, mode="json")))
    assert TURNS.validate_python(rows) == turns
    for index, whole in enumerate(turns):
        short, shared = shorten(whole, turns[:index])
        assert lengthen(short, turns[:index], shared) == whole
        assert short.observation_ids


def test_a_turn_that_rewrote_the_end_of_its_history_is_written_without_the_rest() -> None:
    first = replace(turn(1, 2), observation_ids=tuple(range(5000)))
    second = replace(turn(3, extends=False), observation_ids=(*range(4990), 8, 9))
    row = TURNS.dump_python((first, second), mode="json")[1]
    assert row["shared"] == 4990
    assert TypeAdapter(TokenIds).validate_python(row["observation_ids"]) == (8, 9)


@each("shared", [-1, 4, 10**30, "1", None])
def test_a_turn_that_repeats_what_is_not_there_is_refused(shared: Any) -> None:
    rows = TURNS.dump_python((turn(1, 2), turn(3, extends=False)), mode="json")
    with pytest.raises(ValidationError, match=r"a turn repeats|is no number"):
        TURNS.validate_python([rows[0], rows[1] | {"shared": shared}])


def test_experts_go_to_other_processes_and_into_no_file() -> None:
    told = replace(turn(1, 2), experts=b"\x00\xff")
    assert pickle.loads(pickle.dumps(told)) == told
    (row,) = TURNS.dump_python((told,), mode="json")
    assert "experts" not in row
    assert TURNS.validate_python([row | {"experts": "AP8="}]) == (replace(told, experts=b""),)


def test_a_turn_and_a_trajectory_are_a_line_for_people() -> None:
    two = trajectory(turn(5, 6, reward=1.0), turn(7))
    assert repr(two) == "<Trajectory g/0 of e: 2 turns, 3 sampled tokens, reward 1, terminated>"
    assert repr(two.turns[0]) == "<Turn: 1 observed and 2 sampled tokens, reward 1>"
    assert repr(trajectory()).endswith("0 sampled tokens, failed: None>")
