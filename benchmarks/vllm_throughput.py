"""vLLM in process against the transformers engine, on ragged lengths, by size of the model; with a real one, others too.

    python -m benchmarks.vllm_throughput [--repeats 3] [--sizes "0.45 M" "38 M" smollm2]

All sample the same 256 conversations of three turns (64 for the larger models), 64 at a time, each turn of a length of its
own (lognormal, as in engine_throughput.py), in turn. Log-probabilities are compared with a plain pass first. `smollm2` is
sampled by transformers' `generate` as well, turn by turn in left-padded batches, and by bare vLLM: a loop around the
`LLMEngine` that the engine has made, with the same weights, settings and requests and none of the engine's code.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from agentrl.chat import train_tokenizer
from agentrl.engine import Engine
from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.engine.vllm.engine import VLLMConfig, VLLMEngine
from agentrl.models.gguf import SMOLLM2, gguf_folder
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import make_local_model
from benchmarks.engine_throughput import (
    AT_ONCE,
    PROMPT,
    REPLY,
    check_equality,
    ragged_lengths,
    with_engine,
    with_generate,
)

SIZES: Mapping[str, LocalModelConfig] = {
    "0.45 M": LocalModelConfig(),
    "38 M": LocalModelConfig(hidden_size=512, num_layers=12, num_heads=8, num_kv_heads=4, intermediate_size=1536),
}
SPREADS = (0.5, 1.8)


def make_model(size: str) -> Any:
    if size == SMOLLM2:
        folder = gguf_folder(SMOLLM2, field="--sizes")
        assert folder is not None
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    return make_local_model(SIZES[size], train_tokenizer([], vocab_size=448)).eval()


def converse(index: int, turns: list[int]) -> Generator[tuple[list[int], int], list[int]]:
    """Yield each prompt of a conversation and how many tokens to sample; take the tokens. As `with_engine` does."""
    rng = np.random.default_rng(index)
    context = rng.integers(5, 250, PROMPT).tolist()
    for length in turns:
        sampled = yield context, length
        context = context + sampled + rng.integers(5, 250, REPLY).tolist()


def with_bare_vllm(llm: Any, lengths: np.ndarray[Any, Any]) -> None:
    """Play the conversations by vLLM's own loop."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    def ask(name: str, prompt: list[int], length: int) -> None:
        params = SamplingParams(
            max_tokens=length,
            ignore_eos=True,
            seed=0,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        llm.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)

    live: dict[str, Any] = {}
    todo = iter(range(len(lengths)))

    def begin() -> None:
        if (index := next(todo, None)) is not None:
            live[str(index)] = conversation = converse(index, lengths[index].tolist())
            ask(str(index), *next(conversation))

    for _ in range(AT_ONCE):
        begin()
    while live:
        for output in llm.step():
            if output.finished:
                name = output.request_id.partition("-")[0]
                try:
                    ask(name, *live[name].send(list(output.outputs[0].token_ids)))
                except StopIteration:
                    del live[name]
                    begin()


def compare(size: str, repeats: int) -> list[dict[str, Any]]:
    num = 256 if size == "0.45 M" else 64
    model = make_model(size)
    engines: dict[str, Engine] = {
        "transformers": TransformersEngine(make_model(size), TransformersConfig(max_batch_size=AT_ONCE)),
        "vllm": (vllm := VLLMEngine(model, VLLMConfig(max_batch_size=AT_ONCE), max_tokens=2048)),
    }
    rows = []
    with asyncio.Runner() as runner:
        runner.run(vllm.load_weights(model.state_dict().items(), 0))
        ways: dict[str, Callable[[np.ndarray[Any, Any]], object]] = {
            kind: partial(with_engine, engine, runner=runner) for kind, engine in engines.items()
        }
        if size == SMOLLM2:
            ways["generate"] = lambda lengths: with_generate(model, lengths)
            ways["bare_vllm"] = lambda lengths: vllm._executor.submit(with_bare_vllm, vllm._llm, lengths).result()
        for spread in SPREADS[: 1 if size == SMOLLM2 else None]:  # generate would pad for half an hour
            lengths = ragged_lengths(spread)[:num]
            worst = max(check_equality(model, with_engine(engine, lengths, runner)) for engine in engines.values())
            times: dict[str, list[float]] = {kind: [] for kind in ways}
            for _ in range(repeats):
                for kind, sample in ways.items():
                    runner.run(vllm.load_weights(model.state_dict().items(), 0))  # drops its cache
                    begin = time.perf_counter()
                    sample(lengths)
                    times[kind].append(time.perf_counter() - begin)
            tokens = int(lengths.sum())
            ratios = {"ratio": ("transformers", "vllm")}
            if size == SMOLLM2:
                ratios |= {
                    "transformers_over_generate": ("generate", "transformers"),
                    "vllm_over_bare": ("bare_vllm", "vllm"),
                }
            rows.append(
                {
                    "model": size,
                    "spread": spread,
                    "p90_over_median": float(np.quantile(lengths, 0.9) / np.median(lengths)),
                    **{f"{kind}_tokens_per_s": tokens / statistics.median(found) for kind, found in times.items()},
                    **{
                        name: statistics.median(a / b for a, b in zip(times[above], times[below], strict=True))
                        for name, (above, below) in ratios.items()
                    },
                    "max_logprob_difference": worst,
                }
            )
        for engine in engines.values():
            runner.run(engine.close())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", nargs="*", choices=[*SIZES, SMOLLM2], default=list(SIZES))
    options = parser.parse_args()
    rows = [row for name in options.sizes for row in compare(name, options.repeats)]
    print(f"{'model':>7} {'spread':>7} {'p90/median':>11} {'transformers tok/s':>19} {'vllm tok/s':>11} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['model']:>7} {row['spread']:>7} {row['p90_over_median']:>11.1f} {row['transformers_tokens_per_s']:>19.0f} "
            f"{row['vllm_tokens_per_s']:>11.0f} {row['ratio']:>6.2f}"
        )
    print(json.dumps({"threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
