import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agentrl.credit import Credit
from agentrl.errors import UserError
from agentrl.report.folder import RunFolder
from agentrl.report.records import TrajectoryRecord, calls_of, groups_of, read_records, records
from agentrl.testing.groups import make_group
from agentrl.types import Fault, Need, StopReason, Trajectory, TrajectoryGroup
from tests.support.each import each


def group() -> TrajectoryGroup:
    return make_group(
        [[0.5, 1.0], [0.25]],
        state_keys=[["a", "b"], ["a"]],
        action_keys=[["left", None], ["right"]],
        action_lengths=[[2, 3], [1]],
    )


def credits_of(group: TrajectoryGroup) -> list[Credit]:
    first, second = group.trajectories
    keep = [True, True, False, True, True]
    return [Credit.from_tokens(first, [0.1, -0.2, 0.3, 0.4, 0.5], keep_T=keep), Credit.excluded(second)]


def records_of(group: TrajectoryGroup) -> Iterator[TrajectoryRecord]:
    return records([group], [credits_of(group)], step=7, piece=lambda token: f"<{token}>")


def with_extras(extras: dict[str, Any], metrics: dict[str, float]) -> TrajectoryGroup:
    first, second = group().trajectories
    turns = (replace(first.turns[0], extras=extras), first.turns[1])
    return TrajectoryGroup(group_id="g", trajectories=(replace(first, turns=turns, metrics=metrics), second))


def saved(folder: Path, group: TrajectoryGroup) -> Path:
    run = RunFolder.create(folder, {})
    run.add_rollouts(7, records_of(group))
    (path,) = run.rollouts()
    return path


def assert_same(record: TrajectoryRecord, trajectory: Trajectory) -> None:
    for name in ("group_id", "trajectory_id", "env_id", "seed", "stop_reason", "truncated", "reward", "error"):
        assert getattr(record, name) == getattr(trajectory, name)
    names = ("extends", "reward", "state_key", "next_state_key", "action_key", "finish_reason", "message")
    sequences = ("observation_ids", "action_ids", "behavior_logprobs", "versions", "observation")
    for turn, other in zip(record.turns, trajectory.turns, strict=True):
        assert {name: getattr(turn, name) for name in names} == {name: getattr(other, name) for name in names}
        for name in sequences:
            assert tuple(getattr(turn, name)) == getattr(other, name)


def test_everything_that_training_saw_comes_back_from_the_file(tmp_path: Path) -> None:
    played = group()
    written, read = list(records_of(played)), list(read_records(saved(tmp_path, played)))
    assert read == written
    for record, trajectory, credit in zip(read, played.trajectories, credits_of(played), strict=True):
        assert record.step == 7
        assert_same(record, trajectory)
        # Advantages are float32; JSON holds their value as float64, exactly.
        assert [a for turn in record.turns for a in turn.advantages] == credit.advantages_T.tolist()
        assert [keep for turn in record.turns for keep in turn.keep] == credit.keep_T.tolist()
        assert [len(turn.advantages) for turn in record.turns] == [len(turn.action_ids) for turn in trajectory.turns]
    assert read[0].turns[1].action_pieces == [f"<{token}>" for token in played.trajectories[0].turns[1].action_ids]


def test_lines_of_several_agents_come_back_and_a_parent_that_is_no_earlier_turn_is_refused(tmp_path: Path) -> None:
    first, second = group().trajectories
    turns = (first.turns[0], replace(first.turns[1], parent=0, agent="critic"))
    played = TrajectoryGroup(group_id=first.group_id, trajectories=(replace(first, turns=turns), second))
    read = list(read_records(path := saved(tmp_path, played)))
    assert groups_of(read)[0].trajectories[0].turns[1] == turns[1]
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines[0]["turns"][1]["parent"] = 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(UserError, match=r"line 1: .*turn 1 has the parent 1; a parent is an earlier turn"):
        list(read_records(path))


def test_signals_come_back_as_they_were_credited(tmp_path: Path) -> None:
    played = make_group(
        [[0.5, 1.0], [0.25]],
        action_lengths=[[2, 1], [1]],
        values=[[(0.5, -0.25), 2], [3]],
        turn_scores=[[0.125, 1], [None]],
        branch_rewards=[[((1.0,), (0.0, 0.5)), ()], [None]],
    )
    credits = [[Credit.uniform(t, 1.0) for t in played.trajectories]]
    run = RunFolder.create(tmp_path, {})
    run.add_rollouts(7, records([played], credits, step=7, piece=str))
    (path,) = run.rollouts()
    found = list(read_records(path))
    assert found[0].turns[0].signals == {"values": [0.5, -0.25], "turn_scores": 0.125}
    assert [trajectory.turns for trajectory in groups_of(found)[0].trajectories] == [
        t.turns for t in played.trajectories
    ]
    first = path.read_bytes().replace(b'"values":[0.5,', b'"values":[')
    path.write_bytes(first)
    with pytest.raises(UserError, match="values has 1 entries for 2 action tokens"):
        list(read_records(path))


