"""Exports that are pushed, by the real client, to a server on this machine."""

import io
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from agentrl import TrainedRun
from agentrl.cli import main
from agentrl.errors import ConfigError
from tests.support.each import each
from tests.support.hub_server import TOKEN, HubServer, hub_server
from tests.support.runs import recipe, train

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, _ = train(recipe(tmp_path_factory.mktemp("pushed"), train={"steps": 1}))
    return folder.path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # whose protocol the server does not speak
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def export(*arguments: object) -> tuple[Any, str]:
    """Run the command; return its exit status, and what it printed as one line."""
    printed, status = io.StringIO(), 0
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            main(["export", *map(str, arguments)])
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, " ".join(printed.getvalue().split())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_file_arrives_as_it_is(run_folder: Path, tmp_path: Path, hub: HubServer) -> None:
    status, printed = export(run_folder, tmp_path / "model", "--push", "ann/agent")
    assert status == 0, printed
    assert f"pushed: {hub.url}/ann/agent" in printed
    written = contents(tmp_path / "model")
    assert hub.files == {"ann/agent": written}
    assert {"README.md", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= written.keys()
    assert written["model.safetensors"] in hub.large.values()
    assert len(hub.commits) == 1
    assert not hub.private["ann/agent"]
    assert b'from_pretrained("ann/agent")' in written["README.md"]


def test_a_private_repository_is_private_and_a_public_one_is_not_taken_for_it(
    run_folder: Path, tmp_path: Path, hub: HubServer
) -> None:
    TrainedRun(run_folder).export(tmp_path / "first", push="ann/mine", private=True)
    assert hub.private == {"ann/mine": True}
    hub.made("ann/seen", private=False)
    with pytest.raises(ConfigError, match=r"--private: ann/seen exists, and is public"):
        TrainedRun(run_folder).export(tmp_path / "second", push="ann/seen", private=True)
    assert hub.files["ann/seen"] == {}


@each(
    ("token", "owner", "words"),
    [
        ("", "ann", "--push: no token of the Hub; run `hf auth login`, or set HF_TOKEN."),
        ("hf_bad", "ann", "--push: the Hub does not take the token;"),
        (TOKEN, "bob", "--push: the token may not write to bob/agent;"),
        (None, "ann", "was not reached: ConnectError"),
    ],
)
def test_what_keeps_an_export_from_the_hub_is_one_message_and_the_folder_stays(
    run_folder: Path,
    tmp_path: Path,
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    token: str | None,
    owner: str,
    words: str,
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    if token is None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    status, printed = export(run_folder, tmp_path / "model", "--push", f"{owner}/agent")
    assert status == 2
    assert words in printed
    assert printed.endswith(f"The folder stays; upload it later: hf upload {owner}/agent {tmp_path / 'model'}")
    assert "Traceback" not in printed
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert hub.files.get("bob/agent") is None


def test_a_hub_that_does_not_take_the_weights_is_told(run_folder: Path, tmp_path: Path, hub: HubServer) -> None:
    hub.is_full = True
    status, printed = export(run_folder, tmp_path / "model", "--push", "ann/agent")
    assert status == 2
    assert "--push: the Hub refused it: HfHubHTTPError" in printed
    assert "507" in printed
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert hub.files["ann/agent"] == {}


@each(
    ("options", "words"),
    [
        (["--push", "agent"], "'agent' has no owner; write OWNER/agent"),
        (["--push", "ann/an agent"], "--push: Repo id must use alphanumeric chars"),
        (["--private"], "--private: is of --push"),
    ],
)
def test_options_that_cannot_be_carried_out_are_refused_before_anything_is_written(
    run_folder: Path, tmp_path: Path, options: list[str], words: str
) -> None:
    status, printed = export(run_folder, tmp_path / "model", *options)
    assert status == 2
    assert words in printed
    assert not (tmp_path / "model").exists()
