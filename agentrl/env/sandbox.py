"""Seam of sandboxes, in which code of a model runs."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Field

from agentrl.recipe.plugin import Plugin, Seam, with_fields

Language = Literal["python", "sh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Outcome of a piece of code."""

    output: str
    """Standard output and error, as they came, cut to the sandbox's `max_output_bytes`."""
    returncode: int
    """0 if it ended well. Whatever was stopped from outside has another one."""
    timed_out: bool = False
    """True if it was killed at the sandbox's `timeout_s`."""
    num_cut: int = 0
    """Bytes of output that are left out; if a sandbox stops a flood, those that were seen of it."""


class Sandbox(Protocol):
    """A small world of files in which code of a model runs, and out of which it does not get.

    Paths are relative to the folder in which code runs. Whatever the code does, `exec` returns, by its deadline and a second;
    it raises for what the caller or the machine did wrong alone. It blocks its thread: in a coroutine tool, call it as
    `await asyncio.to_thread(sandbox.exec, code)`; a plain `def` tool has a thread of its own anyway.
    A deep copy of a sandbox is another one with the same files, if its environment is to be forked.
    """

    def exec(self, code: str, *, language: Language = "python") -> ExecResult:
        """Run a program (of Python), or commands (of `sh`), until they end or a limit ends them.

        Files that it leaves are there for the next; those of code that was killed at a limit are as they were before it.

        Raises:
            UserError: for a language that the sandbox does not have.
            EnvironmentFailure: if the machine does not let it run, as where a disk is full. No code ends in it.
            ValueError: after `close`, and for files that were written with names that cannot stand beside one another.
        """
        ...

    def read(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: for a path that leads out of the folder, and after `close`.
        """
        ...

    def write(self, path: str, content: bytes | str) -> None:
        """Write a file, and the folders on the way to it.

        Raises:
            ValueError: for a path that leads out of the folder, for more than the sandbox holds, and after `close`.
        """
        ...

    def paths(self) -> list[str]:
        """List the files, sorted; a folder that holds nothing stands there with a `/` at its end."""
        ...

    def close(self) -> None:
        """End whatever runs, and drop the files; again changes nothing."""
        ...

    def __enter__(self) -> Self:
        """Return the sandbox."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Close the sandbox."""
        ...


class SandboxConfig(Plugin):
    """Sandbox that code runs in; the fields of the sandbox that it names stand beside the name.

    An environment takes one as its option `sandbox`: a name, or a mapping with fields.
    """

    seam = Seam("agentrl.sandboxes", "sandbox", "name")

    name: str = "monty"
    """An installed sandbox, or `module:Class` of a `SandboxConfig`. `monty`: a Python interpreter of its own, without a host.
    `bubblewrap`: CPython and a shell in namespaces of Linux. `container`: an image of podman or docker. `unsafe`: a plain
    process under limits, which can read, write and send whatever you can."""

    timeout_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Wall time of one `exec`, in seconds."""
    max_memory_mb: Annotated[int, Field(ge=16, le=1_000_000)] = 512
    """Memory of a process (`bubblewrap`, `unsafe`: its address space), of the interpreter (`monty`), or of all processes and
    files together (`container`)."""
    max_output_bytes: Annotated[int, Field(ge=1, le=100_000_000)] = 10_000
    """Bytes of output that are kept."""
    max_files_mb: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Megabytes of all files together."""

    @abstractmethod
    def build(self) -> Sandbox:
        """Return a new sandbox without files.

        Raises:
            UserError: if it cannot be had here, saying how to get it. Another one never takes its place.
        """
        raise NotImplementedError


def sandbox_config(sandbox: str | Mapping[str, Any]) -> SandboxConfig:
    """Return what an environment's option `sandbox` says: a name, or a name with fields.

    Raises:
        UserError: for a name or a field that there is not, and for a sandbox that cannot be had here.
    """
    fields = {"name": sandbox} if isinstance(sandbox, str) else dict(sandbox)
    name = fields.setdefault("name", SandboxConfig.model_fields["name"].default)
    config = with_fields(SandboxConfig.named(name), fields, name=name, section=SandboxConfig.seam.section)
    config.build().close()
    return config
