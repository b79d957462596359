"""The sentence of a field: the string under it in its class, or its entry under `Args` of a constructor."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import docstring_parser
from pydantic import BaseModel


@cache
def attribute_docstrings(cls: type[Any]) -> dict[str, str]:
    """Return the string under each annotated attribute of a class and its bases, by name; none where the source is gone."""
    found: dict[str, str] = {}
    for base in (base for base in reversed(cls.__mro__) if base not in (object, BaseModel)):
        try:
            [node] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError, ValueError):  # of builtins, and of what was typed in
            continue
        for line, below in pairwise(node.body if isinstance(node, ast.ClassDef) else []):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                found[line.target.id] = one_line(below.value.value)
    return found


def argument_docstrings(function: Callable[..., Any]) -> dict[str, str]:
    """Return the entry of each argument in a function's or constructor's docstring, by name."""
    text = inspect.getdoc(initializer(function)) or ""
    return {p.arg_name: one_line(p.description or "") for p in docstring_parser.parse(text).params}


def initializer(function: Callable[..., Any]) -> Any:
    """Return what takes the arguments: a class's `__init__`, or the function itself."""
    return getattr(function, "__init__") if isinstance(function, type) else function  # noqa: B009 - mypy forbids the dot


def first_paragraph(documented: object) -> str:
    """Return the first paragraph of a docstring of its own, on one line."""
    return one_line((getattr(documented, "__doc__", None) or "").strip().partition("\n\n")[0])


def one_line(text: str) -> str:
    """Return a text with all its white space made single spaces."""
    return " ".join(text.split())
