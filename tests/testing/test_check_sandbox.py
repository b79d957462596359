import subprocess
from tempfile import gettempdir
from typing import Any, Self

import pytest

from agentrl import ExecResult, SandboxConfig, UserError
from agentrl.errors import CheckError
from agentrl.testing import check_sandbox
from agentrl_envs.sandboxes import bubblewrap
from agentrl_envs.sandboxes.bubblewrap import BubblewrapConfig
from tests.support.containers import container
from tests.support.each import each

WHY_NOT = bubblewrap._problem(BubblewrapConfig())


@pytest.mark.slow
@each(
    "name",
    ["monty", "unsafe", pytest.param("bubblewrap", marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT))],
)
def test_the_sandboxes_keep_their_promises(name: str) -> None:
    check_sandbox(name)


@pytest.mark.slow
@pytest.mark.process
def test_a_container_keeps_its_promises() -> None:
    config = container()
    check_sandbox({"name": "container", "image": config.image, "program": config.program, "runtime": config.runtime})


class Careless:
    """A stranger's: it runs `sh` in the host's folder of temporary files, and forgets most of what it promises."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def exec(self, code: str, *, language: str = "python") -> ExecResult:
        if language == "python":
            raise UserError("no Python here")
        done = subprocess.run(
            ["sh", "-c", "timeout 3 sh"], cwd=gettempdir(), input=code, capture_output=True, text=True, check=False
        )
        return ExecResult(output=done.stdout, returncode=done.returncode)

    def read(self, path: str) -> bytes:
        return self.files[path]

    def __deepcopy__(self, memo: object) -> "Careless":
        return self

    def write(self, path: str, content: bytes | str) -> None:
        self.files[path] = content.encode() if isinstance(content, str) else content

    def paths(self) -> list[str]:
        return sorted(self.files)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class CarelessConfig(SandboxConfig):
    name: str = "careless"

    def build(self) -> Careless:
        return Careless()


def test_a_strangers_sandbox_is_found_by_its_class_and_told_what_is_wrong() -> None:
    with pytest.raises(CheckError) as caught:
        check_sandbox(f"{__name__}:CarelessConfig")
    said = str(caught.value)
    for words in (
        "files: raised KeyError",
        "read() of a file that is not there raised KeyError: 'nothing'; raise FileNotFoundError",
        "write('../x') returned None; raise ValueError",
        "exec() of an endless loop returned ExecResult",
        "exec() of code that prints 5000 characters kept 5001 bytes and cut 0, where max_output_bytes is 1000",
        "what is written into a deep copy changes the sandbox that it was made of",
        "exec() after close() returned ExecResult",
        "read() after close() returned b'other'; raise ValueError",
        "write() after close() returned None; raise ValueError",
    ):
        assert words in said


def test_a_sandbox_that_cannot_be_had_is_refused(monkeypatch: Any) -> None:
    with pytest.raises(UserError, match=r"no 'boxx' is installed"):
        check_sandbox("boxx")
