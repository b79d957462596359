"""What a long prompt costs the transformers engine: peak memory and time, each length in a fresh process.

    python -m benchmarks.prefill_memory [--tokens 2048 4096 8192 16384 32768]

One layer of hidden size 32 with eight query heads on one key-value head, in float32: weights, keys and values are small, so
what is left is what prefill itself holds. The peak is the resident memory at its highest during the prompt, less what the
process held before, after a short prompt has warmed it up. Up to 4,096 tokens the result is compared first: the sampled token's
log-probability must be that of a plain pass of the model.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from agentrl.chat import train_tokenizer
from agentrl.engine.transformers.engine import TransformersConfig, TransformersEngine
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.model import make_local_model
from agentrl.types import Sampling

LENGTHS = (2048, 4096, 8192, 16384, 32768)
SIZES = LocalModelConfig(hidden_size=32, num_layers=1, num_heads=8, num_kv_heads=1, intermediate_size=64)


def make_model() -> Any:
    torch.manual_seed(0)
    return make_local_model(SIZES, train_tokenizer([], vocab_size=261)).eval()


def measure(num_tokens: int) -> dict[str, float]:
    """Sample one token after a prompt of so many, in this process."""
    engine = TransformersEngine(make_model(), TransformersConfig(max_batch_size=1))
    prompt = torch.randint(5, 261, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()

    async def sample(ids: list[int]) -> tuple[int, float]:
        done = await engine.generate(ids, Sampling(max_tokens=1, stop_token_ids=(), seed=0), "a")
        return done.token_ids[0], done.logprobs[0]

    with asyncio.Runner() as runner:
        runner.run(sample(prompt[:64]))
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
        before_mb, begin = memory_mb("VmRSS"), time.perf_counter()
        token, logprob = runner.run(sample(prompt))
        elapsed_s, peak_mb = time.perf_counter() - begin, memory_mb("VmHWM")
    if num_tokens <= 4096:
        with torch.inference_mode():
            exact = make_model()(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[token].item()
        if abs(exact - logprob) > 1e-5:
            raise SystemExit(f"{num_tokens} tokens: the engine says {logprob}, the model {exact}")
    return {"tokens": num_tokens, "peak_mb": peak_mb - before_mb, "seconds": elapsed_s}


def memory_mb(field: str) -> float:
    """Read a field of this process's status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--point", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(options.point)))
        return
    print(f"{'tokens':>8} {'peak MB':>9} {'seconds':>8}")
    rows = []
    for num_tokens in options.tokens:
        command = [sys.executable, "-m", "benchmarks.prefill_memory", "--point", str(num_tokens)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
        print(f"{num_tokens:>8} {rows[-1]['peak_mb']:>9.1f} {rows[-1]['seconds']:>8.2f}", flush=True)
    print(json.dumps({"threads": torch.get_num_threads(), "points": rows}))


if __name__ == "__main__":
    main()
