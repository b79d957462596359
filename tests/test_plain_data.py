import datetime as dt
import json
import math
import pathlib
from collections import OrderedDict
from enum import Enum, StrEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.plain import MAX_DEPTH, MAX_VALUES, PlainDataError, abbreviated, plain_data, printable, words_of
from tests.support.each import each

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**308), 10**308)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


class Colour(Enum):
    RED = 1


class Kind(StrEnum):
    ROUND = "round"


class Rude:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("\ud800\x1b[31m")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class RudeDict(dict[str, Any]):
    def items(self) -> Any:
        raise OSError("no items")


class Speechless(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no words")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@given(PLAIN)
def test_plain_data_is_its_own_copy_and_comes_out_of_json_as_it_went_in(value: Any) -> None:
    copied = plain_data(value)
    assert copied == value == json.loads(json.dumps(copied))
    assert copied is not value or not isinstance(value, list | dict)


@each(
    ("value", "expected"),
    [
        ((1, (2, "a")), [1, [2, "a"]]),
        ({"b", "a"}, ["a", "b"]),
        ({(1, 2)}, [[1, 2]]),
        (OrderedDict(a=1), {"a": 1}),
        ({3: "x"}, {"3": "x"}),
        (np.float32(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int8(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.array(7), 7),
        (Fraction(1, 2), 0.5),
        (math.nan, "NaN"),
        ([math.inf, -np.float64("inf")], ["Infinity", "-Infinity"]),
        (dt.date(2026, 11, 22), "2026-11-22"),
        (pathlib.PurePosixPath("/shop"), "/shop"),
        (Colour.RED, "Colour.RED"),
        (Kind.ROUND, "round"),
        ("shop \ud800", "shop ?"),
    ],
)
def test_values_with_one_plain_form_take_it(value: object, expected: object) -> None:
    copied = plain_data(value)
    assert copied == expected
    assert type(copied) is type(expected)


@each(
    ("value", "words"),
    [
        (b"\xff", r"info is bytes b'\\xff'; give plain data: text, numbers, lists and dicts"),
        ({"a": [0, {"b": object()}]}, r"info\['a'\]\[1\]\['b'\] is object <object object"),
        ({"n": 10**400}, r"info\['n'\] is an integer beyond what a float can hold"),
        ({(1, 2): 3}, r"info has the key tuple \(1, 2\); its keys must be strings"),
        ({1: 2, "1": 3}, r"info has the key str '1' twice"),
        ([1j], r"info\[0\] is complex 1j"),
        (nested(MAX_DEPTH + 1), r"info\[0\]\[0\]\[0\]\[0\]\.\.\.\[0\]\[0\]\[0\]\[0\] nests more than 64 deep"),
        ({"x": Rude()}, r"info\['x'\] cannot be read: RuntimeError: \?\\x1b\[31m"),
        ([RudeDict()], r"info\[0\] cannot be read: OSError: no items"),
        ([0] * MAX_VALUES, r"info is too large"),
        (["x" * 60 * MAX_VALUES] * 2, r"info is too large"),
    ],
)
def test_what_is_no_data_is_refused_with_its_place(value: object, words: str) -> None:
    with pytest.raises(PlainDataError, match=f"^{words}") as caught:
        plain_data(value, "info")
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


def test_data_of_the_greatest_depth_passes_and_what_holds_itself_does_not() -> None:
    assert plain_data(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    ring: list[Any] = []
    ring.append(ring)
    tree: list[Any] = []
    for _ in range(60):
        tree = [tree, tree]
    for value in (ring, tree):
        with pytest.raises(PlainDataError):
            plain_data(value)


def test_words_of_strangers_fit_a_line_a_file_and_a_terminal() -> None:
    assert words_of(Speechless()) == "Speechless: (its __str__ raised RuntimeError)"
    assert words_of(ValueError()) == "ValueError"
    assert words_of(ValueError("a\x1b[2J\x9b\ud800\n\tb")) == "ValueError: a\\x1b[2J\\x9b?\n\tb"
    assert len(printable("x" * 10**7)) < 2_100
    assert abbreviated(Rude()).startswith("Rude ")
    assert abbreviated(["a\ud800\x1b"]) == r"list ['a\ud800\x1b']"
    assert abbreviated(10**5000).startswith("int ")
    assert len(abbreviated("x" * 10**7)) < 100
    assert abbreviated(np.zeros((2, 2))) == "ndarray array([[0., 0.], [0., 0.]])"


@each("character", ["x", "é", "世", "\U0001f600"])
def test_a_long_text_is_made_plain_in_pieces_and_comes_out_whole(character: str) -> None:
    text = character * 200_000
    assert plain_data(text) == text
    for place in (0, 2**16 - 1, 2**16, 199_999):
        assert plain_data(f"{text[:place]}\ud800{text[place:]}") == f"{text[:place]}?{text[place:]}"
