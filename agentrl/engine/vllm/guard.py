"""Kills a process group when whoever started this has ended, however that was killed.

python guard.py GROUP with a pipe as standard input, which ends when its other side does.
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
