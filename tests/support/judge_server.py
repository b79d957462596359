"""An HTTP server that answers as an OpenAI-compatible one does, and misbehaves as it is told."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class JudgeServer:
    """Gives its answers in turn, the last one again and again: text, or a status, or seconds to wait first."""

    url: str = ""
    answers: Sequence[str | int | float] = ('{"scores": [1]}',)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    live: int = 0
    most_live: int = 0


@contextmanager
def judge_server(*answers: str | int | float) -> Iterator[JudgeServer]:
    said = JudgeServer(answers=answers) if answers else JudgeServer()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(said.requests)
                said.requests.append(body)
                said.headers.append({name.lower(): value for name, value in self.headers.items()})
                said.times.append(time.monotonic())
                said.live += 1
                said.most_live = max(said.live, said.most_live)
            answer = said.answers[min(number, len(said.answers) - 1)]
            if isinstance(answer, float):
                time.sleep(answer)
                answer = '{"scores": [1]}'
            status = answer if isinstance(answer, int) else 200
            key = self.headers.get("authorization")  # some servers repeat it in an error
            usage = {"prompt_tokens": 100, "completion_tokens": 10}
            message = {"choices": [{"message": {"role": "assistant", "content": answer}}], "usage": usage}
            data = json.dumps(message if status == 200 else {"error": {"message": f"not now, {key}"}}).encode()
            with lock:
                said.live -= 1
            try:
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # who asked has given up
                pass

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    said.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield said
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
