"""A table of tasks, checked and split: read once in a process, and shared by all environments that play it.

Tables are JSONL, JSON, CSV, TSV, Parquet, or data sets of the Hugging Face hub or of a folder. A row that is no plain data is
refused in one line that names the file and the row.
"""

import csv
import hashlib
import io
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agentrl.data.files import absolute, read_bytes
from agentrl.data.plain import PlainDataError, abbreviated, line_of, plain_data
from agentrl.env.message_env import is_message
from agentrl.errors import UserError
from agentrl.types import Split

_FIX = "mend it, or delete it"


class Row(NamedTuple):
    """One row of a table."""

    place: str
    """File and line, for messages."""
    values: dict[str, Any]
    """By column; plain data."""
    split: str | None = None
    """Split of the data set that it comes from, if that has several."""


def read_rows(source: str, *, field: str, subset: str | None = None) -> Iterator[Row]:
    """Yield the rows of a table.

    Args:
        source: a file, a folder, or the name of a data set on the Hugging Face hub. Paths begin in the working directory.
        field: that names it.
        subset: of the data set, if it has several.

    Raises:
        UserError: for what cannot be read, with file and row.
    """
    try:
        path = absolute(source)
        is_file, is_folder = path.is_file(), path.is_dir()
    except (ValueError, OSError, RuntimeError) as error:  # a null byte, a name that is too long, a home that is unknown
        raise UserError(f"{field}: {abbreviated(source)} is no path ({error})") from error
    if path.suffix.lower() in _READERS and not is_folder:
        if not is_file:
            raise UserError(f"{field}: there is no file {source} (in {absolute('')}, from which paths are read)")
        if subset is not None:
            raise UserError(f"subset: {source} is one file, which has none; remove it")
        yield from _READERS[path.suffix.lower()](path)
    elif is_file:
        raise UserError(f"{field}: {source} must be one of {', '.join(sorted(_READERS))}")
    else:
        yield from _data_set(source, path if is_folder else None, subset)


def rows_of(tasks: Sequence[object], *, field: str) -> Iterator[Row]:
    """Yield the rows of a list of dicts, which a field holds."""
    for number, values in enumerate(tasks):
        yield _row(f"{field}[{number}]", values)


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(
        _text(path).split("\n"), start=1
    ):  # not splitlines(): JSON may hold its other line ends
        if line.strip():
            place = f"{path}, line {number}"
            yield _row(place, _json(line, place))


def _json_list(path: Path) -> Iterator[Row]:
    rows = _json(_text(path), str(path))
    if not isinstance(rows, list):
        raise UserError(f"{path}: it holds {abbreviated(rows)}; write a list of objects, or JSONL")
    for number, values in enumerate(rows, start=1):
        yield _row(f"{path}, row {number}", values)


def _csv(path: Path) -> Iterator[Row]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    # Strictly: a quote that does not close would take all that follows into one field.
    reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    try:
        for fields in reader:
            place = f"{path}, line {reader.line_num}"
            if not fields:
                continue
            if columns is None:
                columns = fields
                if unnamed := [name for name in columns if not name.strip() or columns.count(name) > 1]:
                    raise UserError(
                        f"{place}: the first line names the columns, each once; it has {unnamed[0]!r}; {_FIX}"
                    )
                continue
            if len(fields) != len(columns):
                raise UserError(f"{place}: it has {len(fields)} fields for {len(columns)} columns; {_FIX}")
            yield _row(place, dict(zip(columns, fields, strict=True)))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: it is no CSV ({error}); {_FIX}") from error


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise UserError(f"tasks: to read {path}, pip install 'agentrl[parquet]'") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: it is no Parquet file ({line_of(error)}); {_FIX}") from error
    for number, values in enumerate(rows, start=1):
        yield _row(f"{path}, row {number}", values)


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".json": _json_list,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}


