import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat.forms.form import Literals
from tests.support.each import each

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def read_whole(text: str) -> None:
    literals = Literals(text)
    literals.value()
    literals.expect("")


@given(VALUES)
def test_values_are_read_as_python_and_json_write_them(value: object) -> None:
    for written in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        read = Literals(written).value()
        assert (read, repr(read)) == (value, repr(value))


@each("text", ["", "nan", "NaN", "inf", "(1, 2)", "f(1)", "[1", "{1: 2}", "'a", "[,]", "x", "+", "0x"])
def test_anything_else_is_no_value(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_whole(text)


def test_a_backslash_before_what_has_no_meaning_stays() -> None:
    assert Literals(r"'\d \x41 \U000000e9 \' \" \/'").value() == "\\d A é ' \" /"
    assert Literals('"\\ud83d\\ude00"').value() == "😀"
