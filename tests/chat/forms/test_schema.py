"""The types of arguments that are written as text, whatever a server's schemas hold."""

import contextlib
import time
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.chat.forms.form import typed
from tests.support.each import each

_KEYWORDS = st.sampled_from(["type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref", "nullable", "properties"])
SCHEMAS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=3)
    | st.sampled_from(["string", "integer", "null", "#", "#/properties/x", "#/$defs/a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYWORDS, inner, max_size=3),
    max_leaves=12,
)


def read(text: str, schema: Any, **more: Any) -> object:
    parameters = {"type": "object", "properties": {"x": schema}, **more}
    return typed(text, "look", "x", [{"type": "function", "function": {"name": "look", "parameters": parameters}}])


@example(schema={"anyOf": 5}, text="1")
@example(schema={"type": ["string", {}]}, text="1")
@example(schema={"type": 5, "enum": 5}, text="1")
@given(schema=SCHEMAS, text=st.sampled_from(["1", "x", "null", "[1]", '{"a": 1}']))
def test_whatever_a_schema_holds_an_argument_is_read(schema: Any, text: str) -> None:
    with contextlib.suppress(RecursionError):
        found = read(text, schema, **{"$defs": {"a": schema}})
        assert found == text or not isinstance(found, str)


@each(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "1", 1),
        ({"type": "string"}, "1", "1"),
        ({"type": ["string", {}]}, "1", "1"),
        ({"anyOf": 5}, "1", 1),
        ({"anyOf": [{"type": "string"}, 5]}, "1", "1"),
        ({"$ref": "#/$defs/a"}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
    ],
)
def test_it_has_the_type_that_its_schema_asks_for(schema: Any, text: str, value: object) -> None:
    assert read(text, schema, **{"$defs": {"a": {"type": ["integer", "null"]}}}) == value


def test_schemas_that_refer_to_one_another_are_looked_at_once_each() -> None:
    names = [f"s{number}" for number in range(120)]
    union = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    begun = time.process_time()
    assert read("1", union, **{"$defs": {name: union | {"type": "string"} for name in names}}) == "1"
    assert time.process_time() - begun < 20  # path by path it takes minutes
