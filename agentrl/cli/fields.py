"""`agentrl fields`."""

import argparse
import json
from typing import TYPE_CHECKING

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
