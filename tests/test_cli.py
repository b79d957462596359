"""The command line, in this process where that shows the same as in one of its own."""

import errno
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml

from agentrl.api.training import summary
from agentrl.cli import main
from agentrl.cli.entry import exits
from agentrl.cli.serve import log_end
from agentrl.errors import ConfigError
from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.report.records import read_records
from agentrl.run import loop
from agentrl.run.build import Parts
from tests.support.each import each

TINY = """
env: {id: key_door}
model: {local: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, intermediate_size: 32, vocab_size: 300}}
warmup: {steps: 2, batch_size: 4, num_demonstrations: 16}
rollout: {num_groups: 2, group_size: 2, max_turns: 4, max_turn_tokens: 16, max_context_tokens: 512}
train: {steps: 2, num_minibatches: 2, device: cpu}
evaluation: {num_tasks: 4}
report: {rollouts_every: 1}
"""

SHOP = """
from agentrl.env import MessageEnv
from tests.support.threads import hang


class Shop(MessageEnv):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return ({"role": "user", "content": "Well?"},), {}

    def step(self, action):
        return (), 0.0, True, False, {}


class RaisesInReset(Shop):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("the shop is closed")


class Hangs(Shop):
    def reset(self, *, seed=None, options=None):
        hang()


class HangsInStep(Shop):
    def step(self, action):
        hang()


class ReturnsFour(Shop):
    def step(self, action):
        return (), 0.0, True, {}


class ReturnsText(Shop):
    def reset(self, *, seed=None, options=None):
        return "Well?"


class RaisesWhenMade(Shop):
    def __init__(self):
        raise RuntimeError("no licence for a shop")


class SellsFewThings(Shop):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.wanted = int(self.np_random.integers(10))
        return ({"role": "user", "content": f"Give me {self.wanted}."},), {}

    def step(self, action):
        return (), float({n: 0 for n in range(6)}[self.wanted]), True, False, {}

    def oracle(self, *, skill=1.0, rng=None):
        self.wanted = 0
        return {"role": "assistant", "content": "."}


class NoShop:
    pass
"""


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


Agentrl = Callable[..., Outcome]


