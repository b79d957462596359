"""`agentrl new`."""

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from agentrl.cli import main
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.run.memory import GB, plan_memory
from agentrl.testing import check_env
from tests.support.baselines import play
from tests.support.hugging_face import hugging_face_folder
from tests.support.qwen3 import config_of

TINY = (
    *(
        "--model.local",
        '{"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}',
    ),
    *("--warmup.steps", "2", "--warmup.num_demonstrations", "8", "--train.steps", "1", "--train.device", "cpu"),
    *("--rollout.num_groups", "2", "--rollout.group_size", "2", "--evaluation.num_tasks", "2"),
)
MINE = """
from agentrl import ToolEnv


class Mine(ToolEnv):
    def __init__(self, *, size: int) -> None:
        super().__init__()

    def start(self, options):
        return "?"

    def answer(self, text):
        self.finish(success=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_module_of_new.py").write_text(MINE)
    (tmp_path / "recipe.schema.json").write_text("{}")  # there already: it is left alone
    return tmp_path


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["new", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_without_a_terminal_it_asks_nothing_and_what_it_writes_trains_at_once(folder: Path) -> None:
    main(["new", "--env", "key_door", *TINY])
    text = (folder / "key_door.yaml").read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n# agentrl train key_door.yaml; ")
    assert "  # Episodes per task.\n  group_size: 2\n" in text
    assert (folder / "recipe.schema.json").read_text() == "{}"
    recipe = load_recipe(folder / "key_door.yaml")
    assert recipe.model.local.hidden_size == 16
    assert recipe.rollout.max_turns >= 5  # as many as the oracle takes
    main(["train", "key_door.yaml", "--run_dir", "run"])
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_it_never_writes_over_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.yaml").write_text("precious")
    words = refused("mine", "--env", "key_door", capsys=capsys)
    assert words == "agentrl: NAME: mine.yaml is there already; choose another name\n"
    assert (folder / "mine.yaml").read_text() == "precious"
    assert "there is no folder no" in refused("no/where", "--env", "key_door", capsys=capsys)


def test_it_asks_for_environment_and_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["my_module_of_new:Mine", "owner/model"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _question: next(answers))
    main(["new", "--env.options.size", "3", "--train.learning_rate=2e-6"])
    written = yaml.safe_load((folder / "mine.yaml").read_text(encoding="utf-8"))
    assert written["env"] == {"id": "my_module_of_new:Mine", "options": {"size": 3}}
    assert written["model"] == {"name_or_path": "owner/model"}
    assert written["train"]["learning_rate"] == 2e-6  # a number, which YAML takes `2e-6` not for
    assert "warmup" not in written
    Recipe.model_validate(written)


@pytest.mark.process
def test_a_recipe_for_a_pretrained_model_trains_at_once(folder: Path) -> None:
    hugging_face_folder(folder / "model", rewrites=False)
    shorter = ("--rollout.num_groups", "2", "--rollout.group_size", "2", "--rollout.max_turn_tokens", "16")
    once = ("--train.steps", "1", "--evaluation.num_tasks", "2", "--warmup.steps", "2", "--train.device", "cpu")
    main(["new", "--env", "key_door", "--model", "./model", *shorter, *once])
    recipe = load_recipe(folder / "key_door.yaml")
    assert recipe.env.options == {"prompt": "full"}
    assert (recipe.rollout.temperature, recipe.rollout.cut_off, recipe.evaluation.every) == (1.0, "act", 10)
    assert (recipe.train.precision, recipe.train.learning_rate) == ("float32", 1e-5)  # a small one
    assert (recipe.warmup.skill, recipe.warmup.learning_rate) == (0.5, 2e-5)
    main(["train", "key_door.yaml", "--run_dir", "run"])
    kept = yaml.safe_load((folder / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert kept["env"]["options"] == {"prompt": "full"}
    main(["train", "run", "--train.steps", "2"])  # resumed with the same prompts
    again = yaml.safe_load((folder / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert again == kept | {"train": kept["train"] | {"steps": 2}}
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.process
def test_what_a_pretrained_model_cannot_do_is_refused_before_its_weights_are_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hugging_face_folder(folder / "model", rewrites=False)
    (folder / "model" / "model.safetensors").unlink()
    given = ("--env", "key_door", "--model", "./model", "--train.device", "cpu")
    short = ("--rollout.max_context_tokens", "200", "--rollout.max_turn_tokens", "16")
    assert "leaves no room after the first prompt of" in refused("a", *given, *short, capsys=capsys)
    long = ("--rollout.max_context_tokens", "100000")
    assert "exceeds the model's 4096 positions; lower it" in refused("a", *given, *long, capsys=capsys)
    assert "no model in './none'" in refused("a", *given[:2], "--model", "./none", capsys=capsys)
    mine = ("--env", "my_module_of_new:Mine", "--env.options.size", "3", *given[2:], "--warmup.steps", "2")
    assert "has no oracle()" in refused("a", *mine, capsys=capsys)
    main(["new", "a", *given])
    for command in (["train", "a.yaml", *long], ["train", "a.yaml", *short], ["plan", "a.yaml", *short]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        assert f"agentrl: rollout.max_context_tokens: {command[3]}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "a.yaml", "--run_dir", "run"])
    assert "model.safetensors" in capsys.readouterr().err  # by now weights are missed


def test_rates_and_lengths_follow_the_size_of_a_model(folder: Path) -> None:
    main(["new", "big.yaml", "--env", "calculator", "--model", "a/b", "--model.lora.rank", "8"])
    text = (folder / "big.yaml").read_text(encoding="utf-8")
    assert "# The hub could not be reached: " in text
    assert "begin with  warmup: {steps: 20, skill: 0.5}" in text
    recipe = load_recipe(folder / "big.yaml")
    assert recipe.train.precision == "bfloat16"
    assert recipe.train.learning_rate == pytest.approx(1e-5)
    assert (recipe.rollout.max_turn_tokens, recipe.warmup.steps) == (512, 0)


def test_a_small_model_without_an_oracle_is_told(folder: Path) -> None:
    main(["new", "second.yaml", "--env", "my_module_of_new:Mine", "--env.options.size", "3"])
    assert "There is no oracle() to warm up from" in (folder / "second.yaml").read_text(encoding="utf-8")


def test_options_need_fit_only_the_recipe_that_is_made(folder: Path) -> None:
    main(["new", "third.yaml", "--env", "calculator", "--model", "a/b", "--rollout.max_turn_tokens", "3000"])
    assert load_recipe(folder / "third.yaml").rollout.max_turn_tokens == 3000
    main(["new", "fourth.yaml", "--env", "calculator", "--model", "a/b", "--model.lora.rank", "8"])
    assert load_recipe(folder / "fourth.yaml").model.lora is not None


def test_mistakes_are_told_in_a_line_and_leave_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.iterdir())
    assert "no 'key_dor' is installed. Did you mean 'key_door'?" in refused("a", "--env", "key_dor", capsys=capsys)
    assert "env.options: 'my_module_of_new:Mine' could not be made" in refused(
        "a", "--env", "my_module_of_new:Mine", capsys=capsys
    )
    assert "Did you mean '--train.learning_rate'?" in refused("a", "--env", "key_door", "--lr", "1", capsys=capsys)
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == before


def test_a_dialogue_is_written_and_its_oracle_solves_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "--dialogue"])
    assert "agentrl train table_booking.yaml" in capsys.readouterr().out
    config = load_recipe(folder / "table_booking.yaml").env
    check_env(config.make, seeds=range(3))
    for seed in range(4):
        rng = np.random.default_rng(seed)
        assert play(config.make(), lambda env, _, rng: env.oracle(rng=rng), seed=seed, max_turns=4, rng=rng).success
    assert "is there already" in refused("--dialogue", capsys=capsys)
    assert "leave the other options out" in refused("other", "--dialogue", "--seed", "1", capsys=capsys)


@pytest.mark.slow
@pytest.mark.process
def test_a_recipe_fits_the_memory_that_is_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hugging_face_folder(folder / "model", rewrites=False)
    config_of("4B", vocab_size=151936).save_pretrained(folder / "model")  # with the small one's tokenizer
    given = ("--env", "calculator", "--model", "./model", "--warmup.steps", "0")
    main(["new", "plain", *given])
    main(["new", "fitted", *given, "--memory", "80"])
    plain, fitted = (load_recipe(folder / f"{name}.yaml") for name in ("plain", "fitted"))
    unlike, fits = (plan_memory(each, gpus=1, memory=80 * GB)[0].total / GB for each in (plain, fitted))
    assert unlike > 100
    assert fits < 72
    assert fitted.model.lora is None
    text = (folder / "fitted.yaml").read_text(encoding="utf-8")
    assert f"# Planned for 1 x 80 GB: a training process needs {fits:.1f} (" in text
    main(["plan", "fitted.yaml", "--memory", "80"])
    main(["new", "adapted", *given, "--memory", "80", "--engine.sleep", "false", "--train.offload", "[]"])
    kept = load_recipe(folder / "adapted.yaml")
    assert (kept.train.offload, kept.engine.sleep) == ((), False)  # type: ignore[attr-defined]
    assert kept.model.lora is not None
    capsys.readouterr()
    assert "nothing fits 1 x 4 GB" in refused("small", *given, "--memory", "4", capsys=capsys)
    assert "the hub cannot be reached" in refused("far", *given[:2], "--model", "a/b", "--memory", "80", capsys=capsys)


def test_the_recipe_of_an_agent_names_its_function_and_its_tasks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "agent_of_new.py").write_text("async def solve(task, session):\n    return 1.0\n")
    (folder / "tasks.jsonl").write_text("".join(f'{{"question": "q{i}", "answer": "a"}}\n' for i in range(4)))
    hugging_face_folder(folder / "model", rewrites=False)
    words = ("--agent", "agent_of_new:solve", "--tasks", "tasks.jsonl", "--model", "./model")
    main(["new", *words, "--agent.tasks.answer", "answer", "--agent.processes", "2"])
    written = yaml.safe_load((folder / "solve.yaml").read_text())
    table = {"tasks": "tasks.jsonl", "answer": "answer"}
    assert written["agent"] == {"run": "agent_of_new:solve", "tasks": table, "processes": 2}
    assert not written.keys() & {"env", "warmup"}
    assert "cut_off" not in written["rollout"]
    recipe = load_recipe(folder / "solve.yaml")
    assert recipe.agent is not None
    assert recipe.agent.processes == 2
    assert "agent.run: module 'agent_of_new' has no 'solv'" in refused(
        "x", "--agent", "agent_of_new:solv", *words[2:], capsys=capsys
    )
    assert "needs --tasks" in refused("x", *words[:2], capsys=capsys)
    assert "leave out --env" in refused("x", "--env", "key_door", *words, capsys=capsys)
