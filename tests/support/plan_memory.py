"""`agentrl plan` against what an update and an engine take: models of 5 to 150 million weights, on a CPU.

Each case is a process of its own, or two (`ddp`, `fsdp`): a step of two minibatches of two micro-batches each, filled to
the budget, on made-up trajectories that share nothing. Compared are the megabytes that the plan counts for training (no engine)
with how much the resident set rose over that of a process that has trained a model of nothing, at its highest in the updates
(of two, the one that rose most). Cases of sampling are of the `transformers` engine alone (weights, keys and values, its
largest pass; not the trainer's model): all of its rows get the longest contexts. Memory that is freed goes back at once
(`MALLOC_MMAP_THRESHOLD_`), so that the highest is not what allocators keep; nor are kernels kept, of which a CPU compiles one
for each shape in bfloat16 (`LRU_CACHE_CAPACITY`).
"""

import asyncio
import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from transformers import Qwen3MoeConfig

from agentrl import Credit, Trajectory, TrajectoryGroup, Turn
from agentrl.learn.learner import Learner
from agentrl.learn.policy_state import PolicyState
from agentrl.models.auto_classes import auto_class
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.lora import add_lora, round_frozen
from agentrl.policy.model import Policy, checkpoint_layers, local_config
from agentrl.recipe.config import Recipe
from agentrl.run.memory import model_config, plan_memory
from agentrl.run.parts import build_engine
from agentrl.types import Sampling, StopReason, TaskShard
from tests.support.several import together

_ENGINE = {"engine", "keys and values", "a pass of sampling"}
_ROWS = 16
"""Contexts that are sampled together."""
_NOTHING = {
    "vocab_size": 512,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "intermediate_size": 32,
}


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    tokens: int
    how: str = ""
    """Words: checkpointing, bfloat16, copy (`bfloat16_copy`), adapters, reference (a KL term), vocabulary (a large one), untied
    (head and embedding), mixture (of 16 experts, 4 for a token), ddp, fsdp; or sampling."""

    @property
    def num_processes(self) -> int:
        return 2 if {"ddp", "fsdp"} & set(self.how.split()) else 1

    @property
    def samples(self) -> bool:
        return "sampling" in self.how.split()

    def recipe(self, folder: Path, changes: Mapping[str, int] | None = None) -> Recipe:
        """Return what is planned and measured, of a model's `config.json` in a folder; `changes`: of its sizes."""
        local = {
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "num_heads": self.hidden_size // 64,
            "num_kv_heads": self.hidden_size // 128,
            "intermediate_size": 3 * self.hidden_size,
            "vocab_size": self.vocab_size,
        } | dict(changes or {})
        words = self.how.split()
        config = local_config(LocalModelConfig(**local), vocab_size=local["vocab_size"])
        if "mixture" in words:
            experts = {
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": local["intermediate_size"] // 4,
            }
            config = Qwen3MoeConfig(**config.to_dict() | experts | {"model_type": "qwen3_moe"})
        config.tie_word_embeddings = "untied" not in words
        config.save_pretrained(folder)
        train = {
            "num_minibatches": 2,
            "max_tokens_per_micro_batch": self.tokens,
            "gradient_checkpointing": "checkpointing" in words,
            "precision": "bfloat16" if "bfloat16" in words else "float32",
            "bfloat16_copy": "copy" in words,
            "sharding": "full" if "fsdp" in words else "none",
            "device": "cpu",
        }
        rollout: dict[str, object] = {"max_context_tokens": self.tokens if self.samples else min(self.tokens, 512)}
        if self.samples:
            rollout |= {
                "max_turn_tokens": 16,
                "mode": "async",
            }  # else the plan has what is larger, an update or a pass of the engine
        return Recipe.model_validate(
            {
                "model": {"name_or_path": str(folder), "lora": {} if "adapters" in words else None},
                "loss": {"kl_coefficient": 0.1 if "reference" in words else 0.0},
                "train": train,
                "rollout": rollout,
                "engine": {"name": "transformers", "max_batch_size": _ROWS if self.samples else 1},
            }
        )