def _data_set(source: str, folder: Path | None, subset: str | None) -> Iterator[Row]:
    """Yield the rows of a data set: of a folder that `save_to_disk` wrote, of one with data files, or of the hub."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        what = f"there is no file or folder {source}, and to load a data set of that name" if folder is None else source
        raise UserError(f"tasks: {what}: pip install 'agentrl[datasets]'") from error
    is_saved = folder is not None and any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        where = str(folder or source)
        found: Any = datasets.load_from_disk(where) if is_saved else datasets.load_dataset(where, name=subset)
    except Exception as error:  # every reader and every server has errors of its own
        raise UserError(f"tasks: {source} cannot be loaded as a data set: {line_of(error)}") from error
    splits: dict[str, Iterable[Any]] = dict(found) if isinstance(found, dict) else {"train": found}
    for name, rows in splits.items():
        for number, values in enumerate(rows, start=1):
            yield _row(f"{source}, {name}, row {number}", values)._replace(split=name if len(splits) > 1 else None)


def _text(path: Path) -> str:
    data = read_bytes(path, fix="name another file")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: it is not UTF-8; save it as that") from error


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise UserError(f"{place}: it is not JSON ({error.msg} at {where}character {error.colno}); {_FIX}") from error
    except RecursionError as error:
        raise UserError(f"{place}: it nests too deep; {_FIX}") from error
    except ValueError as error:  # also of integers with thousands of digits
        raise UserError(f"{place}: {line_of(error).partition(': ')[2]}; {_FIX}") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return values


def _row(place: str, values: object) -> Row:
    """Return a row as plain data of its own."""
    if not isinstance(values, dict):
        raise UserError(f"{place}: it is {abbreviated(values)}; give an object whose fields are the columns")
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise UserError(f"{place}: a column is named {abbreviated(name)}; its name must be text")
        try:
            plain[name] = plain_data(value, f"column {name!r}")
        except PlainDataError as error:
            raise UserError(f"{place}: {error}; {_FIX}") from error
        if _has_no_number(value):
            raise UserError(f"{place}: column {name!r} holds a number that is not finite; give null, or text")
    return Row(place, plain)


def _has_no_number(value: object) -> bool:
    """Return whether a NaN or an infinity stands in what is otherwise plain data."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_no_number, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_no_number, value))


_SPLITS: dict[str, Split] = {
    "train": "train",
    "eval": "eval",
    "test": "eval",
    "validation": "eval",
    "valid": "eval",
    "val": "eval",
    "dev": "eval",
}
"""The words by which tables name the side that a row is on."""


