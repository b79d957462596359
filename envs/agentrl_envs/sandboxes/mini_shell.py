"""A shell of some 25 commands on files in memory: no process, no program, nothing of the machine."""

import glob
from typing import Literal, NamedTuple

from agentrl import ExecResult, Language, SandboxConfig
from agentrl_envs.sandboxes import mini_files as mini_files
from agentrl_envs.sandboxes import mini_texts as mini_texts
from agentrl_envs.sandboxes.files import Files, FileSandbox
from agentrl_envs.sandboxes.mini_commands import COMMANDS
from agentrl_envs.sandboxes.mini_tree import ShellError, TooMuchWork, Tree

_MAX_CODE = 20_000
"""Characters of commands."""
_OPERATORS = ("&&", "||", ">>", "2>", ";", "|", ">", "<", "\n")
_NOT_HERE = "$`(){}&!"


class MiniShellConfig(SandboxConfig):
    """Commands with options, patterns, quotes, `|`, `>`, `>>`, `<`, `;`, `&&` and `||`; no variables, loops or programs."""

    name: Literal["mini_shell"] = "mini_shell"

    def build(self) -> "MiniShell":
        """Return a new sandbox."""
        return MiniShell(self)


class MiniShell(FileSandbox):
    """Each `exec` interprets a few lines, in this process."""

    languages = ("sh",)

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self._max_output = config.max_output_bytes

    def _run(self, code: str, language: Language, files: Files) -> tuple[ExecResult, Files | None]:  # noqa: ARG002
        tree = Tree(files, self.max_bytes)
        try:
            said, status = _script(tree, code)
        except ShellError as error:
            said, status = f"sh: {error}\n", 2
        except TooMuchWork:
            return ExecResult(output="sh: stopped, too much work\n", returncode=137, timed_out=True), None
        output = said.encode(errors="replace")
        result = ExecResult(
            output=output[: self._max_output].decode(errors="replace"),
            returncode=status,
            num_cut=max(0, len(output) - self._max_output),
        )
        return result, tree.plain()


class _Token(NamedTuple):
    text: str
    is_operator: bool = False
    pattern: str | None = None
    """Where the word has a `*`, `?` or `[` that is not quoted: the word with those that are quoted escaped."""


def _script(tree: Tree, code: str) -> tuple[str, int]:
    """Run commands one after the other; return what they say, and the last one's status."""
    if len(code) > _MAX_CODE:
        raise ShellError(f"more than {_MAX_CODE} characters")
    tokens = _tokens(code)
    said: list[str] = []
    num_said, status, joined_by, at = 0, 0, ";", 0
    while at < len(tokens):
        end = next((k for k in range(at, len(tokens)) if _is(tokens[k], "&&", "||", ";", "\n")), len(tokens))
        if end > at and (joined_by in (";", "\n") or (joined_by == "&&") == (status == 0)):
            more, status = _pipeline(tree, tokens[at:end])
            said.append(more)
            num_said += len(more)
            if num_said > tree.max_bytes:
                raise ShellError("output too large")
        if end < len(tokens):
            is_missing = end == at and (joined_by in ("&&", "||") or _is(tokens[end], "&&", "||"))
            if is_missing and not (_is(tokens[end], "\n") and joined_by in ("&&", "||")):
                raise ShellError(f"a command is missing before {tokens[end].text.strip() or 'the end of the line'}")
            joined_by = joined_by if is_missing else tokens[end].text
        at = end + 1
    return "".join(said), status


def _pipeline(tree: Tree, tokens: list[_Token]) -> tuple[str, int]:
    """Run commands, each with the output of the one before as its input."""
    stdin, errors, status = "", "", 0
    while tokens:
        end = next((k for k, token in enumerate(tokens) if _is(token, "|")), len(tokens))
        tree.spend(1)
        if end in (0, len(tokens) - 1):
            raise ShellError("a command is missing beside |")
        stdin, error, status = _command(tree, tokens[:end], stdin)
        errors += error
        tokens = tokens[end + 1 :]
    return errors + stdin, status


def _command(tree: Tree, tokens: list[_Token], stdin: str) -> tuple[str, str, int]:
    """Run one command; return its output, its errors and its status."""
    words: list[str] = []
    to: list[tuple[str, str]] = []
    try:
        rest = iter(tokens)
        for token in rest:
            if token.is_operator:
                if (target := next(rest, None)) is None or target.is_operator:
                    raise ShellError(f"a file's name is missing after {token.text}")
                if token.text == "<":
                    stdin = tree.read(target.text)
                else:
                    to.append((token.text, target.text))
            else:
                words += (token.pattern and tree.expanded(token.pattern)) or [token.text]
        if not words:
            raise ShellError("a command is missing")
        if words[0] not in COMMANDS:
            return "", f"sh: {words[0]}: not found (commands here: {', '.join(sorted(COMMANDS))})\n", 127
    except ShellError as error:
        return "", f"sh: {error}\n", 2
    errors = ""
    try:
        output, status = COMMANDS[words[0]](tree, words[1:], stdin)
    except ShellError as error:
        output, status, errors = "", 1, f"{words[0]}: {error}\n"
    for operator, name in to:
        if operator == "2>":
            errors = ""  # only /dev/null makes sense here
            continue
        if name != "/dev/null":
            try:
                before = tree.read(name) if operator == ">>" and tree.path(name) in tree.files else ""
                tree.write(name, before + output)
            except ShellError as error:
                return "", f"sh: {error}\n", 2
        output = ""
    return _bounded(tree, output), errors, status


def _tokens(code: str) -> list[_Token]:
    """Split commands into words and operators, as a shell does."""
    tokens: list[_Token] = []
    word: str | None = None
    pattern, has_pattern, at = "", False, 0

    def end_word() -> None:
        nonlocal word, pattern, has_pattern
        if word is not None:
            tokens.append(_Token(word, pattern=pattern if has_pattern else None))
        word, pattern, has_pattern = None, "", False

    while at < len(code):
        character = code[at]
        operator = next((o for o in _OPERATORS if code.startswith(o, at) and (o != "2>" or word is None)), "")
        if operator:
            end_word()
            tokens.append(_Token(operator, is_operator=True))
            at += len(operator)
        elif character.isspace() or (character == "#" and word is None):
            end_word()
            at = at + 1 if character != "#" else len(code) if (line := code.find("\n", at)) < 0 else line
        elif character in "'\"":
            if (end := code.find(character, at + 1)) < 0:
                raise ShellError(f"a {character} is not closed")
            quoted = code[at + 1 : end]
            if character == '"' and any(c in quoted for c in "$`\\"):
                raise ShellError('no $, ` or \\ within "..." here')
            word, pattern = (word or "") + quoted, pattern + glob.escape(quoted)
            at = end + 1
        elif character in _NOT_HERE:
            raise ShellError(f"no {character} here: no variables, substitutions, groups or jobs")
        else:
            is_escape = character == "\\" and at + 1 < len(code)
            character = code[at + is_escape]
            word = (word or "") + character
            pattern += glob.escape(character) if is_escape else character
            has_pattern |= not is_escape and character in "*?["
            at += 1 + is_escape
    end_word()
    return tokens


def _is(token: _Token, *operators: str) -> bool:
    return token.is_operator and token.text in operators


def _bounded(tree: Tree, text: str) -> str:
    if len(text) > tree.max_bytes:
        raise ShellError("output too large")
    return text
