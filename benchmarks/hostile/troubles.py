"""Troubles of a machine, each once: signals, two processes on one run, a moved folder, clocks, memory, models."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import torch
import yaml
from safetensors.torch import load_file, save_file

from agentrl.engine.vllm.common import is_installed
from benchmarks.hostile.cases import CaseCounts
from benchmarks.hostile.kills import MODES, rows
from benchmarks.hostile.recipes import TINY
from tests.support.ports import free_port

STEPS = 12
AGENTRL = [sys.executable, "-m", "agentrl"]


def _recipe(folder: Path, mode: str = "sync", **sections: Any) -> Path:
    recipe = {**TINY, "train": {**TINY["train"], "steps": STEPS, "checkpoint_every": 2}, **sections}
    recipe["rollout"] = {**TINY["rollout"], "mode": mode}
    if mode != "sync":
        recipe["loss"] = {"unit": "version", "anchor": "behavior"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def _run(folder: Path, *arguments: object, command: tuple[str, ...] = (), **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [*command, *AGENTRL, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def _started(folder: Path, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*AGENTRL, *map(str, arguments)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _wait_for_step(run: Path, step: int, timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_bytes().splitlines()) > step:
            return
        time.sleep(0.02)
    raise TimeoutError(f"{run} has no step {step}")


def _complete(run: Path) -> str | None:
    """Return what is wrong with a run that should have all its steps."""
    steps = [row["step"] for row in rows(run)]
    return None if steps == list(range(STEPS + 1)) else f"steps {steps}"


def _clean(status: int, out: str, expected: int) -> str | None:
    if status != expected:
        return f"status {status}, not {expected}: {out[-300:]}"
    return f"a traceback: {out[-300:]}" if "Traceback" in out else None


def _end_by(number: signal.Signals, mode: str) -> Callable[[Path], str | None]:
    def trouble(here: Path) -> str | None:
        recipe, run = _recipe(here, mode), here / "run"
        process = _started(here, "train", recipe, "--run_dir", run)
        _wait_for_step(run, 3)
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
        if "Traceback" in out:
            return f"a traceback: {out[-300:]}"
        before = rows(run)
        status, out = _run(here, "train", run)
        if wrong := _clean(status, out, 0) or _complete(run):
            return wrong
        kept = rows(run)[: len(before)]
        return None if mode != "sync" or kept == before else "rows of before have changed"

    return trouble


def _stop_and_continue(here: Path) -> str | None:
    recipe, run = _recipe(here), here / "run"
    process = _started(here, "train", recipe, "--run_dir", run)
    _wait_for_step(run, 2)
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=120)
    return _clean(process.returncode, out, 0) or _complete(run)


def _two_at_once(here: Path) -> str | None:
    recipe, run = _recipe(here), here / "run"
    process = _started(here, "train", recipe, "--run_dir", run, "--train.steps", 100_000)
    _wait_for_step(run, 2)
    status, out = _run(here, "train", run)
    is_alive = process.poll() is None
    process.send_signal(signal.SIGINT)
    first, _ = process.communicate(timeout=120)
    wrong = _clean(status, out, 2) or _clean(process.returncode, first, 130)
    return wrong or (None if is_alive else "the first process ended")


def _moved(here: Path) -> str | None:
    recipe, run = _recipe(here), here / "run"
    _run(here, "train", recipe, "--run_dir", run, "--train.steps", 5)
    moved = here / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(run, moved)
    status, out = _run(here, "train", moved, "--train.steps", STEPS)
    return _clean(status, out, 0) or _complete(moved) or (f"{run} is there again" if run.exists() else None)


def _clock(here: Path) -> str | None:
    """The wall clock jumps a day forward and back at each reading."""
    (here / "lib").mkdir(parents=True)
    (here / "lib" / "sitecustomize.py").write_text(
        "import time, itertools\n_now, _jumps = time.time, itertools.cycle((0, 86400, -86400))\n"
        "time.time = lambda: _now() + next(_jumps)\n"
    )
    recipe, run = _recipe(here), here / "run"
    status, out = _run(here, "train", recipe, "--run_dir", run, PYTHONPATH=str(here / "lib"))
    return _clean(status, out, 0) or _complete(run)


def _without_shm(here: Path) -> str | None:
    recipe, run = _recipe(here), here / "run"
    bare = ("bwrap", "--dev-bind", "/", "/", "--tmpfs", "/dev/shm", "--remount-ro", "/dev/shm")
    status, out = _run(here, "train", recipe, "--run_dir", run, command=bare)
    return _clean(status, out, 0) or _complete(run)


def _many_rows(here: Path) -> str | None:
    """A million rows of metrics are read by `report` and `show`, and resumed from."""
    recipe, run = _recipe(here), here / "run"
    _run(here, "train", recipe, "--run_dir", run, "--train.steps", 4)
    line = (run / "metrics.jsonl").read_text().splitlines()[-1]
    row = json.loads(line)
    few = {name: row[name] for name in ("reward/mean", "entropy") if name in row}
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step} | few) + "\n" for step in range(1_000_000))
    status, out = _run(here, "report", run)
    return _clean(status, out, 0)


def _gzip_bomb(here: Path) -> str | None:
    """A file of rollouts that is a gigabyte of zeros, compressed."""
    recipe, run = _recipe(here), here / "run"
    _run(here, "train", recipe, "--run_dir", run, "--train.steps", 2)
    file = max((run / "rollouts").iterdir())
    with gzip.open(file, "wb", compresslevel=1) as bomb:
        for _ in range(1024):
            bomb.write(bytes(2**20))
    status, out = _run(here, "show", run)
    return _clean(status, out, 2)


def _killed(here: Path) -> str | None:
    """The training process is killed as the kernel does that needs its memory; the next command says so, and resumes."""
    recipe, run = _recipe(here), here / "run"
    process = _started(here, "train", recipe, "--run_dir", run)
    _wait_for_step(run, 3)
    process.kill()
    process.communicate(timeout=120)
    before = rows(run)
    status, out = _run(here, "train", run)
    if "it was killed (perhaps for its memory)" not in " ".join(out.split()):
        return f"not a word of the kill: {out[-300:]}"
    return _clean(status, out, 0) or _complete(run) or (None if rows(run)[: len(before)] == before else "other rows")


def _killed_rank(here: Path) -> str | None:
    """One of two ranks is killed for its memory."""
    recipe, run = _recipe(here), here / "run"
    process = _started(here, "launch", "--processes", 2, recipe, "--run_dir", run)
    _wait_for_step(run, 3)
    ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if each.environ().get("RANK") == "1"]
    ranks[0].kill()
    out, _ = process.communicate(timeout=200)
    if wrong := _clean(process.returncode, out, 1):
        return wrong
    if "agentrl launch --processes 2" not in out:
        return f"not a word of how to resume: {out[-300:]}"
    before = rows(run)
    status, out = _run(here, "launch", "--processes", 2, run)
    return _clean(status, out, 0) or _complete(run) or (None if rows(run)[: len(before)] == before else "other rows")


_ACTS = ("--rollout.cut_off", "act")
"""A model that was trained on nothing ends no turn: its environment answers all the same."""
_CHILD = """
import os, signal, subprocess, sys
from agentrl import ToolEnv
class Env(ToolEnv):
    num = 0
    def start(self, options): return "Well?"
    def answer(self, text):
        Env.num += 1
        end = "import os; os.kill(os.getpid(), 9)" if Env.num in (9, 14, 30) else "pass"
        subprocess.run([sys.executable, "-S", "-c", end], check=True)
        self.finish()
