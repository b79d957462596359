"""The architectures that people train, tiny and at random, from the first demonstration to the third step."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.recipe.config import Recipe
from tests.support.architectures import ARCHITECTURES, recipe, write_model
from tests.support.runs import train

pytestmark = pytest.mark.process


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_three_steps_of_a_tool_environment_with_the_family_s_template(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(name, tmp_path / "model")
    folder, rows = train(Recipe.model_validate(recipe(tmp_path / "model", tmp_path / "run")))
    steps = [row for row in rows if row["step"] > 0]
    assert len(steps) == 3
    for row in steps:
        assert row["first/engine_difference"] < 1e-5  # nats, as in float32 without a cache
        assert row["grad_norm"] > 0
    assert sum(row["episode/turns"] for row in steps) > 2 * len(steps)
    played = "".join(file.read_text(encoding="utf-8") for file in folder.path.glob("rollouts/*"))
    assert '"role":"tool"' in played.replace(": ", ":")  # calls were read from what the model wrote, and carried out

    monkeypatch.chdir(tmp_path)
    loaded = run_card(folder.path, tmp_path / "exported")
    assert type(loaded["model"]).__name__ in loaded["model"].config.architectures
    assert loaded["tokenizer"].chat_template


@pytest.mark.slow
def test_the_card_of_adapters_loads_them_beside_a_multimodal_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model("Mistral 3", tmp_path / "model")
    made = recipe(tmp_path / "model", tmp_path / "run")
    made["model"]["lora"], made["warmup"]["steps"], made["train"]["steps"] = {"rank": 2}, 0, 1
    folder, _ = train(Recipe.model_validate(made))
    monkeypatch.chdir(tmp_path)
    loaded = run_card(folder.path, tmp_path / "exported", "--adapter", base=tmp_path / "model")
    assert type(loaded["model"].get_base_model()).__name__ == "Mistral3ForConditionalGeneration"
    assert any("lora_A" in name for name in loaded["model"].state_dict())


def run_card(run: Path, folder: Path, *options: str, base: Path = Path()) -> dict[str, Any]:
    """Export a run; return what the Python of its card makes. A base from a folder of one's own has no name there."""
    main(["export", str(run), str(folder), *options])
    usage = (folder / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    made: dict[str, Any] = {}
    exec(usage.replace("THE BASE MODEL", str(base)), made)
    return made
