from pathlib import Path
from typing import Any

from agentrl.report.folder import RunFolder
from agentrl.report.log import FaultLog
from agentrl.report.records import read_records
from agentrl.types import Fault, StopReason, Trajectory, Turn
from tests.support.each import each


def failed(name: str = "train/000001/2", *, line: int = 4, **changes: Any) -> Trajectory:
    given: dict[str, Any] = {
        "group_id": name.rpartition("/")[0],
        "trajectory_id": name,
        "env_id": "desk",
        "seed": 17,
        "turns": (
            Turn(
                observation_ids=(1,),
                action_ids=(2, 3),
                behavior_logprobs=(0.0, 0.0),
                versions=(0, 0),
                reward=0.0,
                observation=({"role": "user", "content": "Say 3."},),
                message={"role": "assistant", "content": "3"},
            ),
        ),
        "stop_reason": StopReason.ENV_ERROR,
        "error": f"environment desk: step() raised KeyError: 'answer' (desk.py:{line})",
        "fault": Fault(kind=f"KeyError at desk.py:{line}", traceback=f"  File desk.py, line {line}"),
        **changes,
    }
    return Trajectory(**given)


def log(tmp_path: Path) -> FaultLog:
    RunFolder(tmp_path).write_config({})
    return FaultLog(tmp_path, piece=str)


def test_each_kind_is_told_once_also_by_another_process_and_after_a_kill(tmp_path: Path) -> None:
    first = log(tmp_path).add(failed(), step=3)
    assert first is not None
    assert first.splitlines() == [
        "environment desk: step() raised KeyError: 'answer' (desk.py:4); episode train/000001/2, task seed 17",
        "  File desk.py, line 4",
        f"Play it again: agentrl envs replay {tmp_path} train/000001/2",
        f"Others of this kind are counted (faults), and up to 5 kept: agentrl show {tmp_path} --faults",
    ]
    assert log(tmp_path).add(failed("train/000001/3"), step=3) is None
    other = log(tmp_path).add(failed(line=5), step=4)
    assert other is not None
    assert "desk.py, line 5" in other


@each("run_dir", [None, "there", "not/there"])
def test_where_no_run_has_begun_each_kind_is_told_and_nothing_is_written(run_dir: str | None, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    faults = FaultLog(None if run_dir is None else tmp_path / run_dir, piece=str)
    assert faults.add(failed(), step=1) == (
        "environment desk: step() raised KeyError: 'answer' (desk.py:4); task seed 17\n  File desk.py, line 4"
    )
    assert faults.add(failed("train/000001/3"), step=1) is None
    assert faults.add(failed(line=5), step=1) is not None
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_a_few_episodes_of_each_kind_are_kept_whole(tmp_path: Path) -> None:
    for number in range(9):
        log(tmp_path).add(failed(f"train/{number:06d}/0"), step=number)
        log(tmp_path).add(failed(f"train/{number:06d}/0"), step=number)  # another attempt
    kept = RunFolder(tmp_path).kept_faults()
    assert [path.name for path in kept] == [f"train-{number:06d}-0.jsonl" for number in range(5)]
    record = next(read_records(kept[3]))
    assert (record.step, record.seed, record.fault) == (3, 17, failed().fault)
    assert [turn.message for turn in record.turns] == [turn.message for turn in failed().turns]


def test_kinds_are_bounded(tmp_path: Path) -> None:
    told = [log(tmp_path).add(failed(line=line), step=0) for line in range(60)]
    assert sum(words is not None for words in told) == len(RunFolder(tmp_path).fault_kinds()) == 50


def test_a_kind_names_a_folder_whatever_it_is(tmp_path: Path) -> None:
    fault = Fault(kind="../../Odd\x00 at desk.py:4" + "x" * 500)
    assert log(tmp_path).add(failed(fault=fault), step=0) is not None
    assert [path.parent for path in RunFolder(tmp_path).fault_kinds()] == [tmp_path / "faults"]
