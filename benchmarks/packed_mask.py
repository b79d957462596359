"""What a pass over packed rows costs: peak memory and time, each length in a fresh process.

    python -m benchmarks.packed_mask [--tokens 2048 4096 8192 16384] [--window 1024]

A row of so many tokens, and eight that are an eighth as long and stand behind one another in a second line. Two layers of
hidden size 64 with four query heads on two key-value heads, in float32; with a window, Mistral's. The peak is the resident
memory at its highest during one forward and backward pass, less what the process held before, after a short pass has warmed it
up. The time is that of the processor, on one thread: a machine that is busy with other things tells the same.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from agentrl.policy.layout import attending, hidden_states, lay_out

LENGTHS = (2048, 4096, 8192, 16384)


def measure(num_tokens: int, window: int | None) -> dict[str, float]:
    """Run one pass in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.MistralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    run(model, 64)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before_mb, begin = memory_mb("VmRSS"), time.process_time()
    run(model, num_tokens)
    return {"tokens": num_tokens, "seconds": time.process_time() - begin, "peak_mb": memory_mb("VmHWM") - before_mb}


def run(model: transformers.PreTrainedModel, num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(256, size=length) for length in [num_tokens, *[num_tokens // 8] * 8]]
    inputs, _ = lay_out(rows, "packed")
    with attending(model, "packed"):
        hidden_states(model, inputs).sum().backward()


def memory_mb(field: str) -> float:
    """Read a field of this process's status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--window", type=int)
    parser.add_argument("--point", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(options.point, options.window)))
        return
    window = [] if options.window is None else ["--window", str(options.window)]
    print("| tokens of the longest row | peak MB | seconds |\n|---|---|---|")
    for num_tokens in options.tokens:
        command = [sys.executable, "-m", "benchmarks.packed_mask", "--point", str(num_tokens), *window]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(f"| {num_tokens:,} | {found['peak_mb']:,.0f} | {found['seconds']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
