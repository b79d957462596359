"""How much of a young adapter reaches the samples of an engine in bfloat16: kept apart from the weights, and merged into them.

    python -m benchmarks.adapters MODEL [--rates 1e-4 3e-4] [--steps 1] [--engines transformers vllm]

A folder with a real model (SmolLM2-135M-Instruct in the results). Adapters of rank 16 for all linear layers take `--steps`
steps of AdamW on a policy gradient with random advantages, in bfloat16 as a run trains them. Each engine then samples answers;
their tokens are scored by the trainer with the adapters (t1) and without them (t0), and the same in float32 (f1, f0). With e
the log-probabilities that the engine reports:

- `weights`: <round(W + D) - round(W), D> / <D, D> of the change D of the weights W: what a merge keeps.
- `arrives`: <e - t0, t1 - t0> / <t1 - t0, t1 - t0>, the share of the trainer's change that the engine's samples show.
- `of the exact change`: <e - t0, f1 - f0> / <f1 - f0, f1 - f0>. In bfloat16 the trainer's own passes show only a part too: the
  output of a layer is rounded before its adapter's is added. The row `trainer` has that part.
- `gap`: mean |e - t1| in nats; `before` is the same gap without adapters, the noise between the two; `step` is mean |t1 - t0|,
  how far the step moved the policy.
"""

import argparse
import asyncio
import copy
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.engine.base import Adapters
from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.engine.vllm.engine import VLLMConfig, VLLMEngine
from agentrl.policy.config import LoraSettings
from agentrl.policy.lora import (
    adapted_layers,
    add_lora,
    base_weights,
    lost_change,
    merged_weights,
    round_frozen,
    weight_changes,
)
from agentrl.types import Completion, Sampling

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Write a short poem about the sea.",
    "Why is the sky blue?",
    "Tell me a joke.",
    "How do I boil an egg?",
    "What is 7 + 12?",
    "Explain gravity to a child.",
)
NUM_SAMPLES, NUM_TOKENS = 4, 48
HALF = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and a completion."""

    prompt_ids: list[int]
    done: Completion


def score(model: Any, samples: list[Sample], *, autocast: bool) -> Tensor:
    """Return the log-probability of each sampled token by a plain pass."""
    found = []
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.done.token_ids]])
        with torch.autocast("cpu", HALF, enabled=autocast):
            logits_TV = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        logprobs_TV = logits_TV.float().log_softmax(-1)
        found.append(logprobs_TV.gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0])
    return torch.cat(found)


def without_adapters(model: Any) -> Any:
    """Return a copy whose adapters change nothing."""
    copied = copy.deepcopy(model)
    for name, parameter in copied.named_parameters():
        if ".lora_B." in name:
            parameter.data.zero_()
    return copied


def train(model: Any, samples: list[Sample], *, rate: float, steps: int) -> None:
    """Take steps of a policy gradient with random advantages, in bfloat16."""
    advantages = torch.randn(len(samples), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    for _ in range(steps):
        for sample, advantage in zip(samples, advantages, strict=True):
            (-advantage * score(model, [sample], autocast=True).mean() / len(samples)).backward()
        optimizer.step()
        optimizer.zero_grad()


async def sample(engine: Any, prompts: list[list[int]]) -> list[Sample]:
    """Sample several answers to each prompt."""

    async def one(number: int, prompt_ids: list[int]) -> Sample:
        sampling = Sampling(max_tokens=NUM_TOKENS, stop_token_ids=(), temperature=1.0, seed=number)
        return Sample(prompt_ids, await engine.generate(prompt_ids, sampling, str(number)))

    return list(await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts * NUM_SAMPLES))))


def make_engine(name: str, model: Any, trainer: Any) -> Any:
    """Build an engine in bfloat16 that takes adapters."""
    if name == "transformers":
        config = TransformersConfig(lockstep=False)
        return TransformersEngine(copy.deepcopy(model).to(HALF), config, max_context_tokens=256, keeps_adapters=True)
    adapters = Adapters(rank=16, layers=tuple(adapted_layers(trainer)))
    return VLLMEngine(model, VLLMConfig(lockstep=False), max_tokens=256, dtype=HALF, adapters=adapters)


def share(found: Tensor, expected: Tensor) -> float:
    """Return how much of an expected change is in a found one."""
    return float(found @ expected / (expected @ expected))


def compare(samples: list[Sample], trainer: Any, exact: Any) -> dict[str, float]:
    """Compare what an engine reports with the trainer's passes."""
    with torch.no_grad():
        t1, t0 = (score(model, samples, autocast=True) for model in (trainer, without_adapters(trainer)))
        f1, f0 = (score(model, samples, autocast=False) for model in (exact, without_adapters(exact)))
    e = torch.tensor([logprob for one in samples for logprob in one.done.logprobs])
    return {
        "arrives": share(e - t0, t1 - t0),
        "of the exact change": share(e - t0, f1 - f0),
        "gap": float((e - t1).abs().mean()),
        "step": float((t1 - t0).abs().mean()),
        "trainer": share(t1 - t0, f1 - f0),
    }


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each rate, engine and way."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]
    start = copy.deepcopy(model)
    torch.manual_seed(0)
    add_lora(start, LoraSettings(rank=16, alpha=32))
    engines = {name: make_engine(name, model, start) for name in options.engines}
    before: dict[str, list[Sample]] = {}
    for name, engine in engines.items():
        await engine.load_adapters(weight_changes(start), base_weights(start), 0)
        before[name] = await sample(engine, prompts)
    rows: list[dict[str, Any]] = []
    for rate in options.rates:
        trainer = copy.deepcopy(start)
        round_frozen(trainer)
        train(trainer, before[options.engines[0]][: len(prompts)], rate=rate, steps=options.steps)
        exact = copy.deepcopy(trainer).float()
        for name, engine in engines.items():
            noise = compare(before[name], without_adapters(trainer), exact)["gap"]
            for way in ("kept apart", "merged"):
                if way == "kept apart":
                    await engine.load_adapters(weight_changes(trainer), base_weights(trainer), 1)
                else:
                    await engine.load_weights(merged_weights(trainer), 1)
                found = compare(await sample(engine, prompts), trainer, exact)
                kept = 1 - lost_change(trainer, HALF)
                rows.append({"rate": rate, "engine": name, "way": way, **found, "before": noise, "weights": kept})
    for engine in engines.values():
        await engine.close()
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"])
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    columns = ["arrives", "of the exact change", "gap", "before", "step"]
    print(f"| rate, {options.steps} step(s) | engine | adapters | {' | '.join(columns)} |")
    print("|---|---|---|" + "---|" * len(columns))
    for row in rows:
        way = row["way"] if row["way"] == "kept apart" else f"merged (weights: {row['weights']:.2f} arrives)"
        cells = [f"{row[name]:.2f}" if name in columns[:2] else f"{row[name]:.4f}" for name in columns]
        print(f"| {row['rate']:g} | {row['engine']} | {way} | {' | '.join(cells)} |")
    for rate in options.rates:
        parts = [row["trainer"] for row in rows if row["rate"] == rate]
        print(
            f"\nrate {rate:g}: the trainer's own passes show {min(parts):.2f} to {max(parts):.2f} of the exact change"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
