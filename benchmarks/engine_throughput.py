"""The transformers engine against `model.generate` called turn by turn, on ragged lengths, and its share of a step.

    python benchmarks/engine_throughput.py

Both sample the same 256 conversations of three turns, at most 64 at a time, with the same number of tokens for each turn,
lognormal with a long tail, from the same tiny model. `generate` gets, at each turn, 64 conversations as one left-padded
batch, and stops each row at its length. Results are compared first: the engine's log-probabilities must be the model's.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from agentrl.chat import train_tokenizer
from agentrl.engine import Engine
from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import make_local_model
from agentrl.recipe.config import load_recipe
from agentrl.run import loop
from agentrl.run.build import build
from agentrl.types import Sampling

NUM, AT_ONCE, TURNS, PROMPT, REPLY = 256, 64, 3, 30, 6
SPREADS = (0.5, 1.0, 1.3, 1.8)
"""Standard deviations of the logarithm of the length; at 1.8 the longest tenth takes ten times the median."""


def make_model() -> Any:
    torch.manual_seed(0)
    return make_local_model(LocalModelConfig(), train_tokenizer([], vocab_size=448)).eval()


def ragged_lengths(spread: float) -> np.ndarray[Any, Any]:
    """Tokens of each turn of each conversation: lognormal, median 8, at most 256."""
    draws = np.random.default_rng(0).lognormal(np.log(8.0), spread, size=(NUM, TURNS))
    return np.clip(draws, 1, 256).astype(int)


def compare(spread: float, repeats: int) -> dict[str, float]:
    """Interleave both ways of sampling; medians."""
    model, lengths = make_model(), ragged_lengths(spread)
    engine = TransformersEngine(make_model(), TransformersConfig(max_batch_size=AT_ONCE))
    times: dict[str, list[float]] = {"engine": [], "generate": []}
    with asyncio.Runner() as runner:
        difference = check_equality(model, with_engine(engine, lengths, runner))
        with_generate(model, lengths)
        for _ in range(repeats):
            for name, sample in (
                ("engine", lambda: with_engine(engine, lengths, runner)),
                ("generate", lambda: with_generate(model, lengths)),
            ):
                begin = time.perf_counter()
                sample()
                times[name].append(time.perf_counter() - begin)
    tokens = int(lengths.sum())
    return {
        "spread": spread,
        "mean_length": float(lengths.mean()),
        "p90_over_median": float(np.quantile(lengths, 0.9) / np.median(lengths)),
        "engine_tokens_per_s": tokens / statistics.median(times["engine"]),
        "generate_tokens_per_s": tokens / statistics.median(times["generate"]),
        "ratio": statistics.median(g / e for e, g in zip(times["engine"], times["generate"], strict=True)),
        "max_logprob_difference": difference,
    }


def with_engine(
    engine: Engine, lengths: np.ndarray[Any, Any], runner: asyncio.Runner
) -> list[tuple[list[int], list[float]]]:
    async def converse(index: int) -> tuple[list[int], list[float]]:
        rng = np.random.default_rng(index)
        context, logprobs = rng.integers(5, 250, PROMPT).tolist(), [0.0] * PROMPT
        with engine.conversation(str(index)):
            for turn, length in enumerate(lengths[index].tolist()):
                sampling = Sampling(max_tokens=length, stop_token_ids=(), seed=index * TURNS + turn)
                completion = await engine.generate(context, sampling, str(index))
                reply = rng.integers(5, 250, REPLY).tolist()
                context = [*context, *completion.token_ids, *reply]
                logprobs += [*completion.logprobs, *[0.0] * REPLY]
        return context, logprobs

    async def everyone() -> list[tuple[list[int], list[float]]]:
        places = asyncio.Semaphore(AT_ONCE)

        async def in_turn(index: int) -> tuple[list[int], list[float]]:
            async with places:
                return await converse(index)

        return list(await asyncio.gather(*(in_turn(index) for index in range(len(lengths)))))

    return runner.run(everyone())


class OwnLength(StoppingCriteria):
    """Stops each row at its own length."""

    def __init__(self, start: int, lengths: torch.Tensor) -> None:
        self.ends = start + lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def with_generate(model: Any, lengths: np.ndarray[Any, Any]) -> None:
    for start in range(0, len(lengths), AT_ONCE):
        generate_batch(model, lengths[start : start + AT_ONCE])


def generate_batch(model: Any, lengths: np.ndarray[Any, Any]) -> None:
    rngs = [np.random.default_rng(index) for index in range(len(lengths))]
    contexts = [rng.integers(5, 250, PROMPT).tolist() for rng in rngs]
    for turn in range(TURNS):
        longest = max(map(len, contexts))
        ids = torch.tensor([[0] * (longest - len(c)) + c for c in contexts])
        mask = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in contexts])
        wanted = torch.from_numpy(lengths[:, turn])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=int(wanted.max()),
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([OwnLength(longest, wanted)]),
            )
        for index, context in enumerate(contexts):
            context += out[index, longest : longest + int(wanted[index])].tolist()
            context += rngs[index].integers(5, 250, REPLY).tolist()


def check_equality(model: Any, sampled: list[tuple[list[int], list[float]]]) -> float:
    worst = 0.0
    for context, logprobs in sampled[:16]:
        with torch.inference_mode():
            table = model(torch.tensor([context])).logits[0].float().log_softmax(-1)
        exact = table[:-1].gather(1, torch.tensor(context[1:])[:, None]).squeeze(1)
        found = torch.tensor(logprobs[1:])
        worst = max(worst, float((exact - found)[found != 0].abs().max()))
    if worst > 1e-4:
        raise SystemExit(f"the engine's log-probabilities differ from the model's by {worst}")
    return worst


def share_of_step(recipe: Path) -> dict[str, float]:
    """Time split of the default recipe's first steps after its warm-up, medians of ten after two."""
    shares: list[tuple[float, float, float, float]] = []

    def note(phase: str, step: int, _: int, metrics: dict[str, float]) -> None:
        if phase == "training" and step > 2:
            collect_s = metrics["time/sampling_s"] + metrics["time/environment_s"]
            tokens = metrics["time/sampled_tokens_per_s"] * collect_s
            shares.append((metrics["time/sampling_s"], collect_s, metrics["time/step_s"], tokens))

    with tempfile.TemporaryDirectory() as folder:
        options = ["--train.steps", "12", "--evaluation.num_tasks", "8", "--run_dir", f"{folder}/run"]
        with build(load_recipe(recipe, options)) as parts:
            loop.train(parts, on_progress=note)
    sampling_s, collect_s, step_s, tokens = (statistics.median(column) for column in zip(*shares, strict=True))
    return {
        "step_sampling_s": sampling_s,
        "step_collect_s": collect_s,
        "step_s": step_s,
        "sampling_share": statistics.median(sampling / step for sampling, _, step, _ in shares),
        "collect_share": statistics.median(collect / step for _, collect, step, _ in shares),
        "sampled_tokens_per_step": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recipe", type=Path, default=Path("examples/calculator.yaml"))
    options = parser.parse_args()
    rows = [compare(spread, options.repeats) for spread in SPREADS]
    print(
        f"{'spread':>7} {'mean length':>12} {'p90/median':>11} {'engine tok/s':>13} {'generate tok/s':>15} {'ratio':>6}"
    )
    for row in rows:
        print(
            f"{row['spread']:>7} {row['mean_length']:>12.1f} {row['p90_over_median']:>11.1f} "
            f"{row['engine_tokens_per_s']:>13.0f} {row['generate_tokens_per_s']:>15.0f} {row['ratio']:>6.1f}"
        )
    step = share_of_step(options.recipe)
    print(
        f"default recipe: {step['step_s']:.3f} s a step of {step['sampled_tokens_per_step']:.0f} sampled tokens, "
        f"{step['sampling_share']:.0%} of it in the engine, {step['collect_share']:.0%} collecting (environments included)"
    )
    print(json.dumps({"threads": torch.get_num_threads(), "lengths": rows, **step}))


if __name__ == "__main__":
    main()
