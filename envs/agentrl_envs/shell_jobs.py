"""Small jobs on files: what there is, what is to be done, what must come of it, and a command that does it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

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
    """What is to be done."""
    before: Tree
    """The files of its folder."""
    after: Tree
    """What they must be."""
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
