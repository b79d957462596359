"""`agentrl agent try`, and what other commands make of an agent."""

from pathlib import Path

import pytest

from agentrl.cli import main

AGENT = """
import json
import urllib.request

def solve(task, session):
    def ask(messages):
        body = json.dumps({"model": "policy", "messages": messages, "temperature": 0.3}).encode()
        headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{session.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]

    question = {"role": "user", "content": task["question"]}
    ask([question, ask([question]), {"role": "user", "content": "again"}])
    ask([question, {"role": "assistant", "content": "mine"}, {"role": "user", "content": "again"}])
    return 0.5
"""
RECIPE = """
agent: {run: "played:solve", tasks: {tasks: tasks.jsonl, eval_share: 0.5}}
model: {local: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, intermediate_size: 32}}
rollout: {max_turn_tokens: 4, max_context_tokens: 256}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "played", raising=False)
    Path("played.py").write_text(AGENT, encoding="utf-8")
    Path("tasks.jsonl").write_text("".join(f'{{"question": "q{i}"}}\n' for i in range(8)), encoding="utf-8")
    Path("agent.yaml").write_text(RECIPE, encoding="utf-8")
    return "agent.yaml"


def refused(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_task_is_played_and_its_calls_are_printed(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["agent", "try", recipe])
    told = capsys.readouterr().out
    assert "call 2: continues turn 1" in told
    assert "call 3: rewrites turn 1" in told
    assert "became assistant: mine" in told
    assert "not taken over: temperature: 0.3 (calls 1, 2, 3)" in told
    assert "dialect: chat (3 calls)" in told
    assert "3 calls: 1 continued, 0 forked, 1 rewritten, 1 lines" in told
    assert "terminated: reward 0.5" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["agent", "try", "played:solve"], "--tasks: name the table"),
        (["agent", "try", "calculator"], "its recipe has no agent"),
        (["agent", "try", "agent.yaml", "--number", "0"], "--number: expected at least 1"),
        (["envs", "check", "agent.yaml"], "agentrl agent try agent.yaml"),
        (["envs", "play", "agent.yaml"], "plays in place of an environment"),
        (
            ["eval", "agent.yaml", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m"],
            "only an environment is played",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(
    words: list[str], told: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(*words) == 2
    assert told in capsys.readouterr().err
