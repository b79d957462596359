"""Commands in this process."""

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from agentrl.cli import main


def run(arguments: list[str]) -> tuple[Any, str]:
    """Run a command; return its exit status, and what it printed."""
    printed = io.StringIO()
    status: Any = 0
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            main(arguments)
        except SystemExit as ended:
            status = ended.code
    return status, printed.getvalue()
