"""Columns of numbers come out of text as they went in, to the last bit."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agentrl.types import LogProbs, Runs, TokenIds, pack_floats, pack_integers
from tests.support.each import each

IDS, LOGPROBS, RUNS = TypeAdapter(TokenIds), TypeAdapter(LogProbs), TypeAdapter(Runs)
ids = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**17), st.integers(0, 2**31 - 1)))
floats = st.one_of(st.lists(st.floats(-1e30, 1e30)), st.lists(st.floats(-1.0, 0.0, width=32)))


@given(ids)
def test_integers_are_what_they_were(column: list[int]) -> None:
    for adapter in (IDS, RUNS):
        text = adapter.dump_python(tuple(column), mode="json")
        assert isinstance(text, str)
        assert adapter.validate_python(text) == tuple(column)
        assert adapter.validate_python(column) == tuple(column)  # as older files hold them


@given(floats)
def test_numbers_are_what_they_were_to_the_last_bit(column: list[float]) -> None:
    found = LOGPROBS.validate_python(LOGPROBS.dump_python(tuple(column), mode="json"))
    assert [struct.pack("<d", number) for number in found] == [struct.pack("<d", number) for number in column]


@each("column", [[3, -1], [2**31], [10**40]])
def test_what_is_no_token_is_refused(column: list[int]) -> None:
    with pytest.raises(ValidationError, match="are no token ids"):
        IDS.validate_python(column)
    if column[-1] < 2**63:
        with pytest.raises(ValidationError, match="are no token ids"):
            IDS.validate_python(pack_integers(column))


@each("value", [math.nan, math.inf, -math.inf, -1e300])
def test_what_is_no_log_probability_is_refused(value: float) -> None:
    with pytest.raises(ValidationError, match="these are no log-probabilities"):
        LOGPROBS.validate_python(pack_floats([-1.0, value]))


def test_a_token_takes_three_to_six_characters_and_a_log_probability_of_an_engine_as_many() -> None:
    # 3,000 numbers of 2, 4, 4 and 8 bytes, of which base64 makes 4 characters of 3 bytes; one letter says which.
    assert len(IDS.dump_python((65_535,) * 3000, mode="json")) == 1 + 8_000
    assert len(IDS.dump_python((151_642,) * 3000, mode="json")) == 1 + 16_000
    assert (
        len(LOGPROBS.dump_python((-0.3333333432674408,) * 3000, mode="json")) == 1 + 16_000
    )  # -1/3 in single precision
    assert len(LOGPROBS.dump_python((-1 / 3,) * 3000, mode="json")) == 1 + 32_000
    assert RUNS.dump_python((3,) * 120 + (4,) * 7, mode="json") == "3x120 4x7"


@given(st.text())
def test_text_that_is_no_column_is_refused(text: str) -> None:
    for adapter in (IDS, LOGPROBS, RUNS):
        try:
            found = adapter.validate_python(text)
        except ValidationError:
            continue
        assert isinstance(found, tuple)


@each("text", ["", "x", "HAAA", "H!!!!", "iAAAAA", "zAAAA"])
def test_damaged_columns_are_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        IDS.validate_python(text)


@each("text", ["3", "3x", "3x0", "3x-1", "x3", f"3x{10**9}"])
def test_damaged_runs_are_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        RUNS.validate_python(text)
