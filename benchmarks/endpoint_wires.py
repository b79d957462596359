"""Records what real clients send, against a server that answers by a script: `tests/endpoint/wires/*.json`.

    python -m benchmarks.endpoint_wires --python VENV/bin/python [--npm FOLDER/node_modules/.bin] [--only NAME ...]

The environment of `--python` has the packages of `tests/support/agents/requirements.txt`; the folder of `--npm` has
opencode-ai, @openai/codex and @anthropic-ai/claude-code. A client uses a tool, reads its result, says something, and is
asked once more.

What is stored is cut: of more than two tools the used and one other; a text of more than 200 characters to its beginning, its
length and a digest, so that equal texts stay equal and others differ; user, machine and session are left out. `relations` is
what a person read in the requests, not what agentrl makes of them.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from agentrl.endpoint import chat, messages, responses
from agentrl.endpoint.call import Asked, Said, wire_message
from agentrl.endpoint.reading import Dialect
from agentrl.types import Message

ROOT = Path(__file__).resolve().parents[1]
AGENTS = ROOT / "tests" / "support" / "agents"
WIRES = ROOT / "tests" / "endpoint" / "wires"
QUESTIONS = ("What is 6 times 7?", "And 7 more?")
DIALECTS: Mapping[str, Dialect] = {"/chat/completions": chat, "/responses": responses, "/messages": messages}


def text(words: str) -> Message:
    return {"role": "assistant", "content": words}


def call(*choices: tuple[str, dict[str, Any]], thought: str = "") -> Message:
    """Return a call of whichever tool a client has."""
    calls = [{"id": f"call_{i}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(choices)]
    return {"role": "assistant", "content": "", "tool_calls": calls} | (
        {"reasoning_content": thought} if thought else {}
    )


MULTIPLY = call(("multiply", {"b": 7, "a": 6}), thought="Six sevens.")
ECHO = call(
    ("bash", {"command": "echo 42", "description": "Compute"}),
    ("Bash", {"command": "echo 42", "description": "Compute"}),
    ("exec_command", {"cmd": "echo 42"}),
    ("shell", {"command": ["echo", "42"]}),
    thought="Six sevens.",
)
LOOP = (MULTIPLY, text("It is 42."), text("It is 49."))
TERMINAL = (ECHO, text("It is 42."), text("It is 49."))


@dataclass(frozen=True)
class Client:
    """A client, and what it is answered."""

    package: str
    """Name of the package, for its version."""
    commands: Sequence[Sequence[str]]
    """Programs that are run one after the other: a script in the folder of agents, or a command of npm."""
    answers: Sequence[Message] = LOOP
    relations: Sequence[str] = ("root", "continues 0", "continues 1")
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of its home folder, in which `{url}` is the base URL."""


