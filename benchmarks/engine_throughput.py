"""The transformers engine against `model.generate` called turn by turn, on ragged lengths, and its share of a step.

    python benchmarks/engine_throughput.py

Both sample the same 64 conversations of three turns with the same number of tokens for each turn, lognormal with a long
tail, from the same tiny model. `generate` gets, at each turn, all conversations as one left-padded batch, and stops each
row at its length. Results are compared first: under each one's tokens, the engine's log-probabilities must be the model's.
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
from agentrl.config import load_recipe
from agentrl.engine import EngineConfig
from agentrl.engine.transformers import TransformersEngine
from agentrl.learn.model import LocalModelConfig, make_local_model
from agentrl.run import Run
from agentrl.types import Sampling

NUM, TURNS, PROMPT, REPLY = 64, 3, 30, 6


def make_model() -> Any:
    torch.manual_seed(0)
    return make_local_model(LocalModelConfig(), train_tokenizer([], vocab_size=448)).eval()


def ragged_lengths() -> np.ndarray[Any, Any]:
    """Tokens of each turn of each conversation: median 9, mean about 15, a tail of up to 128."""
    draws = np.random.default_rng(0).lognormal(np.log(9.0), 1.0, size=(NUM, TURNS))
    return np.clip(draws, 1, 128).astype(int)


def with_engine(engine: TransformersEngine, lengths: np.ndarray[Any, Any]) -> list[tuple[list[int], list[float]]]:
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
        return list(await asyncio.gather(*(converse(index) for index in range(NUM))))

    return asyncio.run(everyone())


class OwnLength(StoppingCriteria):
    """Stops each row at its own length."""

    def __init__(self, start: int, lengths: torch.Tensor) -> None:
        self.ends = start + lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def with_generate(model: Any, lengths: np.ndarray[Any, Any]) -> None:
    rngs = [np.random.default_rng(index) for index in range(NUM)]
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
    """Time split of the default recipe's steps on an untrained policy, medians of ten after two."""
    shares: list[tuple[float, float, float]] = []

    def note(phase: str, step: int, _: int, metrics: dict[str, float]) -> None:
        if phase == "training" and step > 2:
            shares.append((metrics["time/sampling_s"], metrics["time/step_s"], metrics["time/sampled_tokens_per_s"]))

    with tempfile.TemporaryDirectory() as folder:
        options = ["--train.steps", "12", "--evaluation.num_tasks", "8", "--run_dir", f"{folder}/run"]
        run = Run(load_recipe(recipe, options))
        try:
            run.train(None, on_progress=note)
        finally:
            run.close()
    sampling_s, step_s, tokens_per_s = (statistics.median(column) for column in zip(*shares, strict=True))
    return {
        "step_sampling_s": sampling_s,
        "step_s": step_s,
        "sampling_share": statistics.median(s / w for s, w, _ in shares),
        "step_tokens_per_s": tokens_per_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recipe", type=Path, default=Path("examples/calculator.yaml"))
    options = parser.parse_args()
    model, lengths = make_model(), ragged_lengths()
    engine = TransformersEngine(make_model(), EngineConfig(max_batch_size=NUM))
    difference = check_equality(model, with_engine(engine, lengths))
    with_generate(model, lengths)
    times: dict[str, list[float]] = {"engine": [], "generate": []}
    for _ in range(options.repeats):
        for name, sample in (
            ("engine", lambda: with_engine(engine, lengths)),
            ("generate", lambda: with_generate(model, lengths)),
        ):
            begin = time.perf_counter()
            sample()
            times[name].append(time.perf_counter() - begin)
    tokens = int(lengths.sum())
    rates = {name: tokens / statistics.median(seconds) for name, seconds in times.items()}
    ratio = statistics.median(g / e for e, g in zip(times["engine"], times["generate"], strict=True))
    figures = {
        "sampled_tokens": tokens,
        "max_logprob_difference": difference,
        "engine_tokens_per_s": rates["engine"],
        "generate_tokens_per_s": rates["generate"],
        "ratio": ratio,
        "threads": torch.get_num_threads(),
        **share_of_step(options.recipe),
    }
    for name, value in figures.items():
        print(f"{name:24} {value:.6g}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
