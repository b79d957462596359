"""Small jobs on files, done by shell commands: the files, the task in words, and a command that does it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl import Message, Prompt, Sandbox, ToolEnv, UserError, tool, tool_call
from agentrl_envs.options import opening, prompt_form, share, shell_sandbox, whole_number

_WORDS = (
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "glade", "haven", "inlet"),
    *("jetty", "knoll", "ledge", "maple", "north", "ocean", "pearl", "quartz", "ridge"),
)
_ENDINGS = ("log", "txt", "tmp", "cfg")
Tree = dict[str, str]
"""Text by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job in a folder of its own."""

    text: str
    """Task in words."""
    before: Tree
    """The files of its folder."""
    after: Tree
    """Files as they must become."""
    command: str
    """Does it, in any shell."""


def draw_job(kind: str, folder: str, *, num_files: int, rng: np.random.Generator) -> Job:
    """Draw a job of a kind."""
    return KINDS[kind](folder, num_files, rng)


def _names(count: int, rng: np.random.Generator) -> list[str]:
    """Draw words that differ; from the nineteenth on they have numbers."""
    order = rng.permutation(len(_WORDS)).tolist()
    return [_WORDS[order[k % len(order)]] + (str(k // len(order)) if k >= len(order) else "") for k in range(count)]


def _files(folder: str, count: int, rng: np.random.Generator, *, some: str) -> Tree:
    """Draw files with different endings, at least one of which is `some`."""
    endings = [_ENDINGS[k] for k in rng.integers(len(_ENDINGS), size=count).tolist()]
    endings[int(rng.integers(count))] = some
    numbers = rng.integers(10, 100, size=count).tolist()
    return {
        f"{folder}/{name}.{ending}": f"{number}\n"
        for name, ending, number in zip(_names(count, rng), endings, numbers, strict=True)
    }


def _count_files(folder: str, num_files: int, rng: np.random.Generator) -> Job:
    ending = _ENDINGS[int(rng.integers(len(_ENDINGS)))]
    before = _files(folder, num_files, rng, some=ending)
    count = sum(path.endswith(f".{ending}") for path in before)
    return Job(
        text=f"Write to {folder}/count how many files in {folder} end in .{ending}.",
        before=before,
        after={**before, f"{folder}/count": f"{count}"},
        command=f"ls {folder}/*.{ending} | wc -l > {folder}/count",
    )


def _count_lines(folder: str, num_files: int, rng: np.random.Generator) -> Job:
    lines = [("ERROR " if x < 0.4 else "ok ") + str(k) for k, x in enumerate(rng.random(3 * num_files).tolist())]
    before = {f"{folder}/app.log": "".join(f"{line}\n" for line in lines)}
    count = sum(line.startswith("ERROR") for line in lines)
    return Job(
        text=f"Write to {folder}/count how many lines of {folder}/app.log contain ERROR.",
        before=before,
        after={**before, f"{folder}/count": f"{count}"},
        command=f"grep -c ERROR {folder}/app.log > {folder}/count",
    )


def _sum_column(folder: str, num_files: int, rng: np.random.Generator) -> Job:
    amounts = rng.integers(1, 100, size=num_files).tolist()
    rows = [f"{name},{amount}" for name, amount in zip(_names(num_files, rng), amounts, strict=True)]
    before = {f"{folder}/sales.csv": "".join(f"{row}\n" for row in ["item,amount", *rows])}
    return Job(
        text=f"Add up the amounts in {folder}/sales.csv and write the sum to {folder}/total.",
        before=before,
        after={**before, f"{folder}/total": f"{sum(amounts)}"},
        command=f"awk -F, 'NR>1 {{s+=$2}} END {{print s}}' {folder}/sales.csv > {folder}/total",
    )


def _sort_lines(folder: str, num_files: int, rng: np.random.Generator) -> Job:
    names = _names(num_files, rng)
    names += [names[k] for k in rng.integers(num_files, size=max(1, num_files // 2)).tolist()]
    lines = [names[k] for k in rng.permutation(len(names)).tolist()]
    before = {f"{folder}/names": "".join(f"{line}\n" for line in lines)}
    return Job(
        text=f"Write the lines of {folder}/names to {folder}/sorted, sorted and each once.",
        before=before,
        after={**before, f"{folder}/sorted": "".join(f"{line}\n" for line in sorted(set(lines)))},
        command=f"sort -u {folder}/names > {folder}/sorted",
    )


def _rename(folder: str, num_files: int, rng: np.random.Generator) -> Job:
    before = _files(folder, num_files, rng, some="txt")
    names = [path.removesuffix(".txt") for path in before if path.endswith(".txt")]
    return Job(
        text=f"Rename each .txt file in {folder} so that it ends in .md.",
        before=before,
        after={
            path.removesuffix(".txt") + ".md" if path.endswith(".txt") else path: text for path, text in before.items()
        },
        command=" && ".join(f"mv {name}.txt {name}.md" for name in names),
    )


def _delete(folder: str, num_files: int, rng: np.random.Generator) -> Job:
    before = _files(folder, num_files, rng, some="tmp")
    return Job(
        text=f"Delete each .tmp file in {folder}.",
        before=before,
        after={path: text for path, text in before.items() if not path.endswith(".tmp")},
        command=f"rm {folder}/*.tmp",
    )


def _edit(folder: str, num_files: int, rng: np.random.Generator) -> Job:
    keys = _names(num_files, rng)
    values = rng.integers(10, 100, size=num_files).tolist()
    which, new = int(rng.integers(num_files)), int(rng.integers(100, 1000))
    lines = [f"{key}={value}\n" for key, value in zip(keys, values, strict=True)]
    before = {f"{folder}/app.cfg": "".join(lines)}
    lines[which] = f"{keys[which]}={new}\n"
    return Job(
        text=f"In {folder}/app.cfg, set {keys[which]} to {new}.",
        before=before,
        after={f"{folder}/app.cfg": "".join(lines)},
        command=f"sed -i 's/^{keys[which]}=.*/{keys[which]}={new}/' {folder}/app.cfg",
    )


def _move(folder: str, num_files: int, rng: np.random.Generator) -> Job:
    names = _names(num_files, rng)
    is_urgent = rng.random(num_files) < 0.4
    is_urgent[int(rng.integers(num_files))] = True
    before = {f"{folder}/{name}": f"{'urgent' if u else 'later'}\n" for name, u in zip(names, is_urgent, strict=True)}
    after = {
        f"{folder}/inbox/{name}" if u else f"{folder}/{name}": before[f"{folder}/{name}"]
        for name, u in zip(names, is_urgent, strict=True)
    }
    moved = " ".join(path for path, text in before.items() if text == "urgent\n")
    return Job(
        text=f"Move the files in {folder} that contain urgent to {folder}/inbox.",
        before=before,
        after=after,
        command=f"mkdir -p {folder}/inbox && mv {moved} {folder}/inbox",
    )


KINDS: Mapping[str, Callable[[str, int, np.random.Generator], Job]] = {
    "count_files": _count_files,
    "count_lines": _count_lines,
    "sum_column": _sum_column,
    "sort_lines": _sort_lines,
    "rename": _rename,
    "delete": _delete,
    "edit": _edit,
    "move": _move,
}


_FOLDERS = ("red", "green", "blue", "gold")


class Shell(ToolEnv):
    """`shell` runs commands among the files, `done` ends the task: the files must then be as they should.

    Each job has a folder of its own. Files that become right for the first time earn their share of `progress_reward`, and the
    right files at the end earn 1. Success means that all files are right and there is none too many; blank space at the end of
    a file does not matter. The score is the share of the files to be changed that were.
    """

    def __init__(
        self,
        *,
        num_jobs: int = 2,
        kinds: Sequence[str] | None = None,
        num_files: int = 6,
        progress_reward: float = 0.5,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
        sandbox: str | Mapping[str, Any] = "bubblewrap",
    ) -> None:
        """Set the difficulty.

        Args:
            num_jobs: jobs, each in a folder of its own.
            kinds: of jobs; None: all.
            num_files: files of a folder, or lines of its file.
            progress_reward: for all that is to be changed, as far as it is right.
            turn_rewards: False pays at the end alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
            sandbox: an installed sandbox that runs `sh`, or a mapping of its name and fields.

        Raises:
            UserError: an option is outside its range, or the sandbox is not available here or has no shell.
        """
        super().__init__()
        self.num_jobs = whole_number("num_jobs", num_jobs, at_least=1, at_most=len(_FOLDERS))
        self.kinds = list(KINDS) if kinds is None else list(kinds)
        if not self.kinds or (unknown := [kind for kind in self.kinds if kind not in KINDS]):
            raise UserError(f"kinds: give some of {', '.join(KINDS)}, got {unknown if self.kinds else 'none'}")
        self.num_files = whole_number("num_files", num_files, at_least=2, at_most=100)
        self.progress_reward = share("progress_reward", progress_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        self.sandbox = shell_sandbox(sandbox)
        self.box: Sandbox | None = None
        self.jobs: list[Job] = []
        self.num_at_first = self.fewest_wrong = 0
        self.is_done = False

    def start(self, options: dict[str, Any]) -> str | list[Message]:  # noqa: ARG002 - tasks are too many to meet by chance
        """Draw the jobs and write their files."""
        self.close()
        kinds = [self.kinds[k] for k in self.np_random.integers(len(self.kinds), size=self.num_jobs).tolist()]
        self.jobs = [
            draw_job(kind, folder, num_files=self.num_files, rng=self.np_random)
            for kind, folder in zip(kinds, _FOLDERS, strict=False)
        ]
        self.box = self.sandbox.build()
        for job in self.jobs:
            for path, text in job.before.items():
                self.box.write(path, text)
        self.is_done = False
        self.num_at_first = self.fewest_wrong = self._num_wrong()
        return opening(
            self.prompt,
            "\n".join([*(job.text for job in self.jobs), "Use shell, then call done."]),
            "You do small jobs on files by commands of a POSIX shell. In each turn, call shell with one command line; you get "
            "what it prints, and its status where that is not 0. Files stay between calls; each call begins in the folder that "
            "holds the folders of all jobs. Change nothing else, and leave no other files behind. When all jobs are done, call "
            "done. Text without a call does nothing.",
            self.turn_rewards
            and f"Files that become right for the first time earn up to {self.progress_reward:g} together.",
            "done ends the task: it earns 1 if every file is as it should be and none is left over.",
        )

    @tool
    def shell(self, command: str) -> str:
        """Run commands in the folder that holds the others; files stay, the current folder does not.

        Args:
            command: of sh.
        """
        assert self.box is not None
        result = self.box.exec(command, language="sh")
        num_wrong = self._num_wrong()
        if num_wrong < self.fewest_wrong:
            if self.turn_rewards:
                self.reward(self.progress_reward * (self.fewest_wrong - num_wrong) / self.num_at_first, "progress")
            self.fewest_wrong = num_wrong
        end = f"\n(stopped after {self.sandbox.timeout_s:g} s)" if result.timed_out else ""
        status = f"\n(status {result.returncode})" if result.returncode and not result.timed_out else ""
        return f"{result.output.rstrip()}{end}{status}"[: self.max_tool_chars].strip() or "(no output)"

    @tool
    def done(self) -> str:
        """End the task: all jobs are done."""
        num_wrong = self._num_wrong()
        self.is_done = True
        self.reward(float(num_wrong == 0), "files")
        self.finish(success=num_wrong == 0, score=max(0.0, 1 - num_wrong / self.num_at_first))
        return "All files are right." if num_wrong == 0 else f"Wrong files: {num_wrong}."

    def answer(self, text: str) -> str:  # noqa: ARG002 - words change no files
        """Ask for a tool."""
        return "Use shell, or done."

    def state_key(self) -> str:
        """Return a checksum of the jobs and of all files, and how far they have been right."""
        digest = hashlib.sha256("\n".join(job.text for job in self.jobs).encode())
        for path in self._box().paths():
            content = b"" if path.endswith("/") else self._box().read(path)
            digest.update(f"\0{path}\0{len(content)}\0".encode(errors="replace") + content)
        return f"{digest.hexdigest()[:32]}/{self.fewest_wrong}/{self.is_done}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Do the first job that is not done, then call done; a wrong turn looks around, or calls it done too early."""
        rng = np.random.default_rng() if rng is None else rng
        is_right = rng.random() < skill
        files = self._files()
        left = [job for job in self.jobs if _num_different(_within(files, job), job.after)]
        if is_right:
            return tool_call("shell", command=left[0].command) if left else tool_call("done")
        if left and rng.random() < 0.2:
            return tool_call("done")
        return tool_call("shell", command=f"ls {_FOLDERS[int(rng.integers(self.num_jobs))]}")

    def close(self) -> None:
        """Close the sandbox."""
        if self.box is not None:
            self.box.close()
        self.box = None

    def _box(self) -> Sandbox:
        assert self.box is not None
        return self.box

    def _files(self) -> Tree:
        box = self._box()
        return {path: box.read(path).decode(errors="replace") for path in box.paths() if not path.endswith("/")}

    def _num_wrong(self) -> int:
        """Count the files that are missing, different, or too many."""
        return _num_different(self._files(), {path: text for job in self.jobs for path, text in job.after.items()})


def _within(files: Tree, job: Job) -> Tree:
    folder = next(iter(job.before)).partition("/")[0]
    return {path: text for path, text in files.items() if path.startswith(f"{folder}/")}


def _num_different(files: Tree, expected: Tree) -> int:
    return sum(
        path not in files or path not in expected or files[path].rstrip() != expected[path].rstrip()
        for path in files.keys() | expected.keys()
    )
