"""Model cards, read as those who read them do: the header as YAML, the rest as Markdown."""

import getpass
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from agentrl.recipe.config import Recipe, load_recipe
from agentrl.report.card import first_line, measure, write_card
from agentrl.report.folder import EvaluationNote, RunFolder
from agentrl.report.statistics import settings_of
from agentrl.rollout.evaluation import mean_interval, wilson
from tests.support.each import each
from tests.support.report_runs import member

ROWS = [
    {"step": 0.0, "eval/success": 0.0, "eval/episodes": 8.0, "eval/failed": 0.0},
    {"step": 1.0, "reward/mean": 0.25, "entropy": 2.0},
    {"step": 2.0, "reward/mean": 0.5, "entropy": 1.0, "eval/success": 0.75, "eval/reward": 0.5, "eval/episodes": 8.0},
]


def make_run(path: Path, *, rows: list[dict[str, float]] = ROWS, **sections: Any) -> tuple[RunFolder, dict[str, Any]]:
    recipe = Recipe.model_validate({"run_dir": path, "train": {"steps": 5}, **sections})
    folder = RunFolder.create(path, recipe.model_dump(mode="json"))
    for row in rows:
        folder.add_metrics(row)
    return folder, folder.config()


def card(
    tmp_path: Path, run: RunFolder, config: dict[str, Any], *, name: str = "ann/agent"
) -> tuple[dict[str, Any], str]:
    """Write a card; return its header and its text."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_card(folder, run, config, name=name, step=2, adapter=False)
    _, header, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(header), text


def test_a_card_tells_task_training_curves_and_how_the_model_is_loaded(tmp_path: Path) -> None:
    header, text = card(tmp_path, *make_run(tmp_path / "run", env={"id": "calculator"}, loss={"unit": "turn"}))
    assert header["library_name"] == "transformers"
    assert header["pipeline_tag"] == "text-generation"
    assert "base_model" not in header
    assert "An agent for `calculator`" in text
    assert str(first_line("calculator")) in text.replace("\\", "")
    assert "| importance ratio | one for each turn |" in text
    assert "| steps | 2 of 5 |" in text
    assert "![reward/mean, eval/success, entropy over the steps](curves.png)" in text
    assert (tmp_path / "model" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert 'AutoModelForCausalLM.from_pretrained("ann/agent")' in text
    recipe = yaml.safe_load(text.partition("```yaml\n")[2].partition("\n```")[0])
    assert recipe["loss"]["unit"] == "turn"
    assert "run_dir" not in recipe


def test_a_model_of_the_hub_is_named_and_a_folder_is_not(tmp_path: Path) -> None:
    header, text = card(tmp_path, *make_run(tmp_path / "run", model={"name_or_path": "org/base-1.5B"}))
    assert header["base_model"] == "org/base-1.5B"
    assert "(https://huggingface.co/org/base-1.5B)" in text
    (tmp_path / "b").mkdir()
    header, text = card(tmp_path / "b", *make_run(tmp_path / "b" / "run", model={"name_or_path": str(tmp_path)}))
    assert "base_model" not in header


def add_evaluation(
    run: RunFolder, config: dict[str, Any], *, step: int, successes: list[float], prefix: str = "eval"
) -> Path:
    return run.add_evaluation(
        (
            member(0, reward=2 * success, group_id=f"{prefix}/{task:06d}", step=step, metrics={"success": success})
            for task, success in enumerate(successes)
        ),
        EvaluationNote(step=step, settings=settings_of(config)),
    )


def test_evaluation_comes_from_the_newest_rollouts_of_these_weights_with_intervals(tmp_path: Path) -> None:
    run, config = make_run(tmp_path / "run")
    add_evaluation(run, config, step=2, successes=[1.0] * 4)
    add_evaluation(run, config, step=2, successes=[1.0, 0.0, 1.0, 1.0])
    add_evaluation(run, config, step=9, successes=[0.0] * 4)  # of other weights
    low, high = wilson(0.75, 4)
    (found,) = measure(run, config, step=2)
    assert found.values == {"success": 0.75, "reward": 1.5, "pass@1": 0.75}
    assert found.intervals.pop("pass@1").low < 0.75
    assert found.intervals == {"success": (low, high), "reward": mean_interval([[2.0], [0.0], [2.0], [2.0]])}
    header, text = card(tmp_path, run, config)
    assert f"| success | 0.75 | {low:.4g} to {high:.4g} |" in text
    (result,) = header["model-index"][0]["results"]
    assert result["dataset"]["name"].endswith(", 4 evaluation tasks")
    metrics = {metric["type"]: metric for metric in result["metrics"]}
    assert metrics["success"]["value"] == 0.75
    assert metrics["success"]["name"] == f"success (95 % interval {low:.4g} to {high:.4g})"


@pytest.mark.slow
@each(
    "option",
    [
        "--evaluation.temperature=0",
        "--evaluation.num_tasks=1",
        "--evaluation.samples=2",
        "--evaluation.seed=5",
        "--seed=5",
        "--env.id=key_door",
        "--env.options.max_depth=1",
        "--rollout.max_turns=1",
        "--chat.system=Hurry.",
    ],
)
def test_an_evaluation_with_other_settings_than_the_recipes_is_left_out(tmp_path: Path, option: str) -> None:
    run, config = make_run(tmp_path / "run")
    add_evaluation(run, config, step=2, successes=[1.0, 0.0])
    other = load_recipe(run.config_file, [option]).model_dump(mode="json")
    add_evaluation(run, other, step=2, successes=[1.0] * 4)
    (found,) = measure(run, config, step=2)
    assert found.num_tasks == 2
    (found,) = measure(run, other, step=2)
    assert found.num_tasks == 4


def test_an_evaluation_of_which_nothing_was_noted_is_left_out(tmp_path: Path) -> None:
    run, config = make_run(tmp_path / "run")
    add_evaluation(run, config, step=2, successes=[1.0, 0.0]).with_suffix(".json").unlink()
    (found,) = measure(run, config, step=2)
    assert found.num_tasks == 8  # of the run's own


def test_without_rollouts_the_runs_own_evaluation_is_told(tmp_path: Path) -> None:
    run, config = make_run(tmp_path / "run")
    (found,) = measure(run, config, step=2)
    assert (found.num_tasks, found.episodes) == (8, 8)
    assert found.values == {"success": 0.75, "reward": 0.5}
    assert found.intervals == {"success": wilson(0.75, 8)}
    assert measure(run, config, step=1) == []


def test_environments_of_an_evaluation_are_told_apart(tmp_path: Path) -> None:
    env = {"easy": {"id": "calculator", "options": {"max_depth": 1}}, "hard": {"id": "calculator"}}
    row = {"step": 2.0} | {
        f"eval/{name}/{measure}": value
        for name, success in (("easy", 0.75), ("hard", 0.25))
        for measure, value in (("success", success), ("episodes", 8.0))
    }
    run, config = make_run(tmp_path / "run", rows=[row], evaluation={"env": env})
    header, text = card(tmp_path, run, config)
    assert "in `calculator (easy)`: 8 evaluation tasks" in text
    results = {each["dataset"]["type"]: each["metrics"][0]["value"] for each in header["model-index"][0]["results"]}
    assert results == {"calculator-easy": 0.75, "calculator-hard": 0.25}
    add_evaluation(run, config, step=2, successes=[1.0, 0.0], prefix="eval/hard")
    (found,) = measure(run, config, step=2)
    assert (found.env_id, found.name) == ("calculator", "hard")


def test_without_matplotlib_the_curves_are_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _, text = card(tmp_path, *make_run(tmp_path / "run"))
    assert "| step | reward/mean | eval/success | entropy |" in text
    assert "| 2 | 0.5 | 0.75 | 1 |" in text
    assert not (tmp_path / "model" / "curves.png").exists()


def test_a_card_tells_nothing_private(tmp_path: Path) -> None:
    options = {"api_key": "sesame", "tasks": str(tmp_path / "tasks.jsonl"), "url": "http://lab.example.org/v1"}
    sections: dict[str, Any] = {
        "env": {"id": f"{tmp_path}/envs.py:Mine", "options": options},
        "model": {"name_or_path": str(tmp_path / "base")},
        "engine": {"name": "vllm_server", "server": {"url": ["http://lab.example.org:8000"], "folder": str(tmp_path)}},
    }
    run, config = make_run(tmp_path / "run", **sections)
    header, text = card(tmp_path, run, config)
    said = json.dumps(header) + text
    for private in ("sesame", "lab.example.org", str(tmp_path), str(Path.home())):
        assert private not in said
    if len(getpass.getuser()) > 4:
        assert getpass.getuser() not in said
    assert "envs.py:Mine" in said
    assert "tasks.jsonl" in said


HOSTILE = "</details><script>alert(1)</script> [x](javascript:1) | `a` ![](http://x) ```\n# Heading\n````\n---\n<!-- "


@pytest.mark.slow
def test_what_a_recipe_and_an_environment_say_cannot_break_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told.py").write_text(f"class Told:\n    {'<b>' + HOSTILE.splitlines()[0]!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = card(tmp_path, *make_run(tmp_path / "run", env={"id": "told:Told", "options": {"text": "x"}}))[1]
    (tmp_path / "b").mkdir()
    hostile = make_run(
        tmp_path / "b" / "run", env={"id": "told:Told", "options": {"text": HOSTILE}}, chat={"system": HOSTILE}
    )
    header, text = card(tmp_path / "b", *hostile)
    assert header["library_name"] == "transformers"
    for shown in (plain, text):
        assert html_of(shown) == ["<details><summary>The whole recipe</summary>\n", "</details>\n"]
        links = [token for token in tokens(shown) if token.type == "link_open"]
        assert links == []
    headings = [token.type for token in tokens(text)].count("heading_open")
    assert headings == [token.type for token in tokens(plain)].count("heading_open") == 5


def tokens(text: str) -> list[Any]:
    found = MarkdownIt("commonmark").enable("table").parse(text)
    return [token for block in found for token in (block, *(block.children or ()))]


def html_of(text: str) -> list[str]:
    return [token.content for token in tokens(text) if token.type in ("html_block", "html_inline")]


def test_a_docstring_is_read_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noted").mkdir()
    (tmp_path / "noted" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "noted" / "inner.py").write_text('raise SystemExit\nclass Env:\n    """One line.\n\n    More."""\n')
    (tmp_path / "broken.py").write_text("class Env(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert first_line("noted.inner:Env") == "One line."
    assert first_line("noted.inner:Other") is None
    assert first_line("noted.absent:Env") is None
    assert first_line("broken:Env") is None
    assert first_line("nothing_of_this_name:Env") is None
    assert first_line("FrozenLake-v1") is None
