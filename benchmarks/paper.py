"""GSPO against GRPO on the same rollouts, beside what the GSPO paper reports (arXiv 2507.18071, section 5).

    python -m benchmarks.paper [--seeds 0 1 2] [--plot PATH.svg] [--quick]

For a small dense Qwen3 and a small Qwen3-MoE with as many active parameters, both warmed up on poor demonstrations:

`clipped`: rollouts of the calculator are sampled once; copies of the policy are updated on each batch, in four minibatches,
by each method and at several learning rates. Adam's moments come from other batches, seen at a rate that moves nothing.
`length`: responses of 16 to 1,024 tokens, sampled by policies that have learned a Markov chain; the reward is the share of
steps upward, compared with that of the other responses of the same length. A minibatch has as many responses of each
length, so that all lengths meet the same weights.
`learning`: each method trains on the calculator, from the same weights and with the same first episodes.

All ratios are against the log-probabilities recomputed before the first update. Tables are in Markdown; the last line is
JSON.

`T` tokens, `U` trajectories, `N` symbols of the Markov chain.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from agentrl.chat import ChatMLRenderer, TurnTokens, train_tokenizer
from agentrl.credit import Credit, assign_credit, load_credit
from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.env import make_env
from agentrl.learn.config import LossConfig, TrainConfig, WarmupConfig
from agentrl.learn.learner import Gradient, Learner
from agentrl.learn.metrics import Observations
from agentrl.learn.policy_state import PolicyState
from agentrl.learn.warmup import warm_up
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.layout import choose_layout
from agentrl.policy.model import Policy, make_local_model
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.rollout import EnvPlayer, EpisodeContext, RolloutPool, Tasks
from agentrl.rollout.demonstrations import Demonstration, demonstrations
from agentrl.run import loop
from agentrl.run.build import build
from agentrl.types import Sampling, StopReason, Trajectory, TrajectoryGroup, Turn

RECIPE = Path(__file__).resolve().parents[1] / "examples" / "calculator.yaml"
Array: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
Figures: TypeAlias = dict[str, Any]
Batch: TypeAlias = tuple[list[TrajectoryGroup], list[list[Credit]]]

PAPER = {"GSPO": 0.15, "GRPO": 0.0013}
"""Clipped share of tokens, figure 2."""
GSPO: Figures = {"unit": "trajectory", "trust": "fixed", "clip_low": 3e-4, "clip_high": 4e-4, "anchor": "recomputed"}
GRPO: Figures = {"unit": "token", "trust": "fixed", "clip_low": 0.2, "clip_high": 0.27, "anchor": "recomputed"}
METHODS: dict[str, Figures] = {
    "GSPO": GSPO,
    "GRPO": GRPO,
    "GRPO, replay": GRPO | {"routing_replay": "trainer"},
    "GSPO, GRPO's range": GRPO | {"unit": "trajectory"},  # all but without clipping
}
COMPARED = {"dense": ["GSPO", "GRPO"], "MoE": ["GSPO", "GRPO", "GRPO, replay"]}
TRAINED = {kind: [*methods, "GSPO, GRPO's range"] for kind, methods in COMPARED.items()}
SCALES = (0.25, 1.0, 4.0)
"""Clip ranges that are looked at beside the paper's, in units of it."""
SYMBOLS = 32
NUM_MINIBATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is computed."""

    warmup_steps: int = 900
    """On the calculator, as in the default recipe."""
    rates: tuple[float, ...] = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3)
    """Learning rates of `clipped`."""
    moment_batches: int = 8
    """Batches that fill Adam's moments in `clipped`; in `length`, one."""
    batches: int = 4
    """Batches that are measured in `clipped`."""
    chain_steps: int = 100
    """Warm-up steps on the Markov chain."""
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    responses: int = 32
    """Of each length in a batch."""
    long_rates: tuple[float, ...] = (3e-5, 3e-4)
    long_batches: int = 2
    """Batches that are measured in `length`."""
    steps: int = 25
    """Of `learning`."""
    learning_rate: float = 3e-4
    """Of `learning`: the default recipe's, held constant."""
    num_tasks: int = 256
    """Held-out tasks."""


