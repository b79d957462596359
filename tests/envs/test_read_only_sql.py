import resource
import sqlite3
import threading
import time

import pytest

from agentrl_envs.sql_analyst import QueryError, run_query, same_rows
from tests.support.each import each


def database() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE t (x INTEGER, day TEXT)")
    connection.execute("CREATE TABLE u (x INTEGER)")
    connection.executemany("INSERT INTO t VALUES (?, '2023-04-05')", [(i,) for i in range(200)])
    connection.commit()
    return connection.serialize()


DATABASE = database()
ROWS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
LONG = "WITH RECURSIVE d(x, n) AS (SELECT 'aaaaaaaaaaaaaaa', 0 UNION ALL SELECT x || x, n + 1 FROM d WHERE n < 6)"
NAMES = "".join(f", a{i} AS (SELECT 1 FROM a{i - 1}, a{i - 1})" for i in range(1, 30))

CHANGES = [
    "INSERT INTO t VALUES (1, '')",
    "UPDATE t SET x = 0",
    "DELETE FROM t",
    "REPLACE INTO t VALUES (1, '')",
    "DROP TABLE t",
    "ALTER TABLE t ADD COLUMN y",
    "CREATE TABLE v (x)",
    "CREATE TEMP TABLE v (x)",
    "CREATE VIEW v AS SELECT 1",
    "CREATE VIRTUAL TABLE v USING fts5(x)",
    "CREATE TRIGGER g AFTER INSERT ON t BEGIN SELECT 1; END",
    "WITH n AS (SELECT 1) INSERT INTO t SELECT 1, ''",
    "INSERT INTO t VALUES (1, '') RETURNING x",
    "BEGIN",
    "SAVEPOINT s",
    "VACUUM",
    "ANALYZE",
    "REINDEX",
]
ESCAPES = [
    "ATTACH ':memory:' AS other",
    "ATTACH '/etc/passwd' AS other",
    "DETACH main",
    "VACUUM INTO '/tmp/agentrl-escaped.db'",
    "PRAGMA query_only = 0",
    "PRAGMA hard_heap_limit = 1",
    "PRAGMA temp_store_directory = '/tmp'",
    "SELECT * FROM pragma_database_list",
    "SELECT * FROM pragma_table_info('t')",
    "SELECT load_extension('/tmp/x.so')",
    "SELECT readfile('/etc/passwd')",
    "SELECT writefile('/tmp/x', 'x')",
    "SELECT edit('x')",
    "SELECT fts3_tokenizer('simple')",
    "SELECT * FROM sqlite_dbpage",
    "SELECT random()",
    "SELECT CURRENT_TIMESTAMP",
    "SELECT datetime('now')",
    "SELECT julianday('now')",
    "SELECT unixepoch()",
]
BOMBS = [
    f"{ROWS} SELECT COUNT(*) FROM n",
    f"{ROWS} SELECT i FROM n ORDER BY i DESC",
    f"{LONG}, n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT DISTINCT i || y FROM n, (SELECT MAX(x) AS y FROM d)",
    f"{LONG}, n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i || y FROM n, (SELECT MAX(x) AS y FROM d) ORDER BY 1",
    f"{LONG}, c(x, i) AS (SELECT MAX(x), 1 FROM d UNION SELECT x, i + 1 FROM c) SELECT COUNT(*) FROM c",
    "WITH RECURSIVE c(x) AS (SELECT 'aaaa' UNION ALL SELECT x || x FROM c) SELECT * FROM c ORDER BY 1",
    f"WITH a0 AS (SELECT 1){NAMES} SELECT 1 FROM a29",
    "SELECT randomblob(1000000000)",
    "SELECT zeroblob(1000000000)",
    "SELECT hex(zeroblob(1000000000))",
    "SELECT printf('%1000000000d', 1)",
    "SELECT format('%.*c', 1000000000, 'x')",
    "SELECT replace(replace(replace('aaaaaaaaaaaa', 'a', 'aaaaaaaaaaaaaaaa'), 'a', 'aaaaaaaaaaaaaaaa'), 'a', 'aaaaaaaaaaaa')",
    "SELECT group_concat(a.day) FROM t AS a, t AS b",
    "SELECT COUNT(*) FROM t AS a, t AS b, t AS c, t AS d",
    "SELECT * FROM t AS a, t AS b, t AS c ORDER BY a.x + b.x + c.x",
    "SELECT SUM(a.x) OVER (ORDER BY b.x) FROM t AS a, t AS b, t AS c",
    "SELECT COUNT(*) FROM t WHERE day LIKE '" + "%a" * 200 + "'",
    "SELECT " + "(" * 5_000 + "1" + ")" * 5_000,
    "SELECT " + "1 + " * 400 + "1",
    "SELECT " + "1, " * 60 + "1",
    "SELECT 1" + " UNION ALL SELECT 1" * 60,
    "SELECT '" + "x" * 100_000 + "'",
]  # fmt: skip
MALFORMED = [
    "",
    "-- nothing",
    "SELECT",
    "SELECT 1; SELECT 2",
    "SELECT ?",
    "SELECT \0",
    "SELECT '\ud800'",
    "SELECT y FROM t",
]


