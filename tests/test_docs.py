"""Every block of code in README.md and docs/ works as it stands.

Python is run, with small sizes for what it trains; YAML is read as a recipe, or as the section that it is; commands are given
to the real parser, and carried out where that takes a moment. `<!-- file: NAME -->` before a block: it is that file.
`<!-- not run: REASON -->`: it is not run.
"""

import re
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import agentrl
from agentrl.env.rewards.functions import load_rewards
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.recipe.fields import sections
from agentrl.recipe.foreign_names import of_field, of_path
from agentrl.rollout import RolloutConfig
from agentrl_envs.repository import TaskFile
from tests.support.docs import PAGES, ROOT, Block, blocks
from tests.support.docs_commands import check, commands
from tests.support.small_options import SMALL_OPTIONS

SMALLER = [*SMALL_OPTIONS, "--report.rollouts_every", "1"]
WITH_CODE = [page for page in PAGES if any(block.language != "text" for block in blocks(page))]


def test_every_block_says_what_it_is_and_few_are_not_run() -> None:
    found = [(page.name, block) for page in PAGES for block in blocks(page)]
    assert len(found) > 80
    known = {"python", "yaml", "json", "bash", "text"}
    assert [f"{name}:{block.line}" for name, block in found if block.language not in known] == []
    assert sum(page.read_text(encoding="utf-8").count("\n```") for page in PAGES) == 2 * len(found), "one is not seen"
    assert len([block for _, block in found if block.not_run]) <= 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, for the commands that are given one."""
    folder = tmp_path_factory.mktemp("trained") / "runs" / "calculator"
    return agentrl.train("calculator", run_dir=folder, quiet=True, overrides=SMALLER).path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, where whatever is trained is small."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # as in a checkout
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT), *sys.path])
    train = agentrl.train

    def train_little(*given: Any, **options: Any) -> Any:
        no_warmup = ["--warmup.steps", "0"] if "agent" in options else []
        return train(*given, **{**options, "overrides": [*options.get("overrides", ()), *SMALLER, *no_warmup]})

    monkeypatch.setattr(agentrl, "train", train_little)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")) or name == "page":
            del sys.modules[name]


@pytest.mark.process
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[] if page.name == "README.md" else pytest.mark.slow)
        for page in WITH_CODE
    ],
)
def test_the_blocks_of_a_page_work(page: Path, here: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = types.ModuleType("page")
    sys.modules["page"] = module
    for block in blocks(page):
        if block.file:  # first: a page shows how to name a module before it shows the module
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
    for block in blocks(page):
        if block.not_run:
            continue
        try:
            run(block, module, trained)
        except (Exception, SystemExit) as error:
            told = capsys.readouterr().err.strip()
            raise AssertionError(f"{page.relative_to(ROOT)}, line {block.line}: {error!r} {told}") from error


def run(block: Block, module: types.ModuleType, trained: Path) -> None:
    if block.language == "python":
        if block.file:
            runpy.run_path(block.file, run_name="__main__")
        else:
            exec(compile(block.text, "page", "exec"), vars(module))
    elif block.language == "yaml":
        read(yaml.safe_load(block.text))
    elif block.language == "bash":
        for words, comment in commands(block.text):
            check(words, comment, run=trained)


def read(data: dict[str, Any]) -> None:
    """Read a recipe, a part of one, or the fields of a repository to repair."""
    if data.keys() <= Recipe.model_fields.keys():
        load_recipe(data)
    elif data.keys() == {"rewards"}:
        load_rewards(data["rewards"], columns=["prompt"], has_answer=True)
    elif "command" in data:
        TaskFile.model_validate(data)
    else:
        RolloutConfig.model_validate(data)


def test_names_of_other_libraries_are_told_as_the_page_tells_them() -> None:
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8").partition("### Fields")[2]
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", text, re.MULTILINE)[1:]]
    assert len(rows) > 25
    known = {"credit.scheme"} | {
        name for section in sections() for name in (section.path, *(field.path for field in section.fields))
    }
    for row in rows:
        ours = re.findall(r"`([^`]+)`", row[3])
        assert set(ours) <= known, row[3]
        for theirs in (name for cell in row[:3] for name in re.findall(r"`([^`]+)`", cell)):
            last = theirs.rpartition(".")[2]
            if last not in {name.rpartition(".")[2] for name in ours}:
                told = of_path(theirs) or of_field(last) or ""
                assert any(name.partition(".")[0] in told for name in ours), f"{theirs}: {told}"
