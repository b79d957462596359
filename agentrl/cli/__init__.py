"""The command line: one file for each family of commands; `commands.py` lists them."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, and exit as `agentrl.cli.entry.exits` says: also if it is interrupted while it is imported."""
    try:
        from agentrl.cli import entry
    except KeyboardInterrupt:
        print("agentrl: interrupted", file=sys.stderr)
        sys.exit(130)
    entry.main(arguments)
