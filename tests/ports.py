"""A port of this machine to listen on."""

import socket


def free_port() -> int:
    """Return one that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
