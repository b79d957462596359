"""`each` finds what `parametrize` would."""

import pytest

from tests.support.each import each

pytest_plugins = ["pytester"]

TESTS = """
import os
import pytest
from tests.support.each import each

@each(("a", "b"), [(1, 1), (1, 2), pytest.param(3, 3, id="three"), (4, 5)])
def test_equal(a, b):
    assert a == b

@each("name", ["x", "y"])
def test_own_fixtures(name, tmp_path, monkeypatch, capsys):
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").touch()
    assert "SET_BY_A_ROW" not in os.environ
    monkeypatch.setenv("SET_BY_A_ROW", name)
    assert capsys.readouterr().out == ""
    print(name)

@each("name", ["x", "y"])
@pytest.mark.parametrize("other", [1, 2])
def test_beside_parametrize(name, other):
    assert (name, other) != ("y", 2)
"""


def test_a_row_that_fails_is_named_and_the_others_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    done.assert_outcomes(failed=5, passed=2)  # three rows, and the two tests that they are rows of
    done.stdout.fnmatch_lines(
        ["SUBFAILED[[]row 1] (a=1, b=2) *", "SUBFAILED[[]row 3] (a=4, b=5) *", "FAILED *test_equal*"]
    )
    done.stdout.fnmatch_lines(["SUBFAILED[[]row 1] (name='y') *", "*5 failed, 2 passed*"])


def test_slow_rows_are_a_slow_test(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = slow")
    pytester.makepyfile(
        """
        import pytest
        from tests.support.each import each

        @each("a", [1, pytest.param(2, marks=pytest.mark.slow), 3])
        def test_odd(a):
            assert a % 2

        @each("a", [pytest.param(2, marks=pytest.mark.slow)])
        def test_large(a):
            assert a > 5
        """
    )
    pytester.runpytest_inprocess("-m", "not slow").assert_outcomes(passed=1, deselected=2)
    done = pytester.runpytest_inprocess("-m", "slow")
    done.stdout.fnmatch_lines(["SUBFAILED[[]row 1] (a=2) *test_odd[[]slow]*", "SUBFAILED[[]row 0] (a=2) *test_large*"])


def test_rows_have_no_other_marks() -> None:
    with pytest.raises(AssertionError, match="slow, or have no mark"):
        each("row", [pytest.param(1, marks=pytest.mark.process)])
