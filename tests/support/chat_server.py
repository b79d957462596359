"""A small OpenAI-compatible server in a process of its own: answers by a rule, and misbehaves when the model's name says so."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_failures: dict[str, int] = {}


def reply(messages: list[dict[str, str]]) -> str:
    """Play a customer: tell the email and the order's number when asked, and end when all is done."""
    script, last = messages[0]["content"], messages[-1]["content"].lower()
    if "done" in last or "cannot" in last:
        return "Thank you. [END]"
    if "email" in last:
        return "It is " + script.partition("Your email is ")[2].partition(";")[0]
    return "It is " + script.partition("order number ")[2].partition(")")[0].partition(",")[0]


def call(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Open box 1, then the door at each turn; calls that were sent back must have their arguments in text."""
    for sent in (call for message in messages for call in message.get("tool_calls", ())):
        json.loads(sent["function"]["arguments"])
    names = {tool["function"]["name"] for tool in tools}
    is_first = len(messages) == 1
    name, arguments = ("open_box", '{"box": 1}') if is_first else ("open_door", "{}")
    assert name in names
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        model, status = body["model"], 200
        words = "" if body.get("tools") else reply(body["messages"])
        answer: Any = {"choices": [{"message": {"role": "assistant", "content": words}}]}
        if model == "opens":
            answer = {"choices": [{"message": call(body["messages"], body["tools"])}]}
        elif model == "slow":
            time.sleep(5)
        elif model == "once":
            _failures[model] = _failures.get(model, 0) + 1
            status = 503 if _failures[model] == 1 else 200
        elif model == "broken":
            status = 500
        elif model == "unknown":
            status, answer = 404, {"error": "no such model"}
        elif model.startswith("{"):
            answer = {"choices": [{"message": json.loads(model)}]}
        elif model == "empty":
            answer = {"choices": []}
        elif model == "keyed":
            status = 200 if self.headers["Authorization"] == "Bearer secret" else 401
        payload = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    sys.stdin.close()
    server.serve_forever()
