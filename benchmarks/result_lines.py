"""Files of results: one JSON object a line, compressed if the name ends in `.gz`."""

import gzip
import json
from pathlib import Path
from typing import Any


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
