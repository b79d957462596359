import threading
from typing import Any

import pytest

pytest.importorskip("jsonschema")

from agentrl.env import ToolCallError
from agentrl_envs.adapters.common import check_arguments
from tests.support.each import each

DIALECT = "https://json-schema.org/draft/2020-12/schema"


@each(
    ("schema", "arguments", "words"),
    [
        (
            {"properties": {"n": {"type": "integer"}}},
            {"n": "x"},
            "wrong arguments for look: n: 'x' is not of type 'integer'",
        ),
        ({"required": ["n"]}, {}, "wrong arguments for look: 'n' is a required property"),
        (
            {"properties": {"n": {}}, "additionalProperties": False},
            {"m": 1},
            r"wrong arguments .*Additional properties",
        ),
        (
            {"$schema": DIALECT, "properties": {"$schema": {"type": "string"}, "in": {"$ref": "#"}}},
            {"$schema": "x", "in": {"$schema": 3}},
            r"wrong arguments for look: in.\$schema: 3 is not of type 'string'",
        ),
        (
            {"properties": {"n": {"anyOf": [{"type": "null"}, {"minimum": 3}]}}},
            {"n": 1},
            "wrong arguments for look: n: ",
        ),
    ],
)
def test_what_does_not_fit_is_told(schema: Any, arguments: Any, words: str) -> None:
    with pytest.raises(ToolCallError, match=words):
        check_arguments("look", arguments, {"type": "object", **schema})


@each(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}},
        {"patternProperties": {"^(a+)+$": {"type": "string"}}, "additionalProperties": False},
        {"patternProperties": {"^(a+)+$": {"type": "string"}}, "unevaluatedProperties": False},
        {"propertyNames": {"pattern": "^(a+)+$"}},
        {"properties": {"a": {"$schema": DIALECT, "type": "string", "pattern": "^(a+)+$"}}},
        {"$schema": DIALECT, "properties": {"a": {"pattern": "^(a+)+$"}, "in": {"$ref": "#"}}},
    ],
)
def test_patterns_are_left_to_the_server(schema: Any) -> None:
    text = "a" * 60 + "!"  # a search that would outlast this machine
    arguments = {"a": text, text: text, "in": {"a": text}}
    checking = threading.Thread(
        target=check_arguments, args=("look", arguments, {"type": "object", **schema}), daemon=True
    )
    checking.start()
    checking.join(120)
    assert not checking.is_alive()