@pytest.fixture
def agentrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Agentrl]:
    """Run a command in an empty folder that holds a recipe and a module of environments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "shop_of_faults.py").write_text(SHOP)
    (tmp_path / "shop_of_errors.py").write_text("1 / 0\n")

    def run(*arguments: str) -> Outcome:
        status = 0
        try:
            main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        return Outcome(status, *capsys.readouterr())

    yield run
    sys.modules.pop("shop_of_faults", None)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


GIVEN = {"tiny.yaml", "shop_of_faults.py", "shop_of_errors.py"}


def test_installed_environments_are_listed(agentrl: Agentrl) -> None:
    status, out, err = agentrl("envs")
    assert (status, err) == (0, "")
    for word in ("calculator", "key_door", "service_desk", "calc", "refund"):
        assert word in out


def test_installed_credit_schemes_are_listed_with_their_fields(
    agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = agentrl("credit")
    assert (status, err) == (0, "")
    for word in (
        "turn_return",
        "uniform",
        "turn_rewards",
        "2505.10978",
        "gamma: 1.0",
        "action_values ",
        "token",
    ):
        assert word in out


@pytest.mark.slow
@pytest.mark.process
def test_a_process_ends_with_status_2_and_one_message(tmp_path: Path) -> None:
    def run(*arguments: str) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "agentrl", *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=tmp_path,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    assert run("show", "nowhere") == (2, "", "agentrl: there is no nowhere\n")
    assert run("envs", "--all") == (2, "", "agentrl: agentrl envs does not take --all\n")
    status, out, err = run("trian")
    assert (status, out) == (2, "")
    assert "invalid choice: 'trian'" in err
    assert files(tmp_path) == set()


@each(
    ("arguments", "words"),
    [
        (["nowhere.yaml"], "cannot read the recipe nowhere.yaml: No such file or directory"),
        (["."], "HERE is not the folder of a run: it has no config.yaml"),
        (["tiny.yaml", "--sed", "3"], "--sed: no such option. Did you mean '--seed'?"),
        (
            ["tiny.yaml", "--rollout.group_sise=3"],
            "--rollout.group_sise: no such option. Did you mean '--rollout.group_size'?",
        ),
        (["tiny.yaml", "--train.steps", "0"], "train.steps: Input should be greater than 0 (got '0')"),
        (
            ["tiny.yaml", "--rollout.max_context_tokens", "5000"],
            "rollout.max_context_tokens: 5000 exceeds the model's 4096 positions; lower it",
        ),
        (
            ["tiny.yaml", "--model.name_or_path", "./nowhere"],
            "model.name_or_path: no model in './nowhere': nowhere/config.json does not exist",
        ),
        (
            ["tiny.yaml", "--env.id", "key_dor"],
            "env.id: no 'key_dor' is installed. Did you mean 'key_door'? Or give it as 'module:Class'.",
        ),
        (
            ["tiny.yaml", "--env.id", "shop_of_faults:Shap"],
            "env.id: module 'shop_of_faults' has no 'Shap'. Did you mean 'Shop'?",
        ),
        (
            ["tiny.yaml", "--env.id", "shop_of_faults:NoShop"],
            "env.id: 'shop_of_faults:NoShop' gives NoShop, which is no agentrl.MessageEnv. "
            "Subclass agentrl.ToolEnv (tools, start, answer) or agentrl.MessageEnv (reset, step).",
        ),
        (
            ["tiny.yaml", "--env.id", "shop_of_faults:RaisesWhenMade"],
            "env.options: 'shop_of_faults:RaisesWhenMade' could not be made: RuntimeError: no licence for a shop",
        ),
        (
            ["tiny.yaml", "--env.id", "shop_of_errors:Shop"],
            "env.id: importing 'shop_of_errors' of 'shop_of_errors:Shop' raised ZeroDivisionError: division by zero",
        ),
        (
            ["tiny.yaml", "--env.id", "shop_of_errors:Shop-v0"],
            "env.id: importing 'shop_of_errors' of 'shop_of_errors:Shop-v0' raised ZeroDivisionError: division by zero",
        ),
        (
            ["tiny.yaml", "--env.options.num_boxs", "3"],
            "env.options.num_boxs: 'key_door' has no such option. Did you mean 'num_boxes'?",
        ),
        (["tiny.yaml", "--run_dir", "tiny.yaml"], "run_dir: tiny.yaml is a file; name a folder"),
        (
            ["tiny.yaml", "--run_dir", "full"],
            "run_dir: full is not empty; choose another, or resume that run: agentrl train full",
        ),
    ],
)
def test_a_recipe_that_cannot_be_carried_out_is_refused_and_leaves_no_trace(
    arguments: list[str], words: str, agentrl: Agentrl
) -> None:
    Path("full").mkdir(exist_ok=True)
    Path("full/thesis.txt").write_text("three years of work", encoding="utf-8")
    target, *overrides = arguments
    run_dir = [] if target == "." or "--run_dir" in overrides else ["--run_dir", "run"]
    status, out, err = agentrl("train", target, *overrides, *run_dir)
    assert (status, err) == (2, f"agentrl: {words}\n".replace("HERE", str(Path.cwd())))
    if not words.startswith(("env", "model", "rollout.max_context")):  # those show when the parts are built
        assert out == ""
    assert files(Path()) == GIVEN | {"full", "full/thesis.txt"}


@each(
    ("name", "words"),
    [
        (
            "RaisesInReset",
            "environment RaisesInReset: reset() raised RuntimeError: the shop is closed (shop_of_faults.py:17)",
        ),
        ("Hangs", "environment Hangs: reset() did not return within rollout.env_timeout_s: 0.5 s"),
        ("HangsInStep", "environment HangsInStep: step() did not return within rollout.env_timeout_s: 0.5 s"),
        (
            "ReturnsFour",
            "step() of ReturnsFour returned tuple ((), 0.0, True, {}); "
            "return (messages, reward, terminated, truncated, info)",
        ),
        (
            "ReturnsText",
            "reset() of ReturnsText returned str 'Well?'; return (messages, info)",
        ),
    ],
)
def test_an_environment_that_fails_ends_the_run_with_its_words_and_leaves_no_trace(
    name: str, words: str, agentrl: Agentrl
) -> None:
    timeout_s = "0.5" if name.startswith("Hangs") else "60"
    chosen = ["--env.id", f"shop_of_faults:{name}", "--rollout.env_timeout_s", timeout_s]
    status, _, err = agentrl("train", "tiny.yaml", *chosen, "--run_dir", "run")
    assert (status, err) == (2, f"agentrl: {words}\n")
    assert files(Path()) == GIVEN


@pytest.mark.slow
@pytest.mark.process
def test_of_several_processes_one_speaks_and_writes(agentrl: Agentrl, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "agentrl"]
    arguments = ["train", "tiny.yaml", "--run_dir", "run"]
    ended = subprocess.run([*launcher, *arguments], capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("training 2/2 ") == 1
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]  # the first one is the evaluation before


def test_the_doctor_says_what_samples_and_that_it_agrees(agentrl: Agentrl, tmp_path: Path) -> None:
    status, out, err = agentrl("doctor", "tiny.yaml")
    assert (status, err) == (0, "")
    found = {line[:13].strip(): line[14:] for line in out.splitlines()}
    assert list(found) == ["versions", "device", "engine", "agreement", "weight push", "speed", "prefix cache"]
    assert "torch 2." in found["versions"]
    assert found["device"].startswith("cpu, ")
    assert found["engine"] == "TransformersEngine (engine.name: auto)"
    difference = float(found["agreement"].split()[6])
    assert 0 <= difference < 1e-5
    assert int(found["speed"].split()[0].replace(",", "")) > 0
    # Prompts of 112, 160 and 208 tokens; all but the last sampled token and the 16 that are new were computed before.
    assert found["prefix cache"].startswith(f"{(95 + 143 + 191) / (112 + 160 + 208):.0%} of")
    assert files(tmp_path) == GIVEN


def test_the_doctor_speaks_briefly_where_contexts_are_short(agentrl: Agentrl) -> None:
    for num in ("40", "100"):
        status, out, err = agentrl(
            "doctor", "tiny.yaml", "--rollout.max_context_tokens", num, "--model.local.max_positions", num
        )
        assert (status, err) == (0, "")
        assert "sampled tokens/s" in out


@pytest.mark.slow
@each(
    ("options", "words"),
    [
        (
            ["--engine.vllm", '{"no_such": 32}'],
            "engine.vllm: engine.name: auto chooses transformers, which has no such option; remove it, or set engine.name: "
            "vllm",
        ),
        (
            ["--engine.sleep", "true"],
            "engine.sleep: engine.name: auto chooses transformers, which has no such option; remove it, or set engine.name: "
            "vllm",
        ),
        (
            ["--engine.sleep", "true", "--engine.name", "transformers"],
            "engine.sleep: 'transformers' has no such option; 'auto' and 'vllm' have: remove it, or set engine.name",
        ),
        (
            ["--engine.sleep", "true", "--engine.name", "vllm", "--rollout.mode", "async"],
            "engine.sleep: rollout.mode: async samples while the policy is updated; set engine.sleep to false",
        ),
    ],
)
def test_options_of_vllm_are_refused_where_it_does_not_sample(options: list[str], words: str, agentrl: Agentrl) -> None:
    status, _, err = agentrl("train", "tiny.yaml", *options)
    assert (status, err) == (2, f"agentrl: {words}\n")
    assert files(Path()) == GIVEN


@each("url", ["127.0.0.1:8000", "http://127.0.0.1:abc", "http://127.0.0.1", "ftp://a:1"])
def test_an_address_that_is_none_is_refused(url: str, agentrl: Agentrl) -> None:
    status, _, err = agentrl("doctor", "tiny.yaml", "--engine.name", "vllm_server", "--engine.server.url", url)
    assert (status, err) == (2, f"agentrl: engine.server.url: expected http://HOST:PORT, got {url!r}\n")


def test_the_doctor_finds_an_engine_that_disagrees(agentrl: Agentrl) -> None:
    status, _, err = agentrl("doctor", "tiny.yaml", "--train.agreement", "1e-12")
    assert status == 1
    assert err.startswith("agentrl: the engine's log-probabilities differ from the trainer's by ")


@each(
    ("option", "words"),
    [
        (("--env.id", "nowhere:Env"), "env.id: "),
        (("--model.name_or_path", "./nowhere"), "model.name_or_path: "),
    ],
)
def test_what_is_missing_is_found_before_the_plan_is_printed(
    option: tuple[str, str], words: str, agentrl: Agentrl
) -> None:
    status, out, err = agentrl("train", "tiny.yaml", *option)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"agentrl: {words}")


@pytest.mark.process
def test_a_run_from_beginning_to_end(agentrl: Agentrl, tmp_path: Path) -> None:
    status, out, err = agentrl("train", "tiny.yaml", "--run_dir", "run", "--seed", "3")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("key_door, seed 3")
    assert lines.index("run folder: run") < next(i for i, line in enumerate(lines) if line.startswith("warm-up"))
    assert "reward " in lines[-4]
    assert " on 4 evaluation tasks, 2 steps" in lines[-4]
    assert re.fullmatch(r"checkpoints: steps 0, 2, [\d.]+ [kM]B", lines[-3])
    announced = [line.removesuffix(" ...") for line in lines if line.endswith(" ...")]
    assert announced == [
        "making a model and its tokenizer",
        "starting the engine (auto)",
        "proving which layout of rows is exact",
        "trying the environment",
        "proving that engine and trainer agree",
        "playing 16 demonstrations",
        "evaluating before the first step",
    ]
    assert re.search(r"^before the first step: .*reward -?\d+\.\d{3}, 4 episodes", out, re.M)
    assert lines[-2:] == ["run folder: run", "look at it: agentrl view run"]
    assert re.search(r"training 1/2 .* \d+\.\d\d s/step  [\d,]+ tokens/s  ETA 0:00:\d\d", out)
    assert [line for line in lines if line.startswith("training")][-1].startswith("training 2/2")

    kept = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    for line in (line for line in lines if line.strip() and not line.startswith("warm-up")):
        assert line.strip() in kept

    folder = RunFolder.open(tmp_path / "run")
    config = yaml.safe_load(folder.config_file.read_text())
    assert (config["seed"], config["train"]["steps"], config["rollout"]["temperature"]) == (3, 2, 1.0)
    rows = folder.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval/reward" in rows[0]
    assert "eval/reward" in rows[2]
    assert "eval/reward" not in rows[1]
    assert [path.name for path in folder.rollouts()] == ["step-000001.jsonl", "step-000002.jsonl"]
    played = list(read_records(folder.rollouts()[0]))
    assert [record.trajectory_id for record in played] == [f"train/{i:06d}/{j}" for i in range(2) for j in range(2)]
    assert {record.step for record in played} == {1}
    checkpoints = sorted(path.name for path in folder.checkpoints.iterdir())
    assert checkpoints == ["step-000000", "step-000002"]
    assert not [name for name in files(tmp_path) if name.endswith(".partial")]

    status, out, err = agentrl("show", "run")
    assert (status, err) == (0, "")
    newest = next(read_records(folder.rollouts()[1]))
    assert newest.trajectory_id in out
    assert "advantage: " in out
    read = "<|im_start|>system"  # what no message holds: the tools, as the template writes them
    assert read in out
    assert read not in agentrl("show", "run", "--messages").out
    status, out, err = agentrl("show", "run/rollouts/step-000001.jsonl", "-n", "9", "--trajectory", "train/000001/1")
    assert (status, out.count("train/000001/1"), out.count("train/000000")) == (0, 1, 0)
    assert agentrl("show", "run", "--trajectory", "x") == (
        2,
        "",
        "agentrl: run/rollouts/step-000002.jsonl has no trajectory 'x'\n",
    )
    status, out, err = agentrl("credit", "explain", "gigpo", "run", "--step_weight", "0.5", "--gamma=0.9")
    assert (status, err) == (0, "")
    assert "step_weight=0.5" in out
    assert "gamma=0.9" in out
    assert out.count("train/00000") == 4
    status, out, err = agentrl("credit", "explain", "turn_gae", "run/rollouts/step-000002.jsonl")
    assert (status, out) == (2, "")
    assert err.startswith("agentrl: credit scheme TurnGAE: trajectory train/000002/0, turn 0: no values")
    assert err.endswith("Rollouts hold what the credit scheme of their own run read\n")
    status, out, err = agentrl("credit", "explain", "gigpo", "run", "--gama", "1")
    assert (status, out, err) == (2, "", "agentrl: credit.gama: 'gigpo' has no such option. Did you mean 'gamma'?\n")
    assert agentrl("credit", "explain", "gigpo", "run", "--gamma") == (2, "", "agentrl: --gamma: needs a value\n")
    status, out, err = agentrl("credit", "advise", "run")
    assert (status, err) == (0, "")
    assert "4 groups of run" in out
    assert "\ncredit: {scheme: " in out
    assert agentrl("credit", "advise", "nowhere") == (2, "", "agentrl: there is no nowhere\n")
    assert agentrl("show", "run", "-n", "0") == (2, "", "agentrl: --number: at least 1, got 0\n")

    status, out, err = agentrl("eval", "run")
    assert (status, err) == (0, "")
    metrics, _, unsolved = out.partition("tasks not solved")
    shown = [line.strip("│ ").split("│") for line in metrics.splitlines() if line.startswith("│")]
    numbers = {name.strip(): float(value) for name, value, *_ in shown}
    # The same weights on the same tasks as at the end of training.
    assert numbers["episodes"] == 4
    assert numbers == {
        name: pytest.approx(rows[2][f"eval/{name}"], rel=1e-3) for name in numbers if f"eval/{name}" in rows[2]
    }

    assert unsolved == ""  # no episode came to its end, and told success
    progress = ["making a model and its tokenizer ...", "starting the engine (auto) ..."]
    progress += ["proving which layout of rows is exact ...", "proving that engine and trainer agree ..."]
    progress += ["playing 4 evaluation tasks ..."]
    assert out.splitlines()[: len(progress)] == progress
    assert out.count(" of KeyDoor\n") == 3  # dialogues, in short
    status, out, err = agentrl("eval", "run", "--json")
    assert (status, err.splitlines()) == (0, progress)
    [evaluation], kept = json.loads(out)["evaluations"], json.loads(out)["rollouts"]
    low, high = evaluation["intervals"]["reward"]
    assert low <= evaluation["metrics"]["reward"] == rows[2]["eval/reward"] <= high
    assert [task["group_id"] for task in evaluation["tasks"]] == [f"eval/{i:06d}" for i in range(4)]
    assert kept == "run/evaluations/evaluation-000002.jsonl"
    played = list(read_records(tmp_path / kept))
    assert [(record.step, record.group_id) for record in played] == [(2, f"eval/{i:06d}") for i in range(4)]
    assert not any(any(turn.keep) for record in played for turn in record.turns)  # nothing was trained on them

    before = files(tmp_path)
    status, out, err = agentrl("train", "run")
    assert (status, err) == (0, "")
    assert out.splitlines()[-3:] == [
        "run folder: run",
        "look at it: agentrl view run",
        "all 2 steps are done; resume with a larger --train.steps",
    ]
    assert files(tmp_path) == before
    assert folder.metrics() == rows

    assert agentrl("train", "run", "--train.steps", "1") == (
        2,
        "",
        "agentrl: train.steps: 1 is less than the 2 steps that run has done; raise it\n",
    )
    assert files(tmp_path) == before

    status, out, err = agentrl("train", "run", "--train.steps", "3")
    assert (status, err) == (0, "")
    assert [row["step"] for row in folder.metrics()] == [0, 1, 2, 3]
    assert folder.metrics()[:3] == rows


def fail_in_train(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, has_begun: bool = True) -> None:
    def train(parts: Parts, folder: RunFolder | None, **_: object) -> None:
        if has_begun:
            assert parts.recipe.run_dir is not None
            RunFolder.create(parts.recipe.run_dir, {})
        raise error

    monkeypatch.setattr(loop, "train", train)


INTERRUPTED_IMPORT = """
import sys
class Interrupting:
    @staticmethod
    def find_spec(name, *_):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting)
