"""Files that a run or its user left: each is read with one line about what is wrong with it, and written whole.

A reader ends in data of the type that it was asked for, or in a ConfigError that says `FILE, line N: what; what to do`.
"""

import json
import math
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from agentrl.errors import ConfigError, UserError

T = TypeVar("T")

_LIST = "files.json"
_TENSORS = (".safetensors", ".pt")

_MAX_VALUES = 100_000
"""At one depth of a YAML file, whose aliases can make billions out of a page."""
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+\Z")
"""YAML 1.2's numbers that PyYAML, which knows 1.1, takes for text: `1e-3`."""

_LONG = re.compile(r"\d{20,300}")
"""A bound of a number, as pydantic writes it out."""

_start: Path | None = None
"""Working directory at the start of the command or call that runs. None: none does."""
_is_reported = False
"""Whether `moved_to` has returned the directory in which an environment has left the process."""

MAX_DEPTH = 200
"""Depth of lists and mappings within one another, in a file: pydantic writes no more than 255."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML would silently drop the first.

    It stops at a depth that no recipe has: PyYAML's time grows with the square of the depth.
    """

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level >= MAX_DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_SAME = re.compile(r"[-+]?(0|[1-9]\d*)|0x[\da-fA-F]+|[-+\d]*[.eE][^_:]*|[tT]rue|TRUE|[fF]alse|FALSE")
"""Numbers and booleans that mean the same in YAML 1.1, which PyYAML reads, and in 1.2."""


def _refuse_other_versions(name: str) -> None:
    """Let the loader refuse a scalar of a kind that YAML 1.2 reads as something else: `010`, `1_0`, `1:30`, `off`."""
    construct: Any = getattr(yaml.SafeLoader, f"construct_yaml_{name}")

    def construct_same(loader: _Loader, node: yaml.ScalarNode) -> Any:
        value, text = construct(loader, node), str(node.value)
        if _SAME.fullmatch(text):
            return value
        words = f"{text!r} is {json.dumps(value)} in YAML 1.1 and something else in 1.2; write {json.dumps(value)}, or "
        raise yaml.constructor.ConstructorError(None, None, f"{words}{text!r} in quotes", node.start_mark)

    _Loader.add_constructor(f"tag:yaml.org,2002:{name}", construct_same)


for _kind in ("int", "float", "bool"):
    _refuse_other_versions(_kind)


class _Dumper(yaml.SafeDumper):
    """Writes text that looks like a number in quotes."""


for _of_yaml in (_Loader, _Dumper):
    _of_yaml.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


