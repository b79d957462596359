"""`agentrl view`, in a process of its own."""

import http.client
import json
import os
import re
import subprocess
import sys
from typing import Any

from agentrl.report.folder import RunFolder


class Server:
    """The command at work."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        command = [sys.executable, "-m", "agentrl", "view", str(run.path), "--port", "0"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", self.process.stdout.readline())
        assert found
        self.port = int(found[1])

    def get(self, path: str, *, host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{self.port}"})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body, {name.lower(): value for name, value in answer.getheaders()}

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/data.json")[1])
        return found
