"""Training steps of Qwen3s on one GPU: seconds, memory against `agentrl plan`, and what the head takes.

    python -m benchmarks.gpu step [--cases 0.6B 8B-lora ...] [--repeats 3]
    python -m benchmarks.gpu head [--hidden 1024 4096]
    python -m benchmarks.gpu profile --cases 0.6B
    python -m benchmarks.gpu short [--minutes 9] [--device cpu]

`step`: each case a process of its own. Models have random weights in the sizes of the published ones; what is trained on is
made up: groups of eight episodes with one prompt of 512 tokens and six turns of 96 tokens of observation and 128 of action. A
step is `Learner.update`, of one minibatch: planning, passes forward and backward, the gradient's norm, the optimizer. Told are
the tokens of rows that a second trains on; what of the peak of bfloat16 products, measured in the same process, that is worth
at six operations a token and weight that it passes (passes that are repeated, attention and what is shared do not count); and
the memory that torch had allocated at its most, against what the plan counts, that it had reserved, and what is taken of the
GPU beside that, before the first step and after the last.

`head`: `fused_logprobs` forward and backward, 8,192 tokens and a vocabulary of 151,936 in bfloat16, by the size of its tiles,
against the seconds of its four products alone, at the measured peak.

`short`: for a GPU that is at hand for minutes. Parts in the order of what they tell, each a process of its own and within the
time that is left; each prints a line of JSON as it ends. First a trace of one step (share of it that kernels ran, their number,
the longest gap, calls of ATen, values that the host read); then whether weights of a late sender are waited for; then steps.
`--device cpu` tries all of it on tiny models.
"""

import argparse
import cProfile
import gc
import json
import pstats
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.profiler
from accelerate import Accelerator
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from agentrl import Credit, Trajectory, TrajectoryGroup, Turn
from agentrl.learn.learner import Learner
from agentrl.learn.policy_state import PolicyState
from agentrl.models.auto_classes import auto_class
from agentrl.policy.config import Layout
from agentrl.policy.layout import choose_layout
from agentrl.policy.logprobs import fused_logprobs
from agentrl.policy.lora import add_lora, round_frozen
from agentrl.policy.model import Policy, checkpoint_layers
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.run.memory import ProcessMemory, model_config, plan_memory
from agentrl.types import StopReason
from tests.support.qwen3 import folder_of

EXAMPLES = Path(__file__).parents[1] / "examples" / "gpu"
PROMPT, TURNS = 512, ((96, 128),) * 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how."""

    size: str
    recipe: str
    layout: Layout = "tree"
    groups: int = 4
    turns: int = len(TURNS)
    options: list[str] = field(default_factory=list)
    """Of the recipe."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the model's configuration."""


