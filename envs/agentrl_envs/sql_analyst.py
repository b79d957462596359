"""Questions to a database, answered by a query."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl import Message, ToolEnv, UserError, tool, tool_call
from agentrl_envs.data import read_yaml
from agentrl_envs.options import share, whole_number
from agentrl_envs.read_only_sql import QueryResult, run_query, same_rows
from agentrl_envs.sql_database import make_database

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
    """Of the names, and of all else in the database that is shown; the hidden one has the next."""
    values: dict[str, str] = field(default_factory=dict)
    """What it asks about, by the place in the text: `{customers.city}`."""

    @property
    def databases(self) -> tuple[bytes, bytes]:
        """The database that can be queried, and one with the same names and other rows, on which a query must be right too."""
        shown, hidden = (make_database(self.schema, self.num_rows, self.seeds[0], self.seeds[1] + i)[0] for i in (0, 1))
        return shown, hidden


class SQLAnalyst(ToolEnv):
    """`How many customers live in Oslo?`: look at the tables, try queries, and submit the one that answers.

    The first query that runs and reads every table that the question needs earns `turn_reward`. The query that is
    submitted ends the task and earns 1 where it returns what the right one does: on the database that was shown, and on
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
        self.question = Question(schema="", text="", sql="", num_rows=0, seeds=(0, 0))
        self.has_tables = self.is_submitted = False

    def start(self, options: dict[str, Any]) -> list[Message]:  # noqa: ARG002 - the task follows from the seed alone
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
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]

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
