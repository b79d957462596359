"""The blocks of code in README.md and docs/, with what a comment before each says of it."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(
        path
        for path in (ROOT / "docs").rglob("*.md")
        if path.parent.name != "design" and path.name != "fields.md"  # built, not committed
    ),
]
_BLOCK = re.compile(r"(?:^<!-- (file|not run): (.+?) -->\n)?^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of code."""

    language: str
    text: str
    line: int
    """Of the page, counted from 1."""
    file: str | None
    """What it is written to (`<!-- file: NAME -->`)."""
    not_run: str | None
    """Why it cannot be run (`<!-- not run: REASON -->`)."""


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=found[4],
            text=found[5],
            line=text.count("\n", 0, found.start(5)) + 1,
            file=found[2] if found[1] == "file" else None,
            not_run=found[2] if found[1] == "not run" else None,
        )
        for found in _BLOCK.finditer(text)
    ]