"""


def _killed_child(here: Path) -> str | None:
    """A process that an environment has started is killed for its memory: the episode fails, the run does not."""
    recipe, run = _recipe(here, env={"id": "child:Env"}), here / "run"
    (here / "child.py").write_text(_CHILD)
    status, out = _run(here, "train", recipe, "--run_dir", run, *_ACTS)
    if status != 0:
        return f"status {status}: {out[-300:]}"
    if wrong := _complete(run):
        return wrong
    return None if "SIGKILL" in out else f"not a word of the kill: {out[-300:]}"


def _no_memory(here: Path) -> str | None:
    """The model does not fit into the memory that the process may have."""
    recipe, run = _recipe(here), here / "run"
    local = {"hidden_size": 8192, "intermediate_size": 32768, "num_heads": 64, "num_layers": 8}
    sizes = [word for name, size in local.items() for word in (f"--model.local.{name}", size)]
    bound = ("prlimit", "--as=6000000000")
    status, out = _run(here, "train", recipe, "--run_dir", run, *sizes, command=bound)
    if wrong := _clean(status, out, 2):
        return wrong
    return None if "out of memory" in out and "Lower train." in out else f"not a word of what to lower: {out[-300:]}"


_GREEDY = """
import resource
from agentrl import ToolEnv
class Env(ToolEnv):
    num = 0
    def start(self, options): return "Well?"
    def answer(self, text):
        Env.num += 1
        if Env.num == 20:
            size = int(open("/proc/self/statm").read().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        self.finish()
"""


def _memory_used_up(here: Path) -> str | None:
    """A run is left with the memory that it has, and is resumed with more; a library may end the process itself."""
    recipe, run = _recipe(here, env={"id": "greedy:Env"}), here / "run"
    (here / "greedy.py").write_text(_GREEDY)
    status, out = _run(here, "train", recipe, "--run_dir", run, *_ACTS)
    if status >= 0 and (status != 2 or "out of memory" not in out or "resume with" not in out):
        return f"status {status}, or not a word of memory: {out[-400:]}"
    (here / "greedy.py").write_text(_GREEDY.replace("== 20", "== -1"))
    status, out = _run(here, "train", run)
    return _clean(status, out, 0) or _complete(run)


def _killed_server(here: Path) -> str | None:
    """A server of vLLM's is killed for its memory, started again, and the run resumed."""
    url = f"http://127.0.0.1:{free_port()}"
    engine = {"name": "vllm_server", "server": {"url": url, "max_retries": 1}}
    model = {"local": {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}}  # of heads that vLLM has
    recipe, run = _recipe(here, engine=engine, model=model), here / "run"
    with _serving(here, recipe, url) as server:
        process = _started(here, "train", recipe, "--run_dir", run, "--train.steps", 1000)
        _wait_for_step(run, 3)
        for each in psutil.Process(server.pid).children(recursive=True):
            each.kill()
        out, _ = process.communicate(timeout=200)
        if wrong := _clean(process.returncode, out, 1):
            return wrong
        said, _ = server.communicate(timeout=60)
        if "the server was killed" not in said:
            return f"not a word of the kill: {said[-300:]}"
    before = rows(run)
    with _serving(here, recipe, url):
        status, out = _run(here, "train", run, "--train.steps", len(before) + 2)
    kept = rows(run)[: len(before)]
    return _clean(status, out, 0) or (None if kept == before else "other rows")


@contextmanager
def _serving(here: Path, recipe: Path, url: str) -> "Iterator[subprocess.Popen[str]]":
    process = _started(here, "serve", recipe)
    try:
        end = time.monotonic() + 200
        while time.monotonic() < end and process.poll() is None:
            with suppress(OSError):
                if urlopen(f"{url}/health", timeout=5).status == 200:
                    break
            time.sleep(0.5)
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _exported(here: Path) -> Path:
    recipe, run = _recipe(here), here / "run"
    _run(here, "train", recipe, "--run_dir", run, "--train.steps", 1)
    status, out = _run(here, "export", run, here / "model")
    assert status == 0, out
    return here / "model"


def _wrong_shapes(here: Path) -> str | None:
    model = _exported(here)
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    save_file(weights | {name: torch.zeros(3, 5)}, model / "model.safetensors", metadata={"format": "pt"})
    status, out = _run(here, "train", "recipe.yaml", "--model.name_or_path", model, "--run_dir", here / "next")
    return _clean(status, out, 2)


def _own_code(here: Path) -> str | None:
    """A model whose config asks for code of its own: it is never run."""
    model = _exported(here)
    (model / "evil.py").write_text(f"open({str(here / 'ran')!r}, 'w')\n")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (model / "config.json").write_text(json.dumps(config))
    status, out = _run(here, "train", "recipe.yaml", "--model.name_or_path", model, "--run_dir", here / "next")
    if (here / "ran").exists():
        return "its code ran"
    return _clean(status, out, status if status in (0, 2) else 2)


SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
TROUBLES: dict[str, Callable[[Path], str | None]] = {
    **{f"{each.name} in {mode}": _end_by(each, mode) for each in SIGNALS for mode in MODES},
    "SIGSTOP for five seconds": _stop_and_continue,
    "two processes on one run": _two_at_once,
    "a moved run": _moved,
    "a clock that jumps": _clock,
    "no shared memory": _without_shm,
    "a million rows of metrics": _many_rows,
    "a gzip bomb": _gzip_bomb,
    "weights of wrong shapes": _wrong_shapes,
    "auto_map": _own_code,
    "a run killed for its memory": _killed,
    "a rank killed for its memory": _killed_rank,
    "an environment's process killed for its memory": _killed_child,
    "a model that finds no memory": _no_memory,
    "memory that is used up in a run": _memory_used_up,
    **({"vLLM's server killed for its memory": _killed_server} if is_installed() else {}),
}


def try_troubles(folder: Path, every: int) -> CaseCounts:
    """Meet each trouble of a machine once, and look whether anything is lost."""
    tally = CaseCounts(f"a trouble of the machine: {', '.join(TROUBLES)}")
    for name, trouble in list(TROUBLES.items())[::every]:
        try:
            wrong = trouble(folder / name.replace(" ", "-"))
        except Exception as error:  # noqa: BLE001 - a case that cannot be carried out has failed too
            wrong = f"{type(error).__name__}: {error}"
        tally.add(name, "nothing lost, or refused in one line", wrong=wrong)
    return tally
