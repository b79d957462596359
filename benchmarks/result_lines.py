"""Files of results: one JSON object a line, compressed if the name ends in `.gz`; and the fields that a result was run with.

A benchmark prints `fields_block(...)`, and its page keeps it. `tests/benchmarks/test_result_lines.py` resolves the recipe of
each page that the documents quote, and fails if a recorded field has another value today: then the benchmark is run again.
"""

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.credit import load_credit
from agentrl.recipe.config import load_recipe

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```json fields\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def resolved(recipe: str | Mapping[str, Any], options: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields that a recipe's `loss`, `credit` and `train` resolve to today, defaults included.

    Args:
        recipe: its file, relative to the repository; or its sections.
        options: options as on the command line.
    """
    found = load_recipe(ROOT / recipe if isinstance(recipe, str) else recipe, options)
    loss = found.loss.model_dump(mode="json")
    if found.loss.has_range:
        loss["clip_low"], loss["clip_high"] = found.loss.clip_range()
    return {"loss": loss, "credit": repr(load_credit(found.credit)), "train": found.train.model_dump(mode="json")}


def fields_block(
    recipe: str | Mapping[str, Any],
    options: Sequence[str] = (),
    *,
    sections: Sequence[str] = ("loss", "credit", "train"),
) -> str:
    """Return a fenced block of a recipe and the fields of the sections that a result depends on."""
    fields = resolved(recipe, options)
    lines = [
        f"{json.dumps(name)}: {json.dumps(value)}"
        for name, value in {
            "recipe": recipe,
            "options": list(options),
            **{name: fields[name] for name in sections},
        }.items()
    ]
    return "```json fields\n{" + ",\n ".join(lines) + "}\n```"


def changed_fields(page: str) -> list[str]:
    """List the fields in the blocks of a page that resolve to another value today, with both values.

    A field that did not exist then is not compared: its default has to leave what was as it was.
    """
    found = []
    for block in map(json.loads, _BLOCK.findall(page)):
        today = resolved(block["recipe"], block["options"])
        for section in today.keys() & block.keys():
            then, now = (
                each[section] if isinstance(each[section], dict) else {"": each[section]} for each in (block, today)
            )
            found += [
                f"{section}.{name}".rstrip(".") + f": {value}, today {now.get(name, 'no such field')}"
                for name, value in then.items()
                if name not in now or now[name] != value
            ]
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file: none if there is no file yet."""
    if not path.is_file():
        return []
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.decode("utf-8").splitlines()]


def append_line(path: Path, result: dict[str, Any]) -> None:
    """Append a result by a single write, so that several processes may append to one file."""
    line = f"{json.dumps(result)}\n".encode()
    with path.open("ab") as file:
        file.write(gzip.compress(line) if path.suffix == ".gz" else line)
