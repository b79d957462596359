"""The part of the Hugging Face Hub's API that an upload uses, as a server on this machine: for the real client."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_goodgoodgoodgood"
"""The one that it knows, of somebody who may write as `ann` alone."""
_LFS = (".safetensors", ".bin", ".png")


@dataclass
class HubServer:
    """Repositories by their names."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """What arrived by the protocol for large files, by its SHA-256."""
    commits: list[str] = field(default_factory=list)
    is_full: bool = False
    """It takes no large files."""

    def made(self, repo: str, *, private: bool) -> bool:
        """Make a repository; tell whether it was there."""
        was_there = repo in self.files
        self.files.setdefault(repo, {})
        self.private.setdefault(repo, private)
        return was_there

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        """Carry out a commit, of which all large files must have come."""
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.commits.append(value["summary"])
                case "file":
                    self.files[repo][value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    data = self.large[value["oid"]]
                    assert len(data) == value["size"]
                    self.files[repo][value["path"]] = data


@contextmanager
def hub_server() -> Iterator[HubServer]:
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            repo = self.path.removeprefix("/api/models/").partition("?")[0]
            if self.is_known() and repo in hub.files:
                self.answer({"id": repo, "private": hub.private[repo], "sha": "0" * 40, "tags": [], "siblings": []})
            else:
                self.answer({"error": "Repository Not Found"}, 404)

        def do_PUT(self) -> None:
            data = self.body()
            oid = self.path.rpartition("/")[2]
            if hub.is_full:
                self.answer({"error": "no room"}, 507)
                return
            assert hashlib.sha256(data).hexdigest() == oid
            hub.large[oid] = data
            self.answer({})

        def do_POST(self) -> None:
            data, path = self.body(), self.path.partition("?")[0]
            if path == "/api/validate-yaml":
                self.answer({"warnings": [], "errors": []})
            elif not self.is_known():
                self.answer({"error": "Invalid credentials in Authorization header"}, 401)
            elif path == "/api/repos/create":
                given = json.loads(data)
                repo = f"{given['organization']}/{given['name']}"
                if given["organization"] != "ann":
                    self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
                elif hub.made(repo, private=given.get("visibility") == "private"):
                    self.answer({"error": "You already created this model repo", "url": f"{hub.url}/{repo}"}, 409)
                else:
                    self.answer({"url": f"{hub.url}/{repo}", "name": repo})
            elif path.endswith("/info/lfs/objects/batch"):
                self.answer({"transfer": "basic", "objects": list(map(self.place, json.loads(data)["objects"]))})
            elif "/preupload/" in path:
                self.answer({"files": [self.mode(file["path"]) for file in json.loads(data)["files"]]})
            else:
                owner, name = path.removeprefix("/api/models/").split("/")[:2]
                hub.commit(f"{owner}/{name}", [json.loads(line) for line in data.splitlines()])
                url = f"{hub.url}/{owner}/{name}/commit/{'1' * 40}"
                self.answer({"success": True, "commitUrl": url, "commitOid": "1" * 40})

        def mode(self, path: str) -> dict[str, Any]:
            kind = "lfs" if path.endswith(_LFS) else "regular"
            return {"path": path, "uploadMode": kind, "shouldIgnore": False, "oid": None}

        def place(self, wanted: dict[str, Any]) -> dict[str, Any]:
            return {**wanted, "actions": {"upload": {"href": f"{hub.url}/large/{wanted['oid']}", "header": {}}}}

        def is_known(self) -> bool:
            return self.headers.get("authorization") == f"Bearer {TOKEN}"

        def body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def answer(self, value: dict[str, Any], status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