def test_a_failed_trajectory_is_recorded_with_its_error(tmp_path: Path) -> None:
    first, second = group().trajectories
    fault = Fault(kind="KeyError at desk.py:4", traceback="  File ...\nKeyError: 'answer'")
    failed = replace(second, stop_reason=StopReason.ENV_ERROR, error="step() raised", fault=fault, turns=())
    path = saved(tmp_path, TrajectoryGroup(group_id="g", trajectories=(first, failed)))
    record = list(read_records(path))[1]
    assert_same(record, failed)
    assert (record.error, record.fault, record.turns) == ("step() raised", fault, [])
    assert groups_of([record])[0].trajectories[0].fault == fault


def test_signals_that_are_not_finite_come_back_and_the_file_stays_json(tmp_path: Path) -> None:
    signals = [{"values": float("nan")}, {"values": float("-inf")}]
    members = [replace(t, signals=given) for t, given in zip(group().trajectories, signals, strict=True)]
    path = saved(tmp_path, TrajectoryGroup(group_id="g", trajectories=tuple(members)))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for line in path.read_bytes().splitlines():
        json.loads(line, parse_constant=refuse)
    first, second = (record.signals[Need.VALUES] for record in read_records(path))
    assert np.isnan(first)
    assert second == float("-inf")


@each(
    ("spoil", "words"),
    [
        (lambda line: line[: len(line) // 2], "it is not JSON (Expecting "),
        (lambda line: line.replace(b'"seed":0', b'"seed":"x"'), "seed: Input should be a valid integer"),
        (lambda line: line.replace(b'"turns"', b'"moves"'), "turns: Field required"),
        (
            lambda line: line.replace(b'"finish_reason":"stop"', b'"finish_reason":"tired"', 1),
            "turns.0.finish_reason: Input",
        ),
        (
            lambda line: line.replace(b'"keep":[', b'"keep":[true,', 1),
            "turns.0: Value error, keep has ",
        ),
        (lambda _: b"\x80\x04\x95", "it is not UTF-8"),
        (lambda _: b"", "it is not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, spoil: Any, words: str) -> None:
    path = saved(tmp_path, group())
    first, second = path.read_bytes().splitlines()
    path.write_bytes(first + b"\n" + spoil(second) + b"\n")
    lines = read_records(path)
    assert next(lines).trajectory_id == "g/0"
    with pytest.raises(UserError) as caught:
        next(lines)
    assert str(caught.value).startswith(f"{path}, line 2: {words}")


def test_what_an_update_computed_of_each_token_stands_beside_it() -> None:
    nan = float("nan")
    notes = {"ratio": np.array([1.5, 0.25, nan, 2.0, 1.0]), "clipped": np.array([0.0, 1.0, nan, 0.0, 0.0])}
    first, second = records(
        [group()],
        [credits_of(group())],
        step=7,
        piece=str,
        notes_of=lambda trajectory: notes if trajectory.trajectory_id == group().trajectories[0].trajectory_id else {},
    )
    assert first.turns[0].trained == {"ratio": [1.5, 0.25], "clipped": [0.0, 1.0]}
    assert first.turns[1].trained == {"ratio": [None, 2.0, 1.0], "clipped": [None, 0.0, 0.0]}
    assert second.turns[0].trained == {}
    data = first.model_dump(mode="json")
    assert TrajectoryRecord.model_validate(data) == first
    data["turns"][0]["trained"]["ratio"] = [1.5]
    with pytest.raises(ValidationError, match="ratio has 1 entries for 2 action tokens"):
        TrajectoryRecord.model_validate(data)


def test_calls_read_as_calls_and_what_is_none_as_it_stands() -> None:
    def calls(*functions: Any) -> list[str]:
        return calls_of({"role": "assistant", "tool_calls": [{"function": each} for each in functions]})

    assert calls({"name": "calc", "arguments": {"a": 3, "op": "*", "b": 8}}) == ['calc(a=3, op="*", b=8)']
    assert calls({"name": "find", "arguments": {"words": ["é\n"]}}, {"name": "end", "arguments": {}}) == [
        'find(words=["é\\n"])',
        "end()",
    ]
    assert calls({"name": "calc", "arguments": "a=3"}) == ['{"function": {"name": "calc", "arguments": "a=3"}}']
    assert calls({"name": "", "arguments": '{"name": "calc", '}) == ['{"name": "calc", ']  # malformed
    assert calls_of({"role": "assistant", "tool_calls": 1}) == ["1"]
    assert calls_of({"role": "assistant", "content": "a"}) == []
