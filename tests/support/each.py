"""One test over a table, whose rows are subtests."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]
_Row = type(pytest.param())


def each(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test over a table: what `pytest.mark.parametrize` makes a test a row is one test with a subtest a row.

    Rows that are marked as slow, with `pytest.param(..., marks=pytest.mark.slow)`, are a second test, which is slow.

    A row has its own `tmp_path` and `monkeypatch`, and begins with nothing in `capsys` and `caplog`; other fixtures are
    shared by the rows. Every row runs, whatever the rows before it have done, and a failure names its row.
    """
    columns = [names] if isinstance(names, str) else list(names)
    table = list(enumerate(_row(row, is_alone=isinstance(names, str)) for row in rows))
    slow = [(number, row) for number, row in table if row.marks]
    assert table
    assert all(mark.name == "slow" for _, row in slow for mark in row.marks), "rows are slow, or have no mark"
    tiers = [pytest.param([one for one in table if one not in slow], id="default")] if len(slow) < len(table) else []
    tiers += [pytest.param(slow, id="slow", marks=pytest.mark.slow)] if slow else []

    def decorate(test: Test) -> Test:
        parameters = inspect.signature(test).parameters
        fixtures = [parameter for name, parameter in parameters.items() if name not in columns]
        takes_subtests = "subtests" in parameters

        @functools.wraps(test)
        def over_the_table(*, table_rows: list[Any] = table, **given: Any) -> None:
            subtests = given["subtests"] if takes_subtests else given.pop("subtests")
            for number, row in table_rows:
                values = dict(zip(columns, row.values, strict=True))
                with subtests.test(row.id or f"row {number}", **values), ExitStack() as stack:
                    test(**_own(given, number, stack), **values)

        added = ([] if takes_subtests else ["subtests"]) + (["table_rows"] if slow else [])
        keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in added]
        over_the_table.__signature__ = inspect.Signature([*fixtures, *keywords])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("table_rows", tiers)(over_the_table) if slow else over_the_table

    return decorate


def _row(row: Any, *, is_alone: bool) -> Any:
    if isinstance(row, _Row):
        return row
    return pytest.param(row) if is_alone else pytest.param(*row)


def _own(given: dict[str, Any], number: int, stack: ExitStack) -> dict[str, Any]:
    """Return the fixtures of one row."""
    own = dict(given)
    if "tmp_path" in own:
        own["tmp_path"] = Path(given["tmp_path"]) / f"row-{number}"
        own["tmp_path"].mkdir()
    if "monkeypatch" in own:
        own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
    if "capsys" in own:
        own["capsys"].readouterr()
    if "caplog" in own:
        own["caplog"].clear()
    return own
