"""Runs a command that ends, with every process it has started, when whoever started this does: however that was killed.

python guard.py COMMAND... with a pipe as standard input, as the leader of a process group of its own.
"""

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    """Run the command; exit with its status."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: None)  # the child gets it too
    status = child.wait()
    os.killpg(0, signal.SIGTERM)  # what it has left behind
    sys.exit(status if status >= 0 else 128 - status)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
