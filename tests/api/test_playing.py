import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.env import endpoint as chat_client
from agentrl.errors import ConfigError, EnvironmentFailure
from agentrl_envs.key_door import KeyDoor
from tests.support import chat_server
from tests.support.each import each
from tests.support.judge_server import judge_server


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "_MAX_WAIT_S", 0.02)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, Path(chat_server.__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
        server.terminate()


@pytest.mark.process
def test_a_model_behind_an_endpoint_calls_tools(url: str) -> None:
    played = agentrl.play(
        {"id": "key_door", "options": {"prompt": "short"}}, "opens", endpoint=url, seed=4, max_turns=9
    )
    assert played.is_over
    assert "assistant: open_box(box=1)" in str(played)
    assert [message["role"] for message in played.messages[:3]] == ["user", "assistant", "tool"]
    again = agentrl.play(
        {"id": "key_door", "options": {"num_distractors": 0, "prompt": "short"}}, "opens", endpoint=url, seed=4
    )
    assert len(again.rewards) == 2


def call(function: object) -> dict[str, object]:
    return {"tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.slow
@pytest.mark.process
@each("message", [{"content": 5}, {"tool_calls": "look"}, {"tool_calls": [1]}, call(None), call({"name": 5})])
def test_what_an_endpoint_answers_may_be_no_message(message: dict[str, object], url: str) -> None:
    with pytest.raises(EnvironmentFailure, match="no chat completion"):
        agentrl.play("key_door", json.dumps(message), endpoint=url, max_turns=2)


@each("message", [call({"name": "look"}), {"content": "\ud800"}])
def test_an_odd_message_of_an_endpoint_is_played(message: dict[str, object], url: str) -> None:
    assert len(agentrl.play("key_door", json.dumps(message), endpoint=url, max_turns=2).rewards) == 2


@pytest.mark.slow
@pytest.mark.process
def test_the_seed_says_which_row_of_a_table_is_played_by_a_run_and_by_an_endpoint(url: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}?", "answer": "x"} for number in range(40)]
    options = {
        "tasks": [{"prompt": "t?", "answer": "x"}],
        "eval_tasks": rows,
        "answer": "answer",
        "rewards": ["exact_match"],
    }
    tasks = {"id": "tasks", "options": options}

    def asked(seed: int, model: Any, **given: Any) -> str:
        return str(agentrl.play(tasks, model, seed=seed, max_turns=1, **given).messages[0]["content"])

    said = [asked(seed, '{"content": "no"}', endpoint=url) for seed in (0, 1, 77)]
    assert said == ["0?", "1?", "37?"]
    small = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
    run = agentrl.train(
        env=tasks,
        model={"local": small},
        run_dir=str(tmp_path / "run"),
        warmup={"steps": 0},
        rollout={"num_groups": 1, "group_size": 2, "max_turns": 1, "max_turn_tokens": 4},
        train={"steps": 1, "device": "cpu", "num_minibatches": 1},
        evaluation={"num_tasks": 1},
        quiet=True,
    )
    assert [asked(seed, run.path) for seed in (0, 1, 77)] == said


def test_a_mistake_in_what_is_to_be_played_behind_an_endpoint_is_told_as_one(url: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.idd: no such field"):
        agentrl.play({"idd": "key_door"}, "opens", endpoint=url)
    options = {
        "tasks": [{"prompt": "?", "answer": "x"}],
        "eval_share": 0,
        "answer": "answer",
        "rewards": ["exact_match"],
    }
    with pytest.raises(ConfigError, match="no evaluation tasks"):
        agentrl.play({"id": "tasks", "options": options}, "opens", endpoint=url)


class Raises(KeyDoor):
    def answer(self, text: str) -> str:
        raise SystemExit(0)


def test_what_is_put_around_an_environment_is_there_behind_an_endpoint(url: str) -> None:
    limit = {"id": "agentrl.env.wrappers:LimitObservation", "max_chars": 10}
    played = agentrl.play({"id": "key_door", "wrappers": [limit]}, "opens", endpoint=url, max_turns=1)
    assert "characters" in played.messages[0]["content"]


def test_an_environment_that_fails_behind_an_endpoint_is_told(url: str) -> None:
    with pytest.raises(
        EnvironmentFailure, match=r"environment Raises: step\(\) raised SystemExit: 0 \(test_playing.py:"
    ):
        agentrl.play(Raises, '{"content": "hello"}', endpoint=url)


def test_an_endpoint_that_does_not_answer_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFailure, match="refused the request: HTTP 404"):
        agentrl.play("key_door", "unknown", endpoint=url)
    with pytest.raises(EnvironmentFailure, match="no chat completion"):
        agentrl.play("key_door", "empty", endpoint=url)
    with pytest.raises(EnvironmentFailure, match=r"127\.0\.0\.1:9/v1 does not answer"):
        agentrl.play("key_door", "opens", endpoint="http://127.0.0.1:9/v1")
    monkeypatch.setenv("MY_KEY", "secret")
    with pytest.raises(EnvironmentFailure, match="HTTP 401"):
        agentrl.play("key_door", "keyed", endpoint=url)
    with pytest.raises(ConfigError, match="name an environment"):
        agentrl.play(model="opens", endpoint=url)


def test_a_key_that_an_endpoint_repeats_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with judge_server(401) as server, pytest.raises(EnvironmentFailure, match=r"not now, Bearer \*\*\*"):
        agentrl.play("key_door", "m", endpoint=server.url)