from agentrl.cli import main
main(["fields"])
"""


@pytest.mark.process
@each("module", ["agentrl.cli.entry", "agentrl.cli.plan"])
def test_a_command_that_is_interrupted_while_it_is_imported_ends_in_one_line(module: str) -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT, module], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"agentrl: interrupted\n")


def test_an_interrupted_run_is_told_by_its_folder(agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_train(monkeypatch, KeyboardInterrupt())
    status, out, err = agentrl("train", "tiny.yaml")
    folder = next(line for line in out.splitlines() if line.startswith("run folder: ")).removeprefix("run folder: ")
    assert folder.startswith("runs/tiny-")
    assert (status, err) == (
        130,
        f"agentrl: interrupted. Resume from the last checkpoint with `agentrl train {folder}`\n",
    )
    status, _, err = agentrl("train", "tiny.yaml", "--run_dir", "my [red]run")
    assert err == "agentrl: interrupted. Resume from the last checkpoint with `agentrl train 'my [red]run'`\n"


def test_a_run_that_had_not_started_cannot_be_resumed(agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_train(monkeypatch, KeyboardInterrupt(), has_begun=False)
    status, _, err = agentrl("train", "tiny.yaml", "--run_dir", "run")
    assert (status, err) == (130, "agentrl: interrupted\n")


@pytest.mark.slow
@each(
    ("number", "has_begun", "words"),
    [
        (
            errno.ENOSPC,
            True,
            "cannot write run/metrics.jsonl: it said no. Nothing finished is lost: free the disk and resume with "
            "`agentrl train run`",
        ),
        (
            errno.EDQUOT,
            True,
            "cannot write run/metrics.jsonl: it said no. Nothing finished is lost: free the disk and resume with "
            "`agentrl train run`",
        ),
        (errno.ENOSPC, False, "cannot write run/metrics.jsonl: it said no; free the disk"),
        (errno.EACCES, True, "no permission for run/metrics.jsonl: it said no"),
        (errno.EPERM, True, "no permission for run/metrics.jsonl: it said no"),
        (errno.ENOTDIR, True, "cannot write run/metrics.jsonl: a part of this path is a file"),
        (errno.EROFS, False, "no permission for run/metrics.jsonl: it said no"),
    ],
)
def test_a_disk_that_is_full_and_one_that_is_closed_are_told_apart(
    number: int, has_begun: bool, words: str, agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree("run", ignore_errors=True)
    fail_in_train(monkeypatch, OSError(number, "it said no", "run/metrics.jsonl"), has_begun=has_begun)
    status, _, err = agentrl("train", "tiny.yaml", "--run_dir", "run")
    assert (status, err) == (2, f"agentrl: {words}\n")


def test_a_quiet_run_prints_nothing_but_warnings(agentrl: Agentrl) -> None:
    status, out, err = agentrl("train", "tiny.yaml", "--run_dir", "quiet", "--train.steps", "1", "--quiet")
    assert (status, err) == (0, "")
    assert all(line.startswith(("warning: ", "    ")) for line in out.splitlines())
    assert Path("quiet/metrics.jsonl").is_file()


@pytest.mark.slow
@pytest.mark.process
def test_a_reader_that_has_read_enough_is_no_failure_to_tell_of() -> None:
    command = [sys.executable, "-m", "agentrl", "fields", "--json-schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_another_failure_of_the_machine_keeps_its_traceback(agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_train(monkeypatch, OSError(errno.EIO, "it said no"))
    with pytest.raises(OSError, match="it said no"):
        agentrl("train", "tiny.yaml", "--run_dir", "run")


def test_the_summary_compares_the_first_and_the_last_evaluation_that_was_played() -> None:
    def row(step: int, reward: float | None = None) -> dict[str, float]:
        played = {} if reward is None else {"eval/reward": reward, "eval/success": reward / 2}
        return {"step": step, "eval/episodes": 4.0 * len(played), "eval/failed": 4.0 * (2 - len(played)), **played}

    training = {"step": 1, "reward/mean": 0.9}
    assert summary([row(0, 0.25), training, row(2, 0.5)], 2) == (
        "success 12.5% -> 25.0%, reward 0.250 -> 0.500 on 4 evaluation tasks, 2 steps"
    )
    assert summary([row(0), training, row(2, 0.25), row(3, 0.5), row(4)], 2) == (
        "success 12.5% -> 25.0%, reward 0.250 -> 0.500 on 4 evaluation tasks, 4 steps; "
        "left out, because every episode of them failed: step 0, 4"
    )
    scored = [{**row(step, reward), "eval/score": reward / 2} for step, reward in ((0, 0.25), (2, 0.5))]
    assert summary(scored, 2) == "success 12.5% -> 25.0%, reward 0.250 -> 0.500 on 4 evaluation tasks, 2 steps"
    scored[1]["eval/score"] = 0.9
    assert summary(scored, 2).startswith("success 12.5% -> 25.0%, score 12.5% -> 90.0%, reward 0.250")
    failed = "no result on 4 evaluation tasks: every episode of them failed"
    assert summary([row(0), training, row(2)], 2) == failed
    assert summary([], 2) == "no result: nothing was evaluated"
    assert (
        summary([{"step": 0, "eval/episodes": 4.0}], 2)
        == "no result on 2 evaluation tasks: every episode of them failed"
    )


def test_a_finished_run_whose_every_evaluated_episode_failed_says_so(agentrl: Agentrl, tmp_path: Path) -> None:
    status, _, err = agentrl("train", "tiny.yaml", "--run_dir", "run", "--train.steps", "1")
    assert (status, err) == (0, "")
    folder = RunFolder.open(tmp_path / "run")
    rows = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in folder.metrics()]
    (tmp_path / "run" / "metrics.jsonl").unlink()
    for row in rows:
        folder.add_metrics({**row, "eval/episodes": 0.0, "eval/failed": 4.0})
    status, out, err = agentrl("train", "run")
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "no result on 4 evaluation tasks: every episode of them failed"


@pytest.mark.slow
@pytest.mark.process
def test_a_fault_of_the_environment_is_told_once_kept_shown_and_played_again(agentrl: Agentrl, tmp_path: Path) -> None:
    how = ["--env.id", "shop_of_faults:SellsFewThings", "--rollout.max_retries", "0", "--report.rollouts_every", "0"]
    how += ["--warmup.steps", "60", "--warmup.learning_rate", "2e-2"]
    sizes = ("--train.steps", "4", "--rollout.num_groups", "4", "--evaluation.num_tasks", "12", "--seed", "1")
    status, out, err = agentrl("train", "tiny.yaml", *how, *sizes, "--run_dir", "run")
    assert (status, err) == (0, "")
    kept = RunFolder(tmp_path / "run").kept_faults()
    record = next(read_records(kept[0]))
    number = SHOP[: SHOP.index("range(6)")].count("\n") + 1
    asked = record.turns[0].observation[0]["content"]
    error = f"KeyError: {asked[len('Give me ')]}"
    assert record.error == f"environment SellsFewThings: step() raised {error} (shop_of_faults.py:{number})"
    assert out.count("warning: environment SellsFewThings: step() raised KeyError") == 1
    assert out.count("most recent call last") == 1
    count = RunFolder(tmp_path / "run").metrics()[-1]["pool/faults"]
    assert count > 1
    assert f"faults {count:.0f}\n" in out

    status, shown, _ = agentrl("show", "run", "--faults", "--trajectory", record.trajectory_id)
    assert status == 0
    for piece in (asked, f"line {number}, in step", error):
        assert piece in shown

    status, played, _ = agentrl("envs", "replay", "run", record.trajectory_id)
    assert status == 1
    assert f"user: {asked}" in played
    assert f'shop_of_faults.py", line {number}, in step' in played
    assert "agentrl/cli/" not in played
    assert agentrl("envs", "replay", "run", "train/999999/0").status == 2
    assert agentrl("envs", "replay", "run", "nothing").err.startswith(
        "agentrl: expected the name of an episode, such as"
    )

    status, evaluated, err = agentrl("eval", "run")
    assert (status, err) == (0, "")
    assert evaluated.count("warning: environment SellsFewThings: step() raised KeyError") == 1


def test_an_evaluation_of_a_recipe_keeps_its_dialogues(agentrl: Agentrl, tmp_path: Path) -> None:
    status, out, err = agentrl("eval", "tiny.yaml", "--quiet", "-n", "2")
    assert (status, err, " of KeyDoor\n" in out) == (0, "", False)
    kept = tmp_path / "evaluations" / "key_door-tiny.jsonl"
    assert [record.group_id for record in read_records(kept)] == ["eval/000000", "eval/000001"]
    assert "evaluations/key_door-tiny.jsonl" in out


def test_a_healthy_recorded_episode_is_played_again(agentrl: Agentrl, tmp_path: Path) -> None:
    assert agentrl("train", "tiny.yaml", "--run_dir", "run").status == 0
    record = next(read_records(RunFolder(tmp_path / "run").rollouts()[-1]))
    status, played, err = agentrl("envs", "replay", "run", record.trajectory_id)
    assert (status, err) == (0, "")
    assert record.turns[0].observation[-1]["content"] in played
    assert "The record has other messages" not in played
    assert "It was recorded to end like this: " in played
    status, _, err = agentrl("show", "run", "--faults")
    assert (status, err) == (2, "agentrl: run has no episode whose environment failed\n")


def test_a_recipe_goes_by_its_name_in_comparisons_too(agentrl: Agentrl) -> None:
    status, _, err = agentrl("compare", "calcualtor", "--vary", "credit.scheme=uniform,gigpo")
    assert (status, "Did you mean 'calculator'?" in err) == (2, True)
    status, _, err = agentrl("sweep", "calcualtor", "--over", "credit.scheme=uniform,gigpo")
    assert (status, "Did you mean 'calculator'?" in err) == (2, True)


def test_a_server_is_started_whatever_attention_trains_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Recipe] = []

    def load_to_serve(recipe: Recipe, *_: object, **__: object) -> None:
        built.append(recipe)
        raise ConfigError("enough")

    monkeypatch.setattr("agentrl.run.export.load_to_serve", load_to_serve)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {attention: flex_attention}\ntrain: {layout: tree}\nengine: {server: {url: http://127.0.0.1:9}}\n"
    )
    with pytest.raises(SystemExit):
        main(["serve", str(path)])
    assert (built[0].model.attention, built[0].train.layout) == (None, "padded")


@each("allocate", [lambda: torch.empty(2**55), lambda: bytearray(2**62), lambda: np.empty(2**55)])
def test_memory_that_is_used_up_is_one_line_with_what_to_lower(
    allocate: Callable[[], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(SystemExit) as end, exits(tmp_path):
        allocate()
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert line.startswith("agentrl: out of memory (")
    assert "Lower train.max_tokens_per_micro_batch, engine.max_batch_size or rollout.max_live_episodes" in line
    assert line.endswith(f"resume with `agentrl train {tmp_path}`")


def test_other_errors_of_torch_keep_their_traceback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="must match"), exits(tmp_path):
        torch.zeros(2) + torch.zeros(3)


def test_the_end_of_a_servers_log_is_what_ended_it(tmp_path: Path) -> None:
    lines = ["INFO up", "(EngineCore pid=1) ERROR 11-28 [core.py:9] IndexError: index out of range in self"]
    lines += ["INFO down"] * 400 + ["nanobind: leaked 4 instances!", ' - leaked type "a"']
    (tmp_path / "server.log").write_text("\n".join(lines))
    first, *rest = log_end(tmp_path / "server.log").splitlines()
    assert first == lines[1]
    assert rest[-1] == "INFO down"
