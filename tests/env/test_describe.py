from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat import ChatMLRenderer, train_tokenizer
from agentrl.env import describe
from agentrl.errors import EnvironmentFailure
from agentrl.types import Need
from tests.support.each import each
from tests.support.hostile import TOOLS, VALUES, Says

LOOK: dict[str, Any] = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}


def offering(tools: Any, needs: Any = frozenset()) -> Says:
    class Offers(Says):
        def provides(self) -> Any:
            return needs

    return Offers((), (), tools=tools)


@each(
    ("tools", "words"),
    [
        (
            [{"type": "function", **LOOK}],
            r"tools\[0\] is dict .*, which is no OpenAI-style schema; give {'type': 'function', 'fu",
        ),
        (
            [{"type": "function", "function": LOOK | {"parameters": {"type": "object", "required": 3}}}],
            r"tools\[0\], str 'look': required is int 3; give a list of names",
        ),
        ([{"function": LOOK}, LOOK], r"tools\[1\] is dict .*, which is no OpenAI-style schema"),
        ([{"function": {"name": ""}}], r"tools\[0\] is dict .*, which is no OpenAI-style schema"),
        (None, "tools is NoneType None; give a list"),
        ([{"function": {"name": "look", "parameters": None}}], r"tools\[0\], str 'look': parameters is NoneType None"),
        (
            [{"function": {"name": "look", "parameters": {"properties": {"x": 3}}}}],
            "property str 'x' is int 3, no JSON schema",
        ),
        ([{"function": {"name": "look", "default": b"x"}}], r"tools\[0\]\['function'\]\['default'\] is bytes"),
    ],
)
def test_tools_of_another_form_are_refused_by_their_place(tools: Any, words: str) -> None:
    with pytest.raises(EnvironmentFailure, match=f"^environment Offers: .*{words}"):
        describe(offering(tools))


def test_a_property_may_have_a_boolean_schema() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"x": True, "y": False}}}}]
    (schema,) = describe(offering(tools)).tools
    assert schema["function"]["parameters"]["properties"] == {"x": {}, "y": {"not": {}}}


@each("needs", [None, [Need.VALUES], {"no such need"}, {3}])
def test_what_provides_no_set_of_needs_is_told(needs: Any) -> None:
    with pytest.raises(EnvironmentFailure, match=r"provides\(\) returned .*; return a frozenset of agentrl\.Need"):
        describe(offering([], needs))


def test_needs_may_be_named() -> None:
    assert describe(offering([], {"turn_rewards"})).needs == {Need.TURN_REWARDS}


@each("num", [2**33, 10**12, 2**63, 10**40])
def test_more_tasks_than_an_order_is_kept_of_are_refused(num: int) -> None:
    class Endless(Says):
        def num_tasks(self, split: str) -> int:
            return num

    with pytest.raises(EnvironmentFailure, match=r"Endless: num_tasks\('train'\) returned int .*: return None"):
        describe(Endless((), ()))


@pytest.fixture(scope="module")
def renderer() -> ChatMLRenderer:
    return ChatMLRenderer(train_tokenizer([], vocab_size=261))


@given(tools=TOOLS, needs=st.frozensets(st.sampled_from(Need) | st.text()) | VALUES)
def test_whatever_is_offered_can_be_rendered_or_is_refused(renderer: ChatMLRenderer, tools: Any, needs: Any) -> None:
    words = ""
    try:
        renderer.start(({"role": "user", "content": ""},), describe(offering(tools, needs)).tools)
    except EnvironmentFailure as error:
        words = str(error)
    assert len(words) < 2000
    assert "\n" not in words
