"""Every script of examples/ and the default recipe, run to the end as by a user who has installed agentrl without extras.

The sizes take seconds.
"""

import importlib
import os
import re
import shutil
import signal
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentrl
from agentrl import TrainedRun
from examples.treasure import Treasure
from tests.support.base_environment import make_base_environment
from tests.support.small_options import SMALL_OPTIONS
from tests.support.threads import wait_until

pytestmark = pytest.mark.process
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples in it, where all of them run, and an environment without extras."""
    folder = tmp_path_factory.mktemp("user")
    make_base_environment(folder / "venv")
    shutil.copytree(EXAMPLES, folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(folder: Path, script: str, *arguments: str, is_small: bool = True) -> str:
    small = SMALL_OPTIONS if is_small else []
    return run_python(folder, f"examples/{script}.py", *arguments, *small, cwd=folder)


def run_python(folder: Path, *arguments: str, cwd: Path) -> str:
    ended = subprocess.run(
        [folder / "venv" / "bin" / "python", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def newest(folder: Path) -> TrainedRun:
    return TrainedRun(max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime))


def test_every_script_is_here_and_short() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    for script in EXAMPLES.glob("*.py"):
        assert f'"{script.stem}"' in source or script.stem in ("agent", "color_rewards", "own_loop", "treasure")
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 80


def test_the_shortest_way_leads_to_the_treasure_and_evaluation_has_other_mazes() -> None:
    env, mazes = Treasure(), {"train": set[int](), "eval": set[int]()}
    for seed, split in product(range(30), mazes):
        env.reset(seed=seed, options={"split": split})
        mazes[split].add(env.maze)
        num_moves = env.distance[env.position]
        rewards: list[float] = []
        is_over, info = False, dict[str, Any]()
        while not is_over:
            _, reward, is_over, _, info = env.step(env.oracle())
            rewards.append(reward)
        assert info["success"]
        assert rewards == pytest.approx([0.1] * (num_moves - 1) + [1.1])
    assert not mazes["train"] & mazes["eval"]


def test_extras_are_not_there(folder: Path) -> None:
    script = "from importlib.util import find_spec; print([find_spec(name) for name in ('peft', 'mcp', 'pytest')])"
    assert run_python(folder, "-c", script, cwd=folder).strip() == "[None, None, None]"


def test_the_default_recipe_from_an_empty_folder(folder: Path, tmp_path: Path) -> None:
    told = run_python(folder, "-m", "agentrl", "train", "calculator", *SMALL_OPTIONS, cwd=tmp_path)
    assert "run folder: runs/calculator-" in told
    run_python(folder, "-m", "agentrl", "report", str(newest(tmp_path).path), cwd=tmp_path)
    assert (newest(tmp_path).path / "report.html").is_file()


@pytest.mark.slow
def test_an_environment_of_ones_own_then_its_checkpoint_from_another_process(folder: Path) -> None:
    assert "[reward " in run(folder, "custom_env")
    trained = newest(folder)
    assert trained.recipe.env.id == "examples.custom_env:MyEnv"
    told = run(folder, "evaluate_checkpoint", "--evaluation.num_tasks", "2", is_small=False)
    assert "tasks were never solved" in told
    assert "episodes: " in told
    exported = trained.export(folder / "exported")
    told = run(folder, "hugging_face_model", str(exported), "--train.precision", "float32", "--train.device", "cpu")
    assert re.search(r"weights for other programs: \S+/runs/\S+/exported", told)


@pytest.mark.slow
def test_the_default_recipe(folder: Path) -> None:
    told = run(folder, "train_default")
    assert re.search(r"agentrl show \S+/runs/calculator-", told)
    assert newest(folder).recipe.env.id == "calculator"


@pytest.mark.slow
def test_a_table_of_tasks_with_reward_functions(folder: Path) -> None:
    run(folder, "reward_functions", "--rollout.max_turns", "1")
    trained = newest(folder)
    rewards = trained.recipe.env.options["rewards"]
    assert rewards == [
        "examples.reward_functions:right",
        {"reward": "examples.reward_functions:is_digit", "weight": 0.1},
    ]


@pytest.mark.slow
def test_a_scheme_of_ones_own(folder: Path) -> None:
    run(folder, "custom_scheme")
    assert newest(folder).recipe.credit == {
        "scheme": "examples.custom_scheme:LateReward",
        "gamma": 0.8,
    }


@pytest.mark.slow
def test_two_schemes_are_compared(folder: Path) -> None:
    told = run(folder, "compare_schemes")
    assert "difference, seed by seed: " in told


@pytest.mark.slow
def test_several_processes(folder: Path) -> None:
    told = run(folder, "several_processes", "--rollout.num_groups", "2")
    assert "after 1 steps: " in told


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_several_processes_end_with_the_script(folder: Path, how: signal.Signals) -> None:
    many = ["--run_dir", f"runs/{how.name}", "--train.steps", "5000", "--train.process_timeout_s", "60"]
    script = subprocess.Popen(
        [folder / "venv" / "bin" / "python", "examples/several_processes.py", *SMALL_OPTIONS, *many],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = folder / "runs" / how.name / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and len(metrics.read_bytes().splitlines()) > 2, timeout_s=300)
    others = psutil.Process(script.pid).children(recursive=True)
    assert len(others) >= 3  # the launcher, and its two
    script.send_signal(how)
    assert script.wait(timeout=120) != 0
    assert psutil.wait_procs(others, timeout=120)[1] == []


def test_the_agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")  # an agent brings its own SDK
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    small = [
        *SMALL_OPTIONS,
        "--warmup.steps",
        "0",
        "--train.precision",
        "float32",
        "--rollout.max_context_tokens",
        "1024",
    ]
    trained = agentrl.train("examples/agent.yaml", quiet=True, overrides=["--model.name_or_path", "null", *small])
    assert trained.recipe.player_id == "examples.agent:solve"
    assert trained.metrics[-1]["stop/terminated"] == 1.0
    told = [turn.observation[0]["content"] for turn in trained.trajectories()[0].trajectories[0].turns[:1]]
    assert re.fullmatch(r"What is \(.*\) . \d+\? Answer with the number alone.", str(told[0]))


def test_the_tool_of_the_agent_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.syspath_prepend(str(EXAMPLES.parent))
    calc = importlib.import_module("examples.agent").calc
    assert calc('{"a": 7, "operator": "*", "b": 6}') == "42"
    assert calc('{"a": 7}').startswith("Error: KeyError")