CASES = [
    Case(256, 4, 4096, 1024),
    Case(512, 8, 8192, 512),
    Case(512, 8, 8192, 2048),
    Case(512, 8, 8192, 2048, "checkpointing"),
    Case(768, 12, 16384, 512),
    Case(768, 12, 16384, 1024, "checkpointing"),
    Case(1024, 10, 8192, 512),
    Case(512, 8, 8192, 1024, "bfloat16"),
    Case(768, 12, 16384, 512, "bfloat16"),
    Case(512, 8, 8192, 1024, "bfloat16 checkpointing"),
    Case(512, 8, 8192, 1024, "bfloat16 copy"),
    Case(512, 8, 8192, 1024, "bfloat16 copy checkpointing"),
    Case(512, 8, 8192, 1024, "adapters"),
    Case(768, 12, 16384, 512, "adapters checkpointing"),
    Case(512, 8, 8192, 1024, "adapters bfloat16"),
    Case(768, 12, 16384, 512, "adapters bfloat16 checkpointing"),
    Case(512, 8, 8192, 1024, "reference"),
    Case(512, 8, 8192, 1024, "adapters reference"),
    Case(512, 8, 8192, 1024, "ddp"),
    Case(768, 12, 16384, 512, "ddp"),
    Case(512, 8, 8192, 1024, "ddp adapters"),
    Case(512, 8, 8192, 1024, "fsdp"),
    Case(768, 12, 16384, 512, "fsdp"),
    Case(512, 8, 8192, 1024, "fsdp checkpointing"),
    Case(512, 8, 8192, 1024, "fsdp bfloat16"),
    Case(768, 12, 16384, 512, "fsdp bfloat16 checkpointing"),
    Case(512, 8, 8192, 1024, "fsdp adapters bfloat16"),
    Case(256, 2, 65536, 512, "vocabulary"),
    Case(256, 2, 65536, 512, "vocabulary checkpointing"),
    Case(256, 2, 32768, 512, "vocabulary checkpointing"),
    Case(256, 2, 65536, 512, "vocabulary untied checkpointing"),
    Case(256, 2, 65536, 512, "vocabulary bfloat16 checkpointing"),
    Case(256, 8, 65536, 2048, "vocabulary untied"),
    Case(256, 2, 65536, 512, "vocabulary ddp checkpointing"),
    Case(256, 2, 65536, 512, "vocabulary fsdp checkpointing"),
    Case(256, 2, 32768, 512, "vocabulary fsdp checkpointing"),
    Case(256, 2, 65536, 512, "vocabulary untied fsdp checkpointing"),
    Case(256, 2, 65536, 512, "vocabulary fsdp bfloat16 checkpointing"),
    Case(256, 2, 65536, 512, "vocabulary untied fsdp bfloat16 checkpointing"),
    Case(256, 4, 8192, 512, "mixture"),
    Case(256, 4, 8192, 1024, "mixture checkpointing"),
    Case(256, 4, 8192, 1024, "mixture bfloat16"),
    Case(256, 4, 8192, 1024, "mixture bfloat16 checkpointing"),
    Case(256, 4, 8192, 1024, "mixture adapters bfloat16"),
    Case(256, 4, 8192, 512, "mixture ddp"),
    Case(256, 4, 8192, 512, "mixture fsdp"),
    Case(256, 4, 8192, 512, "mixture fsdp bfloat16 checkpointing"),
    Case(256, 4, 4096, 512, "sampling"),
    Case(512, 8, 8192, 512, "sampling"),
    Case(512, 8, 8192, 1024, "sampling"),
    Case(512, 8, 8192, 512, "sampling bfloat16"),
    Case(512, 8, 8192, 512, "sampling adapters"),
    Case(256, 2, 65536, 64, "sampling vocabulary"),
    Case(256, 4, 8192, 512, "sampling mixture"),
]


