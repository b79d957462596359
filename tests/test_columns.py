"""Columns of numbers come out of text as they went in, to the last bit."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agentrl.columns import Floats, Integers, Runs

INTEGERS, FLOATS, RUNS = TypeAdapter(Integers), TypeAdapter(Floats), TypeAdapter(Runs)
integers = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**17), st.integers(-(2**63), 2**63 - 1)))


@given(integers)
def test_integers_are_what_they_were(column: list[int]) -> None:
    for adapter in (INTEGERS, RUNS):
        text = adapter.dump_python(tuple(column), mode="json")
        assert isinstance(text, str)
        assert adapter.validate_python(text) == tuple(column)
        assert adapter.validate_python(column) == tuple(column)  # as older files hold them


@given(st.one_of(st.lists(st.floats()), st.lists(st.floats(width=32))))
def test_numbers_are_what_they_were_to_the_last_bit(column: list[float]) -> None:
    found = FLOATS.validate_python(FLOATS.dump_python(tuple(column), mode="json"))
    bits, expected = (
        [struct.pack("<d", number) for number in numbers if not math.isnan(number)] for numbers in (found, column)
    )
    assert bits == expected
    assert [*map(math.isnan, found)] == [*map(math.isnan, column)]


def test_a_token_takes_three_to_six_characters_and_a_log_probability_of_an_engine_as_many() -> None:
    # 3,000 numbers of 2, 4, 4 and 8 bytes, of which base64 makes 4 characters of 3 bytes; one letter says which.
    assert len(INTEGERS.dump_python((65_535,) * 3000, mode="json")) == 1 + 8_000
    assert len(INTEGERS.dump_python((151_642,) * 3000, mode="json")) == 1 + 16_000
    assert len(FLOATS.dump_python((-0.3333333432674408,) * 3000, mode="json")) == 1 + 16_000  # -1/3 in single precision
    assert len(FLOATS.dump_python((-1 / 3,) * 3000, mode="json")) == 1 + 32_000
    assert RUNS.dump_python((3,) * 120 + (4,) * 7, mode="json") == "3x120 4x7"


@given(st.text())
def test_text_that_is_no_column_is_refused(text: str) -> None:
    for adapter in (INTEGERS, FLOATS, RUNS):
        try:
            found = adapter.validate_python(text)
        except ValidationError:
            continue
        assert isinstance(found, tuple)


@pytest.mark.parametrize("text", ["", "x", "HAAA", "H!!!!", "iAAAAA", "zAAAA"])
def test_damaged_columns_are_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        INTEGERS.validate_python(text)


@pytest.mark.parametrize("text", ["3", "3x", "3x0", "3x-1", "x3", f"3x{10**9}"])
def test_damaged_runs_are_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        RUNS.validate_python(text)