SMOL_TOOLS = (MULTIPLY, call(("final_answer", {"answer": "42"})), call(("final_answer", {"answer": "49"})))
SMOL_CODE = tuple(
    text(f"Thought: I compute.\n<code>\n{line}\n</code>")
    for line in ("print(multiply(a=6, b=7))", "final_answer(42)", "final_answer(49)")
)
ANSWERS_CHANGED = ("root", "rewrites 0", "rewrites 1")
BESIDE_A_TITLE = ("root", "root", "continues 1", "continues 2")
SWE = (
    text("I shall echo it."),
    call(("bash", {"command": "echo 42"})),
    call(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})),
)
OPENCODE = {
    "provider": {
        "own": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "key"},
            "models": {"policy": {"name": "policy"}},
        }
    },
    "permission": {"*": "allow"},
    "autoupdate": False,
}
CODEX = """model = "policy"
model_provider = "own"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.own]
name = "own"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
CLIENTS = {
    "openai": Client("openai", [["openai_chat.py"]]),
    "openai-stream": Client("openai", [["openai_chat.py", "--stream"]]),
    "openai-responses": Client("openai", [["openai_responses.py"]]),
    "openai-previous": Client("openai", [["openai_responses.py", "--previous"]]),
    "anthropic": Client("anthropic", [["anthropic_messages.py"]]),
    "anthropic-stream": Client("anthropic", [["anthropic_messages.py", "--stream"]]),
    "openai-agents": Client("openai-agents", [["openai_agents.py"]]),
    "openai-agents-stream": Client("openai-agents", [["openai_agents.py", "--stream"]]),
    "openai-agents-chat": Client("openai-agents", [["openai_agents.py", "--chat"]]),
    "langgraph": Client("langgraph", [["langgraph_agent.py"]]),
    "pydantic-ai-chat": Client("pydantic-ai-slim", [["pydantic_ai_agent.py", "chat"]]),
    "pydantic-ai-responses": Client("pydantic-ai-slim", [["pydantic_ai_agent.py", "responses"]]),
    "pydantic-ai-anthropic": Client("pydantic-ai-slim", [["pydantic_ai_agent.py", "anthropic"]]),
    "pydantic-ai-stream": Client("pydantic-ai-slim", [["pydantic_ai_agent.py", "chat", "--stream"]]),
    "smolagents-tools": Client("smolagents", [["smolagents_agent.py", "tools"]], SMOL_TOOLS, ANSWERS_CHANGED),
    "smolagents-code": Client("smolagents", [["smolagents_agent.py", "code"]], SMOL_CODE, ANSWERS_CHANGED),
    "litellm": Client("litellm", [["litellm_loop.py"]]),
    "mini-swe-agent": Client("mini-swe-agent", [["mini_swe_agent.py"]], SWE, ("root", "rewrites 0", "continues 1")),
    "opencode": Client(
        "opencode-ai",
        [
            ["opencode", "run", "--model", "own/policy", QUESTIONS[0]],
            ["opencode", "run", "--model", "own/policy", "--continue", QUESTIONS[1]],
        ],
        TERMINAL,
        BESIDE_A_TITLE,
        files={".config/opencode/opencode.json": json.dumps(OPENCODE)},
    ),
    "codex": Client(
        "@openai/codex",
        [
            ["codex", "exec", "--skip-git-repo-check", QUESTIONS[0]],
            ["codex", "exec", "--skip-git-repo-check", "resume", "--last", QUESTIONS[1]],
        ],
        TERMINAL,
        files={".codex/config.toml": CODEX},
    ),
    "claude-code": Client(
        "@anthropic-ai/claude-code",
        [
            ["claude", "-p", "--model", "policy", "--allowedTools", "Bash", "--", QUESTIONS[0]],
            ["claude", "-p", "--model", "policy", "--continue", "--allowedTools", "Bash", "--", QUESTIONS[1]],
        ],
        TERMINAL,
        BESIDE_A_TITLE,
    ),
}


class Recorder:
    """Answers requests by a script, and keeps them."""

    def __init__(self, answers: Sequence[Message]) -> None:
        self._answers = list(answers)
        self._lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []

    def answer(self, dialect: Dialect, body: bytes) -> tuple[Asked, Said]:
        """Return a request and what is said to it; without tools, where there are some, it is a title."""
        asked = dialect.read(body)
        with self._lock:
            number = len(self.requests)
            is_task = bool(asked.previous) or any(QUESTIONS[0] in str(each["content"]) for each in asked.messages)
            says = (
                dict(self._answers.pop(0))
                if is_task and self._answers and not self._is_title(asked)
                else text("Arithmetic")
            )
            names = {tool["function"]["name"] for tool in asked.tools}
            calls = [each for each in says.get("tool_calls", ()) if each["function"]["name"] in names][:1]
            says = {**says, "tool_calls": calls}
            stop = min((s for s in asked.stop if s in says["content"]), key=says["content"].index, default="")
            if stop:
                says["content"] = says["content"].partition(stop)[0]
            wire = wire_message(says, number=number)
            answer = {"message": wire} | ({"stopped_by": stop} if stop else {})
            self.requests.append({"dialect": dialect.NAME, "body": json.loads(body), "answer": answer})
        return asked, Said(number=number, message=wire, stopped_by=stop, prompt_tokens=9, completion_tokens=3)

    def _is_title(self, asked: Asked) -> bool:
        return not asked.tools and any("tool_calls" in each for each in self._answers)


def serve(recorder: Recorder) -> ThreadingHTTPServer:
    """Return a server that runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path = self.path.partition("?")[0]
            dialect = next((found for end, found in DIALECTS.items() if path.endswith(end)), None)
            if dialect is None:
                return self._send({"input_tokens": 9})
            asked, said = recorder.answer(dialect, body)
            if asked.form.stream:
                return self._send_bytes("".join(dialect.events(asked, [said])).encode(), "text/event-stream")
            return self._send(dialect.write(asked, [said]))

        def do_GET(self) -> None:
            self._send({"object": "list", "data": [{"id": "policy", "object": "model"}], "models": []})

        def do_HEAD(self) -> None:
            self._send_bytes(b"", "text/plain")

        def _send(self, data: Mapping[str, Any]) -> None:
            self._send_bytes(json.dumps(data).encode(), "application/json")

        def _send_bytes(self, data: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def run(client: Client, *, python: str, npm: Path | None) -> list[dict[str, Any]]:
    """Return what a client sends."""
    recorder = Recorder(client.answers)
    server = serve(recorder)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with tempfile.TemporaryDirectory() as home:
            work = Path(home) / "work"
            work.mkdir()
            for name, content in client.files.items():
                path = Path(home) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content.replace("{url}", url), encoding="utf-8")
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": home,
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_KEY": "key",
            }
            environment |= {
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": "key",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            }
            environment |= {"DISABLE_TELEMETRY": "1", "PYTHONPATH": str(ROOT), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
            for first, *rest in client.commands:
                program = [python, str(AGENTS / first)] if first.endswith(".py") else [str((npm or Path()) / first)]
                done = subprocess.run(
                    [*program, *rest],
                    env=environment,
                    cwd=work,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                print(done.stdout[-300:], done.stderr[-1500:] if done.returncode else "", flush=True)
    finally:
        server.shutdown()
        server.server_close()
    text = _UUID.sub("uuid", json.dumps(recorder.requests).replace(home, "/home/user"))
    return list(json.loads(text))


_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def version(package: str, *, python: str, npm: Path | None) -> str:
    """Return the version of a client."""
    if npm is not None and (found := npm.parent / package / "package.json").is_file():
        return str(json.loads(found.read_text(encoding="utf-8"))["version"])
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


PRIVATE = frozenset({"metadata", "client_metadata", "prompt_cache_key", "user", "safety_identifier"})


def shortened(value: Any, *, key: str = "") -> Any:
    """Return what is stored of a value."""
    if isinstance(value, str):
        if len(value) <= 200:
            return value
        digest = hashlib.sha256(value.encode()).hexdigest()[:8]
        return f"{value[:60]}[... {len(value)} characters, {digest}]"
    if isinstance(value, dict):
        return {name: shortened(item, key=name) for name, item in value.items() if name not in PRIVATE}
    if not isinstance(value, list):
        return value
    kept = list(_used_tools(value)) if key == "tools" and len(value) > 2 else value
    return [shortened(item) for item in kept]


USED = ("multiply", "bash", "Bash", "exec_command", "shell", "final_answer")


def _used_tools(tools: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the tools that were used, and one other."""
    names = [str(tool.get("name") or tool.get("function", {}).get("name") or tool["type"]) for tool in tools]
    other = next((name for name in names if name not in USED), None)
    for name, tool in zip(names, tools, strict=True):
        if name in USED or name == other:
            yield {**tool, **({"tools": tool["tools"][:1]} if "tools" in tool else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True)
    parser.add_argument("--npm", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*CLIENTS], default=[*CLIENTS])
    parser.add_argument("--raw", type=Path, help="folder for what is sent, uncut")
    options = parser.parse_args()
    for name in options.only:
        client = CLIENTS[name]
        found = run(client, python=options.python, npm=options.npm)
        print(f"{name}: {len(found)} requests", flush=True)
        if options.raw is not None:
            options.raw.mkdir(exist_ok=True)
            (options.raw / f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        head = {"client": client.package, "version": version(client.package, python=options.python, npm=options.npm)}
        wire = head | {"relations": list(client.relations), "requests": shortened(found)}
        (WIRES / f"{name}.json").write_text(json.dumps(wire, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
