"""Tables of tasks as people keep them: JSONL, JSON, CSV, TSV, Parquet, and data sets of the Hugging Face hub or of a folder.

What is no table of plain data is refused in one line that names the file and the row.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from agentrl.errors import UserError
from agentrl.files import read_bytes
from agentrl.plain_data import PlainDataError, abbreviated, line_of, plain_data

_FIX = "mend it, or delete it"


class Row(NamedTuple):
    """One row of a table."""

    place: str
    """File and line, for messages."""
    values: dict[str, Any]
    """By column; plain data."""
    split: str | None = None
    """Of the data set that it comes from, where that has several."""


def read_rows(source: str, *, field: str, subset: str | None = None) -> Iterator[Row]:
    """Yield the rows of a table.

    Args:
        source: a file, a folder, or the name of a data set on the Hugging Face hub. Paths begin in the working directory.
        field: that names it.
        subset: of the data set, where it has several.

    Raises:
        UserError: for what cannot be read, with file and row.
    """
    try:
        path = Path(source).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (ValueError, OSError, RuntimeError) as error:  # a null byte, a name that is too long, a home that is unknown
        raise UserError(f"{field}: {abbreviated(source)} is no path ({error})") from error
    if path.suffix.lower() in _READERS and not is_folder:
        if not is_file:
            raise UserError(f"{field}: there is no file {source} (in {Path.cwd()}, from which paths are read)")
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
        found: Any = datasets.load_from_disk(source) if is_saved else datasets.load_dataset(source, name=subset)
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
    """Tell whether a NaN or an infinity stands in what is otherwise plain data."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_no_number, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_no_number, value))
