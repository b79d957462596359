"""Questions to a database, each answered by a query.

A query has a connection of its own to a copy, so nothing is shared between threads. Its bounds are counted, not timed: the same
query is refused on every machine. Every value and row is short, every query takes a bounded number of SQLite's instructions, so
memory, files of a sort and time are bounded too. Rows follow from seeds, schemas are in `data/sql_analyst.yaml`.
"""

import contextlib
import functools
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl import Message, Prompt, ToolEnv, UserError, tool, tool_call
from agentrl_envs.data import read_yaml
from agentrl_envs.options import names as names_of
from agentrl_envs.options import opening, prompt_form, share, whole_number

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
    """Rows that a query found."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    is_cut: bool
    """True if there are more rows than these."""
    tables: frozenset[str]
    """The tables that it reads."""


def run_query(database: bytes, sql: str, *, max_rows: int) -> QueryResult:
    """Run one SELECT against a serialised database.

    Raises:
        QueryError: if it is malformed, does more than read, or exceeds a limit.
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
    """Return whether two results hold the same rows, as often, in the same order where that matters.

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


@functools.lru_cache(maxsize=100)
def make_database(schema: str, num_rows: int, name_seed: int, seed: int) -> tuple[bytes, dict[str, list[Any]]]:
    """Make a database; return it with the values of each `table.column`.

    Who is in it follows from one seed; in which row, and all else, from both.
    """
    names, rng = np.random.default_rng(name_seed), np.random.default_rng([name_seed, seed])
    tables = read_yaml("sql_analyst.yaml")[schema]["tables"]
    sizes = {name: max(4, round(num_rows * table["size"])) for name, table in tables.items()}
    values = {
        f"{name}.{column}": _column(kind, sizes, sizes[name], names, rng)
        for name, table in tables.items()
        for column, kind in table["columns"].items()
    }
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("BEGIN")
        for name, table in tables.items():
            declared = ", ".join(_declared(column, kind) for column, kind in table["columns"].items())
            rows = zip(*(values[f"{name}.{column}"] for column in table["columns"]), strict=True)
            connection.execute(f"CREATE TABLE {name} ({declared})")
            connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(table['columns']))})", rows)
        connection.execute("COMMIT")
        return connection.serialize(), values


@functools.cache
def _days() -> tuple[str, ...]:
    return tuple(f"{y}-{m:02}-{d:02}" for y in range(2021, 2025) for m in range(1, 13) for d in range(1, 29))


def _declared(column: str, kind: str) -> str:
    if kind == "key":
        return f"{column} INTEGER PRIMARY KEY"
    if kind.startswith("->"):
        return f"{column} INTEGER REFERENCES {kind.removeprefix('-> ')}(id)"
    return f"{column} {'INTEGER' if re.fullmatch('[0-9]+-[0-9]+', kind) else 'TEXT'}"


def _column(
    kind: str, sizes: dict[str, int], size: int, names: np.random.Generator, rng: np.random.Generator
) -> list[Any]:
    """Draw the values of a column, as `data/sql_analyst.yaml` describes its kind."""
    if kind == "key":
        return list(range(1, size + 1))
    if kind in ("person", "title"):
        pool = names_of(kind)
        drawn = [pool[i] for i in names.choice(len(pool), size=size, replace=False).tolist()]
        return [drawn[i] for i in rng.permutation(size).tolist()]
    if kind.startswith("->"):
        return list(rng.integers(1, sizes[kind.removeprefix("-> ")], endpoint=True, size=size).tolist())
    if kind == "date" or "|" in kind:
        choices = _days() if kind == "date" else kind.split("|")
        return [choices[i] for i in rng.integers(len(choices), size=size).tolist()]
    low, high = map(int, kind.split("-"))
    return list(rng.integers(low, high, endpoint=True, size=size).tolist())


_SYSTEM = (
    "Answer the question with SQL (SQLite). schema() shows the tables, query(sql) tries a query, submit(sql) hands in the "
    "query that answers. It must also be right for other rows in the same tables: copy no ids or results into it. Leave out "
    "groups with nothing in them."
)
_MAX_ROWS = 1_000
"""Rows of a result that is compared."""
_MAX_CELL = 60
"""Characters of a value that is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question, its query and the two databases that it is asked of."""

    schema: str
    text: str
    sql: str
    num_rows: int
    seeds: tuple[int, int]
    """Seeds of the names, and of all else in the database that is shown; the hidden one has the next."""
    values: dict[str, str] = field(default_factory=dict)
    """Values it asks about, by the place in the text: `{customers.city}`."""

    @property
    def databases(self) -> tuple[bytes, bytes]:
        """The database that can be queried, and one with the same names and other rows, on which a query must be right too."""
        shown, hidden = (make_database(self.schema, self.num_rows, self.seeds[0], self.seeds[1] + i)[0] for i in (0, 1))
        return shown, hidden


class SQLAnalyst(ToolEnv):
    """`How many customers live in Oslo?`: look at the tables, try queries, and submit the one that answers.

    The first query that runs and reads every table that the question needs earns `turn_reward`. The query that is
    submitted ends the task and earns 1 if it returns what the right one does: on the database that was shown, and on
    another one with other rows, so that a result that was copied or met by chance is worth nothing.
    """

    def __init__(
        self,
        *,
        schema: str = "all",
        max_level: int = 3,
        num_rows: int = 30,
        show_schema: bool = False,
        max_shown: int = 20,
        turn_reward: float = 0.2,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
    ) -> None:
        """Set the difficulty.

        Args:
            schema: shop, library, school or league; `all` draws one for each task.
            max_level: 1: one table; 2: two tables, or groups; 3: subqueries, several tables, conditions on groups.
            num_rows: rows of a table of middle size; the largest has three times as many.
            show_schema: True writes the tables into the question.
            max_shown: rows of a result that are shown.
            turn_reward: reward of the first query that reads the right tables.
            turn_rewards: False pays for the submitted query alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.

        Raises:
            UserError: for an option outside its range.
        """
        super().__init__()
        if schema not in ("all", *_data()):
            raise UserError(f"schema: give all, {', '.join(_data())}, got {schema!r}")
        self.schemas = list(_data()) if schema == "all" else [schema]
        self.max_level = whole_number("max_level", max_level, at_least=1, at_most=3)
        self.num_rows = whole_number("num_rows", num_rows, at_least=10, at_most=100)
        self.show_schema = show_schema
        self.max_shown = whole_number("max_shown", max_shown, at_least=1, at_most=100)
        self.turn_reward = share("turn_reward", turn_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        self.question = Question(schema="", text="", sql="", num_rows=0, seeds=(0, 0))
        self.has_tables = self.is_submitted = False

    def start(self, options: dict[str, Any]) -> str | list[Message]:  # noqa: ARG002 - the task follows from the seed alone
        """Draw a database and a question."""
        self.has_tables = self.is_submitted = False
        schema = self.schemas[int(self.np_random.integers(len(self.schemas)))]
        name_seed, seed = self.np_random.integers(2**31, size=2).tolist()
        for _ in range(20):
            self.question = self._draw(schema, (name_seed, seed), self.np_random)
            shown, hidden = (_run(database, self.question.sql).rows for database in self.question.databases)
            finds = any(any(row) for row in shown) and any(any(row) for row in hidden)  # more than nothing and 0
            if finds and not same_rows(shown, hidden, in_order=True):
                break
        text = f"{self.question.text}\n\n{self.schema()}" if self.show_schema else self.question.text
        return opening(
            self.prompt,
            text,
            "You answer a question about a database with one SQL query (SQLite). Call schema to see the tables and their "
            "columns, query to try a SELECT and see the first rows of its result, and submit to hand in the SELECT that "
            "answers. Its result must hold what is asked and no other column. It is also run on other rows in the same "
            "tables: copy no ids or results into it. Leave out groups with nothing in them. Text without a call does "
            "nothing.",
            self.turn_rewards and f"The first query that reads the right tables earns {self.turn_reward:g}.",
            "submit ends the task, and earns 1 if the query is right.",
            short=_SYSTEM,
        )

    @tool
    def schema(self) -> str:
        """Show the tables and their columns."""
        return "\n".join(str(row[0]) for row in _run(self.question.databases[0], "SELECT sql FROM sqlite_master").rows)

    @tool
    def query(self, sql: str) -> str:
        """Run a query and show the first rows of its result.

        Args:
            sql: one SELECT.
        """
        result = run_query(self.question.databases[0], sql, max_rows=self.max_shown)
        needed = _run(self.question.databases[0], self.question.sql).tables
        if not self.has_tables and needed <= result.tables:
            self.has_tables = True
            if self.turn_rewards:
                self.reward(self.turn_reward, "tables")
        return _shown(result)

    @tool
    def submit(self, sql: str) -> str:
        """Hand in the query that answers the question; this ends the task.

        Args:
            sql: one SELECT.
        """
        is_right = all(self._is_right(sql, database) for database in self.question.databases)
        self.is_submitted = True
        self.reward(float(is_right), "answer")
        self.finish(success=is_right)
        return "Right." if is_right else "Wrong."

    def answer(self, text: str) -> str:  # noqa: ARG002 - no text answers
        """Ask for a call."""
        return "Call submit(sql) with the query that answers the question."

    def gold_answer(self) -> str:
        """Return the right query."""
        return self.question.sql

    def state_key(self) -> str:
        """Return the task, and what can still be earned: no query changes anything."""
        stage = "submitted" if self.is_submitted else "tables" if self.has_tables else "start"
        return f"{stage}/{self.question.schema}/{self.question.seeds}/{self.question.text}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Try the right query, then submit it; wrong turns ask something else, of the same city, year or name where they can.

        Mistakes that copied at random would never show a policy how to copy.
        """
        rng = np.random.default_rng() if rng is None else rng
        sql = self.question.sql
        if rng.random() >= skill:
            while sql == self.question.sql:
                sql = self._draw(self.question.schema, self.question.seeds, rng, known=self.question.values).sql
        return tool_call("submit" if self.has_tables else "query", sql=sql)

    def _is_right(self, sql: str, database: bytes) -> bool:
        expected = _run(database, self.question.sql).rows
        got = run_query(database, sql, max_rows=_MAX_ROWS).rows
        return same_rows(got, expected, in_order="ORDER BY" in self.question.sql)

    def _draw(
        self, schema: str, seeds: tuple[int, int], rng: np.random.Generator, known: Mapping[str, str] | None = None
    ) -> Question:
        """Draw a question to a database, with known values, or with others that are in it."""
        questions = [(text, sql) for level, text, sql in _data()[schema]["questions"] if level <= self.max_level]
        text, sql = questions[int(rng.integers(len(questions)))]
        _, columns = make_database(schema, self.num_rows, *seeds)
        values = dict(known or {})
        for place, column, is_year in re.findall(r"(\{(\w+\.\w+)(:year)?\})", text + sql):
            if place not in values:
                value = str(columns[column][int(rng.integers(len(columns[column])))])
                values[place] = value[:4] if is_year else value
            text, sql = text.replace(place, values[place]), sql.replace(place, values[place])
        return Question(schema=schema, text=text, sql=sql, num_rows=self.num_rows, seeds=seeds, values=values)


def _shown(result: QueryResult) -> str:
    lines = [" | ".join(str(value)[:_MAX_CELL] for value in row) for row in (result.columns, *result.rows)]
    return "\n".join([*lines, *(["[more rows]"] if result.is_cut else []), *([] if result.rows else ["[no rows]"])])


@functools.cache
def _data() -> dict[str, Any]:
    """Return schemas by name: tables with their columns, and questions."""
    return {
        name: schema | {"questions": [(level, text, " ".join(sql.split())) for level, text, sql in schema["questions"]]}
        for name, schema in read_yaml("sql_analyst.yaml").items()
    }


@functools.lru_cache(maxsize=200)
def _run(database: bytes, sql: str) -> QueryResult:
    """Run a query of our own, once for all rollouts of a group."""
    return run_query(database, sql, max_rows=_MAX_ROWS)
