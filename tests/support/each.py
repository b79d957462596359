"""One test over a table, whose rows are subtests."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def each(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test over a table: what `pytest.mark.parametrize` makes a test a row is one test with a subtest a row.

    A row has its own `tmp_path` and `monkeypatch`, and begins with nothing in `capsys` and `caplog`; other fixtures are
    shared by the rows. Every row runs, whatever the rows before it have done, and a failure names its row.
    """
    columns = [names] if isinstance(names, str) else list(names)
    param = type(pytest.param())
    table = [
        row if isinstance(row, param) else param((row,) if isinstance(names, str) else tuple(row), (), None)
        for row in rows
    ]
    assert table
    assert not any(row.marks for row in table), "rows of a table have no marks: write `parametrize`"

    def decorate(test: Test) -> Test:
        parameters = inspect.signature(test).parameters
        fixtures = [parameter for name, parameter in parameters.items() if name not in columns]
        takes_subtests = any(parameter.name == "subtests" for parameter in fixtures)

        @functools.wraps(test)
        def over_the_table(**given: Any) -> None:
            subtests = given["subtests"] if takes_subtests else given.pop("subtests")
            for number, row in enumerate(table):
                values = dict(zip(columns, row.values, strict=True))
                with (
                    subtests.test(row.id or f"row {number}", **values),
                    ExitStack() as stack,
                ):
                    test(**_own(given, number, stack), **values)

        if not takes_subtests:
            fixtures.append(inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY))
        over_the_table.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return over_the_table

    return decorate


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
