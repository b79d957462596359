"""Runs in which a program plays in place of an environment."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.agent.config import AgentConfig
from agentrl.errors import UserError
from agentrl.recipe.config import load_recipe
from agentrl.report.records import read_records
from agentrl.rollout.agent_episode import AgentPlayer
from agentrl.run import parts
from tests.support.each import each
from tests.support.runs import train

openai: Any = pytest.importorskip("openai", reason="comes with the extra of vLLM")

ROWS = [{"question": f"What is {number}?", "side": "eval" if number > 7 else "train"} for number in range(10)]
MODEL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}


def counts_to_two(task: dict[str, Any], session: Any) -> dict[str, float]:
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(2):
        response = client.chat.completions.create(model="policy", messages=messages)
        messages += [response.choices[0].message, {"role": "user", "content": "on"}]
    return {"reward": float("a" in messages[-2].content), "success": 1.0}


def settings(folder: Path, **changes: Any) -> Any:
    sections = {
        "run_dir": str(folder),
        "agent": {"run": f"{__name__}:counts_to_two", "tasks": {"tasks": ROWS, "split": "side"}},
        "model": {"local": MODEL},
        "rollout": {"num_groups": 2, "group_size": 2, "max_turn_tokens": 4, "max_context_tokens": 128},
        "train": {"steps": 2, "num_minibatches": 1, "checkpoint_every": 1},
        "evaluation": {"num_tasks": 2},
        "report": {"rollouts_every": 1},
    }
    return load_recipe(sections, changes=changes)


@pytest.mark.process
def test_a_run_trains_on_the_calls_of_a_program_and_is_resumed(tmp_path: Path) -> None:
    folder, rows = train(settings(tmp_path / "run"))
    assert [row["eval/success"] for row in rows if "eval/success" in row] == [1.0, 1.0]
    assert rows[-1]["stop/agent_error"] == 0.0
    resumed, rows = train(load_recipe(folder.config_file, changes={"train": {"steps": 3}}), folder)
    assert [row["step"] for row in rows] == [0.0, 1.0, 2.0, 3.0]
    records = [record for path in resumed.rollouts() for record in read_records(path)]
    assert {len(record.turns) for record in records} == {2}
    assert all(len(turn.advantages) == len(turn.action_ids) for record in records for turn in record.turns)
    assert {record.step for record in records} == {1, 2, 3}


@each(
    ("changes", "words"),
    [
        ({"warmup": {"steps": 3}}, r"warmup\.steps: a program has no oracle"),
        ({"agent": {"run": "json:no_such"}}, r"agent\.run"),
        ({"agent": {"tasks": {"prompt": "text"}}}, r"agent\.tasks: .* no column 'text'"),
        ({"agent": {"reward": "exact_mach"}}, r"^agent\.rewards\[0\].*exact_match"),
        ({"engine": {"lockstep": True}}, r"engine\.lockstep"),
        ({"credit": {"scheme": "gigpo"}}, "state_keys"),
    ],
)
def test_what_a_program_cannot_do_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        train(settings(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_recipe_has_a_program_or_an_environment() -> None:
    agent = {"run": f"{__name__}:counts_to_two", "tasks": ROWS}
    with pytest.raises(UserError, match="agent: it plays in place of env"):
        load_recipe({"agent": agent, "env": {"id": "corridor"}})
    assert load_recipe({"agent": agent}, changes={"env": {"id": "corridor"}}).agent is None


def test_each_rank_listens_at_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AgentConfig.model_validate({"run": f"{__name__}:counts_to_two", "tasks": ROWS, "port": 4000})
    monkeypatch.setattr(parts, "process_index", lambda: 2)
    player = parts.build_agent(config).player
    assert isinstance(player, AgentPlayer)
    assert player.config.port == 4002
