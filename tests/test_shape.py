"""The packages stay in a shape that a newcomer can read: files that tell one story, short functions, no circle of imports.

Each rule is one test that lists its offenders.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.packages import PACKAGES, modules

FILES = {
    ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES.values()
    for path in modules(package)
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


def test_files_are_few() -> None:
    assert len(FILES) <= 288


def test_no_file_is_long() -> None:
    assert [f"{module}: {num} lines" for module, path in FILES.items() if (num := num_lines(path)) > 700] == []


def test_the_loop_stands_on_one_page() -> None:
    assert num_lines(FILES["agentrl.run.loop"]) <= 200


def long_functions(module: str, body: ast.Module) -> Iterator[str]:
    """Yield functions of more than sixty lines, their docstrings left out."""
    for node in ast.walk(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                num -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if num > 60:
                yield f"{module}:{node.name}: {num} lines"


def test_a_function_fits_a_screen() -> None:
    assert [line for module in FILES for line in long_functions(module, tree(module))] == []


def test_a_long_function_is_found() -> None:
    lines = 'class C:\n  async def f(self):\n    """Do."""\n' + "    x = 1\n" * 59
    assert list(long_functions("m", ast.parse(lines))) == []
    assert list(long_functions("m", ast.parse(lines + "    x = 1\n"))) == ["m:f: 61 lines"]


def crowded_assignments(body: ast.Module) -> Iterator[int]:
    """Yield the lines of statements that assign three names at once, each its own value."""
    for node in ast.walk(body):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=[_, _, _, *_])], value=ast.Tuple()):
                yield node.lineno


def test_no_statement_assigns_three_names() -> None:
    assert [f"{module}, line {line}" for module in FILES for line in crowded_assignments(tree(module))] == []


def test_an_assignment_of_three_names_is_found() -> None:
    assert list(crowded_assignments(ast.parse("a, b = 1, 2\nx, y, z = f()\na, b, c = 1, 2, 3"))) == [3]


def many_arguments(body: ast.Module) -> Iterator[str]:
    """Yield the lines of constructors with more than seven arguments, beside the `prompt` that all environments have.

    Frozen data is exempt (below): it does nothing, and has a field for each thing that it holds.
    """
    for node in ast.walk(body):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = node.args
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            if len({*names} - {"prompt"}) > 1 + 7:
                yield f"line {node.lineno}: {', '.join(names)}"


def test_no_constructor_takes_more_than_seven_arguments() -> None:
    assert [f"{module}, {line}" for module in FILES for line in many_arguments(tree(module))] == []


def test_a_constructor_with_eight_arguments_is_found() -> None:
    assert list(many_arguments(ast.parse("def __init__(self, a, b, c, d, /, e, *, f, g): ..."))) == []
    assert len(list(many_arguments(ast.parse("def __init__(self, a, b, c, d, /, e, *, f, g, h): ...")))) == 1


def large_unfrozen_data(body: ast.Module) -> Iterator[str]:
    """Yield dataclasses made of more than seven fields that are not both frozen and made by keyword."""
    for node in ast.walk(body):
        for call in getattr(node, "decorator_list", []):
            if not (
                isinstance(call, ast.Call) and ast.unparse(call.func) == "dataclass" and isinstance(node, ast.ClassDef)
            ):
                continue
            given = [line for line in node.body if isinstance(line, ast.AnnAssign) and line.value is None]
            fields = [ast.unparse(line.target) for line in given]  # without what a growing object begins with
            is_set = {keyword.arg: ast.unparse(keyword.value) == "True" for keyword in call.keywords}
            if len(fields) > 7 and not (is_set.get("frozen") and is_set.get("kw_only")):
                yield f"{node.name}: {fields}"


def test_data_of_more_than_seven_fields_is_frozen_and_made_by_keyword() -> None:
    assert [f"{module}, {name}" for module in FILES for name in large_unfrozen_data(tree(module))] == []


def test_large_data_that_is_not_frozen_is_found() -> None:
    seven = "".join(f"  x{k}: int\n" for k in range(7))
    for arguments, num in (("frozen=True", 1), ("kw_only=True", 1), ("frozen=True, kw_only=True", 0)):
        assert len(list(large_unfrozen_data(ast.parse(f"@dataclass({arguments})\nclass C:\n{seven}  y: int")))) == num
    assert list(large_unfrozen_data(ast.parse(f"@dataclass()\nclass C:\n{seven}  y: int = 0"))) == []


def imports(module: str, body: ast.Module) -> set[str]:
    """Return the modules of the packages that a module imports: at its top, in functions, and for type checkers alone.

    A package whose name alone is on the way (`agentrl` of `agentrl.types`) is left out: what it loads does not wait for this
    module's names.
    """
    found = set()
    for node in ast.walk(body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (submodules & FILES.keys()) or {str(node.module)}
    return (found & FILES.keys()) - {module}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the largest sets of modules of which each imports every other on some way."""

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        todo = [module]
        while todo:
            new = graph[todo.pop()] - found
            found |= new
            todo += new
        return found

    reach = {module: reached(module) for module in graph}
    found = []
    for module in graph:
        circle = {other for other in reach[module] if module in reach[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def test_no_module_imports_itself_on_a_way_around() -> None:
    found = circles({module: imports(module, tree(module)) for module in FILES})
    assert [sorted(circle) for circle in found] == []


def test_imports_are_found_wherever_they_stand() -> None:
    lines = "import agentrl.types\nif TYPE_CHECKING:\n  from agentrl import errors\ndef f():\n  import agentrl.credit, ast\n"
    assert imports("m", ast.parse(lines)) == {"agentrl.types", "agentrl.errors", "agentrl.credit"}


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}}) == [{"a", "b", "c"}, {"d", "e"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_what_make_test_quick_leaves_out_is_there() -> None:
    listed = (
        (Path(__file__).parents[1] / "Makefile")
        .read_text(encoding="utf-8")
        .partition("LONG_FILES = ")[2]
        .partition("\ntest-quick:")[0]
    )
    names = listed.replace("\\\n", " ").split()
    assert [name for name in names if not (Path(__file__).parent / f"{name}.py").is_file()] == []
