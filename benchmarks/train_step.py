"""A training step against TRL's GRPOTrainer in GSPO mode, on the same trajectories: time and peak memory.

    pip install 'trl==1.16.*'
    python -m benchmarks.train_step [--rows shared_75 tools ...] [--repeats 5] [--quick]
        [--devices cpu cuda] [--batch_size 8] [--max_tokens 0] [--gradient_checkpointing] [--rollouts FILE]
    python -m benchmarks.train_step --bound 0.02 [--rows shared_75] [--repeats 5] [--quick]    cost of train.target_kl
    python -m benchmarks.train_step --copy [--rows shared_75_bf16] [--repeats 5] [--quick]    gain of train.bfloat16_copy

Each side lives in a process of its own and the two take turns, step by step; times are medians. A step is forward and
backward passes over all trajectories, gradient norm, and AdamW. TRL's is its own training loop, from `on_step_begin` to
`on_step_end`, given the padded tensors that its generation would have made; agentrl's is `Learner.update`, which begins
with trajectories and plans. The first step is not timed: there the losses are compared, and the gradients, as their
optimizers get them: the norm of the difference over all weights, relative to that of TRL's.

Peak memory is the most that a process ever holds resident (on a GPU: has allocated), less what it holds with model and
trainer made and no step taken, and less Adam's moments (`moments_mib`), which are the same for both: it is what the
gradient and the passes take.

A pass holds eight rows of TRL's, its default (`batch_size`), and one group of ours, each shared token once
(`max_tokens`). Gradient checkpointing, which TRL turns on by default, is off unless asked for: it saves memory and costs
time. The model is a small Qwen3 (hidden 256, 4 layers) with random weights, or one of a published size.

`--bound` compares agentrl with itself, without and with `train.target_kl`: whole updates, of one and of four minibatches,
whose tokens are fresh or stale. `--copy` compares autocast with `train.bfloat16_copy`, without and with gradient checkpointing.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from agentrl.chat import train_tokenizer
from agentrl.credit import Credit
from agentrl.learn.config import LossConfig, TrainConfig
from agentrl.learn.learner import CreditedMinibatch, Learner, TrainingPass
from agentrl.learn.policy_state import PolicyState
from agentrl.learn.tokens import rows_of
from agentrl.models.gguf import SMOLLM2, gguf_folder
from agentrl.policy.layout import choose_layout
from agentrl.policy.layout.tree import plan_tree
from agentrl.policy.model import Policy, checkpoint_layers
from agentrl.report.records import read_records
from agentrl.types import StopReason, Trajectory, TrajectoryGroup, Turn
from benchmarks.result_lines import fields_block
from tests.support.qwen3 import config_of

LOSS: dict[str, Any] = {"algorithm": "gspo_token", "clip_low": 3e-4, "clip_high": 4e-4}
TRAIN: dict[str, Any] = {"num_minibatches": 1, "learning_rate": 1e-6, "max_grad_norm": 1e9, "target_kl": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is trained on."""

    groups: int = 4
    group_size: int = 8
    turns: tuple[tuple[int, int], ...] = ()
    """Observation and action tokens of each turn. Empty: of one turn, with lengths from `lengths`."""
    is_shared: bool = True
    """The first observation is the same in the whole group."""
    vocab_size: int = 2048
    size: str | None = None
    """Of a published Qwen3, with its vocabulary, or `smollm2` with its weights. None: hidden 256, 4 layers."""
    precision: Literal["float32", "bfloat16"] = "float32"
    faster: float | None = None
    """The aim: TRL's time over ours."""
    leaner: float | None = None
    """The aim: TRL's peak memory over ours."""


def shared(share: float, length: int = 1024) -> tuple[tuple[int, int], ...]:
    return ((int(share * length), length - int(share * length)),)


