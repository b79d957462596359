"""`agentrl view`: served by the real command, in a process of its own."""

import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentrl.report.html import report
from agentrl.report.html.live import LiveRuns
from agentrl.report.html.page import safe_json
from tests.support.each import each
from tests.support.report_runs import make_run, member
from tests.support.view_server import Server

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(make_run(tmp_path_factory.mktemp("live") / "run"))
    yield found
    found.process.kill()
    found.process.wait()


def test_the_page_and_its_blocks_are_served(server: Server) -> None:
    status, body, headers = server.get("/")
    assert status == 200
    assert b"connect-src &#x27;self&#x27;" in body
    assert "access-control-allow-origin" not in headers
    data = server.data()
    assert data["live"]
    assert [entry["id"] for entry in data["rollouts"]] == ["train/000001/0", "train/000001/1"]
    status, block, headers = server.get(f"/blocks/{data['rollouts'][0]['block']}")
    assert (status, headers["content-encoding"]) == (200, "gzip")
    assert json.loads(gzip.decompress(block))[0]["turns"][0]["pieces"] == ["the answer", "."]
    assert server.get("/blocks/99")[0] == 404
    assert server.get("/config.yaml")[0] == 404


def test_a_name_that_points_here_is_answered_only_if_it_is_this_machines(server: Server) -> None:
    for host, status in (
        (f"localhost:{server.port}", 200),
        ("evil.test", 400),
        (f"evil.test:{server.port}", 400),
        ("", 400),
    ):
        assert server.get("/data.json", host=host or "0.0.0.0")[0] == status, host


def test_what_a_run_adds_is_told_once(server: Server) -> None:
    stamp = server.data()["stamp"]
    assert server.get(f"/data.json?stamp={stamp}")[0] == 204
    server.run.add_metrics({"step": 4.0, "reward/mean": 0.25})
    server.run.add_rollouts(4, [member(7, reward=0.25, step=4, group_id="train/000004")])
    status, body, _ = server.get(f"/data.json?stamp={stamp}")
    assert status == 200
    news = json.loads(body)
    assert news["curves"]["reward/mean"][0]["mean"][-1] == 0.25
    assert "train/000001/7" in [entry["id"] for entry in news["rollouts"]]
    assert server.get(f"/data.json?stamp={news['stamp']}")[0] == 204
    assert server.get("/data.json?stamp=x")[0] == 200


def test_a_port_in_use_is_told_in_one_line(server: Server) -> None:
    command = [sys.executable, "-m", "agentrl", "view", str(server.run.path), "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == f"agentrl: --port: {server.port}: Address already in use; choose another, or 0\n"


def test_ctrl_c_ends_it_in_one_line(tmp_path: Path) -> None:
    server = Server(make_run(tmp_path / "run"))
    assert server.get("/")[0] == 200
    server.process.send_signal(signal.SIGINT)
    rest, _ = server.process.communicate(timeout=60)
    assert rest == "agentrl: interrupted\n"
    assert server.process.returncode == 130


def test_a_run_that_has_not_begun_to_train_is_waited_for(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rewards=(), rollouts=[])
    live = LiveRuns([folder.path])
    data = live.data()
    assert (data["curves"], data["rollouts"]) == ({}, [])
    assert live.text(safe_json, stamp=data["stamp"]) is None
    time.sleep(0.01)
    folder.add_metrics({"step": 1.0, "loss": 0.5})
    news = live.text(safe_json, stamp=data["stamp"])
    assert news is not None
    assert json.loads(news)["stamp"] > data["stamp"]


def test_what_many_pages_ask_for_at_once_is_read_and_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()

    def report_data(*given: Any, **options: Any) -> dict[str, Any]:
        calls.append("read")
        return report.report_data(*given, **options)

    def write(data: dict[str, Any]) -> str:
        calls.append("write")
        return safe_json(data)

    monkeypatch.setattr("agentrl.report.html.live.report_data", report_data)
    folder = make_run(tmp_path / "run")
    live = LiveRuns([folder.path])
    with ThreadPoolExecutor(60) as pool:
        texts = set(pool.map(lambda _: live.text(write), range(60)))
    assert (len(texts), calls) == (1, ["read", "write"])
    time.sleep(0.01)
    folder.add_metrics({"step": 4.0, "loss": 0.5})
    assert live.text(write) not in texts
    assert calls == ["read", "write"] * 2


@each("path", ["/", "/data.json", "/data.json?stamp=1"])
def test_a_run_that_is_damaged_or_gone_is_told_until_it_is_mended(path: str, tmp_path: Path) -> None:
    server = Server(make_run(tmp_path / "run"))
    metrics = server.run.path / "metrics.jsonl"
    whole = metrics.read_bytes()
    try:
        metrics.write_bytes(b"[1]\n" + whole)
        status, body, _ = server.get(path)
        assert status == 503
        assert body.decode().startswith(f"{metrics}, line 1: ")
        metrics.write_bytes(whole)
        assert server.get(path)[0] == 200
        server.run.path.rename(tmp_path / "gone")
        assert server.get(path)[:2] == (503, f"{server.run.path} is not the folder of a run: there is none".encode())
        (tmp_path / "gone").rename(server.run.path)
        assert server.get(path)[0] in (200, 204)
    finally:
        server.process.kill()
        server.process.wait()


@each("number", ["9" * 20, "9" * 5000, "-1", "%C2%B2", "1.5", "x"])
def test_a_number_in_an_address_that_is_none_of_ours_names_nothing(number: str, server: Server) -> None:
    assert server.get(f"/data.json?stamp={number}")[0] == 200
    assert server.get(f"/blocks/{number}")[0] == 404
