import copy
import csv
import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env import task_table
from agentrl.env.task_table import TableOptions, TaskTable, load_table
from agentrl.errors import UserError
from tests.support.each import each


def table(tasks: Any, **options: Any) -> TaskTable:
    return load_table(TableOptions(tasks=tasks, **options))


def written(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def prompts(found: TaskTable, split: str) -> list[Any]:
    return [row["prompt"] for row in found.splits[split]]


def refusal(tasks: Any, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        table(tasks, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


QUESTIONS = [{"prompt": f"What is {i}?", "answer": i} for i in range(200)]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
word = text.filter(lambda words: bool(words.strip()))
rows = st.lists(st.fixed_dictionaries({"prompt": word, "other": plain}), min_size=2, max_size=20)


@given(rows=rows, ends=st.sampled_from(["\n", "\r\n", "\n\n"]), bom=st.booleans(), escaped=st.booleans())
def test_jsonl_says_what_a_list_of_the_same_rows_says(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], ends: str, bom: bool, escaped: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "tasks.jsonl"
    lines = ends.join(json.dumps(row, ensure_ascii=escaped) for row in rows)
    written(path, ("\ufeff" if bom else "") + lines)
    task_table._load_once.cache_clear()  # two examples may have one size and one time
    assert table(path, eval_share=0).splits == table(rows, eval_share=0).splits
    assert list(table(rows, eval_share=0).splits["train"]) == rows


@given(names=st.lists(word.filter(lambda name: name != "prompt"), unique=True, max_size=3), data=st.data())
def test_csv_says_what_it_was_written_from(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], data: st.DataObject
) -> None:
    safe = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=20)
    names = [name.replace("\r", " ").replace("\0", "0") for name in names]
    columns = list(dict.fromkeys(["prompt", *(name for name in names if name.strip())]))
    rows = data.draw(
        st.lists(
            st.fixed_dictionaries(dict.fromkeys(columns, safe) | {"prompt": safe.filter(lambda s: bool(s.strip()))}),
            min_size=1,
        )
    )
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(rows)
    path = written(tmp_path_factory.getbasetemp() / "tasks.csv", file.getvalue())
    task_table._load_once.cache_clear()
    assert list(table(path, eval_share=0).splits["train"]) == rows


@given(rows=rows, share=st.floats(0.01, 0.99), more=rows)
def test_no_prompt_is_on_both_sides_and_none_is_lost(
    rows: list[dict[str, Any]], share: float, more: list[dict[str, Any]]
) -> None:
    if len({row["prompt"] for row in rows}) < 2:
        assert "single task" in refusal(rows, eval_share=share)
        return
    found = table(rows, eval_share=share)
    assert not set(prompts(found, "train")) & set(prompts(found, "eval"))
    assert found.splits["train"]
    assert found.splits["eval"]
    assert sorted(prompts(found, "train") + prompts(found, "eval")) == sorted(row["prompt"] for row in rows)


def test_a_task_stays_on_its_side_whatever_else_is_in_the_table() -> None:
    half, whole = table(QUESTIONS[:100]), table(list(reversed(QUESTIONS)))
    assert set(prompts(half, "eval")) < set(prompts(whole, "eval"))
    assert set(prompts(half, "train")) < set(prompts(whole, "train"))
    assert 10 <= len(whole.splits["eval"]) <= 30
    assert table(QUESTIONS).splits == table(copy.deepcopy(QUESTIONS)).splits


def test_a_prompt_that_stands_twice_is_on_one_side_whatever_else_its_rows_say() -> None:
    found = table([{"prompt": f"{i % 40}", "id": i} for i in range(200)], eval_share=0.5)
    assert not set(prompts(found, "train")) & set(prompts(found, "eval"))
    assert len(found.splits["train"]) + len(found.splits["eval"]) == 200


def test_the_hash_of_a_split_follows_from_its_tasks_and_their_order() -> None:
    found = table(QUESTIONS)
    assert found.hashes == table([dict(reversed(row.items())) for row in QUESTIONS]).hashes
    assert found.hashes["train"] != found.hashes["eval"]
    changed = [row | {"answer": -1} if row == QUESTIONS[0] else row for row in QUESTIONS]
    assert sum(found.hashes[side] != table(changed).hashes[side] for side in ("train", "eval")) == 1
    assert found.hashes != table(list(reversed(QUESTIONS))).hashes
    assert found.hashes == table([row | {"hint": None} for row in QUESTIONS]).hashes


def test_a_column_that_a_row_lacks_is_none() -> None:
    found = table([{"prompt": "a", "hint": "x"}, {"prompt": "b"}], eval_share=0)
    assert [row["hint"] for row in found.splits["train"]] == ["x", None]


def test_a_column_says_the_split() -> None:
    rows = [{"prompt": str(i), "part": part} for i, part in enumerate(["train", "Test", "validation", "train "])]
    found = table(rows, split="part")
    assert [prompts(found, side) for side in ("train", "eval")] == [["0", "3"], ["1", "2"]]
    assert "tasks[0]: column 'part': the split str 'holdout' is none of train" in refusal(
        [{"prompt": "a", "part": "holdout"}], split="part"
    )
    assert "all 1 tasks are held out" in refusal([{"prompt": "a", "part": "test"}], split="part")
    assert "no task is held out" in refusal([{"prompt": "a", "part": "train"}], split="part")
    both = [{"prompt": "a", "part": "train"}, {"prompt": "a", "part": "test", "id": 2}]
    assert refusal(both, split="part").startswith("tasks[1]: the same task is trained on and held out (also tasks[0])")


def test_another_table_is_held_out(tmp_path: Path) -> None:
    train = written(tmp_path / "train.jsonl", '{"prompt": "a"}\n{"prompt": "b"}')
    held_out = written(tmp_path / "eval.csv", "prompt\nc\n")
    found = table(train, eval_tasks=held_out)
    assert [prompts(found, side) for side in ("train", "eval")] == [["a", "b"], ["c"]]
    written(held_out, "prompt\nc\nb\n")
    assert "eval.csv, line 3: the same task is trained on and held out" in refusal(train, eval_tasks=held_out)
    with pytest.raises(ValueError, match="eval_tasks: it says which tasks are held out, and so does eval_share"):
        TableOptions(tasks=str(train), eval_tasks=str(held_out), eval_share=0.5)


@each(
    ("name", "data", "words"),
    [
        ("a.jsonl", '{"prompt": "x"}\n' * 16 + '{"prompt": "x"', "a.jsonl, line 17: it is not JSON (Expecting ',' delimiter"),
        ("a.jsonl", '{"prompt": NaN}', "a.jsonl, line 1: NaN is no number of JSON"),
        ("a.jsonl", '{"prompt": "x", "n": 1e999}', "line 1: column 'n' holds a number that is not finite"),
        ("a.jsonl", '{"prompt": "x", "n": [{"m": -1e999}]}', "line 1: column 'n' holds a number that is not finite"),
        ("a.jsonl", '{"prompt": "x", "n": ' + "9" * 400 + "}", "line 1: column 'n' is an integer beyond what a float can hold"),
        ("a.jsonl", '{"prompt": "x", "n": ' + "9" * 5000 + "}", "line 1: Exceeds the limit"),
        ("a.jsonl", '{"prompt": "x", "n": ' + "[" * 100 + "]" * 100 + "}", "line 1: column 'n'"),
        ("a.jsonl", "[" * 100_000, "line 1: it nests too deep"),
        ("a.jsonl", '{"prompt": "x", "prompt": "y"}', "line 1: 'prompt' is there twice"),
        ("a.jsonl", "[1]", "line 1: it is list [1]; give an object"),
        ("a.jsonl", b'{"prompt": "x"}\n\xff\xfe', "a.jsonl, line 2: it is not UTF-8"),
        ("a.jsonl", "", "a.jsonl: it has no rows"),
        ("a.jsonl", "\n \r\n", "a.jsonl: it has no rows"),
        ("a.jsonl", '{"question": "x"}', "line 1: there is no column 'prompt'; set prompt to one that is there: question"),
        ("a.jsonl", '{"prompt": null}', "line 1: column 'prompt' is empty"),
        ("a.jsonl", '{"prompt": "  "}', "line 1: column 'prompt' is empty"),
        ("a.jsonl", '{"prompt": 5}', "line 1: column 'prompt' is int 5; give text, or a list of messages"),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}', "line 1: column 'prompt' is list"),
        ("a.jsonl", '{"prompt": [{"role": "assistant", "content": "x"}]}', "ends with a message of the assistant"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": [{"role": "user", "content": "y"}]}', "line 2: column 'prompt' is list"),
        ("a.json", '{"prompt": "x"}', "a.json: it holds dict"),
        ("a.json", '[\n{"prompt": "x"},\n{]', "it is not JSON (Expecting property name enclosed in double quotes at line 3, "),
        ("a.json", '[{"prompt": "x"}, 3]', "a.json, row 2: it is int 3"),
        ("a.csv", "prompt,answer\nx,1\ny\n", "a.csv, line 3: it has 1 fields for 2 columns"),
        ("a.csv", "prompt,prompt\nx,1\n", "a.csv, line 1: the first line names the columns, each once; it has 'prompt'"),
        ("a.csv", 'prompt\n"' + "x" * 200_000 + '"\n', "it is no CSV (field larger than field limit"),
        ("a.csv", "prompt\n", "a.csv: it has no rows"),
        ("a.csv", 'prompt,answer\nq1,"a1\nq2,a2\nq3,a3\n', "it is no CSV (unexpected end of data)"),
        ("a.tsv", 'prompt\tanswer\nq1\t"a1\nq2\ta2"b\nq3\ta3\n', "a.tsv, line 3: it is no CSV ("),
        ("a.tsv", "prompt\tanswer\nx\n", "a.tsv, line 2: it has 1 fields for 2 columns"),
        ("a.txt", "x", "must be one of .csv, .json, .jsonl, .parquet, .tsv"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_in_one_line(
    tmp_path: Path, name: str, data: bytes | str, words: str
) -> None:
    assert words in refusal(written(tmp_path / name, data))


def test_an_answer_must_be_there() -> None:
    assert "tasks[1]: column 'answer' is empty" in refusal(
        [{"prompt": "a", "answer": 0}, {"prompt": "b", "answer": None}], answer="answer"
    )
    assert "tasks[0]: there is no column 'anwser'" in refusal([{"prompt": "a", "answer": 0}], answer="anwser")


@each(
    ("held_out", "words"),
    [
        ([], "eval_tasks: it has no rows"),
        ([{"prompt": "a"}], "eval_tasks[0]: there is no column 'answer'"),
        ("nowhere.jsonl", "eval_tasks: there is no file nowhere.jsonl"),
    ],
)
def test_what_is_wrong_with_the_held_out_tasks_is_said_of_them(held_out: Any, words: str) -> None:
    assert words in refusal([{"prompt": "b", "answer": 0}], answer="answer", eval_tasks=held_out)


@each("tasks", ["nowhere.jsonl", "a\0b.jsonl", "x" * 5000 + ".jsonl"])
def test_a_file_that_is_not_there_is_named(tasks: str) -> None:
    assert refusal(tasks).startswith("tasks: ")


@each("tasks", [None, 5, {}, ""])
def test_what_is_no_table_at_all_is_refused(tasks: Any) -> None:
    with pytest.raises(ValueError, match="tasks"):
        table(tasks)


def test_a_file_is_read_once_by_many_threads_and_again_after_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "tasks.jsonl", "".join(json.dumps(row) + "\n" for row in QUESTIONS))
    reads: list[Any] = []
    load = task_table._load

    def counted(options: TableOptions) -> TaskTable:
        reads.append(options)
        return load(options)

    monkeypatch.setattr(task_table, "_load", counted)
    found: list[TaskTable] = []
    threads = [threading.Thread(target=lambda: found.append(table(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1
    assert all(one is found[0] for one in found)
    assert copy.deepcopy(found[0]) is found[0]
    monkeypatch.chdir(tmp_path)
    assert table("tasks.jsonl").splits == found[0].splits
    written(path, json.dumps(QUESTIONS[0]) + "\n" + json.dumps(QUESTIONS[1]))
    assert len(table(path, eval_share=0).splits["train"]) == 2


def test_parquet_and_data_sets_are_read_as_jsonl_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow", reason="pip install 'agentrl[parquet]': 55 MB")
    from pyarrow import parquet

    path = tmp_path / "tasks.parquet"
    parquet.write_table(pa.Table.from_pylist(QUESTIONS), path)
    assert table(path).splits == table(QUESTIONS).splits
    parquet.write_table(pa.table({"prompt": ["a", "b"], "n": [1.0, float("nan")]}), path)
    assert "tasks.parquet, row 2: column 'n' holds a number that is not finite" in refusal(path)
    parquet.write_table(pa.table({"prompt": [b"a"]}), path)
    assert "row 1: column 'prompt' is bytes" in refusal(path)
    assert "it is no Parquet file" in refusal(written(path, "PAR1, but not really"))


def test_a_data_set_of_a_folder_brings_its_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install 'agentrl[datasets]': 60 MB with pyarrow and pandas")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_list(QUESTIONS).save_to_disk("one")
    assert table("one").splits == table(QUESTIONS).splits
    parts = {"train": QUESTIONS[:150], "test": QUESTIONS[150:]}
    both = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    both.save_to_disk("two")
    found = table("two")
    assert [list(found.splits[side]) for side in ("train", "eval")] == [QUESTIONS[:150], QUESTIONS[150:]]
    assert "the data set has splits of its own" in refusal("two", eval_tasks="one")
    os.makedirs("somebody/questions")
    for name, rows in parts.items():
        written(Path("somebody/questions") / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert table("somebody/questions").splits == found.splits
    assert "nobody/nothing cannot be loaded as a data set: " in refusal("nobody/nothing")


@each(("tasks", "extra"), [("a.parquet", "parquet"), ("some/name", "datasets")])
def test_what_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: str, extra: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a.parquet", "")
    for name in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    assert f"pip install 'agentrl[{extra}]'" in refusal(tasks)
