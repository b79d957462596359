"""An image made from this machine's files, so that tests of containers pull none: busybox, the interpreter and its library.

It stays for the next tests, as `localhost/agentrl-test` with the interpreter's version.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentrl_envs.sandboxes.container import ContainerConfig, _look

_LEFT_OUT = re.compile(
    r"(test|site-packages|idlelib|tkinter|ensurepip|lib2to3|turtledemo|pydoc_data|__pycache__|config-.*)$"
)
"""Folders of the library."""


def container(*, program: str | None = None, **fields: Any) -> ContainerConfig:
    """Return a sandbox in a container of the image, or skip the test."""
    found = _base(program or ("podman" if shutil.which("podman") else "docker"))
    if isinstance(found, str):
        pytest.skip(f"containers: {found}")
    return found.model_copy(update=fields)


@cache
def _base(program: str) -> ContainerConfig | str:
    """Import the image, and find a runtime with which it runs; return why there is none."""
    if missing := [name for name in (program, "busybox") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    served = subprocess.run([program, "info"], capture_output=True, text=True, timeout=60)
    if served.returncode:
        return f"{program} info failed: {served.stderr.strip()[-300:]}"
    image = f"localhost/agentrl-test:{platform.python_version()}"
    is_there = subprocess.run([program, "image", "inspect", image], capture_output=True, timeout=300).returncode == 0
    if not is_there and (problem := _import(program, image)):
        return problem
    reasons = []
    for runtime in (None, "runc", "crun"):
        config = ContainerConfig(program=program, image=image, runtime=runtime)
        if not isinstance(found := _look(config), str):
            return config
        reasons.append(found)
    return reasons[0]


def _import(program: str, image: str) -> str:
    """Import the image; return what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "image.tar")
        with tarfile.open(archive, "w") as tar:
            for source, name in _content():
                tar.add(source, name, recursive=False)
            _add_links(tar)
        done = subprocess.run([program, "import", str(archive), image], capture_output=True, text=True, timeout=300)
    return f"{program} import failed: {done.stderr.strip()[-300:]}" if done.returncode else ""


def _content() -> Iterator[tuple[str, str]]:
    """Yield files of this machine and their paths in the image."""
    busybox, python = shutil.which("busybox") or "busybox", os.path.realpath(sys.executable)
    yield busybox, "bin/busybox"
    yield python, python.lstrip("/")
    library = Path(os.__file__).parent
    programs = [busybox, python]
    for path in sorted(library.rglob("*")):
        if path.is_file() and not any(map(_LEFT_OUT.match, path.relative_to(library).parts[:-1])):
            yield str(path), str(path).lstrip("/")
            programs += [str(path)] if path.suffix == ".so" else []
    for shared in sorted({found for program in programs for found in _shared(program)}):
        yield os.path.realpath(shared), shared.lstrip("/")


def _shared(program: str) -> list[str]:
    """List the libraries that a program loads."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    return re.findall(r"(/\S+) \(0x", listed)


def _add_links(tar: tarfile.TarFile) -> None:
    applets = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = {f"bin/{name}": "busybox" for name in applets if name != "busybox"}
    for name, target in {**links, "usr/bin/python3": os.path.realpath(sys.executable)}.items():
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        tar.addfile(entry)
