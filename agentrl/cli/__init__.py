"""The command line: one file for each family of commands; `commands.py` lists them."""

from agentrl.cli.entry import main

__all__ = ["main"]
