"""What a context still shows of earlier turns."""

import random

from agentrl.chat import ChatMLRenderer, Dialogue, HistoryConfig, TurnTokens
from agentrl.chat.renderer import LEFT_OUT
from agentrl.learn.tokens import rows_of
from agentrl.types import Message
from tests.support.each import each
from tests.support.played import TOKENIZER, asked

RENDERER = ChatMLRenderer(TOKENIZER)
OPENING: list[Message] = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def result(text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": f"call {text}"}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


SAID = [*OPENING, says("a"), result("1"), result("2"), says("b"), user("U"), says("c"), result("3"), result("4")]


@each(
    ("fields", "expected"),
    [
        ({}, ["S", "Q", "a", "1", "2", "b", "U", "c", "3", "4"]),
        ({"tool_results": 4}, ["S", "Q", "a", "1", "2", "b", "U", "c", "3", "4"]),
        ({"tool_results": 3}, ["S", "Q", "a", LEFT_OUT, "2", "b", "U", "c", "3", "4"]),
        ({"tool_results": 1}, ["S", "Q", "a", LEFT_OUT, LEFT_OUT, "b", "U", "c", "3", "4"]),  # none unseen is left out
        ({"turns": 3}, ["S", "Q", "a", "1", "2", "b", "U", "c", "3", "4"]),
        ({"turns": 2}, ["S", "Q", "b", "U", "c", "3", "4"]),
        ({"turns": 1}, ["S", "Q", "c", "3", "4"]),
        ({"turns": 3, "tool_results": 2}, ["S", "Q", "a", LEFT_OUT, LEFT_OUT, "b", "U", "c", "3", "4"]),
    ],
)
def test_the_opening_the_last_turns_and_the_newest_results_are_shown(
    fields: dict[str, int], expected: list[str]
) -> None:
    shown = HistoryConfig.model_validate(fields).shown(SAID, num_opening=2)
    assert [message["content"] for message in shown] == expected
    assert [m["tool_call_id"] for m in shown if m["role"] == "tool"][-2:] == ["call 3", "call 4"]
    assert SAID[3]["content"] == "1"  # what was said stays as it was


def test_an_opening_is_shown_whole_whoever_speaks_in_it() -> None:
    opening = [user("Q"), says("an example"), result("of a call"), user("Now you.")]
    view = HistoryConfig(tool_results=1, turns=1)
    shown = view.shown([*opening, says("a"), result("1"), says("b"), result("2")], num_opening=4)
    assert [m["content"] for m in shown] == ["Q", "an example", "of a call", "Now you.", "b", "2"]


VIEWS: list[dict[str, int]] = [
    {},
    {"tool_results": 1},
    {"tool_results": 3},
    {"turns": 1},
    {"turns": 2, "tool_results": 1},
]


@each("fields", VIEWS)
def test_contexts_are_what_is_shown_and_a_segment_begins_exactly_where_less_of_it_is(fields: dict[str, int]) -> None:
    view = HistoryConfig.model_validate(fields)
    for seed in range(20):
        rng = random.Random(seed)
        dialogue = Dialogue.begin(OPENING, (), RENDERER, view=view)
        said: list[Message] = list(OPENING)
        turns: list[TurnTokens] = []
        contexts: list[tuple[int, ...]] = []
        for number in range(6):
            before = view.shown(said, num_opening=2)
            assert dialogue.context_ids == RENDERER.start(before, ())
            message = says(f"action {number}")
            action_ids = RENDERER.encode(message)
            turns.append(dialogue.turn(action_ids))
            contexts.append(dialogue.context_ids)
            kinds = rng.choices([result, user], k=rng.randrange(3))
            replies = [kind(f"{number} {place}") for place, kind in enumerate(kinds)]
            dialogue = dialogue.after(action_ids, message, replies, RENDERER)
            said += [message, *replies]
            assert dialogue.extends is (view.shown(said, num_opening=2) == [*before, message, *replies])
        # Every action is trained once, behind the context in which it was sampled.
        trained = list(asked(rows_of(turns)))
        assert trained == [(context, turn.action_ids) for context, turn in zip(contexts, turns, strict=True)]
