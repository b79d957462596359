"""What memory a process needs to load a checkpoint whose weights are shared out: whole on each first, and each its part.

    python -m benchmarks.loading [--processes 2 3 4] [--layers 16] [--hidden-size 1024]

Writes a Qwen3 with random weights in bfloat16 into a temporary folder. For each number of processes it is loaded and shared out
as a run does it (`load_sharded`), and as it was before (`load_pretrained`), each in processes of their own. Told is the
peak of a process's own memory (`RssAnon`, every 2 ms) above that before loading, the largest of the processes, and seconds.
Beside it what is left afterwards, and its part of the weights with the largest layer.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.chat import train_tokenizer
from agentrl.distributed.processes import barrier, num_processes
from agentrl.learn.config import TrainConfig
from agentrl.learn.policy_state import PolicyState
from agentrl.policy.model import Policy, load_pretrained
from agentrl.policy.sharded_checkpoint import load_sharded
from tests.support.several import together

MB = 10**6


def own_memory() -> float:
    """Return the memory in MB that is this process's alone: what is mapped from files is not."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return float(status.partition("RssAnon:")[2].split()[0]) * 1024 / MB


class Peak:
    """The most memory while a block runs, above that before, in MB."""

    def __enter__(self) -> "Peak":
        self._before = self._most = own_memory()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.left = own_memory() - self._before
        self.most = max(self._most - self._before, self.left)

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self._most = max(self._most, own_memory())


def load(folder: str, how: str) -> tuple[float, float, float]:
    """Load the checkpoint as one of several processes; return peak and rest in MB, and seconds."""
    accelerator = Accelerator(cpu=True)
    load_pretrained(f"{folder}/tiny")  # imports, and what they keep
    barrier()
    start = time.monotonic()
    with Peak() as memory:
        if how == "parts":
            model, _, shares = load_sharded(folder, num_shards=num_processes())
            policy = Policy(model, sharded_checkpoint=shares)
            del shares
        else:
            policy = Policy(load_pretrained(folder)[0])
        PolicyState(policy, accelerator=accelerator, config=TrainConfig(device="cpu", sharding="full"))
    return memory.most, memory.left, time.monotonic() - start


def write(folder: Path, *, layers: int, hidden_size: int) -> tuple[float, float]:
    """Write a model; return the MB of its weights and of its largest layer in float32."""
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        head_dim=64,
        intermediate_size=3 * hidden_size,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    train_tokenizer([], vocab_size=261).save_pretrained(folder)
    layer = max(sum(p.numel() for p in module.parameters()) for module in model.model.layers)
    embedding = model.model.embed_tokens.weight.numel()
    return sum(p.numel() for p in model.parameters()) * 4 / MB, max(layer, embedding) * 4 / MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=1024)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        whole, layer = write(folder, layers=options.layers, hidden_size=options.hidden_size)
        write(folder / "tiny", layers=1, hidden_size=128)
        print(f"Weights {whole:.0f} MB in float32; the largest layer, or the embedding, {layer:.0f} MB.\n")
        print("| processes | how | peak, MB | left, MB | part and a layer, MB | seconds |\n|---|---|---|---|---|---|")
        for count in options.processes:
            for how in ("whole", "parts"):
                rows = together(count, load, str(folder), how)
                most, left, seconds = (max(column) for column in zip(*rows, strict=True))
                part = whole / count + layer
                print(f"| {count} | {how} | {most:.0f} | {left:.0f} | {part:.0f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
