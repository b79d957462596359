"""Which families of models agentrl accepts: a row for each chat template that TRL ships.

    OMP_NUM_THREADS=1 python -m benchmarks.models_table [--only TEMPLATE ...] [--write benchmarks/results/models.md]

Each template is given to `chat.renderer: auto` with a tokenizer of its family's kind (tests/support/families.py), and the
renderer that comes out of it is examined. `--write` replaces the tables of a document, between their markers; the last line
printed is JSON.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.chat import AutoConfig, Renderer, TemplateRenderer
from agentrl.chat.chat_template import TOOLS
from agentrl.chat.proof.template import Finding, examine, functions, says
from agentrl.errors import RendererError
from agentrl.types import Message
from tests.support.families import family_tokenizer, template_names

COLUMNS = (
    "template",
    "renderer",
    "calls",
    "in parallel",
    "text beside calls",
    "thoughts",
    "stop tokens",
    "what it cannot",
)
_CALLS = (("look", {"n": 1}), ("take", {"n": 2}))
_KEPT = {"keep": "kept", "drop_at_user": "dropped at user", "drop": "dropped"}
_USER: Message = {"role": "user", "content": "Hello."}


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a renderer writes so that it is read again."""

    no_tools: str | None
    """Why it is not used with tools. None: it is."""
    parallel: bool
    """Several calls in a turn."""
    text_beside_calls: bool
    thoughts_before_words: bool
    thoughts_before_calls: bool

    @property
    def tools(self) -> bool:
        """Calls."""
        return self.no_tools is None


def abilities(renderer: Renderer) -> Abilities:
    """Try a renderer."""
    no_tools = _refusal(renderer)
    thought = {"reasoning_content": "Hm."}
    one, two = says("", _CALLS[0]), says("", *_CALLS)
    return Abilities(
        no_tools=no_tools,
        parallel=not no_tools and _writes(renderer, two),
        text_beside_calls=not no_tools and _writes(renderer, says("I look.", _CALLS[0])),
        thoughts_before_words=_writes(renderer, says("Yes.") | thought),
        thoughts_before_calls=not no_tools and _writes(renderer, one | thought),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What became of a template."""

    accepted: bool
    """For dialogue."""
    tools: bool
    """Accepted for tools too."""
    cells: tuple[str, ...]
    """Its row of the table, without its name."""


def look_at(tokenizer: Any, *, name: str) -> Examined:
    """Return what `auto` makes of a tokenizer."""
    try:
        renderer = AutoConfig().build(tokenizer, name=name)
    except RendererError as error:
        return Examined(accepted=False, tools=False, cells=("refused", *[""] * (len(COLUMNS) - 3), _line(str(error))))
    can = abilities(renderer)
    findings = examine(renderer, tools=TOOLS if can.tools else ())
    unproven = [finding for finding in findings if finding.problems]
    return Examined(
        accepted=not unproven,
        tools=not unproven and can.tools,
        cells=(
            _kind(renderer),
            _form(renderer) if can.tools else "none",
            _word(can.parallel) if can.tools else "",
            _word(can.text_beside_calls) if can.tools else "",
            _KEPT[renderer.thinking],
            " ".join(f"`{tokenizer.convert_ids_to_tokens(i)}`" for i in renderer.stop_token_ids),
            _lacking(can, findings),
        ),
    )


def _kind(renderer: Renderer) -> str:
    name = getattr(renderer, "name", None)  # of a family of the package `renderers`
    return "template" if isinstance(renderer, TemplateRenderer) else f"renderers: {name}"


def _form(renderer: Renderer) -> str:
    if isinstance(renderer, TemplateRenderer):
        return renderer.facts.form.name
    return getattr(renderer, "form_name", None) or "the package's"


def _refusal(renderer: Renderer) -> str | None:
    """Return why a renderer cannot be used with tools. None: it can."""
    if isinstance(renderer, TemplateRenderer):
        return renderer.facts.no_tools
    try:
        renderer.start([_USER], TOOLS)
    except RendererError as error:
        return str(error)
    return None


def _writes(renderer: Renderer, message: Message) -> bool:
    """Tell whether a renderer writes a message so that it is read again."""
    try:
        parsed = renderer.parse(renderer.encode(message), (), TOOLS)
    except RendererError:
        return False
    same = [parsed.get(key) or "" for key in ("content", "reasoning_content")] == [
        message.get(key) or "" for key in ("content", "reasoning_content")
    ]
    return same and functions(parsed) == functions(message)


def _word(yes: bool) -> str:
    return "yes" if yes else "no"


def _lacking(can: Abilities, findings: Sequence[Finding]) -> str:
    """Return what a renderer cannot, but for what other columns say."""
    thoughts = {"words": can.thoughts_before_words, "calls": can.thoughts_before_calls or not can.tools}
    return "; ".join(
        [
            *([f"tools: {_line(can.no_tools)}"] if can.no_tools else []),
            *(f"write a thought before {what}" for what, writes in thoughts.items() if not writes),
            *(f"not proven: {finding.claim}" for finding in findings if finding.problems),
        ]
    )


def _line(text: str) -> str:
    return " ".join(text.removeprefix("chat.renderer: ").split())[:160]


def rows(names: Sequence[str]) -> dict[str, Examined]:
    """Return what became of each template."""
    return {name: look_at(family_tokenizer(name), name=name) for name in names}


def table(found: Mapping[str, Examined]) -> str:
    """Return the table of some templates."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *((name, *one.cells) for name, one in found.items())]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def counts(found: Mapping[str, Examined]) -> str:
    """Return how many templates are accepted."""
    num_dialogue, num_tools = (sum(getattr(one, key) for one in found.values()) for key in ("accepted", "tools"))
    return (
        f"Of {len(found)} templates, {num_dialogue} are accepted for dialogue and {num_tools} of these for tools.\n\n"
    )


def packaged(found: Mapping[str, Examined]) -> str:
    """Return the families of the package `renderers`, and for which templates each is taken."""
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    lines = ["| family of `renderers` | taken for |", "| --- | --- |"]
    for family in sorted(RENDERER_REGISTRY.keys() - {"default"}):
        taken = [name for name, one in found.items() if one.cells[0] == f"renderers: {family}"]
        lines.append(f"| {family} | {', '.join(taken) or 'none of these templates'} |")
    return "\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=template_names(), default=template_names(), metavar="TEMPLATE")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="put the table into it")
    options = parser.parse_args()
    found = rows(options.only)
    text = counts(found) + table(found) + packaged(found)
    print(text)
    if options.write:
        before, begin, rest = options.write.read_text().partition("<!-- models -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"{options.write} has no markers"
        options.write.write_text(f"{before}{begin}{text}{end}{after}")
    accepted = {key: [name for name, one in found.items() if getattr(one, key)] for key in ("accepted", "tools")}
    print(json.dumps(accepted))


if __name__ == "__main__":
    main()
