"""How minibatches are drawn: what it costs in time, and what it brings in learning a step.

    python benchmarks/minibatches.py time [--repeats 5] [--groups 4 8 ...]
    python benchmarks/minibatches.py table [--seeds 128]
    python benchmarks/minibatches.py rooms --out FILE [--seeds 10 11 ...] [--variants before whole 4]

`draw_minibatches` cuts groups into parts as far as a minibatch needs for having trajectories of `min_groups` groups. 1 keeps
groups whole; `before` is what was done at c6e7780: whole groups, trajectories without advantage among them, and an update
of AdamW also where a minibatch has no gradient.

`time`: `Learner.update` with four minibatches of random trajectories, groups of eight that share most of each trajectory:
tokens that the token tree computes, over those of whole groups; seconds likewise, medians of interleaved rounds.

`table`: the task of `six_rooms.py` by a policy without a language model: softmax over the boxes on random features of room
and named box, fitted to choose right with .75; GRPO with clip range .2/.27, AdamW, four minibatches a step, groups of
eight. Success is computed exactly, over all tasks. `area` is its mean over steps, `collapsed` the share of seeds whose last
success is below half of their first.

`rooms`: the same task by a small language model, warmed up once for each seed. Results are appended to FILE; what is in it
is not run again.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator

from agentrl.credit import Credit
from agentrl.distributed.checkpoints import checkpoints
from agentrl.learn.config import LossConfig, TrainConfig
from agentrl.learn.learner import CreditedMinibatch, Gradient, Learner
from agentrl.learn.plan import Minibatch, draw_minibatches
from agentrl.learn.policy_state import PolicyState
from agentrl.policy.model import Policy
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.report.folder import RunFolder
from agentrl.rollout import derive_seed
from agentrl.run import loop
from agentrl.run.build import build
from agentrl.types import TrajectoryGroup

ROOT = Path(__file__).resolve().parents[1]
NUM_MINIBATCHES, GROUP_SIZE = 4, 8
VARIANTS = ["before", "whole", "2", "4", "8", "16", "32"]
"""Whole: min_groups 1. A number: min_groups."""
Array = npt.NDArray[np.float64]


def drawing(variant: str) -> Callable[..., list[Minibatch]]:
    if variant == "before":
        return group_after_group
    return partial(draw_minibatches, min_groups=1 if variant == "whole" else int(variant))


def group_after_group(
    group_I: Sequence[int], *, has_gradient_I: Sequence[bool], num_minibatches: int, rng: np.random.Generator
) -> list[Minibatch]:
    """Draw whole groups in random order; each minibatch computes one trajectory at least."""
    groups = np.asarray(group_I)
    shuffled = [rng.permutation(np.flatnonzero(groups == group)) for group in rng.permutation(np.unique(groups))]
    parts = []
    for part in np.array_split(np.concatenate(shuffled), num_minibatches):
        computed = [int(i) for i in part if has_gradient_I[i]] or part[:1].tolist()
        parts.append(Minibatch(computed, [int(i) for i in part if int(i) not in computed]))
    return parts


class VariantLearner(Learner):
    """Draws minibatches as a variant does; `before` makes an update of every one of them."""

    def __init__(
        self, variant: str, state: PolicyState, *, loss: LossConfig, config: TrainConfig, temperature: float, seed: int
    ) -> None:
        super().__init__(state, loss=loss, config=config, temperature=temperature, seed=seed)
        self._variant, self._drawing_seed = variant, seed

    def draw(
        self, groups: Sequence[TrajectoryGroup], credits: Sequence[Sequence[Credit]], *, version: int, epoch: int = 0
    ) -> list[CreditedMinibatch]:
        trained = [
            (number, trajectory, credit)
            for number, (group, of_group) in enumerate(zip(groups, credits, strict=True))
            for trajectory, credit in zip(group.trajectories, of_group, strict=True)
            if not trajectory.failed
        ]
        drawn = drawing(self._variant)(
            [number for number, _, _ in trained],
            has_gradient_I=[bool(credit.advantages_T.any()) for _, _, credit in trained],
            num_minibatches=NUM_MINIBATCHES,
            rng=np.random.default_rng(derive_seed(self._drawing_seed, "minibatches", version)),
        )
        return [
            CreditedMinibatch([trained[i][1:] for i in (*computed, *counted)], len(computed))
            for computed, counted in drawn
        ]

    def add_gradients(self, *parts: Any, **options: Any) -> Gradient:
        gradient = super().add_gradients(*parts, **options)
        if self._variant != "before":
            return gradient
        return gradient._replace(stats=replace(gradient.stats, grad_norm=gradient.stats.grad_norm or 1e-300))


def distinct(num_groups: int) -> list[str]:
    """Return the variants but those that keep groups of this number whole, and those that ask for more."""
    return [v for v in VARIANTS if not v.isdigit() or num_groups / NUM_MINIBATCHES < int(v) <= num_groups]


# Time


def measure_time(repeats: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
    from benchmarks.train_step import Row, make_groups, make_model, shared

    torch.set_num_threads(1)
    found = []
    print(f"{'shared':>6} {'groups':>6} {'drawing':>8} {'tokens':>8} {'more':>6} {'seconds':>8} {'slower':>6}")
    for share, num_groups in product((0.5, 0.75, 0.9), numbers):
        row = Row(groups=num_groups, group_size=GROUP_SIZE, turns=shared(share, 128))
        groups, advantages = make_groups(row)
        credits = [
            [Credit.uniform(t, advantage) for t, advantage in zip(group.trajectories, of_group, strict=True)]
            for group, of_group in zip(groups, advantages, strict=True)
        ]
        config = TrainConfig(num_minibatches=NUM_MINIBATCHES, learning_rate=1e-6, device="cpu")
        policy = Policy(make_model(row), layout="tree")
        state = PolicyState(policy, accelerator=Accelerator(cpu=True), config=config)
        loss = LossConfig(trust="fixed", clip_low=0.2, clip_high=0.27)
        variants = distinct(num_groups)[1:]
        learners = {
            variant: VariantLearner(variant, state, loss=loss, config=config, temperature=1.0, seed=0)
            for variant in variants
        }
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        tokens = {}
        for number in range(repeats + 1):
            for variant, learner in learners.items():
                plans = [learner.plan(minibatch) for minibatch in learner.draw(groups, credits, version=0)]
                tokens[variant] = sum(micro.inputs.ids_BL.numel() for plan in plans for micro, _ in plan)
                if number:
                    begin = time.perf_counter()
                    learner.update(groups, credits, version=0)
                    seconds[variant].append(time.perf_counter() - begin)
        for variant in variants:
            more = tokens[variant] / tokens["whole"]
            figures = {"shared": share, "groups": num_groups, "drawing": variant, "tokens": tokens[variant]}
            times = ""
            if repeats:
                figures["seconds"] = statistics.median(seconds[variant])
                figures["slower"] = statistics.median(
                    s / w for s, w in zip(seconds[variant], seconds["whole"], strict=True)
                )
                times = f"{figures['seconds']:>8.2f} {figures['slower']:>6.2f}"
            found.append(figures)
            print(f"{share:>6} {num_groups:>6} {variant:>8} {tokens[variant]:>8} {more:>6.2f} {times}", flush=True)
    return found


# A policy without a language model. `S` seeds, `I` trajectories, `K` rooms, `C` contexts, `D` features, `V` boxes.

NUM_ROOMS, NUM_BOXES, NUM_FEATURES = 6, 4, 16
CLIP_LOW, CLIP_HIGH, BETAS = 0.2, 0.27, (0.9, 0.95)


def softmax(logits: Array) -> Array:
    exped: Array = np.exp(logits - logits.max(-1, keepdims=True))
    normalised: Array = exped / exped.sum(-1, keepdims=True)
    return normalised


def fitted_policies(features_CD: Array, skill: float, num_seeds: int) -> Array:
    """Return weights SDV that choose the named box with about this probability."""
    target_CV = np.full((NUM_ROOMS * NUM_BOXES, NUM_BOXES), (1 - skill) / (NUM_BOXES - 1))
    target_CV[np.arange(len(target_CV)), np.arange(len(target_CV)) % NUM_BOXES] = skill
    weight_DV = np.zeros((NUM_FEATURES, NUM_BOXES))
    for _ in range(2000):
        weight_DV += 0.05 * features_CD.T @ (target_CV - softmax(features_CD @ weight_DV))
    return np.repeat(weight_DV[None], num_seeds, axis=0)


def success_of(probs_SCV: Array) -> Array:
    """Return the probability that all rooms are right, over all tasks (S,)."""
    right_SC = probs_SCV[:, np.arange(NUM_ROOMS * NUM_BOXES), np.arange(NUM_ROOMS * NUM_BOXES) % NUM_BOXES]
    success: Array = right_SC.reshape(-1, NUM_ROOMS, NUM_BOXES).mean(-1).prod(-1)
    return success


def learn_table(variant: str, num_groups: int, *, learning_rate: float, num_steps: int, num_seeds: int) -> Array:
    """Train; return the success of each seed before and after each step: (steps + 1, S)."""
    rng = np.random.default_rng(0)
    features_CD = rng.normal(size=(NUM_ROOMS * NUM_BOXES, NUM_FEATURES)) / np.sqrt(NUM_FEATURES)
    weight_SDV = fitted_policies(features_CD, 0.75, num_seeds)
    first_SDV, second_SDV, updates_S = np.zeros_like(weight_SDV), np.zeros_like(weight_SDV), np.zeros(num_seeds)
    group_I = np.repeat(np.arange(num_groups), GROUP_SIZE)
    seed_S, room_K = np.arange(num_seeds)[:, None, None], np.arange(NUM_ROOMS)
    draw, curve = drawing(variant), []
    for step in range(num_steps):
        probs_SCV = softmax(features_CD @ weight_SDV)
        curve.append(success_of(probs_SCV))
        named_SIK = rng.integers(NUM_BOXES, size=(num_seeds, num_groups, 1, NUM_ROOMS)).repeat(GROUP_SIZE, 2)
        named_SIK = named_SIK.reshape(num_seeds, -1, NUM_ROOMS)
        context_SIK = room_K * NUM_BOXES + named_SIK
        sampled_SIKV = probs_SCV[seed_S, context_SIK]
        action_SIK = (rng.random((*context_SIK.shape, 1)) > sampled_SIKV.cumsum(-1)[..., :-1]).sum(-1)
        behavior_SIK = np.take_along_axis(sampled_SIKV, action_SIK[..., None], -1)[..., 0]
        reward_SGM = (action_SIK == named_SIK).all(-1).astype(float).reshape(num_seeds, num_groups, GROUP_SIZE)
        spread_SG1 = reward_SGM.std(-1, keepdims=True)
        advantage_SI = ((reward_SGM - reward_SGM.mean(-1, keepdims=True)) / (spread_SG1 + 1e-6)).reshape(num_seeds, -1)
        weight_MSI = np.zeros((NUM_MINIBATCHES, *advantage_SI.shape))
        for seed in range(num_seeds):
            drawn = draw(
                group_I,
                has_gradient_I=advantage_SI[seed] != 0,
                num_minibatches=NUM_MINIBATCHES,
                rng=np.random.default_rng([step, seed]),
            )
            for number, (computed, counted) in enumerate(drawn):
                weight_MSI[number, seed, computed] = 1 / max(1, len(computed) + len(counted))
        for weight_SI in weight_MSI:
            probs_SIKV = softmax(features_CD @ weight_SDV)[seed_S, context_SIK]
            ratio_SIK = np.take_along_axis(probs_SIKV, action_SIK[..., None], -1)[..., 0] / behavior_SIK
            pull_SIK = (weight_SI * advantage_SI)[..., None] * ratio_SIK / NUM_ROOMS
            pull_SIK[(advantage_SI[..., None] > 0) & (ratio_SIK > 1 + CLIP_HIGH)] = 0
            pull_SIK[(advantage_SI[..., None] < 0) & (ratio_SIK < 1 - CLIP_LOW)] = 0
            to_logits_SIKV = -probs_SIKV * pull_SIK[..., None]
            np.put_along_axis(
                to_logits_SIKV,
                action_SIK[..., None],
                np.take_along_axis(to_logits_SIKV, action_SIK[..., None], -1) + pull_SIK[..., None],
                -1,
            )
            to_logits_SCV = np.zeros((num_seeds, NUM_ROOMS * NUM_BOXES, NUM_BOXES))
            np.add.at(to_logits_SCV, (seed_S, context_SIK), to_logits_SIKV)
            gradient_SDV = features_CD.T @ to_logits_SCV
            norm_S = np.sqrt((gradient_SDV**2).sum((1, 2)))
            moves_S = (norm_S > 0) | (variant == "before")
            gradient_SDV *= np.minimum(1, 1 / np.maximum(norm_S, 1e-12))[:, None, None]
            updates_S += moves_S
            at = moves_S[:, None, None]
            first_SDV = np.where(at, BETAS[0] * first_SDV + (1 - BETAS[0]) * gradient_SDV, first_SDV)
            second_SDV = np.where(at, BETAS[1] * second_SDV + (1 - BETAS[1]) * gradient_SDV**2, second_SDV)
            bias = [(1 - beta ** np.maximum(updates_S, 1))[:, None, None] for beta in BETAS]
            step_SDV = (first_SDV / bias[0]) / (np.sqrt(second_SDV / bias[1]) + 1e-8)
            weight_SDV = weight_SDV + learning_rate * np.where(at, step_SDV, 0)
    return np.stack([*curve, success_of(softmax(features_CD @ weight_SDV))])


def measure_table(num_seeds: int) -> list[dict[str, Any]]:
    found = []
    print(f"{'groups':>6} {'rate':>6} {'drawing':>8} {'final':>16} {'area':>16} {'collapsed':>9}")
    for num_groups in (4, 8, 16, 32):
        for learning_rate in (0.1, 0.3, 0.6):
            for variant in distinct(num_groups):
                curve = learn_table(variant, num_groups, learning_rate=learning_rate, num_steps=30, num_seeds=num_seeds)
                figures: dict[str, Any] = {"groups": num_groups, "rate": learning_rate, "drawing": variant}
                for name, values in (("final", curve[-1]), ("area", curve[1:].mean(0))):
                    figures[name] = {"mean": values.mean(), "se": values.std(ddof=1) / np.sqrt(num_seeds)}
                figures["collapsed"] = float((curve[-1] < curve[0] / 2).mean())
                found.append(figures)
                cells = [f"{figures[name]['mean']:.3f} ± {figures[name]['se']:.3f}" for name in ("final", "area")]
                print(
                    f"{num_groups:>6} {learning_rate:>6} {variant:>8} {cells[0]:>16} {cells[1]:>16} "
                    f"{figures['collapsed']:>9.1%}",
                    flush=True,
                )
    return found


# A small language model

ROOMS = """
    --env.id benchmarks.six_rooms:SixRooms --model.local.hidden_size 64 --model.local.intermediate_size 192
    --warmup.steps 500 --warmup.learning_rate 3e-3 --warmup.num_demonstrations 3000 --warmup.skill 0.6
    --rollout.num_groups 4 --rollout.max_turns 8 --rollout.max_turn_tokens 24 --rollout.max_episode_tokens 192
    --loss.unit token --loss.clip_low 0.2 --loss.clip_high 0.27
    --train.schedule constant --train.checkpoint_every 1000 --train.steps 24 --train.learning_rate 6e-4
    --evaluation.num_tasks 128 --evaluation.every 4 --report.rollouts_every 0
