"""One query against a copy of a database, which it can neither change, leave nor keep busy.

A query has a connection of its own, so nothing is shared between threads and nothing needs to be copied or pickled. What
bounds it is counted, not timed: the same query is refused on every machine. Every value and row is short, every query
takes a bounded number of SQLite's instructions, and so memory, files of a sort and time are bounded too.
"""

import contextlib
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MAX_INSTRUCTIONS = 1_000_000
_INSTRUCTIONS_A_LOOK = 10_000
_MAX_EXPANDED = 24
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 2_000,  # of a text, a blob and a row
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 2_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 50,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 10,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 20_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 10,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_FUNCTIONS = frozenset((
    "abs", "avg", "cast", "coalesce", "count", "cume_dist", "date", "dense_rank", "first_value", "glob", "group_concat",
    "ifnull", "iif", "instr", "lag", "last_value", "lead", "length", "like", "lower", "ltrim", "max", "min", "nth_value",
    "ntile", "nullif", "percent_rank", "rank", "replace", "round", "row_number", "rtrim", "sign", "strftime", "substr",
    "substring", "sum", "total", "trim", "typeof", "upper",
))  # fmt: skip
"""None reads the clock, draws random numbers, loads code or makes a long text out of a short one."""
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE}


class QueryError(Exception):
    """A query that is not carried out; the message is for who wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    """What a query found."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    is_cut: bool
    """True where there are more rows than these."""
    tables: frozenset[str]
    """The tables that it reads."""


def run_query(database: bytes, sql: str, *, max_rows: int) -> QueryResult:
    """Run one SELECT against a serialised database.

    Raises:
        QueryError: where it is malformed, does more than read, or exceeds a limit.
    """
    if re.search(r"\bwith\b", sql, re.IGNORECASE) and (
        # SQLite repeats a common table expression wherever it is named: names of names would grow without end as it compiles.
        len(re.findall(r",|\b(?:from|join|in)\b", sql, re.IGNORECASE)) > _MAX_EXPANDED
    ):
        raise QueryError(f"a query with WITH has {_MAX_EXPANDED} commas, FROM, JOIN and IN at most")
    tables: set[str] = set()
    named: set[str] = set()  # subqueries and common table expressions, which are read like tables
    num_looks = 0

    def authorize(action: int, first: str | None, second: str | None, schema: str | None, within: str | None) -> int:
        if within:
            named.add(within)
        if action == sqlite3.SQLITE_READ and first and schema in ("main", None):
            tables.add(first)
            return sqlite3.SQLITE_OK
        is_allowed = action in _READING or (action == sqlite3.SQLITE_FUNCTION and str(second).lower() in _FUNCTIONS)
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    def is_too_long() -> bool:
        nonlocal num_looks
        num_looks += 1
        return num_looks * _INSTRUCTIONS_A_LOOK >= _MAX_INSTRUCTIONS

    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.deserialize(database)
        connection.execute("PRAGMA query_only = 1")
        connection.execute("PRAGMA max_page_count = 1")  # no page more than there are
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        # SQLite's own read the clock when asked for "now".
        connection.create_function("strftime", -1, _strftime)
        connection.create_function("date", -1, lambda *arguments: _strftime("%Y-%m-%d", *arguments))
        connection.text_factory = lambda text: text.decode(errors="replace")
        connection.set_authorizer(authorize)
        connection.set_progress_handler(is_too_long, _INSTRUCTIONS_A_LOOK)
        try:
            cursor = connection.execute(sql)
            rows = cursor.fetchmany(max_rows + 1)
        except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError, OverflowError) as error:
            raise QueryError(_words(error)) from None
        if cursor.description is None:
            raise QueryError("write one SELECT")
        columns = tuple(str(column[0]) for column in cursor.description)
    return QueryResult(
        columns=columns, rows=tuple(rows[:max_rows]), is_cut=len(rows) > max_rows, tables=frozenset(tables - named)
    )


def same_rows(got: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]], *, in_order: bool) -> bool:
    """Tell whether two results hold the same rows, as often, in the same order where that matters.

    Columns count in their order, and not by name. Numbers are equal within 0.006 or a millionth of their size, so that a
    result may be rounded to two places; a number equals the text that spells it. Text is compared as it is.
    """
    if len(got) != len(expected):
        return False
    if in_order:
        return all(_same_row(a, b) for a, b in zip(got, expected, strict=True))
    left = list(expected)
    for row in got:
        found = next((i for i, other in enumerate(left) if _same_row(row, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_row(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(_same_value(x, y) for x, y in zip(a, b, strict=True))


def _same_value(a: Any, b: Any) -> bool:
    if a is None or b is None or a == b:
        return bool(a == b)
    try:
        x, y = float(a), float(b)
    except (TypeError, ValueError, OverflowError):
        return False
    return abs(x - y) <= max(0.006, 1e-6 * abs(y))


def _strftime(form: Any = None, day: Any = None, *others: Any) -> str | None:
    """Write a day as `%Y`, `%m` and `%d` ask."""
    if others or not (isinstance(day, str) and re.match(r"\d{4}-\d\d-\d\d", day)):
        return None
    parts = {"%Y": day[:4], "%m": day[5:7], "%d": day[8:10]}
    return re.sub("%[Ymd]", lambda match: parts[match[0]], str(form))


def _words(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "the query is too large"
    words = str(error)
    return {
        "not authorized": "a query reads the tables of this database, and nothing else",
        "interrupted": f"the query takes more than {_MAX_INSTRUCTIONS} steps",
    }.get(words, words)
