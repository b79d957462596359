"""Which call a prompt continues, over the recorded requests of real clients (`tests/endpoint/wires`).

    python -m benchmarks.endpoint_matching

Each request is compared with the calls before it, in three ways: by agentrl's canonical form; by strict equality of the
JSON (an earlier request and its answer as sent, AReaL's rule); by the earlier request alone (rLLM's). `faithful` counts
requests that show an earlier prompt and its answer, in whatever writing, `recognised` those of which the rule finds the
newest call; `wrong` counts requests in which the client has changed or left out an answer, and that the rule would
continue all the same. `rows_linear` is the mean number of rows of a line of calls, of clients that change no answer.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.endpoint import chat, messages, responses
from agentrl.endpoint.call import Asked, Said
from agentrl.endpoint.canonical import after_answer
from agentrl.endpoint.reading import Dialect
from agentrl.endpoint.tree import Call, CallTree
from agentrl.types import Message

WIRES = Path(__file__).resolve().parents[1] / "tests" / "endpoint" / "wires"
DIALECTS: Mapping[str, Dialect] = {each.NAME: each for each in (chat, messages, responses)}


def wires() -> dict[str, dict[str, Any]]:
    """Return the recorded requests, by client and way of use."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(WIRES.glob("*.json"))}


def asked_of(requests: Sequence[Mapping[str, Any]]) -> Iterator[Asked]:
    """Yield what recorded requests ask for, those by the id of an answer with their whole dialogue."""
    dialogues: list[list[Message]] = []
    for request in requests:
        asked = DIALECTS[request["dialect"]].read(json.dumps(request["body"]).encode())
        if asked.previous:
            asked = after_answer(asked, dialogues[int(asked.previous.removeprefix("resp_"))])
        dialogues.append([*asked.messages, request["answer"]["message"]])
        yield asked


def calls_of(requests: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Return the calls of a recorded session."""
    tree = CallTree()
    for asked, request in zip(asked_of(requests), requests, strict=True):
        call, answer = tree.ask(asked), request["answer"]
        tree.answer(call.number, answer["message"], wire=answer["message"], stopped_by=answer.get("stopped_by", ""))
    return tree.calls


def relation(call: Call) -> str:
    """Return the relation of a call to an earlier one, as a wire names it."""
    return str(call.kind) if call.parent is None else f"{call.kind} {call.parent}"


def canonical(requests: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """Return the call that each request continues."""
    return [call.parent if call.kind.extends else None for call in calls_of(requests)]


def strict(requests: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """Return the call that each request continues, if nothing but equal JSON counts."""
    return [_newest(requests, number, _sent) for number in range(len(requests))]


def by_request(requests: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """Return the call that each request continues, if the earlier request is compared and its answer is not."""
    return [_newest(requests, number, _items) for number in range(len(requests))]


def _newest(
    requests: Sequence[Mapping[str, Any]], number: int, path: Callable[[Mapping[str, Any]], list[Any]]
) -> int | None:
    items = _items(requests[number])
    for other in reversed(range(number)):
        before = path(requests[other])
        if before and len(before) < len(items) and items[: len(before)] == before:
            return other
    return None


def _items(request: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a request as sent."""
    body = request["body"]
    found = body.get("messages", body.get("input"))
    return list(found) if isinstance(found, list) else [found]


def _sent(request: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a request as sent, and its answer as it was sent."""
    dialect = DIALECTS[request["dialect"]]
    asked = dialect.read(json.dumps(request["body"]).encode())
    answer = dialect.write(asked, [Said(number=0, message=request["answer"]["message"])])
    match dialect.NAME:
        case "chat":
            return [*_items(request), answer["choices"][0]["message"]]
        case "responses":
            return _items(request) + list(answer["output"])
    return [*_items(request), {"role": "assistant", "content": answer["content"]}]


RULES = {"canonical": canonical, "strict": strict, "earlier_request": by_request}


def figures() -> dict[str, Any]:
    """Return the figures."""
    counts = {name: {"recognised": 0, "wrong": 0} for name in RULES}
    faithful = rewritten = 0
    rows = []
    for wire in wires().values():
        requests, relations = wire["requests"], [each.split() for each in wire["relations"]]
        expected = [int(each[1]) if each[0] == "continues" else None for each in relations]
        faithful += sum(each is not None for each in expected)
        rewritten += sum(each[0] == "rewrites" for each in relations)
        for name, rule in RULES.items():
            found = rule(requests)
            counts[name]["recognised"] += sum(a == b for a, b in zip(found, expected, strict=True) if b is not None)
            counts[name]["wrong"] += sum(a is not None and b is None for a, b in zip(found, expected, strict=True))
        if not any(each[0] == "rewrites" for each in relations):
            calls = calls_of(requests)
            rows.append(sum(not call.kind.extends for call in calls) / len({call.root for call in calls}))
    found_clients = {wire["client"] for wire in wires().values()}
    head = {"wires": len(wires()), "clients": len(found_clients), "faithful": faithful, "changed": rewritten}
    return head | counts | {"rows_linear": sum(rows) / len(rows)}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(json.dumps(figures()))
