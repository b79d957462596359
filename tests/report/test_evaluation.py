"""An evaluation in the terminal and as JSON."""

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from agentrl.report.statistics import as_json, tables
from agentrl.rollout.evaluation import Evaluation, EvaluationConfig, summarize_evaluation
from agentrl.testing import make_group
from agentrl.types import StopReason, TrajectoryGroup


def group(number: int, *solved: bool | None) -> TrajectoryGroup:
    """A task with an episode for each; None: its environment failed."""
    made = make_group([[float(bool(one))] for one in solved], group_id=f"eval/{number:06d}")
    ends = (StopReason.ENV_ERROR if one is None else StopReason.TERMINATED for one in solved)
    members = tuple(
        replace(
            t, stop_reason=end, metrics={"success": float(bool(one))}, error=None if one is not None else "it [broke]"
        )
        for t, end, one in zip(made.trajectories, ends, solved, strict=True)
    )
    return replace(made, trajectories=members)


def found(*groups: TrajectoryGroup) -> dict[str, Evaluation]:
    return {"eval/": summarize_evaluation(groups, EvaluationConfig())}


def printed(evaluations: dict[str, Evaluation], file: Path | None = None) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    for table in tables(evaluations, {"eval/": "key_door"}, file):
        console.print(table)
    return console.export_text()


def test_tasks_that_nobody_solved_are_listed_with_what_ended_them() -> None:
    words = printed(found(group(0, True, False), group(1, False, False), group(2, None, None)), Path("run/e.jsonl"))
    assert "2 of 3 tasks not solved" in words
    listed = words.partition("tasks not solved")[2]
    assert [f"eval/{i:06d}" in listed for i in range(3)] == [False, True, True]
    assert "terminated 2" in listed
    assert "env_error 2" in listed
    assert "it [broke]" in listed
    assert "rollouts: run/e.jsonl" in words
    assert "not solved" not in printed(found(group(0, True)))


def test_a_long_list_is_cut() -> None:
    words = printed(found(*(group(number, False) for number in range(23))))
    assert "and 3 more; --json has all" in words
    assert ("eval/000019" in words, "eval/000020" in words) == (True, False)


def test_json_has_every_task() -> None:
    told = json.loads(
        json.dumps(as_json(found(group(0, True, False), group(1, None, None)), {"eval/": "key_door"}, None))
    )
    assert told["rollouts"] is None
    [evaluation] = told["evaluations"]
    assert (evaluation["name"], evaluation["env"], evaluation["metrics"]["success"]) == ("", "key_door", 0.5)
    assert [(task["solved"], task["reward"], task["episodes"]) for task in evaluation["tasks"]] == [
        (1, 0.5, 2),
        (0, None, 2),
    ]
    assert evaluation["tasks"][1]["stop_reasons"] == {"env_error": 2}
    low, high = evaluation["intervals"]["success"]
    assert 0 < low < 0.5 < high < 1
