"""What a run has written, without what is a matter of the machine."""

import json
from pathlib import Path


def rows(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "process/"))} for line in lines]


def rollouts(folder: Path) -> dict[str, list[dict[str, object]]]:
    files = {}
    for path in sorted((folder / "rollouts").iterdir()):
        files[path.name] = [json.loads(line) for line in path.read_bytes().splitlines()]
        for record in files[path.name]:
            del record["metrics"]["env_s"]  # seconds are a matter of the machine
    return files
