"""How much of a young adapter reaches the samples of an engine in bfloat16: kept apart from the weights, and merged into them.

    python -m benchmarks.adapters MODEL [--rates 1e-4 3e-4] [--steps 1] [--engines transformers vllm]

A folder with a real model (SmolLM2-135M-Instruct in the results). Adapters of rank 16 for all linear layers take `--steps`
steps of AdamW on a policy gradient with random advantages, in bfloat16 as a run trains them. Each engine then samples answers.
Their tokens are scored by plain passes: in float32 with the adapters (f1) and without them (f0), and by the trainer (t1). With
e the log-probabilities that the engine reports:

- `weights`: <round(W + D) - round(W), D> / <D, D> of the change D of the weights W: the part of it that a merge keeps.
- `arrives`: <e - f0, f1 - f0> / <f1 - f0, f1 - f0>, the part of the step that the samples show. The rows `trainer` have it of
  t1: as agentrl computes it, where a layer's output is rounded once, and as peft does, which adds the adapter's output to one
  that is rounded already. Noise of bfloat16 makes each uncertain by `+-`, one standard error.
- `gap`: mean |e - t1| in nats; `before` is the same gap before the step, the noise between the two; `step` is mean |f1 - f0|.
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
NUM_SAMPLES, NUM_TOKENS = 2, 48
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


def share(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return how much of an expected change is in a found one, and its standard error."""
    power = expected @ expected
    part = found @ expected / power
    error = (((found - part * expected) * expected) ** 2).sum().sqrt() / power
    return float(part), float(error)


def as_peft(model: Any) -> Any:
    """Return a copy that computes as peft does."""
    copied = copy.deepcopy(model)
    for layer in adapted_layers(copied).values():
        del layer.forward
    return copied


def logprobs(samples: list[Sample]) -> Tensor:
    """Return what the engine reports."""
    return torch.tensor([logprob for one in samples for logprob in one.done.logprobs])


@torch.no_grad()
def compare(samples: list[Sample], trainer: Any, exact: Any) -> dict[str, Any]:
    """Compare what an engine reports with plain passes."""
    e, t1, peft = logprobs(samples), *(score(model, samples, autocast=True) for model in (trainer, as_peft(trainer)))
    f1, f0 = (score(model, samples, autocast=False) for model in (exact, without_adapters(exact)))
    return {
        "engine": share(e - f0, f1 - f0),
        "trainer": share(t1 - f0, f1 - f0),
        "trainer, by peft": share(peft - f0, f1 - f0),
        "gap": float((e - t1).abs().mean()),
        "step": float((f1 - f0).abs().mean()),
    }


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each rate, engine and way."""
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
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
            with torch.no_grad():
                noise = logprobs(before[name]) - score(without_adapters(trainer), before[name], autocast=True)
            for way in ("kept apart", "merged"):
                if way == "kept apart":
                    await engine.load_adapters(weight_changes(trainer), base_weights(trainer), 1)
                else:
                    await engine.load_weights(merged_weights(trainer), 1)
                row: dict[str, Any] = {"rate": rate, "name": name, "way": way, "before": float(noise.abs().mean())}
                row["weights"] = 1 - lost_change(trainer, HALF)
                rows.append(row | compare(await sample(engine, prompts), trainer, exact))
    for engine in engines.values():
        await engine.close()
    return rows


def text(found: tuple[float, float]) -> str:
    """Return a share with its standard error."""
    return f"{found[0]:.2f} +- {found[1]:.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"])
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    print(f"| rate, {options.steps} step(s) | log-probabilities of | arrives | gap | before | step | weights |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        numbers = f"{row['gap']:.4f} | {row['before']:.4f} | {row['step']:.4f}"
        weights = "1" if row["way"] == "kept apart" else f"{row['weights']:.2f}"
        print(f"| {row['rate']:g} | {row['name']}, {row['way']} | {text(row['engine'])} | {numbers} | {weights} |")
    for rate in options.rates:
        for name in ("trainer", "trainer, by peft"):
            every = [row[name] for row in rows if row["rate"] == rate]
            part, error = (sum(column) / len(every) for column in zip(*every, strict=True))
            print(f"| {rate:g} | {name} | {text((part, error))} | | | | |")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