_PASS = "--train.max_tokens_per_micro_batch"
CASES: dict[str, Case] = {
    "0.6B": Case(size="0.6B", recipe="qwen3-0.6b", options=[_PASS, "4096"]),
    "0.6B, 16k": Case(size="0.6B", recipe="qwen3-0.6b"),
    "0.6B, 16k, packed": Case(size="0.6B", recipe="qwen3-0.6b", layout="packed"),
    "0.6B, 16k, padded": Case(size="0.6B", recipe="qwen3-0.6b", layout="padded"),
    "0.6B, 16k, nothing twice": Case(
        size="0.6B", recipe="qwen3-0.6b", options=["--train.gradient_checkpointing", "false"]
    ),
    "0.6B, 16k, copy": Case(size="0.6B", recipe="qwen3-0.6b", options=["--train.bfloat16_copy", "true"]),
    "0.6B, 16k, moments away": Case(size="0.6B", recipe="qwen3-0.6b", options=["--train.offload", "[optimizer]"]),
    "1.7B, 16k": Case(size="1.7B", recipe="qwen3-0.6b"),
    "8B-lora": Case(size="8B", recipe="qwen3-8b-lora", groups=2, options=[_PASS, "8192"]),
    "8B-lora, packed": Case(size="8B", recipe="qwen3-8b-lora", layout="packed", groups=2, options=[_PASS, "8192"]),
    "30B-A3B, two layers": Case(
        size="30B-A3B", recipe="qwen3-0.6b", changes={"num_hidden_layers": 2}, options=[_PASS, "4096"]
    ),
}
"""The recipes are those of `examples/gpu`; 16k: tokens of a pass, as they are there."""
TINY = Case(
    size="0.6B",
    recipe="qwen3-0.6b",
    groups=1,
    options=["--train.device", "cpu", "--train.precision", "float32", "--train.bfloat16_copy", "false"],
    changes={"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 300},
)
"""To see on a CPU that all of it works."""


def tiny(case: Case) -> Case:
    """Return a case for a CPU: its recipe and layout, on a model of nothing."""
    return replace(case, size="0.6B", groups=1, turns=1, options=[*case.options, *TINY.options], changes=TINY.changes)


def made_up(
    groups: int, vocab_size: int, num_turns: int = len(TURNS)
) -> tuple[list[TrajectoryGroup], list[list[Credit]]]:
    """Return groups of eight that share a prompt, and credit for them."""
    rng = np.random.default_rng(0)
    made = []
    for group in range(groups):
        prompt = rng.integers(vocab_size, size=PROMPT).tolist()
        members = []
        for number in range(8):
            turns = list[Turn]()
            for observed, acted in TURNS[:num_turns]:
                ids = rng.integers(vocab_size, size=observed + acted).tolist()
                turn = Turn(
                    observation_ids=(*(prompt if not turns else ()), *ids[:observed]),
                    action_ids=tuple(ids[observed:]),
                    behavior_logprobs=(-12.0,) * acted,
                    versions=(0,) * acted,
                    reward=0.0,
                )
                turns.append(turn)
            trajectory = Trajectory(
                group_id=str(group),
                trajectory_id=f"{group}/{number}",
                env_id="made up",
                seed=group,
                turns=tuple(turns),
                stop_reason=StopReason.TERMINATED,
            )
            members.append(trajectory)
        made.append(TrajectoryGroup(group_id=str(group), trajectories=tuple(members)))
    credits = [[Credit.uniform(t, 1.0 - 2 * (n % 2)) for n, t in enumerate(group.trajectories)] for group in made]
    return made, credits


def new_learner(recipe: Recipe, layout: Layout, device: torch.device) -> Learner:
    """Return a learner of random weights, made as `agentrl.run.build` makes it."""
    torch.manual_seed(0)
    config, train = model_config(recipe), recipe.train
    half = train.precision == "bfloat16"
    accelerator = Accelerator(cpu=train.device == "cpu", mixed_precision="bf16" if half else "no")
    with device:
        model = auto_class(config).from_config(config, dtype=torch.float32)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora)
        if half:
            round_frozen(model)
    if train.gradient_checkpointing:
        checkpoint_layers(model, every=int(train.gradient_checkpointing))
    chosen, words = choose_layout(model, layout, half=half) if recipe.model.lora is None else (layout, None)
    assert (chosen, words) == (layout, None)
    model.to(device)
    state = PolicyState(Policy(model, layout=layout), accelerator=accelerator, config=train)
    return Learner(state, loss=recipe.loss, config=train, temperature=1.0, seed=0)


def made(case: Case) -> tuple[Learner, list[TrajectoryGroup], list[list[Credit]], ProcessMemory]:
    """Return a case's learner, what it is trained on, and what is planned for its largest pass."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--model.name_or_path", str(folder_of(case.size, Path(folder), **case.changes))]
        options += ["--train.num_minibatches", "1", "--train.target_kl", "null", *case.options]
        recipe = load_recipe(EXAMPLES / f"{case.recipe}.yaml", options)
        learner = new_learner(recipe, case.layout, torch.device("cpu" if recipe.train.device == "cpu" else "cuda"))
        groups, credits = made_up(case.groups, learner.state.policy.model.config.vocab_size, case.turns)
        plan = learner.plan(learner.draw(groups, credits, version=0)[0])
        largest = max(micro.inputs.ids_BL.numel() for micro, _ in plan)
        filled = recipe.model_copy(
            update={
                "engine": load_recipe(None, ["--engine.max_batch_size", "1"]).engine,  # its passes are no larger
                "train": recipe.train.model_copy(update={"max_tokens_per_micro_batch": largest}),
                "rollout": recipe.rollout.model_copy(update={"max_context_tokens": largest}),
            }
        )
        (process, *_) = plan_memory(filled, gpus=1, memory=0)
    return learner, groups, credits, process


def profile(case: Case) -> None:
    """Print in which functions of Python the third step of a case spends its time."""
    learner, groups, credits, _ = made(case)
    for version in range(2):
        learner.update(groups, credits, version=version)
    functions = cProfile.Profile()
    functions.runcall(learner.update, groups, credits, version=2)
    for key in ("tottime", "cumulative"):
        pstats.Stats(functions).sort_stats(key).print_stats(45)


def in_optimizer(event: Any) -> bool:
    """Return whether a fused optimizer reads its own count of steps, which on a CPU are ordinary numbers."""
    while event is not None and not event.name.startswith("aten::_fused"):
        event = event.cpu_parent
    return event is not None


def trace(case: Case) -> dict[str, float]:
    """Return what the third step of a case has the device and the host do."""
    learner, groups, credits, _ = made(case)
    for version in range(2):
        learner.update(groups, credits, version=version)
    on_gpu = learner.state.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        begin = time.perf_counter()
        learner.update(groups, credits, version=2)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    events = profiler.events()
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type == DeviceType.CUDA)
    busy_us, gap_us, end = 0.0, 0.0, spans[0][0] if spans else 0.0
    for start, stop in spans:
        gap_us = max(gap_us, start - end)
        busy_us += max(0.0, stop - max(start, end))
        end = max(end, stop)
    calls = Counter(event.name for event in events)
    return {
        "step_s": seconds,
        "busy_share": busy_us / 1e6 / seconds,
        "kernels": len(spans),
        "longest_gap_ms": gap_us / 1e3,
        "aten_calls": sum(number for name, number in calls.items() if name.startswith("aten::")),
        "host_reads": sum(event.name == "aten::_local_scalar_dense" and not in_optimizer(event) for event in events),
        "synchronizations": calls["cudaStreamSynchronize"] + calls["cudaDeviceSynchronize"],
    }


def beside_trl(*, is_cpu: bool) -> list[str]:
    """Return the command of a step of ours and of TRL's on the same batch."""
    case = ["--quick", "--devices", "cpu"] if is_cpu else ["--rows", "0.6B_tools", "--devices", "cuda"]
    return [sys.executable, "-m", "benchmarks.train_step", "--repeats", "1" if is_cpu else "3", *case]


