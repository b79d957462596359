import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.credit import load_credit
from agentrl.report.advise import credits_of
from agentrl.report.folder import EvaluationNote
from agentrl.report.html.report import report_data, write_report
from agentrl.report.html.rollouts import Block, block_of, other_credit
from agentrl.report.html.runs import open_runs
from agentrl.report.html.store import RolloutStore
from agentrl.report.records import TrajectoryRecord, groups_of
from agentrl.types import Fault, StopReason
from tests.support.records import record, turn
from tests.support.report_runs import make_run, member


def said_in(block: Block) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(block.data))
    return found


def store_of(*folders: Path, **options: Any) -> RolloutStore:
    store = RolloutStore(**options)
    assert store.read(open_runs(folders))
    return store


def test_a_rollout_is_told_as_it_was_recorded() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    first = turn([{"role": "user", "content": "1 + 1?"}], ["<call>", "add"], [0.25, 0.25], keep=[True, False])
    first = first.model_copy(update={"message": {"role": "assistant", "content": "", "tool_calls": [call]}})
    second = turn([{"role": "tool", "name": "add", "content": "Error: no b"}], ["a", "b", "c"], [0.0, 1 / 3, 0.0])
    block = block_of([record(first, second, metrics={"success": 0.0})], run=2, others={})
    (entry,) = block.entries
    assert (entry["run"], entry["tools"], entry["toolErrors"], entry["tokens"], entry["turns"]) == (2, ["add"], 1, 5, 2)
    assert (entry["success"], entry["failed"], entry["task"]) == (False, False, "1 + 1?")
    told = said_in(block)[0]["turns"]
    assert told[0]["pieces"] == ["<call>", "add"]
    assert told[0]["said"] == {"role": "assistant", "text": "", "calls": "add(a=1)"}
    assert told[1]["said"] is None
    assert entry["last"] == "abc"
    assert told[0]["columns"] == {"advantage": 0.25, "logprob": 0.0, "version": 0, "keep": [1, 0]}
    assert told[1]["columns"]["advantage"] == [0.0, 0.3333, 0.0]
    assert told[1]["read"] == [{"role": "tool", "name": "add", "text": "Error: no b"}]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
FIELDS = st.sampled_from(["role", "content", "tool_calls", "name", "reasoning_content", "function"])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(FIELDS, ANYTHING, max_size=4), st.dictionaries(FIELDS, ANYTHING, max_size=4))
def test_whatever_stands_in_a_message_becomes_text(read: dict[str, Any], message: dict[str, Any]) -> None:
    given = turn([read], ["a"], [0.0]).model_copy(update={"message": message})
    (said,) = said_in(block_of([record(given)], run=0, others={}))[0]["turns"][0]["read"]
    assert all(isinstance(value, str) for value in said.values())


def test_other_schemes_give_what_explain_says_they_would(tmp_path: Path) -> None:
    members = [member(0, reward=1.0), member(1, reward=0.0)]
    found = other_credit(members)
    assert "uniform" in found
    assert "gigpo" not in found  # it reads keys of states, which these lack
    assert "distill" not in found  # it reads a teacher
    for name in found:
        expected = credits_of(load_credit({"scheme": name}), groups_of(members))
        assert {ids: list(given) for ids, given in found[name].items()} == {
            ids: credit.advantages_T.tolist() for ids, credit in expected.items()
        }
    folder = make_run(tmp_path / "run", rollouts=members)
    (block,) = store_of(folder.path).blocks.values()
    told = [rollout["turns"][0]["others"]["uniform"] for rollout in said_in(block)]
    assert told == [
        pytest.approx(found["uniform"][given.group_id, given.trajectory_id][0], rel=1e-3) for given in members
    ]


