"""vLLM in process against the transformers engine, on ragged lengths, by size of the model.

    python benchmarks/vllm_throughput.py [--repeats 3]

Both sample the same 256 conversations of three turns (64 for the larger model), 64 at a time, each turn of a length of its
own (lognormal, as in engine_throughput.py), in turn. Log-probabilities are compared with a plain pass first.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from agentrl.chat import train_tokenizer
from agentrl.engine import Engine
from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.engine.vllm.engine import VLLMConfig, VLLMEngine
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import make_local_model
from benchmarks.engine_throughput import AT_ONCE, check_equality, ragged_lengths, with_engine

SIZES: Mapping[str, tuple[LocalModelConfig, int]] = {
    "0.45 M": (LocalModelConfig(), 256),
    "38 M": (
        LocalModelConfig(hidden_size=512, num_layers=12, num_heads=8, num_kv_heads=4, intermediate_size=1536),
        64,
    ),
}
SPREADS = (0.5, 1.8)


def make_model(config: LocalModelConfig) -> Any:
    torch.manual_seed(0)
    return make_local_model(config, train_tokenizer([], vocab_size=448)).eval()


def compare(name: str, repeats: int) -> list[dict[str, Any]]:
    config, num = SIZES[name]
    model = make_model(config)
    engines: dict[str, Engine] = {
        "transformers": TransformersEngine(make_model(config), TransformersConfig(max_batch_size=AT_ONCE)),
        "vllm": VLLMEngine(model, VLLMConfig(max_batch_size=AT_ONCE), max_tokens=2048),
    }
    rows = []
    with asyncio.Runner() as runner:
        runner.run(engines["vllm"].load_weights(model.state_dict().items(), 0))
        for spread in SPREADS:
            lengths = ragged_lengths(spread)[:num]
            times: dict[str, list[float]] = {kind: [] for kind in engines}
            worst = {
                kind: check_equality(model, with_engine(engine, lengths, runner)) for kind, engine in engines.items()
            }
            for _ in range(repeats):
                for kind, engine in engines.items():
                    begin = time.perf_counter()
                    with_engine(engine, lengths, runner)
                    times[kind].append(time.perf_counter() - begin)
            tokens = int(lengths.sum())
            rows.append(
                {
                    "model": name,
                    "spread": spread,
                    "p90_over_median": float(np.quantile(lengths, 0.9) / np.median(lengths)),
                    **{f"{kind}_tokens_per_s": tokens / statistics.median(found) for kind, found in times.items()},
                    "ratio": statistics.median(
                        t / v for t, v in zip(times["transformers"], times["vllm"], strict=True)
                    ),
                    "max_logprob_difference": max(worst.values()),
                }
            )
        for engine in engines.values():
            runner.run(engine.close())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
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
