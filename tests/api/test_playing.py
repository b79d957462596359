import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentrl
from agentrl.errors import ConfigError, EnvironmentFailure
from agentrl_envs.key_door import KeyDoor
from tests.support import chat_server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, Path(chat_server.__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
        server.terminate()


def test_a_model_behind_an_endpoint_calls_tools(url: str) -> None:
    played = agentrl.play("key_door", "opens", endpoint=url, seed=4, max_turns=9)
    assert played.is_over
    assert 'assistant: open_box({"box": 1})' in str(played)
    assert [message["role"] for message in played.messages[:3]] == ["user", "assistant", "tool"]
    again = agentrl.play({"id": "key_door", "options": {"num_distractors": 0}}, "opens", endpoint=url, seed=4)
    assert len(again.rewards) == 2


def call(function: object) -> dict[str, object]:
    return {"tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    "message", [{"content": 5}, {"tool_calls": "look"}, {"tool_calls": [1]}, call(None), call({"name": 5})]
)
def test_what_an_endpoint_answers_may_be_no_message(message: dict[str, object], url: str) -> None:
    with pytest.raises(EnvironmentFailure, match="no chat completion"):
        agentrl.play("key_door", json.dumps(message), endpoint=url, max_turns=2)


@pytest.mark.parametrize("message", [call({"name": "look"}), {"content": "\ud800"}])
def test_an_odd_message_of_an_endpoint_is_played(message: dict[str, object], url: str) -> None:
    assert len(agentrl.play("key_door", json.dumps(message), endpoint=url, max_turns=2).rewards) == 2


class Raises(KeyDoor):
    def answer(self, text: str) -> str:
        raise SystemExit(0)


def test_what_is_put_around_an_environment_is_there_behind_an_endpoint(url: str) -> None:
    limit = {"id": "agentrl.env.wrappers.limit_observation:LimitObservation", "max_chars": 10}
    played = agentrl.play({"id": "key_door", "wrappers": [limit]}, "opens", endpoint=url, max_turns=1)
    assert "characters" in played.messages[0]["content"]


def test_an_environment_that_fails_behind_an_endpoint_is_told(url: str) -> None:
    with pytest.raises(EnvironmentFailure, match=r"the environment raised SystemExit: 0 \(test_playing.py:"):
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
