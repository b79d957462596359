"""The first line of an environment's docstring, read from its source: nothing of it is imported or run."""

import ast
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path


def first_line(env_id: str) -> str | None:
    """Return the first line of the docstring of what `env.id` names.

    None: it has none, or no source that is found by its name.
    """
    registered = next((point.value for point in entry_points(group="agentrl.envs") if point.name == env_id), env_id)
    module, _, attribute = registered.partition(":")
    source = _source(module) if attribute else None
    try:
        tree = ast.parse(source.read_bytes()) if source else None
    except (OSError, SyntaxError, ValueError):  # what is no source says nothing
        return None
    for node in tree.body if tree else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute:
            return (ast.get_docstring(node) or "").partition("\n")[0] or None
    return None


def _source(module: str) -> Path | None:
    top, *rest = module.split(".")
    spec = PathFinder.find_spec(top)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if not rest:
        return Path(spec.origin) if spec and spec.origin else None
    found = (place.joinpath(*rest) for place in places)
    files = (file for path in found for file in (path.with_suffix(".py"), path / "__init__.py"))
    return next((file for file in files if file.is_file()), None)
