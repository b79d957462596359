"""Whether `trust: calibrated` holds its share of clipped tokens, on responses of 20 to 1,000 tokens.

    python -m benchmarks.calibrated [--lengths 20 100 1000] [--seeds 1] [--steps 40] [--responses 32] [--rate 3e-4]

A small dense Qwen3 that has learned a Markov chain is trained, at a constant rate, to take steps upward: each step samples
responses of one length by the present weights, and makes four minibatches of them (`benchmarks/paper.py`, `length`). Told
is the share of clipped tokens, of those with an advantage that an update has moved, over the steps after the twentieth;
the aim is 0.03. Beside it the same with the GSPO paper's range and with `trust: token`. The responses of a minibatch move
together, so that one run tells little: mean and standard error over seeds, which draw other responses.
"""

import argparse
import asyncio
import tempfile
from itertools import product
from math import nan, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from agentrl.chat import train_tokenizer
from agentrl.credit import Credit
from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.learn.config import WarmupConfig
from agentrl.types import Sampling, TrajectoryGroup
from benchmarks.paper import (
    METHODS,
    SYMBOLS,
    WatchedLearner,
    demonstrated,
    new_chain,
    new_learner,
    response,
    walk,
    write_start,
)

REGIONS: dict[str, dict[str, Any]] = {
    "calibrated": {"trust": "calibrated", "anchor": "recomputed"},
    "the paper's range": {"trust": "fixed", "anchor": "recomputed"},
    "token": {"trust": "token", "anchor": "recomputed"},
}


def sampled(
    learner: WatchedLearner, prompt: tuple[int, ...], *, length: int, count: int, step: int, seed: int
) -> TrajectoryGroup:
    """Sample responses by the present weights: a group."""
    engine = TransformersEngine(learner.state.policy.model, TransformersConfig(lockstep=True))

    async def sample(number: int) -> Any:
        sampling = Sampling(max_tokens=length, stop_token_ids=(), seed=seed * 1_000_000 + step * 1_000 + number)
        with engine.conversation(f"{number}"):
            completion = await engine.generate(prompt, sampling, f"{number}")
        return response(prompt, completion.token_ids, completion.logprobs, number=number)

    async def sample_all() -> list[Any]:
        await engine.resume()
        return await asyncio.gather(*(sample(number) for number in range(count)))

    learner.state.policy.eval()
    return TrajectoryGroup(group_id=f"{step}", trajectories=tuple(asyncio.run(sample_all())))


def pushed_share(learner: WatchedLearner) -> tuple[float, float]:
    """Return how many tokens were clipped, and of how many with an advantage in units that an update has moved."""
    clipped = pushed = 0.0
    for seen in learner.seen:
        for part in seen.passes():
            moved_T = (part["ratio_U"] != 1)[part["unit_T"].astype(np.int64)] & (part["advantage_T"] != 0)
            clipped += float(part["clipped_T"][moved_T].sum())
            pushed += float(moved_T.sum())
    learner.seen.clear()
    return clipped, pushed


def measure(
    start: Path, prompt: tuple[int, ...], region: str, *, length: int, steps: int, count: int, rate: float, seed: int
) -> float:
    """Return the share after the twentieth step."""
    learner = new_learner(start, region, rate)
    shares, rewards = [], []
    for step in range(steps):
        group = sampled(learner, prompt, length=length, count=count, step=step, seed=seed)
        scores = np.array([trajectory.reward for trajectory in group.trajectories])
        scores = (scores - scores.mean()) / (scores.std() + 1e-6)
        credits = [Credit.uniform(t, score) for t, score in zip(group.trajectories, scores, strict=True)]
        learner.update([group], [credits], version=0)
        clipped, pushed = pushed_share(learner)
        shares.append(clipped / pushed if pushed else 0.0)
        rewards.append(float(np.mean([trajectory.reward for trajectory in group.trajectories])))
    share = float(np.mean(shares[20:] or shares))
    words = f"{length}, {region}, seed {seed}: {share:.4f} after step 20; reward {rewards[0]:.3f} -> {rewards[-1]:.3f}"
    print(words, flush=True)
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[20, 100, 1000])
    parser.add_argument("--regions", nargs="+", choices=REGIONS, default=list(REGIONS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--responses", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    METHODS.update(REGIONS)
    tokenizer, rng = train_tokenizer([], vocab_size=261), np.random.default_rng(0)
    chain_NN, prompt = new_chain(rng), (SYMBOLS,)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "dense"
        examples = [demonstrated(prompt, walk(chain_NN, 1024, rng)) for _ in range(200)]
        write_start("dense", tokenizer, examples, WarmupConfig(steps=100, batch_size=4, learning_rate=2e-3), start)
        for length, region in product(options.lengths, options.regions):
            shares = [
                measure(
                    start,
                    prompt,
                    region,
                    length=length,
                    steps=options.steps,
                    count=options.responses,
                    rate=options.rate,
                    seed=seed,
                )
                for seed in range(options.seeds)
            ]
            error = stdev(shares) / sqrt(len(shares)) if len(shares) > 1 else nan
            print(f"| {length} | {region} | {fmean(shares):.4f} ± {error:.4f} |", flush=True)


if __name__ == "__main__":
    main()