class _Entry(BaseModel):
    """A file of a folder that was sealed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int
    crc32: int | None
    """None: of tensors."""

    @classmethod
    def of(cls, path: Path) -> "_Entry":
        crc32 = None if path.suffix in _TENSORS else zlib.crc32(path.read_bytes())
        return cls(size=path.stat().st_size, crc32=crc32)


_ENTRIES = TypeAdapter(dict[str, _Entry])


def parse(data: bytes | str, kind: TypeAdapter[T], *, where: str, fix: str) -> T:
    """Return what JSON says, as data of a type.

    Args:
        data: one value, as JSON.
        kind: the type.
        where: file and line, for the message.
        fix: what the user can do about it.

    Raises:
        ConfigError: if it is no text, no JSON, nested too deep, or of another type.
    """
    try:
        value = json.loads(data)
        if nests_deeper(value, MAX_DEPTH):
            raise ValueError(f"it nests deeper than {MAX_DEPTH}")
    except json.JSONDecodeError as error:
        words = f"it is not JSON ({error.msg} at character {error.pos})"
    except UnicodeDecodeError:
        words = "it is not UTF-8"
    except RecursionError:
        words = f"it nests deeper than {MAX_DEPTH}"
    except ValueError as error:
        words = str(error)
    else:
        return typed(value, kind, where=where, fix=fix)
    raise ConfigError(f"{where}: {words}; {fix}")


def typed(value: object, kind: TypeAdapter[T], *, where: str, fix: str) -> T:
    """Return what stood in a file, as data of a type; see `parse`.

    Raises:
        ConfigError: if it is of another.
    """
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        message = _LONG.sub(lambda number: f"{float(number[0]):g}", first["msg"])
        words = ": ".join(filter(None, [".".join(map(str, first["loc"])), message]))
    raise ConfigError(f"{where}: {words}; {fix}")


def read_json(path: Path, kind: TypeAdapter[T], *, fix: str) -> T:
    """Read a file of one JSON value.

    Raises:
        ConfigError: as `parse`, and where it cannot be read.
    """
    return parse(read_bytes(path, fix=fix), kind, where=str(path), fix=fix)


def parse_yaml(text: bytes | str, *, where: str) -> Any:
    """Return what YAML says; `1e-3` is a number, and a key stands once in a mapping.

    Raises:
        ConfigError: if it is no text, no YAML, nested too deep, or repeats itself into more than anyone writes.
    """
    try:
        value = yaml.load(text.decode() if isinstance(text, bytes) else text, _Loader)
        is_too_deep = nests_deeper(value, MAX_DEPTH, max_values=_MAX_VALUES)
    except RecursionError:
        is_too_deep = True
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        words = f"{error.problem}{'' if mark is None else f' (line {mark.line + 1}, column {mark.column + 1})'}"
        raise ConfigError(f"{where} is not valid YAML: {words}") from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:  # of odd characters and tags
        words = " ".join(str(error).split())  # some stand on several lines
        raise ConfigError(f"{where} is not valid YAML: {words}") from error
    if is_too_deep:
        raise ConfigError(f"{where} nests deeper than {MAX_DEPTH}, or repeats itself too often; write it out flat")
    return value


def dump_yaml(value: Any) -> str:
    """Return a value as YAML that `parse_yaml` reads as the same."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def read_bytes(path: Path, *, fix: str) -> bytes:
    """Read a file.

    Raises:
        ConfigError: if it cannot be read, or is no file: a pipe or a device may never end, or never begin.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():  # opening a folder is an error of its own
            raise ConfigError(f"{path}: it is no regular file; {fix}")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {fix}") from error


def sealed(line: str) -> str:
    """Return a line behind its checksum, so that no damage to it passes for something else."""
    return f"{zlib.crc32(line.encode()):08x} {line}"


def unsealed(line: bytes, *, where: str, fix: str) -> bytes:
    """Return what was sealed.

    Raises:
        ConfigError: if it is something else by now.
    """
    checksum, _, rest = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(rest):
        raise ConfigError(f"{where}: it is damaged (its checksum is another); {fix}")
    return rest


def nests_deeper(value: object, limit: int, *, max_values: float = math.inf) -> bool:
    """Return whether lists and mappings stand within one another deeper than a limit, or hold more at one depth."""
    level = [value]
    for _ in range(limit):
        within = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        if sum(map(len, within)) > max_values:
            return True
        level = [child for children in within for child in children]
        if not level:
            return False
    return True


def numbered(folder: Path, pattern: str) -> Iterator[tuple[int, Path]]:
    """Yield the number and path of what stands in a folder under a name of a pattern, by number; all else is ignored.

    Args:
        folder: to look into; there need be none.
        pattern: `step-{}.jsonl`, where `{}` stands for six digits, or more from a million on.

    Raises:
        ConfigError: if something else than a folder stands there.
    """
    check_folder(folder)
    before, after = map(re.escape, pattern.split("{}"))
    name = re.compile(rf"{before}(\d{{6}}|[1-9]\d{{6,17}}){after}", re.ASCII)
    paths = folder.iterdir() if folder.is_dir() else ()
    found = ((name.fullmatch(path.name), path) for path in paths)
    yield from sorted((int(match[1]), path) for match, path in found if match)


def check_name(path: Path, *, field: str = "") -> None:
    """Raise ConfigError if a path is no text, or has letters that names of files do not have in this locale."""
    try:
        str(path).encode()  # what the file system's bytes cannot be decoded to, libraries cannot open
        os.fsencode(path)
    except UnicodeEncodeError as error:
        words = f"names of files are {sys.getfilesystemencoding()} in this locale, and this is none"
        raise ConfigError(f"{field}{str(path)!a}: {words}; set PYTHONUTF8=1, or choose another name") from error


def check_folder(path: Path) -> None:
    """Raise ConfigError if a folder is to be, and something else stands: a file, or a link that leads nowhere."""
    if os.path.lexists(path) and not path.is_dir():
        raise ConfigError(f"{path}: it is no folder; move it away")


@contextmanager
def keep_process() -> Iterator[None]:
    """Read relative paths (`absolute`) from the present working directory; at the end, restore it and the standard streams.

    An environment may change all three for the whole process. Within one another, the outermost decides.

    Raises:
        UserError: if the directory has been deleted.
    """
    global _start, _is_reported
    if _start is not None:
        yield
        return
    try:
        _start, _is_reported = Path.cwd(), False
    except FileNotFoundError:
        raise UserError("the working directory is gone; go to one that is there") from None
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        with suppress(OSError):  # it has been deleted since
            os.chdir(_start)
        _start = None


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path from the working directory at the start, or from the user's home directory if it begins with `~`."""
    path = Path(path).expanduser()
    return path if path.is_absolute() else (_start or Path.cwd()) / path


