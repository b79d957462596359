from collections.abc import Callable
from typing import Annotated, Any, Literal, cast

import pytest
from pydantic import Field

from agentrl.env import MessageEnv, ToolEnv, tool, tool_call
from agentrl.env.tool_env import ToolCallError, tool_specs
from tests.support.each import each


class Shop(ToolEnv):
    def start(self, options: dict[str, Any]) -> str:
        return "Welcome."

    def answer(self, text: str) -> str:
        return text

    @tool
    def buy(self, item: Literal["tea", "salt"], count: Annotated[int, Field(ge=1, le=9)] = 1) -> str:
        """Buy something.

        It is sent home.

        Args:
            item: what to buy.
            count: how many.
        """
        return f"{count} {item}"

    @tool
    async def wait(self) -> None:
        """Wait a while."""

    def not_a_tool(self) -> str:
        return "hidden"


class BiggerShop(Shop):
    @tool
    def buy(self, item: str) -> str:  # type: ignore[override]
        """Buy anything."""
        return item

    @tool
    def sell(self, item: str) -> str:
        """Sell something."""
        return item


def function(env: type[MessageEnv], name: str) -> dict[str, Any]:
    return next(cast("dict[str, Any]", t["function"]) for t in env.tools if t["function"]["name"] == name)


def test_a_schema_comes_from_annotations_and_docstring() -> None:
    assert function(Shop, "buy") == {
        "name": "buy",
        "description": "Buy something. It is sent home.",
        "parameters": {
            "type": "object",
            "properties": {
                "item": {"type": "string", "enum": ["tea", "salt"], "description": "what to buy."},
                "count": {"type": "integer", "minimum": 1, "maximum": 9, "default": 1, "description": "how many."},
            },
            "required": ["item"],
            "additionalProperties": False,
        },
    }


def test_a_tool_without_parameters_has_an_empty_object_of_them() -> None:
    assert function(Shop, "wait")["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}


def test_tools_are_listed_in_order_and_unmarked_methods_are_not() -> None:
    assert [t["function"]["name"] for t in Shop.tools] == ["buy", "wait"]


def test_a_subclass_inherits_adds_and_overrides_tools() -> None:
    assert [t["function"]["name"] for t in BiggerShop.tools] == ["buy", "wait", "sell"]
    assert function(BiggerShop, "buy")["description"] == "Buy anything."
    assert function(Shop, "buy")["description"] == "Buy something. It is sent home."


def test_arguments_are_coerced_and_defaults_are_left_to_the_method() -> None:
    spec = tool_specs(Shop)["buy"]
    assert spec.validate('{"item": "tea", "count": "2"}') == {"item": "tea", "count": 2}
    assert spec.validate({"item": "tea"}) == {"item": "tea", "count": 1}


@each(
    ("arguments", "words"),
    [
        ('{"item": ', "arguments of buy are not valid JSON"),
        ("[1]", "arguments of buy must be a JSON object, got list"),
        (None, "arguments of buy must be a JSON object, got NoneType"),
        ({}, "wrong arguments for buy: item: Missing required keyword only argument"),
        ({"item": "gold"}, "wrong arguments for buy: item: Input should be 'tea' or 'salt'"),
        ({"item": "tea", "count": 10}, "wrong arguments for buy: count: Input should be less than or equal to 9"),
        ({"item": "tea", "colour": "red"}, "wrong arguments for buy: colour: Unexpected keyword argument"),
    ],
)
def test_what_is_wrong_with_arguments_is_said_to_the_model(arguments: object, words: str) -> None:
    with pytest.raises(ToolCallError) as caught:
        tool_specs(Shop)["buy"].validate(arguments)
    assert str(caught.value).startswith(words)


def test_a_parameter_that_no_model_could_name_is_refused_when_the_class_is_defined() -> None:
    def many(self: ToolEnv, *items: str) -> str:
        """Take many."""
        return f"{self}: {items}"

    with pytest.raises(TypeError, match=r"parameter \*items: str has no name a model could give"):
        type("Many", (Shop,), {"many": tool(cast("Callable[..., Any]", many))})


class Odd:
    pass


@each(
    ("annotation", "shown"),
    [
        (Odd, r"tests\.env\.test_tools\.Odd"),
        (list[Odd], r"list\[tests\.env\.test_tools\.Odd\]"),
        (Callable[[int], int], r"collections\.abc\.Callable\[\[int\], int\]"),
        ("Nowhere", "Nowhere"),
        ("list[", r"list\["),
        (3, "3"),
    ],
)
def test_an_annotation_that_no_schema_expresses_is_refused_with_its_tool_and_parameter(
    annotation: Any, shown: str
) -> None:
    def look(self: ToolEnv, at: int, *, with_what: Any) -> str:
        """Look."""
        return f"{self}: {at}, {with_what}"

    look.__annotations__["with_what"] = annotation
    words = rf"tool .*look: parameter 'with_what' is annotated with {shown}, which no JSON schema expresses \("
    with pytest.raises(TypeError, match=words):
        type("Looking", (Shop,), {"look": tool(cast("Callable[..., Any]", look))})


def test_tool_call_is_the_message_that_calls_the_tool() -> None:
    assert tool_call("buy", item="tea", name="n") == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "buy", "arguments": {"item": "tea", "name": "n"}}}
        ],
    }
    env = Shop()
    env.reset(seed=0)
    assert env.step(tool_call("buy", item="salt", count=3))[0][0]["content"] == "3 salt"
