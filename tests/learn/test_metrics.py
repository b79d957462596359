"""What a step reports of the process it runs in."""

import subprocess
import sys
import threading
from pathlib import Path

from agentrl.learn.metrics import process_metrics


def test_what_an_environment_leaks_shows(tmp_path: Path) -> None:
    before = process_metrics()
    release = threading.Event()
    threads = [threading.Thread(target=release.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    files = [(tmp_path / f"{i}").open("w") for i in range(5)]
    hoard = bytearray(200_000_000)
    hoard[::4096] = b"x" * len(hoard[::4096])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = process_metrics()
        child.communicate(b"\n")
    release.set()
    for thread in threads:
        thread.join()
    for file in files:
        file.close()
    assert found["process/threads"] - before["process/threads"] == 3
    assert found["process/open_files"] - before["process/open_files"] == 6  # and the child's input
    assert found["process/children"] - before["process/children"] == 1
    assert found["process/memory_bytes"] - before["process/memory_bytes"] > 150_000_000
