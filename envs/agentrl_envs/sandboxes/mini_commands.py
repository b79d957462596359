"""What the commands of the small shell share: their table, and how they read arguments and files."""

import re
from collections.abc import Callable, Iterable

from agentrl_envs.sandboxes.mini_tree import ShellError, Tree

Command = Callable[[Tree, list[str], str], tuple[str, int]]
"""Files, arguments and input to output and status."""
COMMANDS: dict[str, Command] = {}


def command(function: Command) -> Command:
    """Put a command into the table, by its name."""
    COMMANDS[function.__name__] = function
    return function


def options_of(args: list[str], flags: str, valued: str = "") -> tuple[set[str], dict[str, str], list[str]]:
    """Split arguments into flags, options with a value, and the rest."""
    found: set[str] = set()
    values: dict[str, str] = {}
    rest: list[str] = []
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        if arg == "--":
            return found, values, [*rest, *queue]
        if not arg.startswith("-") or arg == "-":
            rest.append(arg)
            continue
        letters = arg[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in valued:
                if not letters and not queue:
                    raise ShellError(f"-{letter} needs a value")
                if letter in values:
                    raise ShellError(f"-{letter} is known here once")
                values[letter], letters = letters or queue.pop(0), ""
            elif letter in flags:
                found.add(letter)
            else:
                raise ShellError(
                    f"option -{letter} is not known here; known: {' '.join(f'-{x}' for x in flags + valued)}"
                )
    return found, values, rest


def whole(text: str) -> int:
    """Return the number that a text is."""
    if not re.fullmatch(r"\+?\d{1,9}", text):
        raise ShellError(f"{text}: not a number")
    return int(text)


def texts_of(tree: Tree, names: list[str], stdin: str) -> list[tuple[str, str]]:
    """Return what a command reads: files with their names, or its input."""
    texts: list[tuple[str, str]] = []
    num_bytes = 0
    for name in names or ["-"]:
        texts.append((name if names else "", stdin if name == "-" else tree.read(name)))
        num_bytes += len(texts[-1][1])
        if num_bytes > tree.max_bytes:
            raise ShellError("input too large")
    tree.spend(num_bytes // 100)
    return texts


def all_lines(tree: Tree, names: list[str], stdin: str) -> list[str]:
    """Return the lines of all that a command reads."""
    return [line for _, text in texts_of(tree, names, stdin) for line in text.splitlines()]


def lines_of(lines: Iterable[str]) -> str:
    """Return lines as text."""
    return "".join(f"{line}\n" for line in lines)
