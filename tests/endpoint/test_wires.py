"""Recorded requests of real clients: each is related to the call that a person found it to continue."""

import re
from typing import Any

import pytest

from benchmarks.endpoint_matching import WIRES, asked_of, calls_of, figures, relation, wires
from tests.support.each import each
from tests.test_imports import HEAVY, loaded_by


@each(("name", "wire"), wires().items())
def test_requests_continue_the_calls_that_they_show(name: str, wire: dict[str, Any]) -> None:
    assert [relation(call) for call in calls_of(wire["requests"])] == wire["relations"]


@each(("name", "wire"), wires().items())
def test_what_continues_holds_the_words_of_the_policy(name: str, wire: dict[str, Any]) -> None:
    calls = calls_of(wire["requests"])
    for call in calls:
        if call.kind.extends:
            assert call.parent is not None
            before, said = calls[call.parent], wire["requests"][call.parent]["answer"]["message"]
            assert call.history == (*before.history, said, *call.replies)
            assert {reply["role"] for reply in call.replies} <= {"tool", "user"}


def test_the_rules_of_others_miss_or_mistake_what_the_canonical_form_recognises() -> None:
    found = figures()
    assert found["canonical"] == {"recognised": found["faithful"], "wrong": 0}
    assert found["rows_linear"] == 1.0
    assert found["strict"]["recognised"] < 10 < found["faithful"]
    assert found["earlier_request"]["wrong"] == found["changed"] == 5


def test_every_dialect_is_recorded_with_and_without_events() -> None:
    found = {
        (request["dialect"], asked.form.stream)
        for wire in wires().values()
        for request, asked in zip(wire["requests"], asked_of(wire["requests"]), strict=True)
    }
    assert found == {(name, stream) for name in ("chat", "messages", "responses") for stream in (False, True)}
    assert len({wire["client"] for wire in wires().values()}) == 11


def test_fixtures_are_small_and_name_no_machine() -> None:
    private = re.compile(r"/tmp/|/root|/home/(?!user)|20\d\d-\d\d-\d\d|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}|device_id")
    texts = {path.name: path.read_text(encoding="utf-8") for path in WIRES.glob("*.json")}
    assert [name for name, text in texts.items() if private.search(text)] == []
    assert max(map(len, texts.values())) < 20_000


@pytest.mark.process
def test_requests_are_read_without_torch_and_without_a_server() -> None:
    script = (
        "import agentrl.endpoint.chat, agentrl.endpoint.messages, agentrl.endpoint.responses, agentrl.endpoint.tree"
    )
    assert loaded_by(script, (*HEAVY, "starlette", "uvicorn", "httpx2")) == set()