def groups(tokens: int, vocab_size: int, num_processes: int) -> tuple[list[TrajectoryGroup], list[list[Credit]]]:
    """Return trajectories of 512 tokens that fill two minibatches of two micro-batches of each process."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(4 * num_processes * tokens // 512):
        ids = rng.integers(vocab_size, size=512).tolist()
        turn = Turn(
            observation_ids=tuple(ids[:64]),
            action_ids=tuple(ids[64:]),
            behavior_logprobs=(-8.0,) * 448,
            versions=(0,) * 448,
            reward=float(number % 2),
        )
        made.append(
            Trajectory(
                group_id="g",
                trajectory_id=f"g/{number}",
                env_id="made up",
                seed=0,
                turns=(turn,),
                stop_reason=StopReason.TERMINATED,
            )
        )
    credits = [Credit.uniform(trajectory, 1.0 - 2 * (number % 2)) for number, trajectory in enumerate(made)]
    return [TrajectoryGroup(group_id="g", trajectories=tuple(made))], [credits]


def update(recipe: Recipe, tokens: int) -> None:
    """Train a step; the policy is made as `agentrl.run.build` makes it."""
    torch.manual_seed(0)
    config, train = model_config(recipe), recipe.train
    half = train.precision == "bfloat16"
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if half else "no")
    model = auto_class(config).from_config(config)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora)
    if train.gradient_checkpointing:
        checkpoint_layers(model, every=int(train.gradient_checkpointing))
    is_sharded = train.is_sharded(accelerator.num_processes)
    if recipe.model.lora is not None and half and not is_sharded:
        round_frozen(model)
    policy, reference = Policy(model, layout="tree"), None
    del model
    if recipe.loss.kl_coefficient:
        frozen = [p for p in policy.parameters() if not p.requires_grad and not is_sharded]
        reference = copy.deepcopy(policy, {id(p): p for p in frozen})
    state = PolicyState(policy, accelerator=accelerator, config=train, reference=reference)
    learner = Learner(state, loss=recipe.loss, config=train, temperature=1.0, seed=0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # what counts is the highest of the updates
    learner.update(*groups(tokens, config.vocab_size, accelerator.num_processes), version=0)


def sample(recipe: Recipe) -> float:
    """Fill every row of an engine that is made as in a run, by prompts that grow and by long ones.

    Returns:
        the resident set in MB before there was an engine.
    """
    torch.manual_seed(0)
    model = auto_class(config := model_config(recipe)).from_config(config)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora)
    with tempfile.TemporaryDirectory() as handover:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        engine = build_engine(
            recipe.engine,
            model,
            rollout=recipe.rollout,
            train=recipe.train,
            shard=TaskShard(1),
            device=torch.device("cpu"),
            handover=Path(handover),
        )
    length = recipe.rollout.max_context_tokens

    async def fill(of: str, num_prompt_tokens: int) -> None:
        prompts = torch.randint(config.vocab_size, (_ROWS, num_prompt_tokens)).tolist()
        sampling = Sampling(max_tokens=length - num_prompt_tokens, stop_token_ids=(), seed=0)
        names = [f"{of} {number}" for number in range(_ROWS)]
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(engine.conversation(name))
            requests = zip(prompts, names, strict=True)
            await asyncio.gather(*(engine.generate(ids, sampling, name) for ids, name in requests))

    async def fill_twice() -> None:
        await engine.resume()
        await fill("growing", 5 * length // 8)
        await fill("at once", length - 1)
        await engine.close()

    asyncio.run(fill_twice())
    return before


def resident(of: str) -> float:
    """Return the resident set in MB: `VmRSS`, or `VmHWM` at its highest."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{of}:")[2].split()[0]) / 1024


def measure(case: Case) -> float:
    """Return by how many megabytes a case raises the resident set of this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if case.samples:
            sample(case.recipe(Path(folder), _NOTHING))
            before = sample(case.recipe(Path(folder)))
        else:
            update(case.recipe(Path(folder), _NOTHING), 512)
            before = resident("VmRSS")
            update(case.recipe(Path(folder)), case.tokens)
    return resident("VmHWM") - before


def planned_and_measured(case: Case) -> tuple[float, float]:
    """Return the megabytes that the plan counts for what a case does, and those that it took in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (process,) = plan_memory(case.recipe(Path(folder)), gpus=case.num_processes, memory=0)
    planned = sum(size for name, size in process.uses.items() if (name in _ENGINE) == case.samples) / 2**20
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "LRU_CACHE_CAPACITY": "1",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.support.plan_memory", str(CASES.index(case))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return planned, float(done.stdout.split()[-1])


def main() -> None:
    """Measure the case whose number is given, and print megabytes."""
    case = CASES[int(sys.argv[1])]
    print(max([measure(case)] if case.num_processes == 1 else together(case.num_processes, measure, case)))


if __name__ == "__main__":
    main()