_TOOLS = ((70, 30), *[(102, 30)] * 7)
ROWS = {
    "shared_50": Row(turns=shared(0.5)),
    "shared_75": Row(turns=shared(0.75), faster=3, leaner=2),
    "shared_75_bf16": Row(turns=shared(0.75), precision="bfloat16", faster=3, leaner=2),
    "shared_90": Row(turns=shared(0.9)),
    "shared_90_of_16": Row(groups=2, group_size=16, turns=shared(0.9), faster=6),
    "long_tail": Row(is_shared=False, faster=3.5),
    "vocabulary": Row(groups=1, turns=shared(0.75), vocab_size=151_936, faster=8, leaner=8),
    "tools": Row(turns=_TOOLS, vocab_size=8192, faster=1.7),
    "flagship": Row(turns=((41, 2), *[(22, 2)] * 6), vocab_size=49_152, size=SMOLLM2, faster=2),
    "0.6B_shared_75": Row(turns=shared(0.75), vocab_size=151_936, size="0.6B", precision="bfloat16"),
    "0.6B_tools": Row(turns=_TOOLS, vocab_size=151_936, size="0.6B", precision="bfloat16"),
}
"""Tools: three quarters of what follows the prompt are observations. Flagship: SmolLM2-135M-Instruct, seven short
turns of random tokens. `0.6B`: for GPUs."""
QUICK = {"shared_75": replace(ROWS["shared_75"], groups=2, turns=shared(0.75, 128), faster=None, leaner=None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a side is told."""

    row: Row
    groups: list[TrajectoryGroup]
    advantages: list[list[float]]
    """One for each trajectory of each group."""
    device: str
    steps: int
    batch_size: int
    """Rows of a pass of TRL's."""
    max_tokens: int
    """Tokens of a pass of ours."""
    gradient_checkpointing: bool
    folder: Path
    loss: dict[str, Any]
    """Loss of the recipe."""
    train: dict[str, Any]
    """What `train` of the recipe has beside the defaults."""
    version: int = 0
    """Version of the policy before each step. The tokens' is 0."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


def make_model(row: Row) -> Any:
    torch.manual_seed(0)
    small = Qwen3Config(
        vocab_size=row.vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    if row.size == SMOLLM2:
        return AutoModelForCausalLM.from_pretrained(
            str(gguf_folder(SMOLLM2, field="--rows")), dtype="float32", attn_implementation="sdpa"
        )
    config = small if row.size is None else config_of(row.size, vocab_size=row.vocab_size)
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config)


def read_episodes(path: Path) -> list[list[list[npt.NDArray[np.int64]]]]:
    """Return observation and action of each turn of each episode of each group in a step's recorded rollouts."""
    groups: dict[str, list[list[npt.NDArray[np.int64]]]] = {}
    for record in read_records(path):
        parts = [np.array(ids) for turn in record.turns for ids in (turn.observation_ids, turn.action_ids)]
        groups.setdefault(record.group_id, []).append(parts)
    return list(groups.values())


def make_groups(row: Row, rollouts: Path | None = None) -> tuple[list[TrajectoryGroup], list[list[float]]]:
    """Return trajectories of random tokens, or of recorded rollouts, and advantages.

    Ratios of trajectories are 0.5 to 2 % off 1, far beyond the clip range and any rounding: one in four on the side on which
    its advantage clips it, the others on the side on which it does not.
    """
    rng, model = np.random.default_rng(0), make_model(row).to("cuda" if torch.cuda.is_available() else "cpu")
    recorded = None if rollouts is None else read_episodes(rollouts)
    groups, advantages = [], []
    for group in range(row.groups):
        advantages.append((drawn := rng.normal(size=row.group_size)) - drawn.mean())
        prompt = rng.integers(row.vocab_size, size=row.turns[0][0]) if row.turns else None
        members = []
        for member, advantage in enumerate(advantages[-1]):
            # Two standard deviations to either end of the range.
            length = int(np.clip(rng.lognormal(np.log(16 * 2000) / 2, np.log(2000 / 16) / 4), 16, 2000))
            lengths = row.turns or ((8, length - 8),)
            parts = [rng.integers(row.vocab_size, size=size) for turn in lengths for size in turn]
            if row.is_shared and prompt is not None:
                parts[0] = prompt
            if recorded is not None:
                parts = recorded[group][member]
            is_action_L = np.concatenate([np.full(len(part), number % 2 == 1) for number, part in enumerate(parts)])
            logprobs_T = model_logprobs(model, np.concatenate(parts), is_action_L)
            noise_T = rng.normal(scale=0.05, size=len(logprobs_T))
            towards_clip = 1 if member % 4 == 0 else -1
            log_ratio = towards_clip * math.copysign(rng.uniform(0.005, 0.02), advantage)
            behavior_T = logprobs_T - log_ratio + noise_T - noise_T.mean()
            members.append(trajectory(group, member, parts, behavior_T))
        groups.append(TrajectoryGroup(group_id=str(group), trajectories=tuple(members)))
    return groups, [values.tolist() for values in advantages]


@torch.no_grad()
def model_logprobs(model: Any, ids_L: npt.NDArray[np.int64], is_action_L: npt.NDArray[np.bool_]) -> Any:
    ids_1L = torch.from_numpy(ids_L)[None].to(model.device)
    slot_T = torch.from_numpy(is_action_L.nonzero()[0]).to(model.device) - 1
    logits_TV = model(input_ids=ids_1L, logits_to_keep=slot_T).logits[0]
    return logits_TV.log_softmax(-1).gather(1, ids_1L[0, slot_T + 1, None])[:, 0].double().cpu().numpy()


def trajectory(group: int, member: int, parts: Sequence[npt.NDArray[np.int64]], behavior_T: Any) -> Trajectory:
    actions = parts[1::2]
    behaviors = np.split(behavior_T, np.cumsum([len(action) for action in actions])[:-1])
    return Trajectory(
        group_id=str(group),
        trajectory_id=f"{group}/{member}",
        env_id="random",
        seed=group,
        turns=tuple(
            Turn(
                observation_ids=tuple(observation.tolist()),
                action_ids=tuple(action.tolist()),
                behavior_logprobs=tuple(behavior.tolist()),
                versions=(0,) * len(action),
                reward=0.0,
            )
            for observation, action, behavior in zip(parts[::2], actions, behaviors, strict=True)
        ),
        stop_reason=StopReason.TERMINATED,
    )


class TimedLearner(Learner):
    """Knows how long it planned."""

    planning_s = 0.0

    def plan(self, minibatch: CreditedMinibatch, *, share: float | None = None) -> list[TrainingPass]:
        begin = time.perf_counter()
        plan = super().plan(minibatch, share=share)
        self.planning_s += time.perf_counter() - begin
        return plan


def agentrl_side(task: Task, pipe: Connection) -> None:
    model = make_model(task.row)
    config = TrainConfig(max_tokens_per_micro_batch=task.max_tokens, precision=task.row.precision, **task.train)
    mixed = "bf16" if config.precision == "bfloat16" else "no"
    accelerator = Accelerator(cpu=task.device == "cpu", mixed_precision=mixed)
    layout, message = choose_layout(model.to(accelerator.device), "auto")
    if message:
        print(message)
    if config.gradient_checkpointing:
        checkpoint_layers(model, every=int(config.gradient_checkpointing))
    learner = TimedLearner(
        PolicyState(Policy(model, layout=layout), accelerator=accelerator, config=config),
        loss=LossConfig.model_validate(task.loss),
        config=config,
        temperature=1.0,
        seed=0,
    )
    credits = [
        [Credit.uniform(t, advantage) for t, advantage in zip(group.trajectories, advantages, strict=True)]
        for group, advantages in zip(task.groups, task.advantages, strict=True)
    ]
    keep_first_gradient(model, task.folder / "agentrl")
    meter = Meter(task.device, pipe)
    for _ in range(task.steps):
        meter.start()
        learner.planning_s = 0.0
        metrics = learner.update(task.groups, credits, version=task.version)
        meter.stop(loss=metrics["loss"], planning_s=learner.planning_s, clipped=metrics["clip/units"])
    meter.close()


def trl_side(task: Task, pipe: Connection) -> None:
    trl, datasets = import_module("trl"), import_module("datasets")
    meter: Meter
    losses: list[float] = []

    class Recorded(trl.GRPOTrainer):  # type: ignore[name-defined]
        """Trains on the task's trajectories in place of generating any."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return batch

        def training_step(self, *args: Any) -> Any:
            loss = super().training_step(*args)
            losses.append(float(loss))
            return loss

    class TakeTurns(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            losses.clear()
            meter.start()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.stop(loss=sum(losses))

    num = len(task.trajectories)
    model = make_model(task.row)
    config = trl.GRPOConfig(
        output_dir=str(task.folder / "run"),
        use_cpu=task.device == "cpu",
        bf16=task.row.precision == "bfloat16",
        importance_sampling_level="sequence",
        loss_type="grpo",
        beta=0.0,
        epsilon=LOSS["clip_low"],
        epsilon_high=LOSS["clip_high"],
        num_generations=task.row.group_size,
        per_device_train_batch_size=task.batch_size,
        gradient_accumulation_steps=num // task.batch_size,
        gradient_checkpointing=task.gradient_checkpointing,
        max_steps=task.steps,
        learning_rate=TRAIN["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=TRAIN["max_grad_norm"],
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Recorded(
        model=model,
        reward_funcs=[no_reward],
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "unused"}] * num),
        processing_class=train_tokenizer([], vocab_size=261),
        callbacks=[TakeTurns()],
    )
    trainer.remove_callback(PrinterCallback)
    batch = {name: tensor.to(trainer.accelerator.device) for name, tensor in padded(task).items()}
    keep_first_gradient(model, task.folder / "trl")
    meter = Meter(task.device, pipe)
    trainer.train()
    meter.close()


def no_reward(prompts: list[str], **kwargs: Any) -> list[float]:
    raise NotImplementedError


def padded(task: Task) -> dict[str, torch.Tensor]:
    """Return the tensors that TRL's generation returns: (B, P) of prompts, padded on the left, (B, C) of completions."""
    rows = []
    for t in task.trajectories:
        ids = [part for turn in t.turns for part in (turn.observation_ids, turn.action_ids)][1:]
        is_action_C = torch.cat([torch.full((len(part),), number % 2 == 0) for number, part in enumerate(ids)])
        behavior_C = torch.zeros(len(is_action_C))
        behavior_C[is_action_C] = torch.tensor([value for turn in t.turns for value in turn.behavior_logprobs])
        completion_C = torch.tensor([token for part in ids for token in part])
        rows.append((torch.tensor(t.turns[0].observation_ids), completion_C, is_action_C.long(), behavior_C))
    prompts, completions, actions, behaviors = zip(*rows, strict=True)

    def below(tensors: Sequence[torch.Tensor], side: str = "right") -> torch.Tensor:
        return pad_sequence(list(tensors), batch_first=True, padding_side=side)

    return {
        "prompt_ids": below(prompts, "left"),
        "prompt_mask": below([torch.ones_like(prompt_P) for prompt_P in prompts], "left"),
        "completion_ids": below(completions),
        "completion_mask": below([torch.ones_like(completion_C) for completion_C in completions]),
        "tool_mask": below(actions),
        "old_per_token_logps": below(behaviors),
        "advantages": torch.tensor([advantage for of_group in task.advantages for advantage in of_group]),
    }


def keep_first_gradient(model: Any, path: Path) -> None:
    """Write the gradient that the next step of any optimizer gets into a file."""

    def write(*args: Any) -> None:
        handle.remove()
        with path.open("wb") as file:
            for parameter in model.parameters():
                file.write(parameter.grad.float().cpu().numpy().data)

    handle = register_optimizer_step_pre_hook(write)


class Meter:
    """Waits for its turn, times a step, and reports it."""

    def __init__(self, device: str, pipe: Connection) -> None:
        self._device, self._pipe = device, pipe
        self._before = resident_mib("VmRSS") if device == "cpu" else torch.cuda.memory_allocated() / 2**20

    def start(self) -> None:
        self._pipe.recv()
        self._begin, self._begin_cpu = time.perf_counter(), time.process_time()

    def stop(self, **figures: float) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()
        seconds, cpu_s = time.perf_counter() - self._begin, time.process_time() - self._begin_cpu
        self._pipe.send({"seconds": seconds, "cpu_s": cpu_s, **figures})

    def close(self) -> None:
        peak = resident_mib("VmHWM") if self._device == "cpu" else torch.cuda.max_memory_allocated() / 2**20
        self._pipe.send(peak - self._before)


def resident_mib(field: str) -> float:
    """Return what this process holds in memory (VmRSS), or the most that it ever held (VmHWM). Linux."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


Side = Callable[[Task, Connection], None]


def take_turns(sides: dict[str, tuple[Side, Task]]) -> tuple[dict[str, list[dict[str, float]]], dict[str, float]]:
    """Let sides take turns, step by step; return the figures of each step, and each side's peak of memory in MiB."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    pipes, processes = {}, []
    for name, (side, task) in sides.items():
        pipes[name], theirs = get_context("spawn").Pipe()
        processes.append(get_context("spawn").Process(target=side, args=(task, theirs), daemon=True))
        processes[-1].start()
        theirs.close()  # so that the death of a side ends the wait for it
    for _ in range(task.steps):
        for name, pipe in pipes.items():
            pipe.send(None)
            found[name].append(pipe.recv())
    peak_mib = {name: pipe.recv() for name, pipe in pipes.items()}
    for process in processes:
        process.join()
    return found, peak_mib


def measure(task: Task) -> dict[str, Any]:
    """Compare agentrl with TRL."""
    sides: dict[str, tuple[Side, Task]] = {"trl": (trl_side, task), "agentrl": (agentrl_side, task)}
    found, peaks = take_turns(sides)
    moments_mib = sum(2 * parameter.nbytes for parameter in make_model(task.row).parameters()) / 2**20
    peak_mib = {name: peak - moments_mib for name, peak in peaks.items()}
    trl_grad, agentrl_grad = (np.fromfile(task.folder / name, dtype=np.float32) for name in sides)
    (trl, agentrl), timed = [steps[0] for steps in found.values()], {name: steps[1:] for name, steps in found.items()}
    seconds, cpu_s = ({n: median(step[key] for step in timed[n]) for n in sides} for key in ("seconds", "cpu_s"))
    return {
        "loss_gap": abs(agentrl["loss"] - trl["loss"]) / abs(trl["loss"]),
        "gradient_gap": float(np.linalg.norm(agentrl_grad - trl_grad) / np.linalg.norm(trl_grad)),
        "clipped": agentrl["clipped"],
        "seconds": seconds,
        "faster": seconds["trl"] / seconds["agentrl"],
        "cpu_s": cpu_s,
        "peak_mib": peak_mib,
        "moments_mib": moments_mib,
        "leaner": peak_mib["trl"] / peak_mib["agentrl"],
        "planning": median(step["planning_s"] / step["seconds"] for step in timed["agentrl"]),
    }


BOUND_CASES = {"1 minibatch, fresh": (1, 0), "4 minibatches, fresh": (4, 0), "4 minibatches, stale": (4, 1)}
"""Minibatches, and version of the policy, of each comparison of a bound."""


def measure_bound(task: Task, bound: float) -> list[dict[str, Any]]:
    """Compare updates without and with a bound on their divergence; print a row for each case."""
    print(f"{'case':>22} {'without, s':>10} {'with, s':>8} {'more':>6} {'processor':>9} {'MiB':>6} {'with':>6}")
    rows = []
    for name, (num_minibatches, version) in BOUND_CASES.items():
        train = task.train | {"num_minibatches": num_minibatches}
        sides: dict[str, tuple[Side, Task]] = {
            str(target): (agentrl_side, replace(task, train=train | {"target_kl": target}, version=version))
            for target in (None, bound)
        }
        found, peak_mib = take_turns(sides)
        (free, bounded), (free_cpu, bounded_cpu) = (
            [median(step[key] for step in steps[1:]) for steps in found.values()] for key in ("seconds", "cpu_s")
        )
        rows.append({"case": name, "seconds": [free, bounded], "cpu_s": [free_cpu, bounded_cpu]})
        rows[-1]["peak_mib"] = list(peak_mib.values())
        print(
            f"{name:>22} {free:>10.2f} {bounded:>8.2f} {bounded / free - 1:>6.1%} {bounded_cpu / free_cpu - 1:>9.1%}"
            f" {rows[-1]['peak_mib'][0]:>6.0f} {rows[-1]['peak_mib'][1]:>6.0f}",
            flush=True,
        )
    return rows


def measure_copy(task: Task) -> list[dict[str, Any]]:
    """Compare updates under autocast with those on a rounded copy of the weights; print a row for each case."""
    print(f"{'checkpointing':>13} {'cast, s':>8} {'copy, s':>8} {'faster':>6} {'processor':>9} {'MiB':>6} {'copy':>6}")
    rows = []
    for checkpointing in (False, True):
        train = task.train | {"gradient_checkpointing": checkpointing}
        sides: dict[str, tuple[Side, Task]] = {
            str(copied): (agentrl_side, replace(task, train=train | {"bfloat16_copy": copied}))
            for copied in (False, True)
        }
        found, peaks = take_turns(sides)
        seconds, cpu_s = (
            [median(step[key] for step in steps[1:]) for steps in found.values()] for key in ("seconds", "cpu_s")
        )
        peak_mib = list(peaks.values())
        rows.append({"checkpointing": checkpointing, "seconds": seconds, "cpu_s": cpu_s, "peak_mib": peak_mib})
        print(
            f"{checkpointing!s:>13} {seconds[0]:>8.2f} {seconds[1]:>8.2f} {seconds[0] / seconds[1]:>6.2f}"
            f" {cpu_s[0] / cpu_s[1]:>9.2f} {peak_mib[0]:>6.0f} {peak_mib[1]:>6.0f}",
            flush=True,
        )
    return rows


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=[name for name, row in ROWS.items() if row.size is None]
    )
    parser.add_argument("--repeats", type=int, default=5)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--devices", nargs="+", choices=devices, default=devices)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_tokens", type=int, default=0, help="0: those of the largest group")
    parser.add_argument("--rollouts", type=Path, help="a step's recorded rollouts, for --rows flagship")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="TRL's, as by default")
    parser.add_argument("--quick", action="store_true", help="one small row, to see that it works")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--bound", type=float, help="measure the cost of this train.target_kl, in place of TRL")
    instead.add_argument("--copy", action="store_true", help="measure the gain of train.bfloat16_copy, in place of TRL")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.bound is None and not options.copy:
        try:
            import_module("trl")
        except ImportError as error:
            raise SystemExit("TRL is what agentrl is compared with: pip install 'trl==1.16.*'") from error
    # For the sides: TRL reports its use otherwise, and transformers that it took the tokenizer's special tokens.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    rows = QUICK if options.quick else {name: ROWS[name] for name in options.rows}
    if options.copy:
        rows = {name: replace(row, precision="bfloat16") for name, row in rows.items()}
    figures: list[Any] = []
    trained: list[dict[str, Any]] = []
    header = (
        f"{'row':>16} {'device':>6} {'loss gap':>8} {'gradient':>8} {'TRL s':>7} {'agentrl':>7} {'faster':>6} {'(aim)':>6}"
        f" {'TRL MiB':>7} {'agentrl':>7} {'leaner':>6} {'(aim)':>6} {'planning':>8}"
    )
    if options.copy:
        header = "gain of train.bfloat16_copy"
    print(header if options.bound is None else f"cost of train.target_kl: {options.bound}")
    for device in options.devices:
        for name, row in rows.items():
            groups, advantages = make_groups(row, options.rollouts)
            trees = [plan_tree([row.ids_L for t in group.trajectories for row in rows_of(t.turns)]) for group in groups]
            with tempfile.TemporaryDirectory() as folder:
                task = Task(
                    row=row,
                    groups=groups,
                    advantages=advantages,
                    device=device,
                    steps=1 + options.repeats,
                    batch_size=options.batch_size,
                    max_tokens=options.max_tokens or max(tree.num_tokens for tree in trees),
                    gradient_checkpointing=options.gradient_checkpointing,
                    folder=Path(folder),
                    loss=LOSS,
                    train=TRAIN,
                )
                train = TRAIN | {"max_tokens_per_micro_batch": task.max_tokens, "target_kl": options.bound}
                if train not in trained:
                    trained.append(train)
                if options.copy:
                    figures += measure_copy(task)
                    continue
                if options.bound is not None:
                    figures += measure_bound(task, options.bound)
                    continue
                found = measure(task)
            print(
                f"{name:>16} {device:>6} {found['loss_gap']:>8.0e} {found['gradient_gap']:>8.0e}"
                f" {found['seconds']['trl']:>7.2f} {found['seconds']['agentrl']:>7.2f}"
                f" {found['faster']:>6.2f} {row.faster or '':>6}"
                f" {found['peak_mib']['trl']:>7.0f} {found['peak_mib']['agentrl']:>7.0f}"
                f" {found['leaner']:>6.2f} {row.leaner or '':>6} {found['planning']:>8.2%}",
                flush=True,
            )
            bound = 1e-5 if row.precision == "float32" else 3e-2
            assert found["gradient_gap"] < bound, f"the gradients differ by {found['gradient_gap']:.1e} of their norm"
            figures.append({"name": name, "device": device, "row": asdict(row), **found})
    print(json.dumps(figures))
    for train in trained:
        print(fields_block({"loss": LOSS, "train": train}, sections=["loss", "train"]))


if __name__ == "__main__":
    main()
