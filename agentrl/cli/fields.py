"""`agentrl fields`, `agentrl algorithms`."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from agentrl.cli.commands import Commands
from agentrl.errors import ConfigError
from agentrl.report.terminal import Console

if TYPE_CHECKING:
    from agentrl.recipe.fields import Field, Section


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    fields = commands.add("fields", _fields, "Print what a recipe may say: every field, type, default and sentence.")
    fields.add_argument(
        "what",
        nargs="?",
        default="",
        metavar="SECTION|FIELD",
        help="rollout, rollout.group_size, group_size, credit.gigpo, or the name of a plug-in; nothing: all",
    )
    form = fields.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="as a page (docs/fields.md)")
    form.add_argument("--json-schema", action="store_true", help="of a recipe, for editors (docs/recipe.schema.json)")
    form.add_argument("--types", action="store_true", help="of sections in Python (agentrl/recipe/sections.pyi)")
    named = commands.add(
        "algorithms",
        _algorithms,
        "List the algorithms that `loss: NAME` names, or print what one of them sets and how it differs.",
    )
    named.add_argument("name", nargs="?", metavar="NAME", help="of an algorithm; nothing: all")
    named.add_argument("--markdown", action="store_true", help="as a table (of docs/ratio-units.md)")


def _fields(options: argparse.Namespace, _: list[str]) -> None:
    from agentrl.recipe.fields import page, sections
    from agentrl.recipe.schema import recipe_schema, section_types

    if options.what and (options.markdown or options.json_schema or options.types):
        raise ConfigError(
            f"{options.what}: --markdown, --json-schema and --types are of the whole recipe; leave it out"
        )
    if options.json_schema:
        print(json.dumps(recipe_schema(sections()), indent=1))
    elif options.types:
        print(section_types(), end="")
    elif options.markdown:
        print(page(sections()), end="")
    else:
        console = Console(soft_wrap=True)
        for section, fields in _found(options.what):
            _print(console, section, fields)


def _found(what: str) -> "list[tuple[Section, tuple[Field, ...]]]":
    """Return the sections that are asked for, each with the fields that are.

    Raises:
        ConfigError: if there is nothing of this name.
    """
    from agentrl.recipe.fields import find, sections

    # Environments import much: they are asked only where they may be meant.
    found = find(what, sections(with_environments=False)) if what and what.partition(".")[0] != "env" else []
    if not (found := found or find(what, sections())):
        from agentrl.recipe.plugin import suggest_field

        paths = [field.path for section in sections() for field in section.fields]
        hint = suggest_field(what.rpartition(".")[2], {s.path for s in sections() if s.path} | set(paths))
        raise ConfigError(f"{what}: no such section or field.{hint}")
    return found


def _print(console: Console, section: "Section", fields: "tuple[Field, ...]") -> None:
    console.print(Text(section.title, "bold underline"))
    if fields == section.fields:
        console.print(Text(section.sentence, "dim"))
    for field in fields:
        unit = f" ({field.unit})" if field.unit else ""
        default = f"default {field.default}" if field.default else "must be given"
        console.print(Text.assemble("\n  ", (field.path, "bold cyan"), f"   {field.type}{unit}   ", (default, "green")))
        console.print(Text(f"    {field.sentence}"))
        changes = "how the run goes" if field.on_resume.startswith("kept") else "what is learned"
        console.print(Text(f"    changes {changes}; on resume, episodes are {field.on_resume}", "dim"))
    console.print()


def _algorithms(options: argparse.Namespace, _: list[str]) -> None:
    from agentrl.learn.config import algorithms

    if options.name is not None:
        if options.markdown:
            raise ConfigError(f"{options.name}: --markdown is a table of all algorithms; leave one of them out")
        _print_algorithm(Console(soft_wrap=True), options.name)
    elif options.markdown:
        print(_algorithms_table(), end="")
    else:
        table = Table("loss", "in a phrase", "paper", box=None, pad_edge=False)
        for name, chosen in algorithms().items():
            table.add_row(Text(name, "bold cyan"), Text(_phrase(name)), Text(chosen.paper or "-", "dim"))
        Console().print(table)


def _resolved(name: str) -> dict[str, Any]:
    """Return the fields of each section that an algorithm sets."""
    from agentrl.learn.config import algorithm
    from agentrl.recipe.config import load_recipe

    chosen, recipe = algorithm(name), load_recipe({"loss": name})
    low, high = recipe.loss.clip_range()
    ranges = {"clip_low": float(f"{low:.4g}"), "clip_high": float(f"{high:.4g}")} if recipe.loss.has_range else {}
    loss = {field: getattr(recipe.loss, field) for field in chosen.loss}
    credit = {"credit": chosen.credit} if chosen.credit else {}
    return {"loss": {**loss, **ranges}, **credit, "train": {"target_kl": recipe.train.target_kl}}


def _phrase(name: str) -> str:
    from agentrl.recipe.config import load_recipe

    return load_recipe({"loss": name}).loss.describe().partition(": ")[2]


def _print_algorithm(console: Console, name: str) -> None:
    from agentrl.learn.config import algorithm

    chosen = algorithm(name)
    console.print(Text(f"loss: {name}", "bold underline"))
    console.print(Text(chosen.title))
    console.print(Text(f"paper: {chosen.paper or 'none'}; equation: {chosen.equation}"))
    for section, fields in _resolved(name).items():
        console.print(Text.assemble(f"{section}: ", (_yaml_line(fields), "cyan")))
    if chosen.credit is None:
        console.print(Text("credit: the recipe's"))
    console.print(Text(f"differs: {chosen.differs}"))


def _yaml_line(fields: dict[str, Any]) -> str:
    """Return a mapping as YAML writes it in one line."""
    import yaml

    return yaml.safe_dump(fields, default_flow_style=True, sort_keys=False, width=1000).strip()


def _algorithms_table() -> str:
    from agentrl.learn.config import algorithms

    rows = [
        f"| `{name}` | {_paper(chosen.paper)} | {chosen.equation} | `{_yaml_line(fields['loss'])[1:-1]}` "
        f"| {f'`{_yaml_line(chosen.credit)[1:-1]}`' if chosen.credit else 'any'} | {chosen.differs} |"
        for name, chosen in algorithms().items()
        for fields in [_resolved(name)]
    ]
    return "\n".join([_HEAD, *rows, ""])


def _paper(paper: str) -> str:
    return f"[{paper}](https://arxiv.org/abs/{paper})" if paper[:1].isdigit() else paper or "-"


_HEAD = """| `loss` | paper | equation | fields | credit | how ours differs |
|---|---|---|---|---|---|"""
