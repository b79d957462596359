import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentrl
from agentrl.errors import ConfigError, EnvironmentFailure
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
