"""Databases whose rows follow from seeds, of the schemas in `data/sql_analyst.yaml`."""

import contextlib
import functools
import re
import sqlite3
from typing import Any

import numpy as np

from agentrl_envs.data import read_yaml
from agentrl_envs.names import names as names_of


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