class TableOptions(BaseModel):
    """Table of tasks, and which of them are held out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: Any
    """A file (.jsonl, .json, .csv, .tsv, .parquet), relative to the working directory; a folder or name of a Hugging Face data
    set; or a list of dicts."""
    prompt: str | None = "prompt"
    """Column of the prompt: text, or a list of messages. None: `opening` of a subclass says it."""
    answer: str | None = None
    """Column of the right answer. None: there is none."""
    demonstration: str | None = None
    """Column of what the `oracle` says, from which a policy may be warmed up. None: the answer, as where a held-out task has
    none."""
    split: str | None = None
    """Column that says `train` or `eval` (`test`, `validation`, `valid`, `val`, `dev`) of each task. None: see `eval_share`."""
    eval_tasks: Any = None
    """Another table, of the held-out tasks."""
    eval_share: float = Field(default=0.1, ge=0, lt=1)
    """Share of the tasks that is held out, if nothing else says which: chosen by the hash of each prompt, so that a task
    stays on its side whatever else is in the table, once its share holds one. 0: none."""
    subset: str | None = None
    """Subset of a Hugging Face data set that has several (`main` of `openai/gsm8k`)."""

    @field_validator("tasks", "eval_tasks")
    @classmethod
    def _source(cls, tasks: Any) -> str | list[Any] | None:
        if tasks is None or (isinstance(tasks, str | Path) and str(tasks)):
            return None if tasks is None else str(tasks)
        if isinstance(tasks, list | tuple):
            return list(tasks)
        raise UserError(f"give a file, a folder, the name of a data set, or a list of dicts, got {abbreviated(tasks)}")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("split", "eval_tasks", "eval_share") if name in self.model_fields_set]
        given = [name for name in given if getattr(self, name) is not None]
        if self.tasks is None:
            raise ValueError("tasks: name a file, a folder or a data set, or give a list of dicts")
        if len(given) > 1:
            raise ValueError(f"{given[0]}: it says which tasks are held out, and so does {given[1]}; remove one")
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self  # it is frozen, and may hold the table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskTable:
    """The tasks of both splits. Nothing of it is ever written to: whoever plays a task takes a copy."""

    splits: Mapping[str, tuple[dict[str, Any], ...]]
    """The rows of each split, in the order of the table; a column that a row lacks is None."""
    hashes: Mapping[str, str]
    """Hash of the content of each split, in its order."""
    columns: tuple[str, ...]

    def __deepcopy__(self, memo: object) -> "TaskTable":
        return self


def load_table(options: TableOptions) -> TaskTable:
    """Return the table of tasks; a file is read once, and again only after it has changed.

    Raises:
        UserError: with file, row and column, for what cannot be played.
    """
    if not isinstance(options.tasks, str) or not isinstance(options.eval_tasks, str | None):
        return _load(options)
    table_options = TableOptions.model_validate(
        {name: getattr(options, name) for name in TableOptions.model_fields if name in options.model_fields_set}
    )
    with _reading:  # whoever comes second waits for the table, rather than reading it too
        return _load_once(
            table_options.model_dump_json(exclude_unset=True), _stamp(options.tasks), _stamp(options.eval_tasks)
        )


_reading = threading.Lock()


@lru_cache(maxsize=16)
def _load_once(options: str, *stamps: object) -> TaskTable:  # noqa: ARG001 - the stamps tell one version of a file from another
    return _load(TableOptions.model_validate_json(options))


def _stamp(source: str | None) -> tuple[str, int, int] | None:
    try:
        path = absolute(source or "")
        stat = path.stat()
    except (OSError, ValueError, RuntimeError):
        return None
    return str(path.resolve()), stat.st_mtime_ns, stat.st_size


def _load(options: TableOptions) -> TaskTable:
    rows = list(_checked(options, "tasks"))
    if options.eval_tasks is not None:
        held_out = list(_checked(options, "eval_tasks"))
        if declared := next((row for row in rows + held_out if row.split is not None), None):
            raise UserError(f"{declared.place}: the data set has splits of its own; remove eval_tasks, or give files")
        rows = [row._replace(split="train") for row in rows] + [row._replace(split="eval") for row in held_out]
    elif options.split is not None:
        rows = [row._replace(split=row.values[options.split]) for row in rows]
    columns = tuple(dict.fromkeys(name for row in rows for name in row.values))
    sides = _by_hash(rows, options) if rows[0].split is None else _declared(rows, options)
    if (shown := options.demonstration) is not None:
        if shown not in columns:
            raise UserError(f"demonstration: there is no column {shown!r}; name one of {', '.join(columns)}")
        for row, its in zip(rows, sides, strict=True):
            if its == "train" and row.values.get(shown) in (None, ""):
                raise UserError(
                    f"{row.place}: column {shown!r} is empty, and a warm-up shows it; fill it, or delete the row"
                )
    splits: dict[str, tuple[dict[str, Any], ...]] = {
        side: tuple(dict.fromkeys(columns) | row.values for row, its in zip(rows, sides, strict=True) if its == side)
        for side in ("train", "eval")
    }
    if not splits["train"]:
        raise UserError(f"{_name(options)}: all {len(rows)} tasks are held out, and none is left to train on")
    if not splits["eval"] and (options.split is not None or options.eval_tasks is not None):
        raise UserError(
            f"{_name(options)}: no task is held out; name one that is, or say so: eval_share: 0 in place of this"
        )
    hashes = {side: _digest([_identity(row) for row in found]) for side, found in splits.items()}
    return TaskTable(splits=splits, hashes=hashes, columns=columns)


def _read(options: TableOptions, field: str) -> Iterable[Row]:
    tasks = getattr(options, field)
    return (
        read_rows(tasks, field=field, subset=options.subset) if isinstance(tasks, str) else rows_of(tasks, field=field)
    )


def _name(options: TableOptions, field: str = "tasks") -> str:
    tasks = getattr(options, field)
    return tasks if isinstance(tasks, str) else field


def _checked(options: TableOptions, field: str) -> Iterator[Row]:
    """Yield the rows of a table, each of which has a prompt of the same form as all others, and an answer."""
    form, empty = None, True
    for row in _read(options, field):
        empty = False
        for option in ("prompt", "answer", "split"):
            column = getattr(options, option)
            if column is None:
                continue
            if column not in row.values:
                raise UserError(
                    f"{row.place}: there is no column {column!r}; set {option} to one that is there: "
                    f"{', '.join(row.values) or 'the row is empty'}"
                )
            if row.values[column] is None or row.values[column] in ("", []):
                raise UserError(f"{row.place}: column {column!r} is empty; fill it, or delete the row")
        if options.prompt is not None:
            prompt, where = row.values[options.prompt], f"{row.place}: column {options.prompt!r}"
            _check_prompt(prompt, where)
            if form not in (None, type(prompt)):
                raise UserError(
                    f"{where} is {abbreviated(prompt)}, where rows before it are of another type; use one of them"
                )
            form = type(prompt)
        yield row
    if empty:
        raise UserError(f"{_name(options, field)}: it has no rows; a task is one")


def _check_prompt(prompt: object, where: str) -> None:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError(f"{where} is empty; fill it, or delete the row")
    elif not (isinstance(prompt, list) and all(map(is_message, prompt))):
        raise UserError(f"{where} is {abbreviated(prompt)}; give text, or a list of messages with role and content")
    elif prompt[-1]["role"] == "assistant":
        raise UserError(f"{where} ends with a message of the assistant, which the policy is to write; drop it")


def _key(row: Row, options: TableOptions) -> str:
    """Return what must not stand on both sides: the prompt, or the whole row if there is none."""
    return _identity(row.values if options.prompt is None else {"prompt": row.values[options.prompt]})


def _by_hash(rows: Sequence[Row], options: TableOptions) -> list[Split]:
    keys = [_key(row, options) for row in rows]
    if options.eval_share == 0:
        return ["train"] * len(rows)
    distinct = sorted(set(keys))
    if len(distinct) < 2:
        raise UserError(
            f"{_name(options)}: it has a single task, which cannot be held out and trained on; set eval_share: 0"
        )
    # A hash is below the share by chance; of few tasks, at least one is on each side.
    held_out = [key for key in distinct if int(key[:16], 16) < options.eval_share * 2**64]
    held_out = held_out[: len(distinct) - 1] or distinct[:1]
    return ["eval" if key <= held_out[-1] else "train" for key in keys]


def _declared(rows: Sequence[Row], options: TableOptions) -> list[Split]:
    sides: list[Split] = []
    places: dict[str, Row] = {}
    for row in rows:
        side = _SPLITS.get(row.split.strip().lower()) if isinstance(row.split, str) else None
        if side is None:
            where = row.place if options.split is None else f"{row.place}: column {options.split!r}"
            raise UserError(f"{where}: the split {abbreviated(row.split)} is none of {', '.join(_SPLITS)}")
        sides.append(side)
        other = places.setdefault(_key(row, options), row._replace(split=side))
        if other.split != side:
            raise UserError(f"{row.place}: the same task is trained on and held out (also {other.place}); delete one")
    return sides


def _identity(values: Mapping[str, Any]) -> str:
    """Return a hash of what a row says: blake2b of its JSON with sorted keys, without columns that are None."""
    said = {name: value for name, value in values.items() if value is not None}
    return _digest([json.dumps(said, sort_keys=True, ensure_ascii=True, separators=(",", ":"))])


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()
