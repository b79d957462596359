"""Which call a prompt continues, forks from or rewrites."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.endpoint import chat, messages
from agentrl.endpoint.call import Asked, wire_message
from agentrl.endpoint.canonical import canonical_arguments, request_digest
from agentrl.endpoint.tree import Call, CallTree, Kind
from agentrl.types import Message
from tests.support.each import each

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SYSTEM = {"role": "system", "content": "Be short."}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str, *calls: tuple[str, object], thought: str = "") -> Message:
    message: Message = {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})
    made = [{"id": f"call_{i}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    return message | ({"tool_calls": made} if made else {})


def asked(*said: Message, tools: tuple[dict[str, Any], ...] = (TOOL,)) -> Asked:
    return Asked(messages=said, tools=tools)


class Session:
    """A tree whose answers are given at once."""

    def __init__(self, **options: Any) -> None:
        self.tree = CallTree(**options)

    def call(self, request: Asked, message: Message, *, stopped_by: str = "") -> tuple[Call, Message]:
        call = self.tree.ask(request)
        wire = wire_message(message, number=call.number)
        self.tree.answer(call.number, message, wire=wire, stopped_by=stopped_by)
        return call, wire


def test_a_second_call_that_continues_an_answer_forks_from_it() -> None:
    session = Session()
    _, answer = session.call(asked(user("a")), says("b"))
    one, _ = session.call(asked(user("a"), answer, user("c")), says("d"))
    two, _ = session.call(asked(user("a"), answer, user("c")), says("e"))
    three, _ = session.call(asked(user("a"), answer, user("other")), says("e"))
    assert [(call.kind, call.parent) for call in (one, two, three)] == [
        (Kind.CONTINUES, 0),
        (Kind.FORKS, 0),
        (Kind.FORKS, 0),
    ]
    assert [call.sibling for call in (one, two, three)] == [0, 1, 0]
    assert one.digest == two.digest != three.digest


def test_equal_roots_are_siblings() -> None:
    session = Session()
    calls = [session.call(asked(user("a")), says("b"))[0] for _ in range(3)]
    assert [(call.kind, call.sibling, call.root) for call in calls] == [(Kind.ROOT, i, i) for i in range(3)]


def test_of_equal_answers_the_one_with_the_ids_that_the_client_sends_is_continued() -> None:
    session = Session()
    wires = [session.call(asked(user("a")), says("", ("look", {})))[1] for _ in range(3)]
    for number in (1, 2, 0):
        result = {"role": "tool", "tool_call_id": f"call_{number}_0", "content": "x"}
        assert session.call(asked(user("a"), wires[number], result), says("y"))[0].parent == number


def test_a_changed_answer_is_shown_as_the_client_has_it() -> None:
    session = Session()
    session.call(asked(SYSTEM, user("a")), says("It is 42, I think."))
    changed = {"role": "assistant", "content": "It is 42."}
    call, _ = session.call(asked(SYSTEM, user("a"), changed, user("c")), says("d"))
    assert (call.kind, call.parent, call.replies) == (Kind.REWRITES, 0, call.history)
    assert call.history == (SYSTEM, user("a"), changed, user("c"))
    assert str(call.difference) == "message 2: assistant: It is 42, I think. became assistant: It is 42."


def test_an_answer_that_is_left_out_is_rewritten() -> None:
    session = Session()
    session.call(asked(user("a")), says("b"))
    call, _ = session.call(asked(user("a"), user("again")), says("c"))
    assert (call.kind, call.parent) == (Kind.REWRITES, 0)
    assert str(call.difference) == "message 1: assistant: b became user: again"


def test_an_answer_left_out_behind_another_forks_from_that_one_and_is_told() -> None:
    session = Session()
    _, first = session.call(asked(user("a")), says("b"))
    session.call(asked(user("a"), first, user("c")), says("d"))
    call, _ = session.call(asked(user("a"), first, user("c"), user("again")), says("e"))
    assert (call.kind, call.parent, call.replies) == (Kind.FORKS, 0, (user("c"), user("again")))
    assert str(call.difference) == "message 3: assistant: d became user: again"


def test_changed_history_is_rewritten_and_what_stands_before_it_keeps_the_words_of_the_policy() -> None:
    session = Session()
    said = [user("a")]
    for number in range(3):
        _, wire = session.call(asked(*said), says(f"{number}", thought="hm"))
        said += [{"role": "assistant", "content": wire["content"]}, user(f"next {number}")]
    said[4] = user("(left out)")
    call, _ = session.call(asked(*said), says("x"))
    assert (call.kind, call.parent) == (Kind.REWRITES, 2)
    kept = (user("a"), says("0", thought="hm"), user("next 0"), says("1", thought="hm"))
    assert call.history == (*kept, *said[4:])
    assert call.difference is not None
    assert (call.difference.index, call.difference.asked) == (4, "user: (left out)")


def test_another_opening_or_other_tools_are_a_root() -> None:
    session = Session()
    session.call(asked(SYSTEM, user("a")), says("b"))
    other, _ = session.call(asked(SYSTEM, user("You summarise.")), says("c"))
    assert (other.kind, other.root, other.parent) == (Kind.ROOT, 1, None)
    bare, _ = session.call(asked(SYSTEM, user("a"), tools=()), says("c"))
    assert (bare.kind, str(bare.difference)) == (Kind.ROOT, "message 0: tools look became tools (none)")


def test_lines_of_calls_are_kept_apart() -> None:
    session = Session()
    lines: list[list[Message]] = [[user("a")], [user("b")]]
    for step in range(4):
        for root, line in enumerate(lines):
            call, wire = session.call(asked(*line), says(f"{step}"))
            assert (call.root, call.parent) == (root, None if step == 0 else call.number - 2)
            line += [wire, user(f"{step}?")]


def test_calls_are_named_by_the_ids_that_the_policy_gave_them() -> None:
    session = Session()
    _, wire = session.call(asked(user("a")), says("", ("look", {}), ("look", {"at": "b"})))
    assert [call["id"] for call in wire["tool_calls"]] == ["call_0_0", "call_0_1"]
    renamed = {**wire, "tool_calls": [{**call, "id": f"x{i}"} for i, call in enumerate(wire["tool_calls"])]}
    results = [{"role": "tool", "tool_call_id": f"x{i}", "content": "c"} for i in (1, 0)]
    call, _ = session.call(asked(user("a"), renamed, *results), says("d"))
    assert call.kind is Kind.CONTINUES
    assert [reply["tool_call_id"] for reply in call.replies] == ["call_1", "call_0"]
    assert {reply["name"] for reply in call.replies} == {"look"} or "name" not in call.replies[0]


def test_a_thought_that_is_not_sent_is_unsaid_or_taken_back() -> None:
    answer = says("b", thought="Hm.")
    for thoughts, kind in (("unsaid", Kind.CONTINUES), ("as_sent", Kind.REWRITES)):
        session = Session(thoughts=thoughts)
        session.call(asked(user("a")), answer)
        call, _ = session.call(asked(user("a"), says("b"), user("c")), says("d"))
        assert (call.kind, call.is_unsaid) == (kind, thoughts == "unsaid")
        assert call.history[1] == (answer if thoughts == "unsaid" else says("b"))
    session = Session(thoughts="as_sent")
    session.call(asked(user("a")), answer)
    assert session.call(asked(user("a"), answer, user("c")), says("d"))[0].kind is Kind.CONTINUES


def test_a_stop_string_that_a_client_adds_again_changes_nothing() -> None:
    session = Session()
    said: list[Message] = [user("a")]
    for step in range(3):
        call, _ = session.call(asked(*said), says(f"<code>\n{step}\n"), stopped_by="</code>")
        assert call.parent == (None if step == 0 else step - 1)
        shown = f"<code>\n{step}\n" + "</code>" * (step != 1)
        said += [{"role": "assistant", "content": shown}, user("Observation")]


def test_a_malformed_call_is_shown_as_text_and_continued() -> None:
    session = Session()
    malformed = says("Hm.", ("", "look(at:"))
    _, wire = session.call(asked(user("a")), malformed)
    assert wire == {"role": "assistant", "content": "Hm.\nlook(at:"}
    call, _ = session.call(asked(user("a"), wire, user("?")), says("b"))
    assert (call.kind, call.history[1]) == (Kind.CONTINUES, malformed)


@each(
    ("field", "value"),
    [("max_tokens", 9), ("stop", ("x",)), ("model", "other"), ("n", 2), ("calls_as_text", True), ("tools", ())],
)
def test_what_decides_the_sample_is_in_the_digest(field: str, value: object) -> None:
    plain: dict[str, Any] = {"messages": (user("a"),), "tools": (TOOL,)}
    assert request_digest(Asked(**plain)) != request_digest(Asked(**(plain | {field: value})))


@each(
    ("one", "other"),
    [
        ({"a": 2.0, "b": [1, None]}, '{"b":[1,null],"a":2}'),
        ('{"a": "\\u00fc"}', '{"a":"ü"}'),
        (None, "{}"),
        ("", {}),
        (" not JSON", "not JSON "),
    ],
)
def test_arguments_are_equal_in_every_writing(one: object, other: object) -> None:
    assert canonical_arguments(one) == canonical_arguments(other)
    assert canonical_arguments(one) != canonical_arguments({"a": 3})


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8).map(str.strip)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, 2.0]) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(texts, values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(["look", "go"]), arguments), max_size=2)


@dataclass
class Step:
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    thought: str
    reply: str
    deed: str
    """Treatment of the answer by the client."""


steps = st.lists(
    st.builds(
        Step,
        text=texts,
        calls=calls,
        thought=texts,
        reply=texts.map("r".__add__),
        deed=st.sampled_from(["echo", "echo", "edit", "drop", "stop", "merge"]),
    ),
    min_size=1,
    max_size=5,
)


@dataclass
class Disguise:
    """Writes the same messages otherwise at each request, as clients do."""

    random: Random

    def coin(self) -> bool:
        return self.random.random() < 0.5

    def shuffled(self, value: Any) -> Any:
        """Return a value with the keys of its objects in another order."""
        if isinstance(value, dict):
            keys = self.random.sample(sorted(value), len(value))
            return {key: self.shuffled(value[key]) for key in keys}
        return [self.shuffled(item) for item in value] if isinstance(value, list) else value

    def arguments(self, value: dict[str, Any]) -> str:
        """Return arguments as text: spaced or not, escaped or not, 2.0 as 2."""
        spaced = (", ", ": ") if self.coin() else (",", ":")
        text = json.dumps(self.shuffled(value), separators=spaced, ensure_ascii=self.coin())
        whole = json.loads(
            text, parse_float=lambda digits: int(float(digits)) if digits.endswith(".0") else float(digits)
        )
        return json.dumps(whole) if self.coin() else text

    def content(self, text: str) -> Any:
        """Return a text alone or in parts, with a cache mark or without."""
        if not text:
            return self.random.choice(["", None, [], [{"type": "text", "text": ""}]])
        if self.coin():
            return text + " " * self.coin()
        lines = text.split("\n") if self.coin() and all(text.split("\n")) else [text]
        marks: list[dict[str, Any]] = [{}, {"cache_control": {"type": "ephemeral"}}, {"annotations": None}]
        return [{"type": "text", "text": line, **self.random.choice(marks)} for line in lines]

    def message(self, message: Message) -> dict[str, Any]:
        """Return a message of chat completions."""
        sent = {"role": message["role"], "content": self.content(message["content"])}
        if message["role"] == "tool":
            sent["tool_call_id"] = message["tool_call_id"]
        if found := message.get("tool_calls"):
            made = [(call["id"], call["function"]) for call in found]
            sent["tool_calls"] = [
                {
                    "id": i,
                    "type": "function",
                    "function": {"name": f["name"], "arguments": self.arguments(f["arguments"])},
                }
                for i, f in made
            ]
        elif message["role"] == "assistant" and self.coin():
            sent["tool_calls"] = None
        if thought := message.get("reasoning_content") if self.coin() else None:
            sent["reasoning_content"] = thought
        nulls: Message = self.random.choice(
            [{}, {"refusal": None}, {"name": None, "audio": None, "status": "completed"}]
        )
        return dict(self.shuffled(sent | nulls))


@settings(max_examples=60, deadline=None)
@given(script=steps, seed=st.integers(0, 99))
def test_faithful_answers_are_continued_and_changed_ones_never(script: list[Step], seed: int) -> None:
    disguise, session = Disguise(Random(seed)), Session()
    shown: list[Message] = [SYSTEM, user("begin")]
    expected: tuple[Kind, int | None] = (Kind.ROOT, None)
    last: Message = {}
    for number, step in enumerate(script):
        body = {"messages": [disguise.message(each) for each in shown], "tools": [disguise.shuffled(TOOL)]}
        stop = "STOP" if step.deed == "stop" else ""
        made = [] if stop else step.calls
        call, wire = session.call(
            chat.read(json.dumps(body).encode()), says(step.text, *made, thought=step.thought), stopped_by=stop
        )
        assert (call.kind, call.parent) == expected
        if call.kind is Kind.CONTINUES:
            assert call.history[: -len(call.replies)] == (*session.tree.calls[-2].history, last)
        last = says(step.text, *made, thought=step.thought)
        results = [
            {"role": "tool", "tool_call_id": each["id"], "content": step.reply} for each in wire.get("tool_calls", ())
        ]
        answers = answers_of(step.deed, wire)
        shown += [*answers, *(results if answers else ()), user(step.reply)]
        expected = (Kind.REWRITES if step.deed in ("edit", "drop") else Kind.CONTINUES, number)
        if step.deed == "drop" and call.kind.extends:  # the answer before stands as it was sampled
            expected = (Kind.FORKS, call.parent)


def answers_of(deed: str, wire: Message) -> list[Message]:
    """Return the messages in which a client shows an answer."""
    match deed:
        case "edit":
            return [{**wire, "content": f"{wire['content']}!"}]
        case "drop":
            return []
        case "stop":
            return [{**wire, "content": f"{wire['content']}STOP"}]
        case "merge" if wire.get("tool_calls"):  # text and calls as items of their own
            calls = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in wire["tool_calls"]]
            return [{"role": "assistant", "content": wire["content"]}, *calls]
    return [wire]


@settings(max_examples=50, deadline=None)
@given(num=st.integers(1, 6), seed=st.integers(0, 99))
def test_a_cache_mark_that_moves_changes_nothing(num: int, seed: int) -> None:
    session, random = Session(), Random(seed)
    sent: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "begin"}]}]
    for number in range(num):
        marked = random.randrange(len(sent))
        body = [
            {**each, "content": [{**block, "cache_control": {"type": "ephemeral"}} for block in each["content"]]}
            if index == marked
            else each
            for index, each in enumerate(sent)
        ]
        request = messages.read(json.dumps({"messages": body, "max_tokens": 9}).encode())
        call, wire = session.call(request, says("ok", ("look", {"at": number}), thought="Hm."))
        assert call.parent == (number - 1 if number else None)
        assert not number or call.kind is Kind.CONTINUES
        block = {"type": "tool_use", "id": wire["tool_calls"][0]["id"], "name": "look", "input": {"at": number}}
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "x"}]}
        sent += [
            {"role": "assistant", "content": [{"type": "text", "text": "ok"}, block]},
            {"role": "user", "content": [result]},
        ]
