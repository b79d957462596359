"""What a run has written, without what is a matter of the machine."""

import json
from collections.abc import Mapping
from pathlib import Path


def repeatable(row: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics without seconds and memory."""
    return {name: value for name, value in row.items() if not name.startswith(("time/", "process/"))}


def rows(folder: Path) -> list[dict[str, float]]:
    return [repeatable(json.loads(line)) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def rollouts(folder: Path) -> dict[str, list[dict[str, object]]]:
    files = {}
    for path in sorted((folder / "rollouts").iterdir()):
        files[path.name] = [json.loads(line) for line in path.read_bytes().splitlines()]
        for record in files[path.name]:
            del record["metrics"]["env_s"]  # seconds are a matter of the machine
    return files
