"""`agentrl credit`."""

import argparse
import sys
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl.cli.commands import Commands, first_line
from agentrl.cli.show import add_rollouts, read_rollouts
from agentrl.errors import ConfigError, CreditError
from agentrl.files import parse_yaml
from agentrl.report.terminal import Console


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    credit = commands.add(
        "credit", _credit, "List installed credit schemes, or explain what one does to recorded rollouts."
    )
    explain = credit.add_subparsers(dest="action").add_parser(
        "explain",
        help="print the advantages of each turn of recorded rollouts",
        description="Print the advantages of each turn of recorded rollouts, coloured token by token. Any field of the scheme "
        "can be given as an option: --gamma 0.5",
        allow_abbrev=False,
    )
    explain.set_defaults(run=_explain, takes_overrides=True)
    explain.add_argument("scheme", metavar="SCHEME", help="an installed scheme, or module:Class")
    add_rollouts(explain, default=8)


def _credit(_: argparse.Namespace, __: list[str]) -> None:
    table = Table("scheme", "what it is", "needs", "credits each", "paper", "fields and defaults")
    from agentrl.credit import credit_class, installed_credit

    for name, needs in installed_credit().items():
        try:
            scheme = credit_class(name)
        except ConfigError as error:
            table.add_row(name, Text(str(error)))
            continue
        fields = ", ".join(f"{field} {info.default}" for field, info in scheme.model_fields.items())
        mark = " (experimental)" if scheme.experimental else ""
        table.add_row(
            name + mark,
            Text(first_line(sys.modules[scheme.__module__]) or first_line(scheme)),
            ", ".join(sorted(scheme.needs if needs is None else needs)) or "-",
            scheme.granularity,
            scheme.paper or "-",
            Text(fields),
        )
    Console().print(table)


def _explain(options: argparse.Namespace, rest: list[str]) -> None:
    from agentrl.credit import load_credit
    from agentrl.report.explain import explain
    from agentrl.report.show import legend

    scheme = load_credit({"scheme": options.scheme, **_fields(rest)}, field="credit")
    everyone, chosen = read_rollouts(options)
    try:
        tables = list(explain(scheme, everyone, shown=chosen))
    except CreditError as error:
        raise CreditError(f"{error}. Rollouts hold what the credit scheme of their own run read") from error
    console = Console()
    console.print(Text(repr(scheme)))
    console.print(legend())
    for table in tables:
        console.print(table)


def _fields(arguments: list[str]) -> dict[str, Any]:
    """Read `--name value` and `--name=value` pairs; values are YAML."""
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"expected --FIELD VALUE, a field of the scheme, got {name!r}")
        if not has_value and not rest:
            raise ConfigError(f"{name}: needs a value")
        value = value if has_value else rest.pop(0)
        found[name.removeprefix("--")] = parse_yaml(value, where=f"{name}: {value[:80]!r}")
    return found