QUICK = Size(
    warmup_steps=200,
    rates=(1e-4, 1e-3),
    moment_batches=1,
    batches=1,
    chain_steps=2,
    lengths=(16, 64),
    responses=8,
    long_rates=(1e-3,),
    long_batches=1,
    steps=1,
    num_tasks=8,
)


# Policies


def new_model(kind: str, tokenizer: Any) -> Any:
    torch.manual_seed(0)
    dense = make_local_model(LocalModelConfig(), tokenizer)
    if kind == "dense":
        return dense
    shape = dense.config.to_dict()
    names = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("max_position_embeddings", "initializer_range", "tie_word_embeddings", "eos_token_id", "pad_token_id"),
    )
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **{name: shape[name] for name in names},
            num_experts=32,
            num_experts_per_tok=8,
            moe_intermediate_size=shape["intermediate_size"] // 8,
            norm_topk_prob=True,
        )
    )


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def write_start(kind: str, tokenizer: Any, examples: list[Demonstration], warmup: WarmupConfig, folder: Path) -> None:
    """Warm a policy up on examples, and write down what every comparison begins with."""
    model = new_model(kind, tokenizer)
    layout, warning = choose_layout(model, "auto")
    assert layout == "tree", warning
    loss = warm_up(Policy(model, layout=layout), examples, warmup, seed=0, max_tokens=16_384)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder.name}: {model.num_parameters():,} parameters, {loss:.2f} nats a token after warm-up", flush=True)


# Updates


class WatchedLearner(Learner):
    """Keeps what each minibatch showed."""

    def __init__(self, state: PolicyState, **settings: Any) -> None:
        super().__init__(state, **settings)
        self.seen: list[Observations] = []

    def add_gradients(self, *parts: Any, **options: Any) -> Gradient:
        gradient = super().add_gradients(*parts, **options)
        self.seen.append(gradient.observations)
        return gradient


def new_learner(start: Path, method: str, learning_rate: float) -> WatchedLearner:
    config = TrainConfig(num_minibatches=NUM_MINIBATCHES, learning_rate=learning_rate, device="cpu")
    return WatchedLearner(
        PolicyState(Policy(load(start), layout="tree"), accelerator=Accelerator(cpu=True), config=config),
        loss=LossConfig(**METHODS[method]),
        config=config,
        temperature=1.0,
        seed=0,
    )


