import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from agentrl.env import tool_call
from agentrl.errors import UserError
from agentrl.testing.check_env import check_env
from agentrl_envs.sql_analyst import SQLAnalyst, run_query
from tests.support.each import each

OPTIONS: list[dict[str, Any]] = [
    {},
    {"schema": "shop", "max_level": 1, "num_rows": 10},
    {"schema": "league", "show_schema": True, "turn_rewards": False},
]


def analyst(seed: int = 0, **options: Any) -> SQLAnalyst:
    env = SQLAnalyst(**options)
    env.reset(seed=seed)
    return env


def says(env: SQLAnalyst, name: str, **arguments: Any) -> tuple[str, float, bool]:
    observation, reward, terminated, _, _ = env.step(tool_call(name, **arguments))
    return observation[0]["content"], float(reward), terminated


@pytest.mark.slow
@each("options", OPTIONS)
def test_the_sql_analyst_keeps_the_contract(options: dict[str, Any]) -> None:
    check_env(SQLAnalyst, seeds=range(10), **options)


def test_every_question_of_every_schema_is_drawn_and_solved_by_its_query() -> None:
    env, asked = SQLAnalyst(), set()
    for seed in range(300):
        env.reset(seed=seed)
        asked.add((env.question.schema, env.question.sql[:60]))
        rewards = [env.step(env.oracle())[1], env.step(env.oracle())[1]]
        assert rewards == [0.2, 1.0], env.question.text
        assert "{" not in env.question.text + env.question.sql
        for database in env.question.databases:
            rows = run_query(database, env.question.sql, max_rows=1_000).rows
            assert any(any(row) for row in rows), env.question.text
    assert len({schema for schema, _ in asked}) == 4
    assert len(asked) >= 42


def test_the_right_queries_stay_within_the_limits_in_the_largest_databases() -> None:
    env = SQLAnalyst(num_rows=100)
    asked = set()
    for seed in range(150):
        env.reset(seed=seed)  # runs the query
        asked.add(env.question.sql[:60])
    assert len(asked) > 35


def test_the_first_query_of_the_right_tables_is_paid_once() -> None:
    env = analyst(schema="shop", max_level=1)
    table = "customers" if "customers" in env.question.sql else "products"
    other = "products" if table == "customers" else "customers"
    before = env.state_key()
    assert says(env, "query", sql=f"SELECT COUNT(*) FROM {other}")[1] == 0
    assert says(env, "query", sql=f"SELECT nothing FROM {table}")[1] == 0
    assert env.state_key() == before
    assert says(env, "query", sql=f"SELECT COUNT(*) FROM {table}")[1] == 0.2
    assert env.state_key() != before
    assert says(env, "query", sql=f"SELECT COUNT(*) FROM {table}")[1] == 0
    assert env.state_key().startswith("tables/")


def test_a_result_that_is_copied_is_worth_nothing() -> None:
    for seed in range(30):
        env = analyst(seed, schema="shop", max_level=1)
        rows = run_query(env.question.databases[0], env.question.sql, max_rows=100).rows
        copied = " UNION ALL ".join(f"SELECT {row[0]!r}" for row in rows[:10])
        if len(rows) > 10:
            continue
        assert says(env, "submit", sql=copied)[1:] == (0.0, True), env.question.text


def test_a_query_that_fails_can_be_submitted_again() -> None:
    env = analyst()
    content, reward, terminated = says(env, "submit", sql="SELECT y FROM sqlite_master")
    assert content == "Error: QueryError: no such column: y"
    assert (reward, terminated) == (0.0, False)
    assert says(env, "submit", sql=env.question.sql) == ("Right.", 1.0, True)
    assert env.state_key().startswith("submitted/")


def test_an_order_counts_where_it_was_asked_for() -> None:
    env = SQLAnalyst(schema="school")
    outcomes = set()
    for seed in range(300):
        env.reset(seed=seed)
        is_ordered = "ORDER BY" in env.question.sql
        num_rows = len(run_query(env.question.databases[0], env.question.sql, max_rows=100).rows)
        if num_rows > 3:
            columns = range(1, len(run_query(env.question.databases[0], env.question.sql, max_rows=1).columns) + 1)
            order = ", ".join(f"{column} DESC" for column in reversed(columns))
            shuffled = f"SELECT * FROM ({env.question.sql}) ORDER BY {order}"
            outcomes.add((is_ordered, says(env, "submit", sql=shuffled)[1]))
    assert (False, 0.0) not in outcomes
    assert (True, 0.0) in outcomes


def test_observations_are_bounded() -> None:
    env = analyst(schema="shop", num_rows=100, max_shown=100)
    content = says(env, "query", sql="SELECT o.*, c.*, p.*, o.*, c.* FROM orders o, customers c, products p")[0]
    assert len(content) < 4_100
    assert says(env, "query", sql="SELECT id FROM orders")[0].endswith("\n[more rows]")
    assert says(env, "query", sql="SELECT id FROM orders WHERE id < 0")[0] == "id\n[no rows]"
    assert len(says(env, "schema")[0]) < 600


def test_the_sql_analyst_moves_between_threads_and_processes() -> None:
    env = analyst()
    copies = [env.fork(), copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    assert len(pickle.dumps(env)) < 10_000  # databases follow from the seed
    played: list[tuple[str, float, bool]] = []
    thread = threading.Thread(target=lambda: played.append(says(copies[0], "query", sql=env.question.sql)))
    thread.start()
    thread.join()
    for one in (env, *copies[1:]):
        assert says(one, "query", sql=env.question.sql) == played[0]
    assert len({one.state_key() for one in (env, *copies)}) == 1


def test_two_seeds_ask_of_two_databases() -> None:
    databases = {analyst(seed, schema="shop").question.databases[0] for seed in range(20)}
    assert len(databases) == 20


def test_an_easy_setting_asks_of_one_table() -> None:
    env = SQLAnalyst(schema="shop", max_level=1)
    for seed in range(50):
        env.reset(seed=seed)
        assert "JOIN" not in env.question.sql
        assert "(SELECT" not in env.question.sql


def test_wrong_turns_of_the_analyst_ask_something_else_of_the_same_city() -> None:
    env, rng = analyst(2, schema="shop", max_level=1), np.random.default_rng(0)
    city = env.question.values["{customers.city}"]
    for _ in range(40):
        sql = env.oracle(skill=0.0, rng=rng)["tool_calls"][0]["function"]["arguments"]["sql"]
        assert sql != env.question.sql
        assert "customers" not in sql or f"city = '{city}'" in sql


@each(
    ("options", "words"),
    [
        ({"schema": "bank"}, "schema: give all, shop, library, school, league, got 'bank'"),
        ({"max_level": 4}, "max_level: give a whole number from 1 to 3, got 4"),
        ({"num_rows": 9}, "num_rows: give a whole number from 10 to 100, got 9"),
        ({"turn_reward": 2}, "turn_reward: give a number from 0 to 1, got 2"),
    ],
)
def test_an_impossible_option_of_the_analyst_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        SQLAnalyst(**options)
    assert str(caught.value) == words