def test_a_damaged_file_is_shown_up_to_the_damage(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (path,) = folder.rollouts()
    whole, _, rest = path.read_text(encoding="utf-8").partition("\n")
    path.write_text(f"{whole}\n{rest[:40]}\n", encoding="utf-8")
    store = store_of(folder.path)
    assert [entry["id"] for entry in store.entries()] == ["train/000001/0"]
    assert len(store.notices) == 1
    assert f"{path}, line 2" in store.notices[0]
    (folder.path / "warnings.jsonl").write_text("{}\n")
    notices = report_data(open_runs([folder.path]), store)["notices"]
    assert len(notices) == 2
    assert "warnings.jsonl, line 1" in notices[1]


def test_faults_come_first_and_the_newest_rollouts_next(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for step in (1, 2, 4):
        folder.add_rollouts(step, [member(0, reward=0.0, step=step, group_id=f"g{step}")])
    fault = member(
        9, reward=0.0, stop_reason=StopReason.ENV_ERROR, error="no desk", fault=Fault(kind="KeyError at desk.py:4")
    )
    kind = folder.faults / "KeyError"
    kind.mkdir(parents=True)
    (kind / "a.jsonl").write_text(fault.model_dump_json(exclude_defaults=True) + "\n", encoding="utf-8")
    store = store_of(folder.path, max_rollouts=3)
    assert [(entry["failed"], entry["step"]) for entry in store.entries()] == [
        (True, 3),
        (False, 4),
        (False, 3),
        (False, 3),
    ]
    assert store.left_out == 2
    data = report_data(open_runs([folder.path]), store)
    assert data["faults"] == [{"run": 0, "kind": "KeyError", "kept": 1}]
    assert "newest 4 rollouts" in data["notices"][0]


def test_evaluations_are_as_new_as_what_they_evaluated(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for step in (1, 2, 4):
        folder.add_rollouts(step, [member(0, reward=0.0, step=step, group_id=f"g{step}")])
    played = member(1, reward=0.0, split="eval", group_id="eval/000000", step=4)
    folder.add_evaluation([played], EvaluationNote(step=4, settings={}))
    store = store_of(folder.path, max_rollouts=2)
    assert [(entry["split"], entry["step"]) for entry in store.entries()] == [("train", 4), ("eval", 4)]
    assert store.left_out == 3
    next(folder.evaluations.glob("*.json")).write_text("{")  # which agentrl train refuses
    assert [entry["step"] for entry in store_of(folder.path).entries()] == [4, 3, 3, 2, 1, 4]


def test_a_file_that_is_written_again_replaces_what_it_held(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    store = RolloutStore()
    runs = open_runs([folder.path])
    assert not store.read(runs, seconds=-1.0)  # out of time before the first
    assert store.read(runs)
    assert len(store.entries()) == 2
    folder.add_rollouts(3, [member(5, reward=0.0)])
    (path,) = folder.rollouts()
    os.utime(path, ns=(1, 1))
    assert store.read(runs)
    assert [entry["id"] for entry in store.entries()] == ["train/000001/5"]


def test_as_a_run_goes_on_the_newest_rollouts_take_the_place_of_the_oldest(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=[])
    store = RolloutStore(max_rollouts=4)
    shown = []
    for step in range(1, 7):
        folder.add_rollouts(step, [member(k, reward=0.0, step=step, group_id=f"g{step}") for k in (0, 1)], keep=4)
        assert store.read(open_runs([folder.path]))
        shown.append(
            (sorted({entry["step"] for entry in store.entries()}, key=str), len(store.entries()), store.left_out)
        )
    assert shown == [([1], 2, 0), ([1, 2], 4, 0), ([2, 3], 4, 1), ([3, 4], 4, 2), ([4, 5], 4, 3), ([5, 6], 4, 3)]
    for path in folder.rollouts()[2:]:
        path.unlink()
    assert store.read(open_runs([folder.path]))
    assert sorted((entry["step"] for entry in store.entries()), key=str) == [1, 1, 3, 3]
    assert store.left_out == 0


def test_the_newest_rollouts_have_other_credit_whenever_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.report.html.store.MAX_CREDITED", 2)
    folder = make_run(tmp_path / "run", rollouts=[])
    store = RolloutStore()
    for step in (1, 2):
        folder.add_rollouts(step, [member(k, reward=float(k), step=step, group_id=f"g{step}") for k in (0, 1)])
        assert store.read(open_runs([folder.path]))
    assert all(rollout["turns"][0]["others"] for block in store.blocks.values() for rollout in said_in(block))


def test_the_same_runs_give_the_same_page_but_for_the_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")

    def lines(name: str) -> list[str]:
        text = write_report([folder.path], tmp_path / name).read_text(encoding="utf-8")
        return [line for line in text.splitlines() if '"written"' not in line]

    assert lines("a.html") == lines("b.html")


def test_of_an_empty_record_nothing_is_divided(tmp_path: Path) -> None:
    empty: TrajectoryRecord = record(error="the environment raised")
    folder = make_run(tmp_path / "run", rollouts=[empty])
    (entry,) = store_of(folder.path).entries()
    assert (entry["turns"], entry["tokens"], entry["failed"], entry["error"]) == (0, 0, True, "the environment raised")


def test_a_ratio_keeps_the_digits_that_a_clip_range_is_told_by() -> None:
    said = turn([{"role": "user", "content": "?"}], ["a", "b"], [1.0, 1.0])
    trained = {"ratio": [1.000312, 0.9996], "entropy": [0.123456, 0.5], "clipped": [1.0, None]}
    block = block_of([record(said.model_copy(update={"trained": trained}))], run=0, others={})
    columns = said_in(block)[0]["turns"][0]["columns"]
    assert (columns["ratio"], columns["entropy"], columns["clipped"]) == ([1.00031, 0.9996], [0.123, 0.5], [1.0, None])


def test_what_the_model_really_read_is_told_where_a_context_begins() -> None:
    begins = turn([{"role": "user", "content": "?"}], ["a"], [0.0]).model_copy(update={"observation_ids": [7, 8]})
    extends = begins.model_copy(update={"observation_ids": [9]})
    rewrites = begins.model_copy(update={"observation_ids": [3], "extends": False})
    block = block_of([record(begins, extends, rewrites)], run=0, others={}, decode=lambda ids: f"<{ids}>")
    assert [told["context"] for told in said_in(block)[0]["turns"]] == ["<[7, 8]>", "", "<[3]>"]


def test_rollouts_of_evaluations_are_there_without_credit(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    said = turn([{"role": "user", "content": "?"}], ["a", "b"], [0.0, 0.0], keep=[False, False])
    played = record(said).model_copy(update={"split": "eval", "group_id": "eval/000000", "step": 2})
    folder.add_evaluation([played], EvaluationNote(step=2, settings={}))
    store = store_of(folder.path)
    assert [(entry["split"], entry["step"]) for entry in store.entries()] == [("train", 3), ("train", 3), ("eval", 2)]
    columns = said_in(list(store.blocks.values())[-1])[0]["turns"][0]["columns"]
    assert set(columns) == {"logprob", "version"}