def curve(folder: Path, *, is_cpu: bool) -> list[str]:
    """Return the command that trains SmolLM2-135M-Instruct, whose success in evaluations is the curve; on a CPU, a step."""
    steps = {
        "--train.steps": "1",
        "--warmup.steps": "1",
        "--warmup.num_demonstrations": "8",
        "--evaluation.num_tasks": "2",
    }
    few = {"--rollout.num_groups": "1", "--rollout.dynamic_sampling": "0", "--rollout.group_size": "2"}
    small = [word for option in (steps | few).items() for word in option] if is_cpu else []
    run = ["run", "--out", str(folder / "curve.jsonl"), "--runs", str(folder), "--seeds", "0", "--arms", "grpo/uniform"]
    return [sys.executable, "-m", "benchmarks.flagship", *run, *small]


def short(minutes: float, *, is_cpu: bool) -> None:
    """Print what a GPU tells in a few minutes, a line for each part as it ends."""
    with tempfile.TemporaryDirectory() as folder:
        _short(minutes, Path(folder), is_cpu=is_cpu)


def _short(minutes: float, folder: Path, *, is_cpu: bool) -> None:
    device, repeats = (["--device", "cpu"], "1") if is_cpu else ([], "3")
    own = [sys.executable, "-m", "benchmarks.gpu"]
    late = ["tests/gpu/test_processes.py", "-k", "arrive or read_only", "-m", "gpu"]
    parts = {"trace of 0.6B, 16k": [*own, "trace", "--case", "0.6B, 16k", *device]}
    parts |= {} if is_cpu else {"late weights": [sys.executable, "-m", "pytest", "-q", "-n0", *late]}
    cases = [
        "0.6B, 16k",
        "0.6B, 16k, copy",
        "8B-lora",
        "0.6B, 16k, packed",
        "0.6B, 16k, moments away",
        "8B-lora, packed",
    ]
    parts |= {f"step of {name}": [*own, "step", "--repeats", repeats, "--case", name, *device] for name in cases}
    parts |= {"a step beside TRL's": beside_trl(is_cpu=is_cpu), "SmolLM2's curve": curve(folder, is_cpu=is_cpu)}
    end = time.monotonic() + 60 * minutes
    for name, command in parts.items():
        begin = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(0.1, end - begin))
            lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines()
        except subprocess.TimeoutExpired:
            lines = ["no time left"]
        line = next((line for line in lines if line.startswith(("{", "[{"))), None)  # of TRL's there is one in a list
        found = {"said": lines[-1]} if line is None else json.loads(line.strip("[]"))
        print(json.dumps({"part": name, "took_s": round(time.monotonic() - begin, 1), **found}), flush=True)


