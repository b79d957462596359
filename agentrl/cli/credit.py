"""`agentrl credit`."""

import argparse
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl.cli.commands import Commands, first_line
from agentrl.cli.show import add_rollouts, read_rollouts, rollout_files
from agentrl.data.files import parse_yaml
from agentrl.errors import ConfigError, CreditError
from agentrl.report.terminal import Console


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    credit = commands.add(
        "credit",
        _credit,
        "List installed credit schemes, explain what one does to recorded rollouts, or say which one suits them.",
    )
    actions = credit.add_subparsers(dest="action")
    explain = actions.add_parser(
        "explain",
        help="print the advantages of each turn of recorded rollouts",
        description="Print the advantages of each turn of recorded rollouts, coloured token by token. Any field of the scheme "
        "can be given as an option: --gamma 0.5",
        allow_abbrev=False,
    )
    explain.set_defaults(run=_explain, takes_overrides=True)
    explain.add_argument("scheme", metavar="SCHEME", help="an installed scheme, or module:Class")
    add_rollouts(explain, default=8)
    advise = actions.add_parser(
        "advise",
        help="say which scheme suits what a run's rollouts show",
        description="Measure turns, groups, keys and noise of a run's recorded rollouts, and print the recipe's line for the "
        "scheme that learned fastest on the tasks most like them (docs/credit.md).",
        allow_abbrev=False,
    )
    advise.set_defaults(run=_advise)
    advise.add_argument("target", type=Path, metavar="RUN|FILE", help="a run's folder, or a rollouts file")


def _credit(_: argparse.Namespace, __: list[str]) -> None:
    table = Table("scheme", "what it is, what it credits and needs, and its fields", show_lines=True)
    from agentrl.credit import credit_class, installed_credit

    for name, needs in installed_credit().items():
        try:
            scheme = credit_class(name)
        except ConfigError as error:
            table.add_row(name, Text(str(error)))
            continue
        reads = ", ".join(sorted(scheme.needs if needs is None else needs)) or "nothing else"
        lines = [
            first_line(sys.modules[scheme.__module__]) or first_line(scheme),
            f"credits each {scheme.granularity}; needs {reads}" + (f"; {scheme.paper}" if scheme.paper else ""),
            ", ".join(f"{field}: {info.default}" for field, info in scheme.model_fields.items()),
        ]
        table.add_row(name, Text("\n".join(filter(None, lines))))
    Console().print(table)


def _explain(options: argparse.Namespace, rest: list[str]) -> None:
    from agentrl.credit import load_credit
    from agentrl.report.advise import explain
    from agentrl.report.terminal import legend
    from agentrl.types import Need

    scheme = load_credit({"scheme": options.scheme, **_fields(rest)}, field="credit")
    everyone, chosen = read_rollouts(options)
    try:
        tables = list(explain(scheme, everyone, shown=chosen))
    except CreditError as error:
        hint = (
            ""
            if scheme.requirements() <= {Need.TURN_REWARDS}
            else ". Rollouts hold what the credit scheme of their own run read"
        )
        raise CreditError(f"{error}{hint}") from error
    console = Console()
    console.print(Text(repr(scheme)))
    console.print(legend())
    for table in tables:
        console.print(table)


def _advise(options: argparse.Namespace, _: list[str]) -> None:
    from agentrl.report.advise import advise, read_map, show
    from agentrl.report.records import groups_of, read_records

    groups = [group for file in rollout_files(options.target) for group in groups_of(read_records(file))]
    if (shown := show(groups)) is None:
        raise ConfigError(
            f"{options.target} has no rollouts of usable episodes (report.rollouts_every says how often they are written)"
        )
    tasks = read_map()
    found = advise(shown, tasks, shipped=_shipped(options.target))
    table = Table(title=f"{len(groups)} groups of {options.target}", title_justify="left", show_header=False, box=None)
    table.add_row("turns of an episode", f"{shown.turns:.1f}")
    table.add_row("usable episodes of a group", f"{shown.group_size:.1f}")
    table.add_row("turns whose state key another episode of the group has", f"{shown.repeated:.0%}")
    table.add_row("of the spread of what follows, with the action", f"{shown.explained:.0%}")
    table.add_row("episodes that earn something before their last turn", f"{shown.by_turn:.0%}")
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(found.line)
    console.print(found.why[0].upper() + found.why[1:])


def _shipped(target: Path) -> Mapping[str, Any] | None:
    """Return the section `credit` of the recipe that comes along for a run's environment. None: there is none."""
    from agentrl.api.target import load
    from agentrl.report.terminal import run_of

    with suppress(ConfigError):
        if (run := run_of(target)) is not None:
            env_id = load(run)[0].player_id
            recipe, run_dir = load(env_id)
            return recipe.credit if run_dir is None and recipe.player_id == env_id else None
    return None


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