@each("sql", CHANGES + ESCAPES + MALFORMED)
def test_what_is_no_plain_reading_is_refused(sql: str) -> None:
    before = threading.active_count()
    if sql == "SELECT datetime('now')" or "readfile" in sql:  # each for a reason that its error names
        with pytest.raises(QueryError, match="function"):
            run_query(DATABASE, sql, max_rows=5)
    else:
        with pytest.raises(QueryError):
            run_query(DATABASE, sql, max_rows=5)
    assert len(run_query(DATABASE, "SELECT x FROM t", max_rows=500).rows) == 200
    assert threading.active_count() == before


@each("sql", BOMBS)
def test_a_bomb_is_refused_at_once_and_takes_no_memory(sql: str) -> None:
    before_kb, before_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(QueryError):
        run_query(DATABASE, sql, max_rows=10**6)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200_000
    assert time.process_time() - before_s < 10  # about a second on a busy machine


def test_the_largest_expansion_that_is_let_through_is_cheap() -> None:
    names = "".join(f", a{i} AS (SELECT 1 FROM a{i - 1}, a{i - 1})" for i in range(1, 7))
    before = time.process_time()
    run_query(DATABASE, f"WITH a0 AS (SELECT 1){names} SELECT 1 FROM a6", max_rows=1)
    assert time.process_time() - before < 2


def is_refused(num_rows: int) -> bool:
    try:
        run_query(DATABASE, f"{ROWS} SELECT COUNT(*) FROM (SELECT 1 FROM n LIMIT {num_rows})", max_rows=1)
    except QueryError:
        return True
    return False


def test_the_same_query_is_refused_however_often_it_is_tried() -> None:
    sizes = range(10_000, 200_000, 10_000)
    refused = [is_refused(size) for size in sizes]
    assert refused == sorted(refused)
    assert set(refused) == {False, True}
    assert [is_refused(size) for size in sizes] == refused


def test_rows_are_cut_where_asked() -> None:
    result = run_query(DATABASE, "SELECT x AS number FROM t ORDER BY x", max_rows=3)
    assert (result.columns, result.rows, result.is_cut) == (("number",), ((0,), (1,), (2,)), True)
    assert not run_query(DATABASE, "SELECT x FROM t LIMIT 3", max_rows=3).is_cut


@each(
    ("sql", "tables"),
    [
        ("SELECT 1", set()),
        ("SELECT COUNT(*) FROM t", {"t"}),
        ("SELECT 1 FROM t JOIN u", {"t", "u"}),
        ("SELECT COUNT(*) FROM (SELECT x FROM u)", {"u"}),
        ("WITH t AS (SELECT 1) SELECT COUNT(*) FROM t", set()),
        ("WITH n AS (SELECT x FROM t) SELECT COUNT(*) FROM n", {"t"}),
        ("SELECT name FROM sqlite_master", {"sqlite_master"}),
    ],
)
def test_the_tables_that_a_query_reads(sql: str, tables: set[str]) -> None:
    assert run_query(DATABASE, sql, max_rows=1).tables == tables


def test_days_are_taken_apart_without_the_clock() -> None:
    sql = "SELECT strftime('%Y', day), strftime('%m/%d', day), date(day), date('now'), strftime('%Y') FROM t"
    assert run_query(DATABASE, sql, max_rows=1).rows == (("2023", "04/05", "2023-04-05", None, None),)


@each(
    ("got", "expected", "in_order", "is_same"),
    [
        ([(1,), (2,)], [(2,), (1,)], False, True),
        ([(1,), (2,)], [(2,), (1,)], True, False),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False),  # a bag, not a set
        ([(1,)], [(1,), (1,)], False, False),
        ([(1, "a")], [("a", 1)], False, False),  # columns as they were asked for
        ([(1.0,)], [(1,)], True, True),
        ([("1",)], [(1,)], True, True),
        ([(2.67,)], [(2.6666,)], True, True),
        ([(2.68,)], [(2.6666,)], True, False),
        ([(3,)], [(2,)], True, False),
        ([("Oslo",)], [("oslo",)], True, False),
        ([(None,)], [(0,)], True, False),
        ([(None,)], [(None,)], True, True),
        ([("x",)], [(1,)], True, False),
        ([], [], True, True),
    ],
)
def test_results_are_compared_as_documented(
    got: list[tuple[object, ...]], expected: list[tuple[object, ...]], in_order: bool, is_same: bool
) -> None:
    assert same_rows(got, expected, in_order=in_order) is is_same
