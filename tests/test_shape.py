"""The packages stay in a shape that a newcomer can read: small files, short constructors, no import cycle."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from tests.support.packages import PACKAGES

FILES = {
    ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES.values()
    for path in sorted(package.rglob("*.py"))
}
"""Every module of the packages."""


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_there_are_modules_of_each_package() -> None:
    assert {"agentrl", "agentrl_envs", "agentrl_credit"} <= FILES.keys()
    assert len(FILES) > 100


@pytest.mark.parametrize("module", FILES)
def test_no_file_is_long(module: str) -> None:
    assert num_lines(FILES[module]) <= 400


def test_most_files_are_short() -> None:
    assert median(map(num_lines, FILES.values())) < 100


def test_the_loop_stands_on_one_page() -> None:
    assert num_lines(FILES["agentrl.run.loop"]) <= 150


@pytest.mark.parametrize("module", FILES)
def test_no_constructor_takes_more_than_seven_arguments(module: str) -> None:
    """Frozen data is exempt (below): it does nothing, and has a field for each thing that it tells."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = node.args
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            assert len(names) <= 1 + 7, f"line {node.lineno}: {', '.join(names)}"


@pytest.mark.parametrize("module", FILES)
def test_what_is_made_of_more_than_seven_fields_is_frozen_data_and_made_by_keyword(module: str) -> None:
    for node in ast.walk(tree(module)):
        for call in getattr(node, "decorator_list", []):
            if not (
                isinstance(call, ast.Call) and ast.unparse(call.func) == "dataclass" and isinstance(node, ast.ClassDef)
            ):
                continue
            given = [line for line in node.body if isinstance(line, ast.AnnAssign) and line.value is None]
            fields = [ast.unparse(line.target) for line in given]  # without what a growing object begins with
            is_set = {keyword.arg: ast.unparse(keyword.value) == "True" for keyword in call.keywords}
            assert len(fields) <= 7 or (is_set.get("frozen") and is_set.get("kw_only")), f"{node.name}: {fields}"


def at_import(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run when a module is imported: not those in functions, nor those for type checkers alone."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody"):
                yield from at_import(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from at_import(handler.body)


def imported(module: str) -> set[str]:
    """Return the modules of the packages that a module loads.

    A package whose name alone is on the way (`agentrl` of `agentrl.types`) is left out: what it loads does not wait for this
    module's names.
    """
    found = set()
    for node in at_import(tree(module).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module is not None:
            assert node.level == 0, f"{module}: a relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (submodules & FILES.keys()) or {node.module}
    return (found & FILES.keys()) - {module}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return a way from a module back to itself; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module not in done:
            for other in sorted(graph[module]):
                if found := visit(other, [*way, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in graph if (found := visit(module, []))), [])


def test_no_module_imports_itself_on_a_way_around() -> None:
    assert cycle({module: imported(module) for module in FILES}) == []


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