def shown(text: object) -> str:
    """Return a path, or a text with paths, as a person writes them in the working directory of the start: relative to it."""
    with suppress(FileNotFoundError):
        if (here := absolute("")) != here.parent:
            return re.sub(rf"(?<![\w.~/-]){re.escape(os.path.join(here, ''))}(?=[^/])", "", str(text))
    return str(text)


def moved_to() -> str | None:
    """Return the working directory if it is another than at the start: once. None: it is the same, or was returned before."""
    global _is_reported
    try:
        now = os.getcwd()
    except FileNotFoundError:
        now = "one that has been deleted"
    if _start is None or _is_reported or now == str(_start):
        return None
    _is_reported = True
    return now


def check_links(folder: Path, *, what: str, left_out: str = "") -> None:
    """Raise ConfigError if an entry of a folder is a symbolic link out of it, so that no entry leads to files elsewhere.

    Args:
        folder: the folder, which may itself stand behind a link.
        what: name of the folder, for the message.
        left_out: an entry of the folder whose content is not looked at.
    """
    inside = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                raise ConfigError(f"{path}: a symbolic link out of {what}; put what it leads to in its place")
        folders[:] = [name for name in folders if Path(place, name) != folder / left_out]


def write_whole(path: Path, data: str | bytes | Iterable[bytes]) -> None:
    """Write a file so that it is there whole or not at all, after a power cut too."""
    partial = path.with_name(f".{path.name}.partial")
    pieces = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    try:
        partial.unlink(missing_ok=True)  # of a write that was cut short; opening a pipe would wait for its reader
        with partial.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk it takes what little room there is
        raise
    rename(partial, path)


def seal(folder: Path) -> None:
    """List the files of a folder, in one of it: with their sizes, and with checksums but for tensors, which are too large."""
    files = {
        path.relative_to(folder).as_posix(): _Entry.of(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }
    (folder / _LIST).write_bytes(_ENTRIES.dump_json(files))


def damage(folder: Path) -> str | None:
    """Return what is wrong with a folder that was sealed. None: all is there that was; what was added is not looked at."""
    try:
        files = read_json(folder / _LIST, _ENTRIES, fix="")
    except ConfigError as error:
        return str(error).removesuffix("; ")
    for name, entry in files.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{folder / _LIST} names {name}, which lies elsewhere"
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != entry.size:
            return f"{path} has {size} bytes of {entry.size}"
        if entry.crc32 is not None and _Entry.of(path) != entry:
            return f"the checksum of {path} is another"
    return None


def rename(partial: Path, target: Path) -> None:
    """Give what was written its name, and wait until the disk has it."""
    partial.replace(target)
    _sync(target.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has all that stands in a folder."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    with suppress(PermissionError):  # Windows opens no folder, and writes back only what can be written to
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
