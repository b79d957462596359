"""Docstrings and pages are written in the field's plain words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.packages import PACKAGES, modules

FIRST = re.compile(r"(Of|As|That|Whom|Told|What|Where|Which|Whose|How|Tells?)\b")
"""No docstring begins with one of these: it is a noun phrase or an imperative sentence that begins with its head word."""
BANNED = re.compile(
    r"\b(anew|whom|of which nobody|(gone|goes?|going|went) on with|(is|are|was|were) told"
    r"|(True|False|None|Error:) where)\b",
    re.IGNORECASE,
)
PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes, functions and attributes, with their lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def offenders(text: str) -> list[str]:
    return [f"{line}: {words[:60]}" for line, words in docstrings(text) if FIRST.match(words) or BANNED.search(words)]


def test_docstrings_begin_with_their_head_word_and_use_plain_words() -> None:
    files = [path for package in PACKAGES.values() for path in modules(package)]
    assert [f"{path.name}:{found}" for path in files for found in offenders(path.read_text(encoding="utf-8"))] == []


def test_pages_use_plain_words() -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES if page.name != "fields.md"}
    assert [f"{name}: {found[0]}" for name, text in pages.items() if (found := BANNED.search(text))] == []


def test_an_offender_is_found() -> None:
    assert offenders('"""Of what a recipe keeps."""')
    assert offenders('def f():\n    """Return what it is told."""')
    assert not offenders('"""Count of objects held at once."""')