def write_moments(start: Path, batches: Sequence[Batch], folder: Path) -> None:
    """Write a learner with the weights of the start, whose Adam has seen batches.

    Where no weight moves all ratios are 1, and all methods have the same gradient: one learner does for all.
    """
    learner = new_learner(start, "GSPO", 1e-12)
    for groups, credits in batches:
        learner.update(groups, credits, version=0)
    learner.state.save(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What the update of a copy on one batch showed."""

    metrics: dict[str, float]
    seen: list[Observations]
    """Of each minibatch."""


def update(start: Path, moments: Path, batch: Batch, method: str, learning_rate: float) -> Updated:
    learner = new_learner(start, method, learning_rate)
    learner.state.load(moments)
    return Updated(metrics=learner.update(*batch, version=0), seen=learner.seen)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ratios:
    """What the ratios of some minibatches are made of."""

    log_ratio_T: Array
    advantage_T: Array
    unit_T: IntArray
    """Number of each token's trajectory."""

    @classmethod
    def of(cls, seen: Sequence[Observations], by_trajectory: Sequence[Observations] | None = None) -> "Ratios":
        """Put minibatches together; `by_trajectory`: the same by a method of that unit, where theirs is another."""
        units: list[IntArray] = []
        for unit_T in (column for part in by_trajectory or seen for column in part.columns["unit_T"]):
            units.append(unit_T.astype(np.int64) + (1 + units[-1].max() if units else 0))
        log_ratio_T, advantage_T = (
            np.concatenate([part.column(name) for part in seen]) for name in ("log_ratio_T", "advantage_T")
        )
        return cls(log_ratio_T=log_ratio_T, advantage_T=advantage_T, unit_T=np.concatenate(units))

    def means(self) -> Array:
        """Return the log-ratio of each trajectory (U,)."""
        return np.bincount(self.unit_T, weights=self.log_ratio_T) / np.bincount(self.unit_T)

    def of_length(self, length: int) -> "Ratios":
        is_one_T = np.bincount(self.unit_T)[self.unit_T] == length
        unit_T = np.unique(self.unit_T[is_one_T], return_inverse=True)[1].astype(np.int64)
        return Ratios(log_ratio_T=self.log_ratio_T[is_one_T], advantage_T=self.advantage_T[is_one_T], unit_T=unit_T)

    def clipped(self, method: str, scale: float = 1.0) -> float:
        """Return the share of tokens that a method clips at these weights."""
        loss = METHODS[method]
        ratio_T = np.exp(self.means()[self.unit_T] if loss["unit"] == "trajectory" else self.log_ratio_T)
        is_high_T, is_low_T = ratio_T > 1 + scale * loss["clip_high"], ratio_T < 1 - scale * loss["clip_low"]
        return float((is_high_T & (self.advantage_T > 0) | is_low_T & (self.advantage_T < 0)).mean())

    def spreads(self) -> Figures:
        """Return standard deviations of ratios; the number of independent tokens that would have both; the drift."""
        token, sequence = float(np.exp(self.log_ratio_T).std()), float(np.exp(self.means()).std())
        return {
            "token_spread": token,
            "sequence_spread": sequence,
            "independent_tokens": (token / sequence) ** 2,
            "mean_log_ratio": float(self.means().mean()),
        }


# `clipped`


def prepare(size: Size) -> tuple[Recipe, Any, list[Demonstration]]:
    """Return the recipe of the calculator, a tokenizer and demonstrations."""
    recipe = load_recipe(RECIPE, ["--warmup.steps", str(size.warmup_steps)])
    show = partial(
        demonstrations,
        partial(make_env, recipe.env.id),
        skill=recipe.warmup.skill,
        config=recipe.rollout,
        tasks=Tasks(seed=0),
    )
    as_bytes = train_tokenizer([], vocab_size=261)
    with asyncio.Runner() as runner:
        texts = [
            as_bytes.decode([token for turn in t.turns for token in (*turn.observation_ids, *turn.action_ids)])
            for t in runner.run(show(ChatMLRenderer(as_bytes), count=256))
        ]
        tokenizer = train_tokenizer(texts, vocab_size=recipe.model.local.vocab_size)
        return recipe, tokenizer, runner.run(show(ChatMLRenderer(tokenizer), count=recipe.warmup.num_demonstrations))


def play(start: Path, recipe: Recipe, count: int) -> list[Batch]:
    """Sample batches of rollouts, all by the weights of the start."""
    scheme = load_credit({"scheme": "uniform"})
    with asyncio.Runner() as runner:
        pool = RolloutPool(
            player=EnvPlayer(partial(make_env, recipe.env.id)),
            context=EpisodeContext(
                engine=TransformersEngine(load(start), TransformersConfig(lockstep=True)),
                renderer=ChatMLRenderer(AutoTokenizer.from_pretrained(start)),
                config=recipe.rollout,
            ),
            tasks=Tasks(seed=0),
        )
        batches = [runner.run(pool.collect()) for _ in range(count)]
        pool.close()
    return [(groups, assign_credit(scheme, groups)) for groups in batches]


def measure_clipped(kind: str, start: Path, recipe: Recipe, size: Size) -> Figures:
    batches = play(start, recipe, size.moment_batches + size.batches)
    filling, measured = batches[: size.moment_batches], batches[size.moment_batches :]
    assert any(credit.advantages_T.any() for _, credits in measured for row in credits for credit in row), "no rewards"
    trajectories = [t for groups, _ in measured for group in groups for t in group.valid]
    with tempfile.TemporaryDirectory() as folder:
        write_moments(start, filling, Path(folder))
        rows = []
        for rate in size.rates:
            found = [{m: update(start, Path(folder), batch, m, rate) for m in COMPARED[kind]} for batch in measured]
            rows.append({"learning_rate": rate} | summarise(found))
    return {
        "trajectories": len(trajectories),
        "tokens": sum(t.num_action_tokens for t in trajectories),
        "reward": statistics.mean(t.reward for t in trajectories),
        "rates": rows,
        "matching": matching(rows),
    }


def summarise(found: list[dict[str, Updated]]) -> Figures:
    """Describe batches at one learning rate: all minibatches, and the second by itself.

    There every method still has the same weights, so that only how the ratio is formed differs.
    """
    row: Figures = {}
    gspo = [of_batch["GSPO"] for of_batch in found]
    for method in found[0]:
        updated = [of_batch[method] for of_batch in found]
        seconds, gspo_seconds = [u.seen[1] for u in updated], [u.seen[1] for u in gspo]
        for own, other in zip(seconds, gspo_seconds, strict=True):
            is_same = np.array_equal(own.column("log_ratio_T"), other.column("log_ratio_T"))
            assert is_same or method == "GRPO, replay", "the first update was not the same"
        ratios = Ratios.of(seconds, gspo_seconds)
        shares = [u.metrics["clip/tokens"] for u in updated]
        row[method] = {
            "clipped": statistics.mean(shares),
            "clipped_by_batch": shares,
            "second_minibatch": ratios.spreads() | {"clipped": [ratios.clipped(method, scale) for scale in SCALES]},
        }
    changed = [u.metrics["moe/changed_experts"] for u in gspo if "moe/changed_experts" in u.metrics]
    return row | ({"changed_experts": statistics.mean(changed)} if changed else {})


def matching(rows: list[Figures]) -> Figures | None:
    """Return where each method clips as much as in the paper, and how long responses would have to be for one such rate.

        length = (token spread where GRPO clips the paper's share / sequence spread where GSPO does) ** 2

    Interpolated between rates; shares are of all minibatches, spreads of the second. The length holds for independent tokens
    that do not drift. None: out of reach.
    """
    found: Figures = {}
    for method, name in (("GSPO", "sequence_spread"), ("GRPO", "token_spread")):
        shares = [row[method]["clipped"] for row in rows]
        upper = next((i for i, clipped in enumerate(shares) if clipped >= PAPER[method]), 0)
        if upper == 0:
            return None
        pair = rows[upper - 1 : upper + 1]
        part = (PAPER[method] - shares[upper - 1]) / (shares[upper] - shares[upper - 1])
        of_pair = {
            "learning_rate": [row["learning_rate"] for row in pair],
            "spread": [row[method]["second_minibatch"][name] for row in pair],
        }
        found[method] = {key: low ** (1 - part) * high**part for key, (low, high) in of_pair.items()}
    return found | {"length": (found["GRPO"]["spread"] / found["GSPO"]["spread"]) ** 2}


# `length`


def new_chain(rng: np.random.Generator) -> Array:
    """Return the probabilities (N, N) of the next symbol."""
    return rng.dirichlet(np.full(SYMBOLS, 0.2), size=SYMBOLS)


def walk(chain_NN: Array, length: int, rng: np.random.Generator) -> tuple[int, ...]:
    symbols = [int(rng.integers(SYMBOLS))]
    limits_NN = chain_NN.cumsum(1)
    for draw in rng.random(length - 1):
        symbols.append(min(int(np.searchsorted(limits_NN[symbols[-1]], draw)), SYMBOLS - 1))
    return tuple(symbols)


def demonstrated(prompt: tuple[int, ...], ids: tuple[int, ...]) -> Demonstration:
    turn = TurnTokens(observation_ids=prompt, extends=True, action_ids=ids)
    return Demonstration(turns=(turn,), is_over=True)


def response(prompt: tuple[int, ...], ids: tuple[int, ...], logprobs: tuple[float, ...], *, number: int) -> Trajectory:
    turn = Turn(
        observation_ids=prompt,
        action_ids=ids,
        behavior_logprobs=logprobs,
        versions=(0,) * len(ids),
        reward=float((np.diff(ids) > 0).mean()),
    )
    return Trajectory(
        group_id=str(number),
        trajectory_id=f"{number}/{len(ids)}",
        env_id="chain",
        seed=0,
        turns=(turn,),
        stop_reason=StopReason.MAX_TOKENS,
    )


def respond(start: Path, prompt: tuple[int, ...], size: Size, count: int) -> list[Batch]:
    """Sample batches of responses; a group has one of each length, and a reward is compared within its length."""
    engine = TransformersEngine(load(start), TransformersConfig(lockstep=False))

    async def sample(length: int, number: int) -> Trajectory:
        name = f"{number}/{length}"
        sampling = Sampling(max_tokens=length, stop_token_ids=(), seed=number * 10_000 + length)
        with engine.conversation(name):
            completion = await engine.generate(prompt, sampling, name)
        return response(prompt, completion.token_ids, completion.logprobs, number=number)

    async def sample_all() -> list[list[Trajectory]]:
        await engine.resume()
        rows = [[sample(length, number) for length in size.lengths] for number in range(count * size.responses)]
        return await asyncio.gather(*(asyncio.gather(*row) for row in rows))

    groups = [TrajectoryGroup(group_id=row[0].group_id, trajectories=tuple(row)) for row in asyncio.run(sample_all())]
    rewards = np.array([[t.reward for t in group.trajectories] for group in groups])
    scores = (rewards - rewards.mean(0)) / rewards.std(0)
    credits = [
        [Credit.uniform(t, score) for t, score in zip(group.trajectories, row, strict=True)]
        for group, row in zip(groups, scores, strict=True)
    ]
    parts = [slice(i * size.responses, (i + 1) * size.responses) for i in range(count)]
    return [(groups[part], credits[part]) for part in parts]


def measure_length(start: Path, prompt: tuple[int, ...], size: Size) -> Figures:
    """Update by GSPO; show of each length what its ratios are and what either method clips at these very weights."""
    filling, *measured = respond(start, prompt, size, 1 + size.long_batches)
    later_share = (NUM_MINIBATCHES - 1) / NUM_MINIBATCHES
    figures: Figures = {"responses": int(later_share * size.responses * size.long_batches), "rates": []}
    with tempfile.TemporaryDirectory() as folder:
        write_moments(start, [filling], Path(folder))
        for rate in size.long_rates:
            later = [update(start, Path(folder), batch, "GSPO", rate).seen[1:] for batch in measured]
            ratios = Ratios.of([part for parts in later for part in parts])
            rows = [
                {"length": length, **part.spreads(), "GSPO": part.clipped("GSPO"), "GRPO": part.clipped("GRPO")}
                for length in size.lengths
                for part in [ratios.of_length(length)]
            ]
            powers = {
                name: float(np.polyfit(np.log(size.lengths), np.log([row[name] for row in rows]), 1)[0])
                for name in ("token_spread", "sequence_spread")
            }
            figures["rates"].append({"learning_rate": rate, "powers": powers, "lengths": rows})
    return figures


# `learning`


def train(start: Path, method: str, seed: int, size: Size) -> Figures:
    settings = {
        "seed": seed,
        "model.name_or_path": start,
        "warmup.steps": 0,
        "engine.name": "transformers",
        "credit.scheme": "uniform",
        "train.steps": size.steps,
        "train.learning_rate": size.learning_rate,
        "train.schedule": "constant",
        "train.device": "cpu",
        "evaluation.num_tasks": size.num_tasks,
        "report.rollouts_every": 0,
        **{f"loss.{name}": value for name, value in METHODS[method].items()},
    }
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with (
        tempfile.TemporaryDirectory() as folder,
        build(load_recipe(RECIPE, [*options, "--run_dir", f"{folder}/run"])) as parts,
    ):
        _, rows = loop.train(parts)
    first, *steps = rows
    names = {"clipped": "clip/tokens", "grad_norm": "grad_norm", "changed_experts": "moe/changed_experts"}
    columns = {name: [row[key] for row in steps if key in row] for name, key in names.items()}
    means = {name: statistics.mean(column) for name, column in columns.items() if column}
    rewards = [row["reward/mean"] for row in steps]
    # It is missing where no episode came to its end.
    success = {"before": first.get("eval/success", 0.0), "after": steps[-1].get("eval/success", 0.0)}
    return {"seed": seed, **success, **means, "reward": statistics.mean(rewards), "rewards": rewards}


def against(of_method: list[Figures], of_gspo: list[Figures], name: str) -> str:
    """Return the mean difference over the same seeds, and its standard error; one seed has none."""
    differences = [own[name] - other[name] for own, other in zip(of_method, of_gspo, strict=True)]
    error = f" ± {statistics.stdev(differences) / len(differences) ** 0.5:.3f}" if len(differences) > 1 else ""
    return f"{statistics.mean(differences):+.3f}{error}"


# What is shown


def table(title: str, rows: Sequence[dict[str, str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(row.values())} |")
    print(flush=True)


def show_clipped(kind: str, figures: Figures) -> None:
    clipped, second = [], []
    for row in figures["rates"]:
        rate = {"learning rate": f"{row['learning_rate']:.0e}"}
        shares = {method: row[method]["clipped"] for method in COMPARED[kind]}
        spread = {method: f"{share(x)} ({deviation(row[method]['clipped_by_batch'])})" for method, x in shares.items()}
        factor = f"{shares['GSPO'] / shares['GRPO']:.0f}" if shares["GRPO"] else "-"
        changed = {"experts changed": share(row["changed_experts"])} if "changed_experts" in row else {}
        clipped.append(rate | spread | {"GSPO / GRPO": factor} | changed)
        of = {method: row[method]["second_minibatch"] for method in COMPARED[kind]}
        for method in COMPARED[kind][1:]:  # GSPO's ratios are GRPO's
            how = ", replayed" if "replay" in method else ""
            names = {"sequences": "sequence_spread", "tokens": "token_spread", "independent": "independent_tokens"}
            rate |= {f"{name}{how}": f"{of[method][key]:.2g}" for name, key in names.items()}
        second.append(rate | {f"{m} clips": ", ".join(map(share, of[m]["clipped"])) for m in ("GSPO", "GRPO")})
    table(
        f"{kind}, clipped share (standard deviation over batches) of {figures['tokens']:,} tokens of "
        f"{figures['trajectories']} trajectories",
        clipped,
    )
    table(f"{kind}, second minibatch: spread of ratios, and clipped share with {SCALES} of the range", second)
    print(f"{kind}, where each clips as in the paper: {figures['matching']}")


def show_length(kind: str, figures: Figures) -> None:
    for row in figures["rates"]:
        powers = {name: f"{power:.2f}" for name, power in row["powers"].items()}
        table(
            f"{kind}, {figures['responses']} responses of each length, learning rate {row['learning_rate']:.0e}; spread as a "
            f"power of length: sequences {powers['sequence_spread']}, tokens {powers['token_spread']}",
            [
                {
                    "length": str(of_length["length"]),
                    "sequences": f"{of_length['sequence_spread']:.2g}",
                    "tokens": f"{of_length['token_spread']:.2g}",
                    "mean log-ratio": f"{of_length['mean_log_ratio']:.2g}",
                    "GSPO clips": share(of_length["GSPO"]),
                    "GRPO clips": share(of_length["GRPO"]),
                }
                for of_length in row["lengths"]
            ],
        )


def show_learning(kind: str, figures: dict[str, list[Figures]]) -> None:
    rows = []
    for method, runs in figures.items():
        means = {
            name: statistics.mean(run[name] for run in runs) for name in runs[0] if name not in ("seed", "rewards")
        }
        row = {"method": method, **{name: f"{means[name]:.3f}" for name in ("before", "after", "reward")}}
        row["after"] += " (" + ", ".join(f"{run['after']:.2f}" for run in runs) + ")"
        for name in ("after", "reward"):
            row[f"{name}, against GSPO"] = "-" if method == "GSPO" else against(runs, figures["GSPO"], name)
        rows.append(row | {name: share(means[name]) for name in ("clipped", "changed_experts") if name in means})
    table(f"{kind}, learning: means over {len(runs)} seeds, differences seed by seed", rows)


def deviation(values: Sequence[float]) -> str:
    return share(statistics.stdev(values)) if len(values) > 1 else "-"


def share(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def plot(figures: dict[str, Figures], path: Path) -> None:
    """Draw clipped shares by learning rate, spreads by length, and rewards, one line of panels for each model."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "agentrl", "font.size": 9}
    plt.switch_backend("Agg")
    colors = dict(zip(METHODS, ("tab:blue", "tab:orange", "tab:red", "tab:cyan"), strict=True))
    fig, axes = plt.subplots(len(figures), 3, figsize=(12, 3.2 * len(figures)), squeeze=False)
    for (kind, of_kind), (left, middle, right) in zip(figures.items(), axes, strict=True):
        rows = of_kind["clipped"]["rates"]
        rates = [row["learning_rate"] for row in rows]
        for method in COMPARED[kind]:
            left.plot(rates, [row[method]["clipped"] for row in rows], "o-", ms=3, color=colors[method], label=method)
        for method, value in PAPER.items():
            left.axhline(value, ls=":", lw=1, color=colors[method])
        left.set(title=f"{kind}: clipped share (dotted: paper)", xlabel="learning rate", xscale="log")
        left.set_yscale("symlog", linthresh=1e-4)
        left.set_ylim(bottom=0)
        for row, style in zip(of_kind["length"]["rates"], ("-", "--", ":"), strict=False):
            lengths = [of_length["length"] for of_length in row["lengths"]]
            for name, color in (("sequence_spread", colors["GSPO"]), ("token_spread", colors["GRPO"])):
                values = [of_length[name] for of_length in row["lengths"]]
                label = f"{name.partition('_')[0]}s, {row['learning_rate']:.0e}"
                middle.plot(lengths, values, style, marker="o", ms=3, color=color, label=label)
        middle.set(title=f"{kind}: spread of ratios", xlabel="tokens of the response", xscale="log", yscale="log")
        for method, runs in of_kind["learning"].items():
            rewards = np.mean([run["rewards"] for run in runs], axis=0)
            right.plot(np.arange(1, len(rewards) + 1), rewards, color=colors[method], label=method)
        right.set(title=f"{kind}: reward, mean over seeds", xlabel="step")
        for axis in (left, middle, right):
            axis.grid(alpha=0.3)
            axis.minorticks_off()
            axis.legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of `learning`")
    parser.add_argument("--plot", type=Path, help="an SVG or PNG file; needs matplotlib")
    parser.add_argument("--quick", action="store_true", help="a little of everything, to see that it works")
    options = parser.parse_args()
    size, seeds = (QUICK, options.seeds[:1]) if options.quick else (Size(), options.seeds)
    if options.plot and find_spec("matplotlib") is None:
        raise SystemExit("--plot needs matplotlib: pip install 'agentrl[dev]', or leave it out")
    disable_progress_bar()
    recipe, tokenizer, examples = prepare(size)
    rng, prompt, longest = np.random.default_rng(0), (SYMBOLS,), size.lengths[-1]
    chain_NN = new_chain(rng)
    walks = [demonstrated(prompt, walk(chain_NN, longest, rng)) for _ in range(200)]
    chain_warmup = WarmupConfig(steps=size.chain_steps, batch_size=4, learning_rate=2e-3)
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in COMPARED:
            start, chain_start = Path(folder) / f"{kind}, calculator", Path(folder) / f"{kind}, chain"
            write_start(kind, tokenizer, examples, recipe.warmup, start)
            write_start(kind, train_tokenizer([], vocab_size=261), walks, chain_warmup, chain_start)
            of_kind = figures[kind] = {"clipped": measure_clipped(kind, start, recipe, size)}
            show_clipped(kind, of_kind["clipped"])
            of_kind["length"] = measure_length(chain_start, prompt, size)
            show_length(kind, of_kind["length"])
            of_kind["learning"] = {m: [train(start, m, seed, size) for seed in seeds] for m in TRAINED[kind]}
            show_learning(kind, of_kind["learning"])
    if options.plot:
        plot(figures, options.plot)
    print(json.dumps({"size": asdict(size), "seeds": seeds, "models": figures}))


if __name__ == "__main__":
    main()