def step(case: Case, repeats: int) -> dict[str, float]:
    """Measure one case in this process."""
    on_gpu = "cpu" not in case.options
    peak = bfloat16_peak(torch.device("cuda" if on_gpu else "cpu"))
    learner, groups, credits, process = made(case)
    beside_at_first = beside_gb() if on_gpu else 0.0
    num_weights = read_by_a_token(learner.state.policy.model)
    tokens = case.groups * 8 * (PROMPT + sum(map(sum, TURNS[: case.turns])))
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for version in range(1 + repeats):
        begin = time.perf_counter()
        learner.update(groups, credits, version=version)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    now = median(seconds[1:])
    reserved = torch.cuda.max_memory_reserved() if on_gpu else 0
    sampling = ("engine", "keys and values", "a pass of sampling")
    planned = sum(size for name, size in process.uses.items() if name not in sampling)
    return {
        "first_s": seconds[0],
        "step_s": now,
        "tokens": tokens,
        "tokens_per_s": tokens / now,
        "peak_tflops": peak / 1e12,
        "share_of_peak": 6 * num_weights * tokens / now / peak,
        "planned_gb": planned / 1e9,
        "allocated_gb": (torch.cuda.max_memory_allocated() if on_gpu else 0) / 1e9,
        "reserved_gb": reserved / 1e9,
        "beside_at_first_gb": beside_at_first,
        "beside_gb": beside_gb() if on_gpu else 0.0,
    }


def read_by_a_token(model: Any) -> float:
    """Return the number of weights that a token passes: all but those of the experts that it is not sent to."""
    config = model.config.get_text_config()
    sent_to = config.num_experts_per_tok / config.num_experts if hasattr(config, "num_experts") else 1.0
    sizes = ((name, weight.numel()) for name, weight in model.named_parameters())
    return float(sum(size * sent_to if ".experts." in name else size for name, size in sizes))


def beside_gb() -> float:
    """Return what is taken of the GPU beside torch's own allocations: by CUDA, libraries, kernels, and other processes."""
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 1e9


def bfloat16_peak(device: torch.device) -> float:
    """Return the operations a second of a large product."""
    size = 8192 if device.type == "cuda" else 256
    left, right = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / timed(lambda: left @ right, device)


def timed(work: Any, device: torch.device, repeats: int = 10) -> float:
    """Return the seconds of a call: the median of some after two."""
    seconds = []
    for _ in range(2 + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return median(seconds[2:])


def head(hidden_size: int, device: torch.device, num_tokens: int = 8192, vocab_size: int = 151936) -> None:
    """Print what the head takes with tiles of several sizes."""
    peak = bfloat16_peak(device)
    hidden_TD = torch.randn(num_tokens, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = (torch.randn(vocab_size, hidden_size, device=device) * hidden_size**-0.5).requires_grad_()
    targets_T = torch.randint(vocab_size, (num_tokens,), device=device)
    products_s = 4 * 2 * num_tokens * vocab_size * hidden_size / peak
    for exponent in range(21, 28):

        def run(chunk_elements: int = 2**exponent) -> None:
            fused_logprobs(hidden_TD, weight_VD, targets_T, chunk_elements=chunk_elements)[0].sum().backward()

        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        hidden_TD.grad = weight_VD.grad = None
        seconds = timed(run, device, repeats=3)
        most = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
        cells = [hidden_size, f"2^{exponent}", f"{1000 * seconds:.0f}", f"{1000 * products_s:.0f}", f"{most / 1e9:.2f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["short", "step", "trace", "head", "profile", "try"])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=9.0, help="of `short`, at most")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    if options.part == "short":
        short(options.minutes, is_cpu=options.device == "cpu")
        return
    if options.case and options.device == "cpu":
        CASES[options.case] = tiny(CASES[options.case])
    if options.part == "trace":
        print(json.dumps(trace(CASES[options.case])))
        return
    if options.case or options.part == "try":
        print(json.dumps(step(CASES[options.case] if options.case else TINY, options.repeats)))
        return
    if options.part == "profile":
        for name in options.cases:
            profile(CASES[name])
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    if options.part == "head":
        print("| hidden size | elements of a tile | ms | ms of its products at the peak | GB |\n|---|---|---|---|---|")
        for hidden_size in options.hidden:
            head(hidden_size, torch.device("cuda"))
        return
    print(
        "| case | first step, s | step, s | tokens/s | of the peak | planned, GB | allocated | ratio | reserved | beside |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in options.cases:
        command = [sys.executable, "-m", "benchmarks.gpu", "step", "--case", name, "--repeats", str(options.repeats)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"| {name} | {done.stderr.strip().splitlines()[-1]} |", flush=True)
            print(done.stderr[-3000:], file=sys.stderr)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {name} | {found['first_s']:.1f} | {found['step_s']:.2f} | {found['tokens_per_s']:,.0f} "
            f"| {found['share_of_peak']:.0%} | {found['planned_gb']:.1f} | {found['allocated_gb']:.1f} "
            f"| {found['planned_gb'] / found['allocated_gb']:.2f} | {found['reserved_gb']:.1f} "
            f"| {found['beside_at_first_gb']:.1f} to {found['beside_gb']:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
