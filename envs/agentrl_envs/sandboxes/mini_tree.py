"""Files in memory as the commands of the small shell see them."""

import fnmatch

from agentrl_envs.sandboxes.files import Files

_MAX_WORK = 1_000_000
_MAX_ENTRIES = 1000
"""Files, and folders."""


class ShellError(Exception):
    """A command cannot do what it was asked to; the message is for whoever asked."""


class TooMuchWork(Exception):  # noqa: N818 - a limit
    """The commands would take too long."""


class Tree:
    """Files and folders below the one in which commands begin, and the work that commands may still do on them."""

    def __init__(self, files: Files, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._work_left = _MAX_WORK
        self.files = {path: content for path, content in files.items() if not path.endswith("/")}
        self.folders = {path.removesuffix("/") for path in files if path.endswith("/")} | {""}
        for path in self.files:
            self.folders |= set(_parents(path))
        self.folder = ""
        """In which commands run."""

    def spend(self, work: int) -> None:
        """Note work, in about microseconds: what is done in this process must end, and the same each time.

        Raises:
            TooMuchWork: where all is spent.
        """
        self._work_left -= work
        if self._work_left < 0:
            raise TooMuchWork

    def plain(self) -> Files:
        """Return the files as a sandbox holds them."""
        return {**{f"{folder}/": b"" for folder in self.folders if folder}, **self.files}

    def path(self, name: str) -> str:
        """Return where a name leads to, from the folder; `""` is the top.

        Raises:
            ShellError: where it leads out.
        """
        parts = [] if name.startswith("/") else self.folder.split("/") if self.folder else []
        if name == "/work" or name.startswith("/work/"):
            name = name.removeprefix("/work")
        elif name.startswith("/"):
            raise ShellError(f"{name}: No such file or directory")
        for part in name.split("/"):
            if part == "..":
                if not parts:
                    raise ShellError(f"{name}: Permission denied")
                parts.pop()
            elif part not in ("", "."):
                parts.append(part)
        if len(path := "/".join(parts)) > 255:
            raise ShellError(f"{name[:20]}...: File name too long")
        return path

    def is_folder(self, name: str) -> bool:
        """Tell whether a name is a folder's."""
        return self.path(name) in self.folders

    def read(self, name: str) -> str:
        """Return a file's text."""
        path = self.path(name)
        if path in self.folders:
            raise ShellError(f"{name}: Is a directory")
        if path not in self.files:
            raise ShellError(f"{name}: No such file or directory")
        self.spend(1 + len(self.files[path]) // 100)
        return self.files[path].decode(errors="replace")

    def write(self, name: str, text: str | bytes) -> None:
        """Write a file into a folder that is there."""
        path = self.path(name)
        if path in self.folders:
            raise ShellError(f"{name}: Is a directory")
        if path.rpartition("/")[0] not in self.folders:
            raise ShellError(f"{name}: No such file or directory")
        content = text.encode(errors="replace") if isinstance(text, str) else text
        self.spend(1 + len(self.files) + len(content) // 100)
        held = sum(map(len, self.files.values())) - len(self.files.get(path, b""))
        if held + len(content) > self.max_bytes or len(self.files) > _MAX_ENTRIES:
            raise ShellError(f"{name}: No space left on device")
        self.files[path] = content

    def make_folder(self, name: str, *, parents: bool) -> None:
        """Make a folder."""
        path = self.path(name)
        if path in self.folders or path in self.files:
            if parents and path in self.folders:
                return
            raise ShellError(f"{name}: File exists")
        if not parents and path.rpartition("/")[0] not in self.folders:
            raise ShellError(f"{name}: No such file or directory")
        if any(above in self.files for above in _parents(path)):
            raise ShellError(f"{name}: Not a directory")
        if len(self.folders) > _MAX_ENTRIES:
            raise ShellError(f"{name}: No space left on device")
        self.folders |= {path, *_parents(path)}

    def below(self, path: str) -> list[str]:
        """List all files and folders below a folder, sorted."""
        self.spend(1 + len(self.files) + len(self.folders))
        prefix = f"{path}/" if path else ""
        return sorted(p for p in (*self.files, *self.folders) if p and p.startswith(prefix) and p != path)

    def children(self, path: str) -> list[str]:
        """List the names in a folder, sorted."""
        prefix = f"{path}/" if path else ""
        return [p.removeprefix(prefix) for p in self.below(path) if "/" not in p.removeprefix(prefix)]

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all below it."""
        for inner in [*self.below(path), path] if path in self.folders else [path]:
            self.files.pop(inner, None)
            self.folders.discard(inner)

    def move(self, path: str, to: str) -> None:
        """Give a file, or a folder with all below it, another path."""
        if f"{to}/".startswith(f"{path}/"):
            if to == path:
                raise ShellError(f"'{path}' and '{to}' are the same file")
            raise ShellError(f"cannot move '{path}' to a subdirectory of itself")
        for old in [path, *self.below(path)] if path in self.folders else [path]:
            new = to + old[len(path) :]
            if old in self.folders:
                self.folders.discard(old)
                self.folders.add(new)
            else:
                self.files[new] = self.files.pop(old)

    def expanded(self, pattern: str) -> list[str]:
        """List the names that a pattern of `*`, `?` and `[...]` stands for, sorted; hidden ones only where it says so."""
        names = ["/work/" if pattern.startswith("/work/") else ""]
        for part in pattern.removeprefix(names[0]).split("/"):
            if part in (".", ".."):
                names = [f"{name}{part}/" for name in names]
                continue
            found = []
            for name in names:
                at = name.removesuffix("/") or "."
                if not self.is_folder(at):
                    continue
                matching = fnmatch.filter(self.children(self.path(at)), part)
                found += [f"{name}{child}/" for child in matching if child.startswith(".") == part.startswith(".")]
            names = found
        return [name.removesuffix("/") for name in names]


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: k + 1]) for k in range(len(parts))]
