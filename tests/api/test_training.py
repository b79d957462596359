import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest

import agentrl
from agentrl import Credit, CreditScheme, ToolEnv, TrainedRun, TrajectoryGroup, tool
from agentrl.api.target import load, name_of, sections
from agentrl.api.training import run as run_process
from agentrl.api.training import with_run_dir
from agentrl.chat import train_tokenizer
from agentrl.errors import ConfigError, UserError
from agentrl.learn.config import LossConfig
from agentrl.policy.config import LocalModelConfig
from agentrl.policy.export import export_model
from agentrl.policy.model import make_local_model
from agentrl.recipe import registry
from agentrl.recipe.config import load_recipe
from agentrl.report.folder import RunFolder
from agentrl.report.terminal import Console
from tests.support.each import each
from tests.support.runs import SIZES

TINY: dict[str, Any] = {
    "model": {"local": SIZES},
    "rollout": {"num_groups": 2, "group_size": 2, "max_turns": 2, "max_turn_tokens": 8, "max_context_tokens": 512},
    "train": {"steps": 2, "num_minibatches": 2, "device": "cpu"},
    "evaluation": {"num_tasks": 2},
}


def make_classes() -> tuple[type[ToolEnv], Any]:
    """Define them where nobody can import them from."""

    class Guess(ToolEnv):
        def __init__(self, *, largest: int = 3) -> None:
            super().__init__()
            self.largest = largest

        def start(self, options: dict[str, Any]) -> str:
            self.number = int(self.np_random.integers(1, self.largest + 1))
            return f"1 to {self.largest}?"

        @tool
        def look(self, n: int) -> str:
            """Look."""
            self.finish(success=n == self.number)
            return "done"

        def answer(self, text: str) -> str:
            self.reward(float(len(text) % 3))
            return "Use look."

    class Half(CreditScheme):
        factor: float = 0.5

        def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
            return [[Credit.uniform(t, self.factor) for t in group.trajectories] for group in groups]

    return Guess, Half


GUESS, HALF = make_classes()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    told: list[dict[str, float]] = []
    path = tmp_path_factory.mktemp("api") / "run"
    made = agentrl.train(
        TINY,
        env={"id": GUESS, "options": {"largest": 4}},
        credit=HALF(factor=0.25),
        loss=LossConfig(unit="turn"),
        run_dir=path,
        report={"rollouts_every": 1},
        on_step=told.append,
        quiet=True,
    )
    assert [row["step"] for row in told] == [1, 2]
    assert told == made.metrics[1:]
    return made


def test_the_recipe_is_written_down_with_names_for_what_was_handed_in(run: TrainedRun) -> None:
    recipe = run.recipe
    assert recipe.env.id == "tests.api.test_training:make_classes.<locals>.Guess"
    assert recipe.env.options == {"largest": 4}
    assert recipe.credit == {"scheme": "tests.api.test_training:make_classes.<locals>.Half", "factor": 0.25}
    assert recipe.loss.unit == "turn"


@pytest.mark.process
def test_what_was_trained_and_recorded_is_at_hand(run: TrainedRun) -> None:
    groups = run.trajectories()
    assert [len(group.trajectories) for group in groups] == [2, 2]
    assert [g.group_id for g in run.trajectories(1)] != [g.group_id for g in groups]
    with pytest.raises(ConfigError, match=r"step 7 has no rollouts; recorded \(report.rollouts_every\): 1, 2"):
        run.trajectories(7)
    frame = run.to_pandas()
    assert list(frame.index) == [0, 1, 2]
    assert frame["reward/mean"][2] == run.metrics[2]["reward/mean"]


def test_metrics_are_drawn(run: TrainedRun) -> None:
    figure = run.plot("reward/mean", "eval/reward")
    first, second = figure.axes
    assert first.lines[0].get_xydata().tolist() == [[row["step"], row["reward/mean"]] for row in run.metrics[1:]]
    assert [x for x, _ in second.lines[0].get_xydata()] == [0, 2]
    assert {axes.get_title() for axes in run.plot().axes} >= {"reward/mean", "entropy"}
    with pytest.raises(ConfigError, match="has no metric 'reward'"):
        run.plot("reward")


