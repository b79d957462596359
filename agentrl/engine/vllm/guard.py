"""Process that kills a process group when its parent has ended, however that ended.

Usage: `python guard.py GROUP`, with a pipe from the parent as standard input.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Wait for the end of the pipe."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    with suppress(ProcessLookupError):
        os.killpg(int(sys.argv[1]), signal.SIGKILL)


if __name__ == "__main__":
    main()
