"""Commands of the small shell that look for files, and move them."""

import fnmatch

from agentrl_envs.sandboxes.mini_commands import command, lines_of, options_of
from agentrl_envs.sandboxes.mini_tree import ShellError, Tree


@command
def pwd(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """Print the folder."""
    return f"/work/{tree.folder}".rstrip("/") + "\n", 0


@command
def cd(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """Change the folder, for the rest of these commands."""
    name = args[0] if args else "/work"
    if not tree.is_folder(name):
        raise ShellError(f"{name}: No such directory")
    tree.folder = tree.path(name)
    return "", 0


@command
def ls(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """List folders: `-1 -a -l -p -R`."""
    flags, _, names = options_of(args, "1alRp")
    said = []
    for name in names or ["."]:
        path = tree.path(name)
        if path in tree.files:
            said.append(name)
        elif path not in tree.folders:
            raise ShellError(f"{name}: No such file or directory")
        else:
            for folder in [path, *(p for p in tree.below(path) if p in tree.folders)] if "R" in flags else [path]:
                said += [f"{folder or '.'}:"] if "R" in flags or len(names) > 1 else []
                said += [_listed(tree, folder, child, flags) for child in tree.children(folder)]
    return lines_of(said), 0


def _listed(tree: Tree, folder: str, child: str, flags: set[str]) -> str:
    path = f"{folder}/{child}".lstrip("/")
    is_folder = path in tree.folders
    size = f"{'d' if is_folder else '-'} {len(tree.files.get(path, b'')):>7} " if "l" in flags else ""
    return f"{size}{child}{'/' * (is_folder and 'p' in flags)}"


@command
def find(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """List what is below folders: `-name -type -delete`."""
    names = []
    queue = list(args)
    while queue and not queue[0].startswith("-"):
        names.append(queue.pop(0))
    pattern, kind, deletes = "*", "", False
    while queue:
        test = queue.pop(0)
        if test == "-delete":
            deletes = True
        elif test in ("-name", "-type") and queue:
            pattern, kind = (queue.pop(0), kind) if test == "-name" else (pattern, queue.pop(0))
        elif test != "-print":
            raise ShellError(f"{test} is not known here; known: -name PATTERN, -type f, -type d, -delete")
    said = []
    for name in names or ["."]:
        top = tree.path(name)
        if top not in tree.folders:
            raise ShellError(f"{name}: No such directory")
        for path in [top, *tree.below(top)]:
            is_kind = kind in ("", "d" if path in tree.folders else "f")
            if is_kind and fnmatch.fnmatchcase(path.rpartition("/")[2] if path != top else name, pattern):
                said.append((path, name.rstrip("/") + path[len(top) :] if top else f"{name}/{path}".rstrip("/")))
    if deletes:
        for path, _ in reversed(said):
            if path in tree.folders and (not path or tree.children(path)):
                raise ShellError(f"cannot delete {path or '.'}: Directory not empty")
            tree.remove(path)
        return "", 0
    return lines_of(shown for _, shown in said), 0


@command
def mkdir(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """Make folders: `-p`."""
    flags, _, names = options_of(args, "p")
    for name in names:
        tree.make_folder(name, parents="p" in flags)
    return "", 0


@command
def touch(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """Make empty files."""
    for name in options_of(args, "")[2]:
        if tree.path(name) not in tree.files and not tree.is_folder(name):
            tree.write(name, "")
    return "", 0


@command
def rm(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """Remove files: `-f -r`."""
    flags, _, names = options_of(args, "rRf")
    for name in names:
        path = tree.path(name)
        if path in tree.folders:
            if not flags & {"r", "R"} or not path:
                raise ShellError(f"cannot remove '{name}': Is a directory")
            tree.remove(path)
        elif path in tree.files:
            tree.remove(path)
        elif "f" not in flags:
            raise ShellError(f"cannot remove '{name}': No such file or directory")
    return "", 0


@command
def rmdir(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """Remove empty folders."""
    for name in args:
        path = tree.path(name)
        if not path or path not in tree.folders or tree.children(path):
            raise ShellError(f"failed to remove '{name}'")
        tree.remove(path)
    return "", 0


def _targets(tree: Tree, names: list[str]) -> list[tuple[str, str]]:
    """Return what is moved or copied, and where to."""
    if len(names) < 2:
        raise ShellError("give what and where to")
    *sources, to = names
    if len(sources) > 1 and not tree.is_folder(to):
        raise ShellError(f"target '{to}' is not a directory")
    pairs = []
    for name in sources:
        path = tree.path(name)
        if path not in tree.files and (path not in tree.folders or not path):
            raise ShellError(f"cannot stat '{name}': No such file or directory")
        target = f"{tree.path(to)}/{path.rpartition('/')[2]}".lstrip("/") if tree.is_folder(to) else tree.path(to)
        if target.rpartition("/")[0] not in tree.folders:
            raise ShellError(f"'{to}': No such file or directory")
        if target in tree.folders:
            raise ShellError(f"cannot overwrite directory '{target}'")
        pairs.append((path, target))
    return pairs


@command
def mv(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """Move or rename."""
    for path, target in _targets(tree, options_of(args, "f")[2]):
        if path in tree.folders and target in tree.files:
            raise ShellError(f"cannot overwrite '{target}' with a directory")
        tree.move(path, target)
    return "", 0


@command
def cp(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """Copy: `-r`."""
    flags, _, names = options_of(args, "rRf")
    for path, target in _targets(tree, names):
        if path in tree.files:
            tree.write(f"/work/{target}", tree.files[path])
            continue
        if not flags & {"r", "R"}:
            raise ShellError(f"-r not specified; omitting directory '{path}'")
        if f"{target}/".startswith(f"{path}/"):
            raise ShellError(f"cannot copy '{path}' into itself")
        tree.make_folder(f"/work/{target}", parents=True)
        for inner in tree.below(path):
            new = f"/work/{target}{inner[len(path) :]}"
            if inner in tree.folders:
                tree.make_folder(new, parents=True)
            else:
                tree.write(new, tree.files[inner])
    return "", 0