def test_a_page_is_written(run: TrainedRun, tmp_path: Path) -> None:
    assert run.report() == run.path / "report.html"
    assert run.report(tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!")


@each(("module", "call"), [("pandas", "to_pandas"), ("matplotlib", "plot")])
def test_what_is_not_installed_is_named(
    run: TrainedRun, module: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"pip install {module.partition('.')[0]}"):
        getattr(run, call)()


@pytest.mark.process
def test_the_newest_weights_are_evaluated_played_and_exported(run: TrainedRun, tmp_path: Path) -> None:
    found = run.evaluate(evaluation={"num_tasks": 3})
    assert found.metrics["episodes"] + found.metrics["failed"] == 3
    assert len(found.groups) == 3
    assert agentrl.evaluate(run, evaluation={"num_tasks": 3}).metrics == found.metrics
    played = agentrl.play(model=run, seed=2, max_turns=2)
    assert str(played).startswith("user: 1 to 4?\nassistant: ")
    assert str(played).endswith(f"score 0, {len(played.rewards)} turns]")
    exported = run.export(tmp_path / "exported")
    assert agentrl.play(GUESS, exported, max_turns=1).messages[0]["content"] == "1 to 3?"
    with pytest.raises(ConfigError, match="exists already"):
        run.export(exported)


def test_a_run_resumes_only_where_its_classes_are_at_hand(run: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_handed_in", {})  # as in another process
    with pytest.raises(
        ConfigError, match=r"was defined in a notebook or inside a function.*agentrl\.train\(RUN, \.\.\.\)"
    ):
        agentrl.train(run.path, train={"steps": 3}, quiet=True)
    before = run.metrics
    resumed = agentrl.train(run.path, env=GUESS, credit=HALF, train={"steps": 3}, quiet=True)
    assert resumed.path == run.path
    assert resumed.metrics[:3] == before
    assert resumed.metrics[3]["step"] == 3
    assert resumed.recipe.env.options == {"largest": 4}
    assert agentrl.train(run.path, quiet=True).metrics == resumed.metrics  # all steps are done


def test_where_an_event_loop_runs_it_trains_as_well(tmp_path: Path) -> None:
    async def cell() -> TrainedRun:
        trained = agentrl.train(TINY, env=GUESS, train={"steps": 1}, run_dir=tmp_path / "run", quiet=True)
        await asyncio.sleep(0)
        assert asyncio.get_running_loop().is_running()
        return trained

    assert len(asyncio.run(cell()).metrics) == 2


def test_what_a_step_is_told_may_end_the_run_which_resumes(tmp_path: Path) -> None:
    def stop(row: dict[str, float]) -> None:
        raise KeyboardInterrupt

    settings = {**TINY, "env": {"id": "key_door"}, "train": {**TINY["train"], "checkpoint_every": 1}}
    with pytest.raises(KeyboardInterrupt):
        agentrl.train(settings, run_dir=tmp_path / "run", on_step=stop, quiet=True)
    assert [row["step"] for row in TrainedRun(tmp_path / "run").metrics] == [0, 1]
    resumed = agentrl.train(tmp_path / "run", quiet=True)
    assert [row["step"] for row in resumed.metrics] == [0, 1, 2]


class Model:
    def state_dict(self) -> dict[str, Any]:
        return {}


@each(
    ("given", "words"),
    [
        ({"env": lambda: None}, "env: a lambda has no name"),
        ({"env": {"id": GUESS, "options": {"largest": object()}}}, r"env\.options\.largest"),
        ({"model": Model()}, r"model: give the name or the folder of a model.*save_pretrained"),
        ({"credit": 3}, "credit.scheme: expected the name of a credit scheme"),
        ({"env": np.mean}, r"env\.id: 'numpy:mean'"),
        ({"trian": {"steps": 3}}, "trian: no such field. Did you mean 'train'"),
        ({"train": {"setps": 3}}, "train.setps: no such field. Did you mean 'steps'"),
        ({"recipe": "calcualtor"}, "calcualtor is no file, no run and no recipe.*Did you mean 'calculator'"),
        ({"recipe": "/nowhere/x.yaml"}, "cannot read the recipe /nowhere/x.yaml"),
        ({"processes": 2, "on_step": print}, "on_step"),
        ({"overrides": ["--train.setps", "3"]}, "--train.setps: no such option"),
    ],
)
def test_a_mistake_is_told_in_a_line(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        agentrl.train(**{"recipe": TINY, "run_dir": tmp_path / "run", "quiet": True, **given})
    assert not (tmp_path / "run").exists()


def test_recipes_that_come_along_go_by_their_name() -> None:
    from agentrl.api.target import load

    recipe, run_dir = load("corridor", ["--seed", "5"], changes={"train": {"steps": 3}})
    assert (recipe.env.id, recipe.seed, recipe.train.steps, run_dir) == ("corridor", 5, 3, None)
    assert recipe.rollout.max_turns == load(recipe)[0].rollout.max_turns == 18


def test_the_sections_of_a_recipe_hold_classes_too() -> None:
    from agentrl.api.target import load

    recipe, _ = load({"env": {"id": GUESS, "options": {"largest": 4}}, "credit": HALF(factor=0.25)})
    assert isinstance(recipe.env.make(), GUESS)
    assert recipe.credit["factor"] == 0.25


def test_a_run_that_has_just_begun_has_an_empty_frame(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", load_recipe(TINY).model_dump(mode="json"))
    assert len(TrainedRun(folder.path).to_pandas()) == 0
    assert "0 steps" in TrainedRun(folder.path)._repr_html_()


def test_a_notebook_shows_the_folder_and_the_main_metrics_of_a_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a<b>", load_recipe(TINY).model_dump(mode="json"))
    for step, reward in enumerate((0.25, 0.5, 0.75)):
        folder.add_metrics({"step": step, "reward/mean": reward})
    page = TrainedRun(folder.path)._repr_html_()
    assert "a&lt;b&gt;" in page
    assert "2 steps" in page
    assert "<td>reward/mean</td><td>0.25</td><td>0.75</td>" in page


def test_naming_another_environment_or_scheme_drops_the_options_of_the_former() -> None:
    from agentrl.api.target import load

    recipe, _ = load("corridor", changes={"env": {"id": "key_door"}, "credit": {"scheme": "uniform"}})
    assert (recipe.env.options, recipe.credit) == ({}, {"scheme": "uniform"})


@pytest.mark.slow
@pytest.mark.process
def test_scripts_find_modules_of_the_working_directory_unless_it_is_a_runs(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "lies_here.py").write_text("from agentrl_envs.key_door import KeyDoor", encoding="utf-8")
    script = """
import agentrl
try:
    agentrl.play("lies_here:KeyDoor", {model!r}, endpoint="http://127.0.0.1:9/v1")
except agentrl.AgentRLError as error:
    print(error)
"""
    for model, words in (("any", "127.0.0.1"), (".", "cannot import 'lies_here'")):
        (tmp_path / "scripts" / "play.py").write_text(script.format(model=model), encoding="utf-8")
        command = [sys.executable, "scripts/play.py"]
        told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300).stdout
        assert words in told


@pytest.mark.slow
@pytest.mark.process
def test_a_run_is_opened_where_its_modules_lie(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "lies_here.py").write_text("from agentrl_envs.key_door import KeyDoor", encoding="utf-8")
    RunFolder.create(tmp_path / "run", {"env": {"id": "lies_here:KeyDoor"}, "credit": {"scheme": "lies_there:Mine"}})
    (tmp_path / "lies_there.py").write_text(
        "from agentrl import CreditScheme\nclass Mine(CreditScheme):\n    def assign(self, groups): ...",
        encoding="utf-8",
    )
    script = "import agentrl; print(agentrl.TrainedRun('run').recipe.credit['scheme'])"
    (tmp_path / "scripts" / "look.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "scripts/look.py"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300).stdout
    assert told.strip() == "lies_there:Mine"


def test_a_process_trains_in_the_folder_that_the_first_one_has_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_first = load_recipe(TINY, ["--run_dir", str(tmp_path / "first")])

    @contextmanager
    def build(*_: Any, **__: Any) -> Iterator[Any]:  # stands in for what processes tell each other there
        yield SimpleNamespace(recipe=of_first, warnings=())

    def train(parts: Any, *_: Any, **__: Any) -> None:
        RunFolder.create(parts.recipe.run_dir, parts.recipe.model_dump(mode="json"))

    monkeypatch.setattr("agentrl.api.training.build", build)
    monkeypatch.setattr("agentrl.api.training.loop.train", train)
    own = of_first.model_copy(update={"run_dir": tmp_path / "a second later"})
    assert run_process(own, None, console=Console(quiet=True), is_main=False).path == tmp_path / "first"


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = []
    for _ in range(3):
        path = with_run_dir(load_recipe({"env": {"id": "key_door"}}), None, name="doors").run_dir
        assert path is not None
        path.mkdir(parents=True)
        paths.append(path)
    assert len(set(paths)) == 3


def test_a_script_that_trains_while_it_is_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trains_at_once.py").write_text("import agentrl\nagentrl.train('calculator')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="trains_at_once trains while it is imported"):
        agentrl.train(TINY, env="trains_at_once:MyEnv", run_dir=tmp_path / "run", quiet=True)


def test_no_turn_that_is_trained_on_holds_an_end_of_the_generation_config(tmp_path: Path) -> None:
    made = train_tokenizer([], vocab_size=261)
    model = make_local_model(LocalModelConfig(**SIZES), made)
    export_model(model, made, tmp_path / "model")
    config = tmp_path / "model" / "generation_config.json"
    ends = [*range(100, 180), *made.convert_tokens_to_ids(["<|im_end|>"])]  # many, so that a random model samples them
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": ends}))
    recipe = TINY | {"model": {"name_or_path": str(tmp_path / "model")}, "warmup": {"steps": 0}}
    recipe["env"] = {"id": "key_door", "options": {"prompt": "short"}}
    run = agentrl.train(recipe, run_dir=tmp_path / "run", quiet=True)
    turns = [turn for group in run.trajectories() for each in group.trajectories for turn in each.turns]
    assert any(turn.action_ids[-1] in ends[:-1] for turn in turns)
    assert not [turn for turn in turns if set(turn.action_ids[:-1]) & set(ends)]


def test_a_run_is_named_after_its_recipe_or_else_after_its_environment() -> None:
    def name(target: object, **changes: object) -> str:
        return name_of(target, load(target, changes=sections(changes))[0])  # type: ignore[arg-type]

    assert name("calculator") == name("calculator", env={"options": {"num_operations": 1}}) == "calculator"
    assert name("calculator", env=GUESS) == name({}, env=GUESS) == "Guess"
    assert name("calculator", env="key_door") == name(None, env="key_door") == "key_door"
    assert name(None, env="agentrl/Bisect-v0") == "agentrl-Bisect-v0"


@pytest.mark.slow
def test_an_agent_is_a_function_with_a_list_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def solve(task: dict[str, Any], session: Any) -> float:
        body = {"model": "policy", "messages": [{"role": "user", "content": task["question"]}]}
        async with httpx2.AsyncClient(base_url=session.base_url) as client:
            response = await client.post(
                "chat/completions", json=body, headers={"Authorization": f"Bearer {session.api_key}"}
            )
        return float(len(response.json()["choices"][0]["message"]["content"]))

    rows = [{"question": f"q{i}"} for i in range(8)]
    trained = agentrl.train(agent=solve, tasks=rows, run_dir=tmp_path / "run", quiet=True, **TINY)
    agent = trained.recipe.agent
    assert agent is not None
    assert agent.tasks.tasks == rows
    assert [turn.extends for group in trained.trajectories() for t in group.trajectories for turn in t.turns] == [
        True
    ] * 4
    assert trained.evaluate().metrics["episodes"] == 1.0
    assert agentrl.play(model=trained.path).rewards[0] >= 0


def test_an_agent_takes_the_place_of_what_played(tmp_path: Path) -> None:
    def changed(former: dict[str, Any], *overrides: str, **changes: Any) -> Any:
        return load_recipe({**former, "model": {"local": SIZES}}, overrides, changes=changes)

    tasks = {"tasks": [{"question": "q"}]}
    by_function = {"agent": {"run": "my:solve", "tasks": tasks}}
    by_command = {"agent": {"command": ["true"], "files": str(tmp_path), "check": ["true"], "tasks": tasks}}
    assert changed({"env": {"id": "corridor", "options": {"length": 3}}}, **by_function).player_id == "my:solve"
    assert changed(by_function, "--agent.run", "other:solve").agent.tasks.tasks == tasks["tasks"]
    assert changed(by_command, agent={"run": "my:solve"}).agent.check == ()
    assert changed(by_command, agent={"command": ["false"]}).agent.check == ("true",)
    assert changed(by_function, "--env.id", "corridor").agent is None
    assert changed(by_function, "--warmup.steps", "0").warmup.steps == 0
    with pytest.raises(ConfigError, match=r"warmup\.steps: a program has no oracle"):
        changed(by_function, "--warmup.steps", "1")
    with pytest.raises(ConfigError, match="agent: it plays in place of env"):
        load_recipe({"env": {"id": "corridor"}, **by_function})
