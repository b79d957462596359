"""Results that the documents quote were run with the fields that their recipes resolve to today."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.result_lines import changed_fields, fields_block

ROOT = Path(__file__).parents[2]
QUOTED = sorted(
    {
        name
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for name in re.findall(r"benchmarks/results/([\w.-]+\.md)", page.read_text(encoding="utf-8"))
    }
)
WITHOUT_FIELDS = {
    # No loss is trained with: exact sums, engines, environments, kills.
    "2026-11-28-credit_exact.md",
    "2026-11-28-credit_graph.md",
    "2026-11-21-partial_rollouts.md",
    "2026-11-21-vllm_throughput.md",
    "2026-11-22-architectures.md",
    "2026-11-27-architectures.md",
    "2026-11-23-contract.md",
    "2026-11-27-pushes.md",
    "2026-11-28-adapters.md",
    "2026-11-28-bfcl.md",
    "2026-11-29-collectives.md",
    "2026-11-29-up_kills.md",
    "2026-11-29-bfloat16_copy.md",
    "2026-11-29-untrained.md",
    "models.md",
    "reliability.md",
    # From before fields were recorded: the next run of each adds them.
    "2026-11-21-tree.md",
    "2026-11-22-paper.md",
    "2026-11-23-calibrated.md",
    "2026-11-23-compare.md",
    "2026-11-24-default_recipe.md",
    "2026-11-24-environments.md",
    "2026-11-26-gpu.md",
    "2026-11-26-plan_memory.md",
    "2026-11-27-gpu.md",
    "environments.md",
    "evidence.md",
    "scaling.md",
}


def text(name: str) -> str:
    return (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", QUOTED)
def test_a_quoted_result_was_run_with_the_fields_of_today(name: str) -> None:
    has_fields = "```json fields\n" in text(name)
    assert has_fields != (name in WITHOUT_FIELDS), "print benchmarks.result_lines.fields_block into the page"
    assert changed_fields(text(name)) == [], f"run the benchmark of {name} again, or quote it no more"


def test_no_page_is_excused_that_nobody_quotes() -> None:
    assert set(QUOTED) >= WITHOUT_FIELDS


def test_a_changed_default_is_found_and_a_new_field_is_not_one() -> None:
    block = fields_block({"loss": "gspo_token"}, ["--train.num_minibatches", "2"])
    assert changed_fields(block) == []
    assert changed_fields(block.replace('"clip_low": 0.0003', '"clip_low": 0.2')) == [
        "loss.clip_low: 0.2, today 0.0003"
    ]
    old = json.loads(block.removeprefix("```json fields\n").removesuffix("\n```"))
    old["train"].pop("num_minibatches")
    old["train"]["gone"] = old["credit"] = "x"
    found = changed_fields(f"```json fields\n{json.dumps(old)}\n```")
    assert sorted(line.partition(",")[0] for line in found) == ["credit: x", "train.gone: x"]
