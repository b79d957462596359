"""The architectures that people train, tiny and at random, from the first demonstration to the third step."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.config import Recipe
from benchmarks.architectures import ARCHITECTURES, recipe, write_model
from tests.support.runs import train


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

    main(["export", str(folder.path), str(tmp_path / "exported")])
    usage = (
        (tmp_path / "exported" / "README.md")
        .read_text(encoding="utf-8")
        .partition("```python\n")[2]
        .partition("```")[0]
    )
    monkeypatch.chdir(tmp_path)
    loaded: dict[str, Any] = {}
    exec(usage, loaded)
    assert type(loaded["model"]).__name__ in loaded["model"].config.architectures
    assert loaded["tokenizer"].chat_template
