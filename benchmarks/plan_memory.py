"""`agentrl plan` against what an update takes: models of 5 to 150 million weights, on a CPU.

    python -m benchmarks.plan_memory

Each case is a process of its own: two steps of two minibatches of two micro-batches each, filled to the budget, on made-up
trajectories that share nothing. Printed: megabytes that the plan counts for training (no engine), by how much the resident set
rose over that of a process that has trained a model of nothing, at its highest, and their ratio. Memory that is freed goes back
at once (`MALLOC_MMAP_THRESHOLD_`), so that the highest is not what allocators keep.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from agentrl import Credit, Trajectory, TrajectoryGroup, Turn
from agentrl.config import Recipe
from agentrl.engine.model_class import auto_class
from agentrl.learn.learner import Learner
from agentrl.learn.policy_state import PolicyState
from agentrl.memory import model_config, plan_memory
from agentrl.policy.model import Policy
from agentrl.types import StopReason

_ENGINE = {"engine", "keys and values"}
_NOTHING = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    tokens: int
    checkpointing: bool = False
    bfloat16: bool = False

    def recipe(self) -> Recipe:
        """Return what is planned and measured."""
        local = {
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "num_heads": self.hidden_size // 64,
            "num_kv_heads": self.hidden_size // 128,
            "intermediate_size": 3 * self.hidden_size,
            "vocab_size": self.vocab_size,
        }
        train = {
            "num_minibatches": 2,
            "max_tokens_per_micro_batch": self.tokens,
            "gradient_checkpointing": self.checkpointing,
            "precision": "bfloat16" if self.bfloat16 else "float32",
            "device": "cpu",
        }
        rollout = {"max_context_tokens": min(self.tokens, 512)}
        return Recipe.model_validate(
            {"model": {"local": local}, "train": train, "rollout": rollout, "engine": {"name": "transformers"}}
        )


CASES = [
    Case(256, 4, 4096, 1024),
    Case(512, 8, 8192, 512),
    Case(512, 8, 8192, 2048),
    Case(512, 8, 8192, 2048, checkpointing=True),
    Case(768, 12, 16384, 512),
    Case(768, 12, 16384, 1024, checkpointing=True),
    Case(1024, 10, 8192, 512),
]


def groups(tokens: int, vocab_size: int) -> tuple[list[TrajectoryGroup], list[list[Credit]]]:
    """Return trajectories of 512 tokens that fill two minibatches of two micro-batches each."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(4 * tokens // 512):
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
    """Train twice."""
    torch.manual_seed(0)
    config = model_config(recipe)
    model = auto_class(config).from_config(config)
    if recipe.train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if recipe.train.precision == "bfloat16" else "no")
    state = PolicyState(Policy(model, layout="tree"), accelerator=accelerator, config=recipe.train)
    learner = Learner(state, loss=recipe.loss, config=recipe.train, temperature=1.0, seed=0)
    for version in range(2):
        learner.update(*groups(tokens, config.vocab_size), version=version)


def resident(of: str) -> float:
    """Return the resident set in MB: `VmRSS`, or `VmHWM` at its highest."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{of}:")[2].split()[0]) / 1024


def measure(case: Case) -> None:
    """Print by how many megabytes a case raises the resident set."""
    torch.set_num_threads(1)
    nothing = case.recipe().model_dump()
    nothing["model"]["local"] |= _NOTHING
    update(Recipe.model_validate(nothing), 512)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    update(case.recipe(), case.tokens)
    print(resident("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=int, help="measure this one here, and print the number alone")
    options = parser.parse_args()
    if options.case is not None:
        measure(CASES[options.case])
        return
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
    }
    print(
        "| hidden size | layers | vocabulary | tokens | checkpointing | bfloat16 | planned, MB | measured, MB | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for number, case in enumerate(CASES):
        (process,) = plan_memory(case.recipe(), gpus=1, memory=0)
        planned = sum(size for name, size in process.uses.items() if name not in _ENGINE) / 2**20
        command = [sys.executable, "-m", "benchmarks.plan_memory", "--case", str(number)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        measured = float(done.stdout.split()[-1])
        cells = [case.hidden_size, case.num_layers, case.vocab_size, case.tokens, case.checkpointing, case.bfloat16]
        print(
            f"| {' | '.join(map(str, cells))} | {planned:.0f} | {measured:.0f} | {planned / measured:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