"""
"""What the task changes in the default recipe."""


def train(recipe: Recipe, folder: RunFolder | None, variant: str) -> list[dict[str, float]]:
    """Train, with minibatches drawn as the variant does."""
    with build(recipe, tokenizer_folder=None if folder is None else folder.tokenizer) as parts:
        learner = VariantLearner(
            variant,
            parts.learner.state,
            loss=recipe.loss,
            config=recipe.train,
            temperature=recipe.rollout.temperature,
            seed=recipe.seed,
        )
        return loop.train(replace(parts, learner=learner), folder)[1]


def measure_rooms(out: Path, seeds: Sequence[int], variants: Sequence[str]) -> dict[str, Any]:
    from benchmarks.credit_learning import describe, figures

    torch.set_num_threads(1)

    def recipe(seed: int, run_dir: Path, *options: str) -> Recipe:
        changed = [
            *ROOMS.split(),
            "--credit.scheme",
            "uniform",
            "--seed",
            str(seed),
            "--run_dir",
            str(run_dir),
            *options,
        ]
        return load_recipe(ROOT / "examples" / "calculator.yaml", changed)

    def known() -> dict[tuple[int, str], dict[str, Any]]:
        lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
        return {(row["seed"], row["drawing"]): row for row in map(json.loads, lines)}

    for seed in seeds:
        missing = [variant for variant in variants if (seed, variant) not in known()]
        with tempfile.TemporaryDirectory() as folder:
            warm = Path(folder) / "warm"
            if missing:
                train(recipe(seed, warm, "--train.steps", "1"), None, "4")
                shutil.rmtree(checkpoints(warm / "checkpoints")[1])  # what resumes begins right after the warm-up
            for variant in missing:
                run_dir = Path(folder) / "run"
                shutil.copytree(warm, run_dir)
                rows = train(recipe(seed, run_dir), RunFolder.open(run_dir), variant)
                shutil.rmtree(run_dir)
                row = {"seed": seed, "drawing": variant, **figures(rows)}
                row["skipped"] = statistics.mean(row["skipped_minibatches"] for row in rows[1:])
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"seed {seed} {variant:8}", " ".join(f"{success:.2f}" for success in row["curve"]), flush=True)
    table = {}
    for variant in variants:
        of_variant = [row for (seed, name), row in known().items() if name == variant and seed in seeds]
        if of_variant:
            table[variant] = {
                "seeds": len(of_variant),
                "collapsed": sum(row["final"] < row["start"] / 2 for row in of_variant),
                **{name: describe([row[name] for row in of_variant]) for name in ("start", "final", "area", "skipped")},
            }
            print(variant, json.dumps(table[variant]))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["time", "table", "rooms"])
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16, 32], help="of a step, in `time`")
    parser.add_argument("--repeats", type=int, default=5, help="of `time`; 0: tokens alone")
    parser.add_argument("--seeds", type=int, nargs="+", help="`table`: how many (128); `rooms`: which (10 to 17)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["before", "whole", "4"], help="of `rooms`")
    parser.add_argument("--out", type=Path, help="results of `rooms`")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ["OMP_NUM_THREADS"] = "1"
    found: Any
    if options.part == "time":
        found = measure_time(options.repeats, options.groups)
    elif options.part == "table":
        found = measure_table(options.seeds[0] if options.seeds else 128)
    else:
        if options.out is None:
            parser.error("rooms: --out FILE is needed")
        found = measure_rooms(options.out, options.seeds or list(range(10, 18)), options.variants)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
