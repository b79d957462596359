"""What a push of weights to vLLM's server writes: bytes and seconds, by the server's dtype.

    python -m benchmarks.pushes [--hidden 1024] [--layers 8] [--repeats 3]

A random Qwen3 with the vocabulary of the real ones is written as a push writes it, into a folder that is deleted after.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.engine.vllm_weights import ServedModel, write_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    sizes: dict[str, Any] = {"hidden_size": options.hidden, "num_hidden_layers": options.layers, "vocab_size": 151_936}
    heads: dict[str, Any] = {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
    model = Qwen3ForCausalLM(Qwen3Config(intermediate_size=3 * options.hidden, **sizes, **heads))
    state = model.state_dict()
    print(f"{model.num_parameters() / 1e6:.0f} million parameters\n\n| server's dtype | MB | seconds |\n|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        served = ServedModel(shapes=state, vocab_size=sizes["vocab_size"], dtype=dtype)
        seconds, num_bytes = [], 0
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                begin = time.perf_counter()
                asyncio.run(write_weights(Path(folder), state.items(), served))
                seconds.append(time.perf_counter() - begin)
                num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(
            f"| {str(dtype).removeprefix('torch.')} | {num_bytes / 1e6:.0f} | {statistics.median(seconds):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
