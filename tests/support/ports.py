"""A port of this machine to listen on."""

import itertools
import os
import random
import socket

# Below the ports that the system gives to outgoing connections, and apart from those of other workers: what is free now must
# be free when a server that takes half a minute to start comes to listen.
_SHARE = 500
_FIRST = 20_000 + _SHARE * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = itertools.cycle(random.SystemRandom().sample(range(_FIRST, _FIRST + _SHARE), _SHARE))


def free_port() -> int:
    """Return one that nothing listens on now."""
    for port in _ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError
