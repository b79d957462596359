"""Promises of every renderer and of every sandbox, each as one call: `check_renderer(MyRenderer(tokenizer))`."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agentrl.data.plain import line_of
from agentrl.env import ExecResult, Language, Sandbox, SandboxConfig, sandbox_config
from agentrl.errors import CheckError, UserError

if TYPE_CHECKING:
    from agentrl.chat.renderer import Renderer, Tools


def check_renderer(renderer: "Renderer", *, tools: "Tools | None" = None) -> None:
    """Raise with all that is wrong with a renderer; return if nothing is.

    The same dialogues are played as with a model's own template before a run (`agentrl.chat.proof.template.examine`).

    Args:
        renderer: what to check.
        tools: at least two, as in the first context of an episode, or none for a renderer without tools. None: two of ours.

    Raises:
        CheckError: one line for each thing that is wrong.
    """
    from agentrl.chat.chat_template import TOOLS
    from agentrl.chat.proof.template import examine

    findings = examine(renderer, tools=TOOLS if tools is None else tools)
    problems = dict.fromkeys(problem for finding in findings for problem in finding.problems)
    if problems:
        lines = "".join(f"\n- {problem}" for problem in problems)
        raise CheckError(f"renderer {type(renderer).__name__}:{lines}")


_LATE_S = 5.0
"""Seconds beyond its deadline that an `exec` may take here."""
_LOOP: dict[Language, str] = {"python": "while True: pass", "sh": "while true; do true; done"}
_ECHO: dict[Language, str] = {"python": "print('well')", "sh": "echo well"}
_LONG: dict[Language, str] = {"python": "print('x' * 5000)", "sh": f"echo {'x' * 5000}"}
_MAX_OUTPUT = 1000
_COPY: dict[Language, str] = {
    "python": "text = open('in/a.txt').read()\nopen('out.txt', 'w').write(text)",
    "sh": "cat in/a.txt > out.txt",
}


def check_sandbox(sandbox: str | Mapping[str, Any]) -> None:
    """Hold a sandbox to what `agentrl.Sandbox` says; not to being one: what gets out, only attempts to get out can tell.

    Args:
        sandbox: an installed name or `module:Class`, or a mapping of its name and fields.

    Raises:
        CheckError: listing what is wrong.
        UserError: if it cannot be had here.
    """
    named = {"name": sandbox} if isinstance(sandbox, str) else dict(sandbox)
    lines: list[str] = []
    _check(sandbox_config({**named, "timeout_s": 2.0, "max_output_bytes": _MAX_OUTPUT}), lines)
    if lines:
        raise CheckError("\n".join([f"{named.get('name')}: {len(lines)} of its promises do not hold", *lines]))


def _check(config: SandboxConfig, lines: list[str]) -> None:
    with config.build() as sandbox:
        language = _language(sandbox, lines)
        if language is None:
            return
        with _noting(lines, "files"):
            sandbox.write("in/a.txt", "née\n")
            sandbox.exec(_COPY[language], language=language)
            if (got := (sandbox.read("in/a.txt"), sandbox.read("out.txt"))) != ("née\n".encode(),) * 2:
                lines.append(f"exec() copied 'née' from a file to another, and they read {got!r}")
            if (paths := sandbox.paths()) != ["in/a.txt", "out.txt"]:
                lines.append(f"paths() returned {paths!r} where there are in/a.txt and out.txt")
        _refuses(lines, "read() of a file that is not there", FileNotFoundError, lambda: sandbox.read("nothing"))
        for path in ("../x", "/etc/hostname", "in/../../x"):
            _refuses(lines, f"read({path!r})", ValueError, lambda path=path: sandbox.read(path))  # type: ignore[misc]
            _refuses(lines, f"write({path!r})", ValueError, lambda path=path: sandbox.write(path, "x"))  # type: ignore[misc]
        with _noting(lines, "long output"):
            result = sandbox.exec(_LONG[language], language=language)
            if len(result.output.encode()) > _MAX_OUTPUT or result.num_cut == 0:
                lines.append(
                    f"exec() of code that prints 5000 characters kept {len(result.output.encode())} bytes and cut "
                    f"{result.num_cut}, where max_output_bytes is {_MAX_OUTPUT}"
                )
        with _noting(lines, "a deep copy"), copy.deepcopy(sandbox) as copied:
            copied.write("in/a.txt", "other")
            if sandbox.read("in/a.txt") != "née\n".encode():
                lines.append("what is written into a deep copy changes the sandbox that it was made of")
        with _noting(lines, "code that is none"):
            if sandbox.exec("(", language=language).returncode == 0:
                lines.append("exec() of what is no code returned 0")
        _check_loop(sandbox, language, lines)
        with _noting(lines, "another sandbox"), config.build() as other:
            if (paths := other.paths()) != []:
                lines.append(f"a new sandbox begins with {paths!r}")
    with _noting(lines, "close"):
        sandbox.close()
    _refuses(lines, "exec() after close()", ValueError, lambda: sandbox.exec(_ECHO[language], language=language))
    _refuses(lines, "read() after close()", ValueError, lambda: sandbox.read("in/a.txt"))
    _refuses(lines, "write() after close()", ValueError, lambda: sandbox.write("in/a.txt", "x"))


def _language(sandbox: Sandbox, lines: list[str]) -> Language | None:
    """Return a language that the sandbox has. None: it has none, or cannot say a word in it."""
    for language, code in _ECHO.items():
        with _noting(lines, f"exec(language={language!r})"):
            try:
                result = sandbox.exec(code, language=language)
            except UserError:
                continue
            if result == ExecResult(output="well\n", returncode=0):
                return language
            lines.append(f"exec({code!r}) returned {result!r}")
            return None
    lines.append("exec() runs neither python nor sh")
    return None


def _check_loop(sandbox: Sandbox, language: Language, lines: list[str]) -> None:
    with _noting(lines, "an endless loop"):
        begun = time.monotonic()
        result = sandbox.exec(_LOOP[language], language=language)
        seconds = time.monotonic() - begun
        if not result.timed_out or result.returncode == 0:
            lines.append(f"exec() of an endless loop returned {result!r}; timed_out must be True, returncode not 0")
        if seconds > 2.0 + _LATE_S:
            lines.append(f"exec() returned {seconds:.1f} s after it began, where timeout_s is 2")
        if sandbox.paths() != ["in/a.txt", "out.txt"]:
            lines.append(
                f"after code that was killed, paths() returned {sandbox.paths()!r}: the files are not as before"
            )


def _refuses(lines: list[str], what: str, error: type[Exception], call: Callable[[], object]) -> None:
    try:
        got = call()
    except error:
        return
    except Exception as other:  # noqa: BLE001 - whatever it raises is what the report is about
        lines.append(f"{what} raised {line_of(other)}; raise {error.__name__}")
        return
    lines.append(f"{what} returned {got!r}; raise {error.__name__}")


@contextmanager
def _noting(lines: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it raises is what the report is about
        lines.append(f"{what}: raised {line_of(error)}")
