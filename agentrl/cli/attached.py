"""`agentrl ...` that is interrupted when its standard input ends: with the process that holds the other end."""

import os
import signal
import sys
import threading

from agentrl.cli import main


def _watch() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's `agentrl compare ... &` hands it on ignored
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # an actor of Ray hands it on blocked
    threading.Thread(target=_watch, daemon=True).start()
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - nothing else is to read what is watched
    main()
