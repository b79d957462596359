"""Faults in small repositories: read, edit and run the files, then submit them to a hidden command.

A task is a folder with `task.yaml` (see `TaskFile`), `repository/` (the files at the start) and `hidden/` (files that are laid
over them while success is measured, and at no other time). Beside them may stand `expected.txt`, the output that the command
must have, and `solution.patch`, a unified diff that the oracle follows.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl import (
    EnvironmentFailure,
    Message,
    Prompt,
    Sandbox,
    SandboxConfig,
    ToolEnv,
    UserError,
    tool,
    tool_call,
)
from agentrl_envs.options import opening, prompt_form, share, shell_sandbox

Files: TypeAlias = dict[str, bytes]
"""Content by path."""

_BUILT_IN = Path(__file__).parent / "data" / "repository"
_LEFT_OUT = {".git", "__pycache__"}
"""Folders that are no part of a snapshot: a history may hold the solution."""
_MAX_LISTED = 30
"""Paths in the first message."""


class TaskFile(BaseModel):
    """Fields of `task.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    words: str = Field(min_length=1)
    """Report of the fault."""
    command: str = Field(min_length=1)
    """Commands of `sh` in the repository's folder: success is status 0, and the output of `expected.txt` if there is one."""
    editable: tuple[str, ...] = Field(default=("*",), min_length=1)
    """Patterns of the paths whose changes count (`src/*`; `*` matches `/` too). While success is measured, other files are as
    in the snapshot, and those of `hidden/` as they are there."""
    split: Literal["train", "eval"] = "train"
    """Purpose of the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A repository to repair."""

    file: TaskFile
    files: Files
    """Snapshot at the start."""
    hidden: Files
    expected: str | None
    """Output that the command must have; code never runs beside it. None: its status alone counts."""
    patch: str | None
    """Unified diff of a solution."""

    def counts(self, path: str) -> bool:
        """Return whether changes to a path count."""
        return path not in self.hidden and any(fnmatchcase(path, pattern) for pattern in self.file.editable)


@lru_cache(maxsize=1000)
def read_task_file(folder: Path) -> TaskFile:
    """Return the fields of a task.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    path = folder / "task.yaml"
    try:
        return TaskFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems = (
            [f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}" for each in error.errors()]
            if isinstance(error, ValidationError)
            else [" ".join(str(error).split())]
        )
        raise UserError(f"tasks: {path}: {'; '.join(problems)}") from error


@lru_cache(maxsize=32)
def read_task(folder: Path) -> Task:
    """Return a task with its files.

    Raises:
        UserError: for a folder without a repository, and for what cannot be read.
    """
    expected, patch = folder / "expected.txt", folder / "solution.patch"
    try:
        task = Task(
            file=read_task_file(folder),
            files=_files_in(folder / "repository"),
            hidden=_files_in(folder / "hidden"),
            expected=expected.read_text(encoding="utf-8") if expected.exists() else None,
            patch=patch.read_text(encoding="utf-8") if patch.exists() else None,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"tasks: {folder} cannot be read: {error}") from error
    if not task.files:
        raise UserError(f"tasks: {folder / 'repository'} holds no files; put the snapshot to repair there")
    return task


def _files_in(folder: Path) -> Files:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    named = {path.relative_to(folder): path for path in paths}
    return {name.as_posix(): path.read_bytes() for name, path in named.items() if _LEFT_OUT.isdisjoint(name.parts)}


def share_passed(task: Task, files: Files, sandbox: SandboxConfig) -> float:
    """Return the share of checks that files pass in a new sandbox: the command's status, and each line that is expected."""
    expected = (task.expected or "").rstrip().splitlines()
    most = max(sandbox.max_output_bytes, 2 * len((task.expected or "").encode()))
    measured = task.files.keys() - task.hidden.keys()
    laid_out = {path: task.files[path] for path in measured if not task.counts(path)}
    laid_out |= {path: content for path, content in files.items() if task.counts(path)} | task.hidden
    with sandbox.model_copy(update={"max_output_bytes": most}).build() as box:
        try:
            for path, content in laid_out.items():
                box.write(path, content)
            result = box.exec(task.file.command, language="sh")
        except EnvironmentFailure:
            raise
        except ValueError:  # too much, or names that cannot stand beside one another: the policy's doing
            return 0.0
    checks = [result.returncode == 0]
    if task.expected is not None:
        checks += [one == other for one, other in zip_longest(result.output.rstrip().splitlines(), expected)]
    return sum(checks) / len(checks)


@lru_cache(maxsize=1000)
def share_at_start(folder: Path, sandbox: SandboxConfig) -> float:
    """Return the share of checks that the snapshot passes.

    Raises:
        EnvironmentFailure: if it passes all, so that there is nothing to repair.
    """
    task = read_task(folder)
    passed = share_passed(task, task.files, sandbox)
    if passed == 1:
        raise EnvironmentFailure(f"{folder}: the command succeeds at the start, so there is nothing to repair")
    return passed


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """One replacement of a unified diff, by lines."""

    at: int
    """Lines of the file before it."""
    before: list[str]
    after: list[str]


_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def read_patch(patch: str) -> dict[str, list[Hunk]]:
    """Return the hunks of a unified diff by path.

    Raises:
        UserError: for a diff that removes or renames a file.
    """
    found: dict[str, list[Hunk]] = {}
    old = path = ""
    num_before = num_after = 0
    for line in patch.split("\n"):
        if line.startswith("\\"):  # "No newline at end of file": the end of a file stays as it is
            continue
        if num_before > 0 or num_after > 0:
            hunk, kind = found[path][-1], line[:1] or " "
            if kind != "+":
                hunk.before.append(line[1:])
                num_before -= 1
            if kind != "-":
                hunk.after.append(line[1:])
                num_after -= 1
        elif line.startswith("--- "):
            old = line[4:].partition("\t")[0].removeprefix("a/")
        elif line.startswith("+++ "):
            path = line[4:].partition("\t")[0].removeprefix("b/")
            if path == "/dev/null" or old not in (path, "/dev/null"):
                raise UserError(f"solution.patch: it removes or renames {old}; the oracle changes and adds files alone")
        elif header := _HUNK.match(line):
            num_before, num_after = (1 if count is None else int(count) for count in header.group(2, 3))
            at = int(header[1]) - (num_before > 0)
            found.setdefault(path, []).append(Hunk(at=at, before=[], after=[]))
    return found


def patched(files: Files, hunks: Mapping[str, Sequence[Hunk]]) -> Files:
    """Return the files that a patch changes, as it leaves them.

    Raises:
        UserError: if it does not fit.
    """
    changed: Files = {}
    for path, of_file in hunks.items():
        lines = files.get(path, b"").decode().split("\n")
        for hunk in reversed(of_file):
            end = hunk.at + len(hunk.before)
            if lines[hunk.at : end] != hunk.before:
                raise UserError(f"solution.patch: it does not fit {path} at line {hunk.at + 1}")
            lines[hunk.at : end] = hunk.after
        changed[path] = "\n".join(lines).encode()
    return changed


class Repository(ToolEnv):
    """`run`, `read_file`, `edit_file` and `write_file` work on a repository with a fault; `submit` ends the task.

    Success is that the task's hidden command succeeds on the changes that count. It runs in a sandbox of its own, with tests
    that the policy neither sees nor changes. A success at `submit` earns 1; changes after which more checks pass than ever
    before earn their share of `progress_reward`. The score is the share of the checks that failed at the start and pass.
    """

    max_tool_chars = 10_000

    def __init__(
        self,
        *,
        tasks: str | None = None,
        only: Sequence[str] | None = None,
        progress_reward: float = 0.3,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
        sandbox: str | Mapping[str, Any] = "bubblewrap",
    ) -> None:
        """Choose the tasks.

        Args:
            tasks: folder of tasks, each a folder; relative paths begin in the working directory. None: ten that are built in.
            only: names of the tasks to play, as their folders are called; None: all.
            progress_reward: for all hidden checks, as far as they pass before `submit`.
            turn_rewards: False pays for the submission alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
            sandbox: an installed sandbox that runs `sh`, or a mapping of its name and fields.

        Raises:
            UserError: a folder holds no task, an option is outside its range, or the sandbox is not available here.
        """
        super().__init__()
        top = _BUILT_IN if tasks is None else Path(tasks).expanduser().absolute()
        found = {path.parent.name: path.parent for path in sorted(top.glob("*/task.yaml"))}
        if not found:
            raise UserError(f"tasks: {top} holds no task; give a folder of folders, each with a task.yaml")
        if unknown := [name for name in only or () if name not in found]:
            raise UserError(f"only: give some of {', '.join(found)}, got {unknown}")
        self.folders: dict[str, list[Path]] = {"train": [], "eval": []}
        for name, folder in found.items():
            if only is None or name in only:
                self.folders[read_task_file(folder).split].append(folder)
        self.progress_reward = share("progress_reward", progress_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        self.sandbox = shell_sandbox(sandbox)
        self.box: Sandbox | None = None
        self.folder = Path()
        self.best = self.passed = 0.0
        self.measured: Files = {}
        self.seen: frozenset[str] = frozenset()
        self.is_submitted = False

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        return len(self.folders[split])

    def tasks_hash(self, split: str) -> str:
        """Return a hash of the tasks of a split: their fields, and the paths and sizes of their files."""
        digest = hashlib.sha256()
        for folder in self.folders[split]:
            digest.update(f"{folder.name}\n{read_task_file(folder).model_dump_json()}\n".encode())
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        return digest.hexdigest()

    def start(self, options: dict[str, Any]) -> str | list[Message]:
        """Lay out the repository of a task."""
        split, index = options.get("split") or "train", options.get("task_index")
        folders = self.folders[split]
        if not folders:
            raise EnvironmentFailure(f"no task has `split: {split}` in its task.yaml")
        self.close()
        self.folder = folders[int(self.np_random.integers(len(folders))) if index is None else index]
        self.best = self.passed = share_at_start(self.folder, self.sandbox)
        self.seen, self.is_submitted = frozenset(), False
        self.box = self.sandbox.build()
        task = self.task
        for path, content in task.files.items():
            self.box.write(path, content)
        self.measured = self._counted()
        paths = list(task.files)
        more = f" and {len(paths) - _MAX_LISTED} more" if len(paths) > _MAX_LISTED else ""
        return opening(
            self.prompt,
            f"{task.file.words.strip()}\nFiles: {', '.join(paths[:_MAX_LISTED])}{more}",
            "You repair a repository of source code. The user reports a fault: find its cause, and change the code so that it "
            "does what the report asks for, also where the report gives no example.",
            "In each turn, call one tool and look at its reply. run runs a command of a POSIX shell in the repository's folder "
            f"and kills it after {self.sandbox.timeout_s:g} seconds; read_file shows a file; edit_file replaces a text that is "
            "in a file once; write_file writes a whole file. Files stay between calls. Text without a call does nothing.",
            task.file.editable != ("*",) and f"Only changes to {', '.join(task.file.editable)} count.",
            "Hidden tests decide: you do not see them, and they undo what you change in tests.",
            self.turn_rewards
            and f"Changes with which more of them pass than before earn up to {self.progress_reward:g} together.",
            "submit runs them and ends the task: it earns 1 if all pass.",
        )

    @property
    def task(self) -> Task:
        """The task that is played."""
        return read_task(self.folder)

    @tool
    def run(self, command: str) -> str:
        """Run a command in the repository's folder; files stay, the current folder does not.

        Args:
            command: of sh.
        """
        result = self._box().exec(command, language="sh")
        self._pay_progress()
        end = f"\n(stopped after {self.sandbox.timeout_s:g} s)" if result.timed_out else ""
        status = f"\n(status {result.returncode})" if result.returncode and not result.timed_out else ""
        return f"{result.output.rstrip()[: self.max_tool_chars - 100]}{end}{status}".strip() or "(no output)"

    @tool
    def read_file(self, path: str, first_line: int = 1, num_lines: int = 200) -> str:
        """Show lines of a file.

        Args:
            path: in the repository.
            first_line: number of the first one.
            num_lines: how many, at most.
        """
        lines = self._text(path).splitlines()
        begin = max(first_line, 1) - 1
        shown = lines[begin : begin + max(num_lines, 0)]
        self.seen |= {path}
        note = f"\n[lines {begin + 1} to {begin + len(shown)} of {len(lines)}]" if len(shown) < len(lines) else ""
        return "\n".join(shown) + note or "(empty)"

    @tool
    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text in a file, where it stands once.

        Args:
            path: in the repository.
            old: text as it is in the file, with its spaces and line ends.
            new: text in its place.
        """
        text = self._text(path)
        if (count := text.count(old) if old else 0) != 1:
            raise ValueError(f"old is {count} times in {path}; give a text that is in it once")
        return self.write_file(path, text.replace(old, new))

    @tool
    def write_file(self, path: str, content: str) -> str:
        """Write a whole file, a new one too.

        Args:
            path: in the repository.
            content: of the file.
        """
        self._box().write(path, content)
        self._pay_progress()
        return "Written."

    @tool
    def submit(self) -> str:
        """End the task: the repository is repaired, and the hidden tests run."""
        passed, at_start = self._share_passed(), share_at_start(self.folder, self.sandbox)
        self.is_submitted = True
        self.reward(float(passed == 1), "hidden tests")
        self.finish(success=passed == 1, score=max(0.0, (passed - at_start) / (1 - at_start)))
        return "The hidden tests pass." if passed == 1 else "Not all hidden tests pass."

    def answer(self, text: str) -> str:  # noqa: ARG002 - words change no files
        """Ask for a tool."""
        return "Call a tool; submit ends the task."

    def state_key(self) -> str:
        """Return a checksum of the task and of all files, and how many checks have passed at best."""
        digest = hashlib.sha256(str(self.folder).encode())
        for path, content in self._files().items():
            digest.update(f"\0{path}\0{len(content)}\0".encode(errors="replace") + content)
        return f"{digest.hexdigest()[:32]}/{self.best:.6f}/{self.is_submitted}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Read and edit each file of the reference solution, then submit; a wrong turn looks around, or submits too early."""
        rng = np.random.default_rng() if rng is None else rng
        task = self.task
        if task.patch is None:
            raise NotImplementedError(f"{self.folder.name} has no solution.patch, which the oracle follows")
        if rng.random() >= skill:
            return tool_call("submit") if rng.random() < 0.2 else tool_call("run", command="ls")
        hunks, files = read_patch(task.patch), self._files()
        for path, solved in patched(task.files, hunks).items():
            if files.get(path) == solved:
                continue
            text = files.get(path, b"").decode(errors="replace")
            if path in files and path not in self.seen:
                return tool_call("read_file", path=path)
            for before, after in (("\n".join(lines) for lines in (hunk.before, hunk.after)) for hunk in hunks[path]):
                if before and text.count(before) == 1 and after not in text:
                    return tool_call("edit_file", path=path, old=before, new=after)
            return tool_call("write_file", path=path, content=solved.decode())
        return tool_call("submit")

    def close(self) -> None:
        """Close the sandbox."""
        if self.box is not None:
            self.box.close()
        self.box = None

    def _box(self) -> Sandbox:
        assert self.box is not None
        return self.box

    def _files(self) -> Files:
        box = self._box()
        return {path: box.read(path) for path in box.paths() if not path.endswith("/")}

    def _text(self, path: str) -> str:
        return self._box().read(path).decode(errors="replace")

    def _counted(self) -> Files:
        return {path: content for path, content in self._files().items() if self.task.counts(path)}

    def _share_passed(self) -> float:
        """Return the share of checks that pass, measured again if a change counts."""
        if (counted := self._counted()) != self.measured:
            self.measured, self.passed = counted, share_passed(self.task, counted, self.sandbox)
        return self.passed

    def _pay_progress(self) -> None:
        if self.turn_rewards and (passed := self._share_passed()) > self.best:
            at_start = share_at_start(self.folder, self.sandbox)
            self.reward(self.progress_reward * (passed - self.best) / (1 - at_start), "progress")
            self.best = passed
