"""Commands of the small shell that read and write text."""

import re

from agentrl_envs.sandboxes.mini_commands import COMMANDS, all_lines, command, lines_of, options_of, texts_of, whole
from agentrl_envs.sandboxes.mini_patterns import Pattern
from agentrl_envs.sandboxes.mini_tree import ShellError, Tree

_NUMBER = re.compile(r"\s*[+-]?\d{1,18}(\.\d{1,18})?")


@command
def cat(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:
    """Print files."""
    return "".join(text for _, text in texts_of(tree, options_of(args, "")[2], stdin)), 0


@command
def echo(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """Print arguments; `-n` without an end of line."""
    return (" ".join(args[1:]), 0) if args[:1] == ["-n"] else (" ".join(args) + "\n", 0)


@command
def true(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """Do nothing, well."""
    return "", 0


@command
def false(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:  # noqa: ARG001
    """Do nothing, badly."""
    return "", 1


@command
def head(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:
    """Print the first lines: `-n`."""
    args = [f"-n{arg[1:]}" if re.fullmatch(r"-\d+", arg) else arg for arg in args]
    _, values, names = options_of(args, "", "n")
    count = whole(values.get("n", "10"))
    return lines_of(line for _, text in texts_of(tree, names, stdin) for line in text.splitlines()[:count]), 0


@command
def tail(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:
    """Print the last lines: `-n`, `-n +2` from a line on."""
    args = [f"-n{arg[1:]}" if re.fullmatch(r"-\d+", arg) else arg for arg in args]
    _, values, names = options_of(args, "", "n")
    count = values.get("n", "10")
    begin = whole(count) - 1 if count.startswith("+") else None
    said = []
    for _, text in texts_of(tree, names, stdin):
        lines = text.splitlines()
        said += lines[max(begin, 0) :] if begin is not None else lines[max(0, len(lines) - whole(count)) :]
    return lines_of(said), 0


@command
def wc(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:
    """Count lines, words and bytes: `-l -w -c`."""
    flags, _, names = options_of(args, "lwc")
    rows = [[text.count("\n"), len(text.split()), len(text.encode())] for _, text in texts_of(tree, names, stdin)]
    if len(names) > 1:
        rows.append([sum(column) for column in zip(*rows, strict=True)])
    shown = [k for k, flag in enumerate("lwc") if not flags or flag in flags]
    labels = [*names, "total"] if len(names) > 1 else names or [""]
    return lines_of(
        " ".join([*(str(row[k]) for k in shown), label]).strip() for row, label in zip(rows, labels, strict=True)
    ), 0


@command
def grep(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:
    """Print lines that match: `-c -e -F -h -H -i -l -n -r -v`."""
    flags, values, rest = options_of(args, "rRlLcivnhHFEowx", "e")
    if unknown := flags & set("LEowx"):
        raise ShellError(f"option -{min(unknown)} is not known here")
    if "e" not in values and not rest:
        raise ShellError("a pattern is missing")
    source = values["e"] if "e" in values else rest.pop(0)
    if "F" in flags:
        source = re.sub(r"([.*\[\]^$\\])", r"\\\1", source)
    pattern = Pattern(source, spend=tree.spend, ignores_case="i" in flags)
    names = rest
    if flags & {"r", "R"}:
        names = [file for name in rest or [""] for file in _files_below(tree, name)]
        if not names:
            return "", 1
    shows_name = "h" not in flags and (len(names) > 1 or bool(flags & {"r", "R", "H"}))
    said = []
    num_found = 0
    for name, text in texts_of(tree, names, stdin):
        found = [
            (number, line)
            for number, line in enumerate(text.splitlines(), 1)
            if (pattern.find(line) is not None) != ("v" in flags)
        ]
        num_found += len(found)
        label = f"{name}:" if shows_name else ""
        if "l" in flags:
            said += [name] if found else []
        elif "c" in flags:
            said.append(f"{label}{len(found)}")
        else:
            said += [f"{label}{f'{number}:' * ('n' in flags)}{line}" for number, line in found]
    return lines_of(said), 0 if num_found else 1


def _files_below(tree: Tree, name: str) -> list[str]:
    path = tree.path(name)
    if path in tree.files:
        return [name]
    if path not in tree.folders:
        raise ShellError(f"{name}: No such file or directory")
    prefix = f"{name.rstrip('/')}/" if name else ""
    return [prefix + (p[len(path) + 1 :] if path else p) for p in tree.below(path) if p in tree.files]


@command
def sort(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:
    """Sort lines: `-n -r -u -t -k`."""
    flags, values, names = options_of(args, "nru", "tk")
    lines = all_lines(tree, names, stdin)
    by = re.fullmatch(r"([1-9]\d{0,8})([nr]*)(?:,\d+([nr]*))?", values.get("k", "1"))
    if by is None:
        raise ShellError(f"-k {values['k']}: give the number of a field, with n and r if need be")
    flags |= set(by[2] + (by[3] or ""))
    field, is_number = int(by[1]) if "k" in values else 0, "n" in flags

    def key(line: str) -> tuple[float, str]:
        parts = line.split(values.get("t"))
        text = line if not field else parts[field - 1] if field <= len(parts) else ""
        found = _NUMBER.match(text)
        return (float(found[0]) if is_number and found else 0.0, "" if is_number and field else text)

    lines.sort(key=lambda line: (key(line), line), reverse="r" in flags)
    return lines_of(dict.fromkeys(lines) if "u" in flags else lines), 0


@command
def uniq(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:
    """Drop repeated neighbors: `-c -d`."""
    flags, _, names = options_of(args, "cd")
    runs: list[tuple[str, int]] = []
    for line in all_lines(tree, names, stdin):
        if runs and runs[-1][0] == line:
            runs[-1] = (line, runs[-1][1] + 1)
        else:
            runs.append((line, 1))
    runs = [run for run in runs if run[1] > 1] if "d" in flags else runs
    return lines_of(f"{count} {line}" if "c" in flags else line for line, count in runs), 0


@command
def cut(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:
    """Print fields: `-d -f`."""
    _, values, names = options_of(args, "", "df")
    if "f" not in values:
        raise ShellError("give -f and the numbers of the fields")
    delimiter = values.get("d", "\t")
    if len(delimiter) != 1:
        raise ShellError("the delimiter must be a single character")
    wanted = [whole(number) for number in values["f"].split(",")]
    rows = [line.split(delimiter) for line in all_lines(tree, names, stdin)]
    return lines_of(delimiter.join(row[k - 1] for k in wanted if 0 < k <= len(row)) for row in rows), 0


@command
def sed(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:
    """Replace in lines: `s/a/b/`, `s/a/b/g`, `-i`."""
    flags, values, rest = options_of(args, "i", "e")
    script = values["e"] if "e" in values else rest.pop(0) if rest else ""
    parts = script[2:].split(script[1]) if len(script) > 3 and script[0] == "s" else []
    if len(parts) != 3 or parts[2] not in ("", "g"):
        raise ShellError("known here: s/pattern/text/ and s/pattern/text/g")
    pattern, new, is_all = Pattern(parts[0], spend=tree.spend), parts[1], parts[2] == "g"
    said = []
    for name, text in texts_of(tree, rest, stdin):
        edited = [pattern.replace(line, new, all_of_them=is_all) for line in text.splitlines()]
        if "i" in flags and name:
            tree.write(name, lines_of(edited))
        else:
            said += edited
    return lines_of(said), 0


@command
def awk(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:
    """Print or add up one field."""
    _, values, rest = options_of(args, "", "F")
    program = (rest.pop(0) if rest else "").replace(" ", "")
    said = re.fullmatch(r"(?:NR>(\d{1,6}))?\{(print|(\w{1,20})\+=)\$(\d{1,4})\}(?:END\{print(\w{1,20})\})?", program)
    if said is None or said[3] != said[5]:
        raise ShellError("known here: '{print $2}' and '{s+=$2} END {print s}', with NR>1 before them, and -F,")
    skipped, field = int(said[1] or 0), int(said[4])
    rows = [line.split(values.get("F")) for line in all_lines(tree, rest, stdin)[skipped:]]
    cells = [" ".join(row) if field == 0 else row[field - 1] if field <= len(row) else "" for row in rows]
    if said[3] is None:
        return lines_of(cells), 0
    total = sum(float(number[0]) for cell in cells if (number := _NUMBER.match(cell)))
    return f"{total:.6g}\n" if total % 1 else f"{total:.0f}\n", 0


@command
def xargs(tree: Tree, args: list[str], stdin: str) -> tuple[str, int]:
    """Run a command with its input as arguments."""
    name, *given = args or ["echo"]
    if name not in COMMANDS or name == "xargs":
        raise ShellError(f"{name}: not found")
    return COMMANDS[name](tree, [*given, *stdin.split()[:10_000]], "")
