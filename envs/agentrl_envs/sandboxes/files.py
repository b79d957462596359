"""A sandbox whose state is its files, held here: copied, compared and forgotten as plain data, and nothing to clean up."""

import io
import tarfile
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Self

from agentrl import ExecResult, Language, Sandbox, SandboxConfig, UserError

_BLOCK = 512
Files = dict[str, bytes]
"""Content by path, relative and with `/`. A path that ends in `/` is a folder."""


class FileSandbox(Sandbox, ABC):
    """A sandbox in which each `exec` begins with the files that are held here and hands back those that it left."""

    languages: tuple[Language, ...] = ("python", "sh")

    def __init__(self, config: SandboxConfig) -> None:
        self.name, self.max_bytes = config.name, config.max_files_mb * 1_000_000
        self._files: Files | None = {}

    @abstractmethod
    def _run(self, code: str, language: Language, files: Files) -> tuple[ExecResult, Files | None]:
        """Run code among files, and return those that it left. None: they are lost."""

    def exec(self, code: str, *, language: Language = "python") -> ExecResult:
        """Run code; see `Sandbox.exec`."""
        if language not in self.languages:
            raise UserError(f"sandbox: {self.name!r} does not run {language}; use one that does: 'bubblewrap'")
        result, files = self._run(code, language, dict(self._open()))
        if files is not None and sum(map(len, files.values())) <= self.max_bytes:
            self._files = files
        elif not result.timed_out:
            result = replace(
                result, output=f"{result.output}\n[the files are as before: what it left is lost, or too large]"
            )
        return result

    def read(self, path: str) -> bytes:
        """Return a file's content."""
        try:
            return self._open()[plain_path(path)]
        except KeyError:
            raise FileNotFoundError(f"there is no file {path!r}") from None

    def write(self, path: str, content: bytes | str) -> None:
        """Write a file."""
        files = {**self._open(), plain_path(path): content.encode() if isinstance(content, str) else content}
        if (num_bytes := sum(map(len, files.values()))) > self.max_bytes:
            raise ValueError(f"{path}: the files would take {num_bytes:,} bytes; the sandbox holds {self.max_bytes:,}")
        self._files = files

    def paths(self) -> list[str]:
        """List the files, and the folders that hold nothing."""
        files = self._open()
        filled = {
            f"{'/'.join(path.split('/')[:k])}/" for path in files for k in range(1, path.rstrip("/").count("/") + 1)
        }
        return sorted(files.keys() - filled)

    def close(self) -> None:
        """Drop the files."""
        self._files = None

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> Files:
        if self._files is None:
            raise ValueError("the sandbox is closed")
        return self._files


def plain_path(path: str) -> str:
    """Return a path in the form in which files are held.

    Raises:
        ValueError: if it leads out of the folder, or is none.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or not parts or "\0" in path:
        raise ValueError(f"{path!r}: give a path within the sandbox's folder, such as 'data/a.txt'")
    return "/".join(parts)


def packed(files: Files) -> bytes:
    """Return files as a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path.removesuffix("/"))
            entry.type, entry.mode = (tarfile.DIRTYPE, 0o755) if path.endswith("/") else (tarfile.REGTYPE, 0o644)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def unpacked(archive: bytes) -> Files:
    """Return the files and folders of a tar archive in the form `ustar` or GNU's; links and devices are left out.

    It may come from whoever ran in the sandbox, and `tarfile` would believe a header that claims terabytes: this reads
    what is there, and nothing else.

    Raises:
        ValueError: for what is no whole archive.
    """
    files: Files = {}
    at, long_name = 0, ""
    while (header := archive[at : at + _BLOCK]) != bytes(_BLOCK):
        if len(header) < _BLOCK or header[257:262] != b"ustar":
            raise ValueError("no whole archive")
        size, kind = int(header[124:136].strip(b"\0 ") or b"0", 8), header[156:157]
        name, prefix = (_text(header[a:b]) for a, b in ((0, 100), (345, 500)))
        at += _BLOCK
        if not 0 <= size <= len(archive) - at:
            raise ValueError("no whole archive")
        path, long_name = long_name or (f"{prefix}/{name}" if prefix else name), ""
        if kind == b"L":  # GNU's form of a name that does not fit: the content is the name of what follows
            long_name = _text(archive[at : at + size])
        elif path not in (".", "./"):
            if kind == b"5":
                files[f"{plain_path(path)}/"] = b""
            elif kind in (b"0", b"\0"):
                files[plain_path(path)] = archive[at : at + size]
        at += -(-size // _BLOCK) * _BLOCK
    return files


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="backslashreplace")
