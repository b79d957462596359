"""Facts about a model's dialogues, in the terminal: choice, proof, facts, and a dialogue token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from agentrl.chat.proof.inspection import Author, Inspection, Token, Turn
from agentrl.report.terminal import printable

_SHADES: dict[Author, tuple[str, str]] = {
    "template": ("#d4d4d4", "#bebebe"),
    "system": ("#ead2f5", "#d9b6ea"),
    "user": ("#bfdcf7", "#9fc9f0"),
    "tool": ("#fbe3b0", "#f3d087"),
    "model": ("#bfe8b9", "#9ed996"),
}
"""Colours of neighbouring tokens, in turn."""
_SPECIAL = Style(bold=True, color="#b00000")
_MARKS = {"proven": ("proven", "green"), "lacking": ("lacking", "yellow"), "not so": ("not so", "bold red")}
_WHO = {"model": "sampled"}
_GUTTER = 10


def sections(found: Inspection) -> Iterator[RenderableType]:
    """Yield what is printed of a model, one below the other."""
    choices = _grid()
    for choice in found.tried:
        is_refused = found.error is not None and choice.chosen
        mark = ("refused", "bold red") if is_refused else ("chosen", "bold green") if choice.chosen else ("not", "dim")
        choices.add_row(Text(*mark), Text.assemble((choice.renderer, "bold"), f": {choice.reason}"))
    for note in found.notes:
        choices.add_row(Text("note", "yellow"), Text(note))
    if choices.row_count:
        yield from _section(f"Renderer of {found.model}", choices)
    if found.facts:
        facts = _grid()
        for name, words in found.facts.items():
            facts.add_row(Text(name, "bold"), Text(words))
        stops = [f"{token.text} ({token.id})" for token in found.stop_tokens]
        facts.add_row(Text("stop tokens", "bold"), Text("\n".join(stops)))
        yield from _section("What it does", facts)
    if found.proof:
        claims = _grid()
        for claim in found.proof:
            reasons = [(f"\n{words}", "dim" if claim.result == "lacking" else "red") for words in claim.words]
            claims.add_row(Text(*_MARKS[claim.result]), Text.assemble(claim.claim, *reasons))
        yield from _section("What was proven, by playing dialogues", claims)
    if found.dialogue:
        yield from _section("A dialogue, token by token", Legend(), *dialogue(found.dialogue))


def dialogue(turns: Sequence[Turn]) -> Iterator[RenderableType]:
    """Yield the turns of a dialogue."""
    for number, turn in enumerate(turns, start=1):
        title = Text(f"\nturn {number}", "bold")
        if turn.rewrites:
            title.append(f"   history is rewritten: after {turn.num_kept} tokens as before, a new segment", "yellow")
        yield title
        for author, tokens in groupby(turn.tokens, key=lambda token: token.author):
            yield Run(author, list(tokens))


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that one author has written in a row; a line is broken between tokens, and after ends of lines."""

    author: Author
    tokens: list[Token]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield lines."""
        who = _WHO.get(self.author, self.author).ljust(_GUTTER)
        line = Text.assemble((who, "bold" if self.author == "model" else "dim"))
        room = options.max_width - _GUTTER
        left, is_broken = room, False
        for number, token in enumerate(self.tokens):
            piece = _piece(token, number, in_colour=_in_colour(console))
            for part in piece.divide(_cuts(piece.plain, room)):
                if is_broken or (cell_len(part.plain) > left and left < room):
                    yield _of_one_line(line)
                    line, left = Text(" " * _GUTTER), room
                line = line + part
                left = left - cell_len(part.plain)
                is_broken = False
            is_broken = token.text.endswith("\n")
        yield _of_one_line(line)


class Legend:
    """Says what colours and brackets mean."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a line."""
        special = Token(id=0, text="<control>", author="template", special=True)
        if not _in_colour(console):
            yield Text("[a token]  «a control token»  ↵ an end of line")
            return
        pieces = [
            Text(f" {_WHO.get(author, author)} ", Style(color="black", bgcolor=shades[0]))
            for author, shades in _SHADES.items()
        ]
        yield Text(" ").join([*pieces, _piece(special, 0, in_colour=True), Text("↵ an end of line", "dim")])


def _grid() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _section(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
    yield Text(title, "bold underline")
    yield from parts
    yield Padding("", (0, 0))


def _in_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _piece(token: Token, number: int, *, in_colour: bool) -> Text:
    """Return a token as it is shown."""
    text = printable(token.text.replace("\n", "↵").replace("\t", "→")) or "·"
    if not in_colour:
        return Text(f"«{text}»" if token.special else f"[{text}]")
    style = Style(color="black", bgcolor=_SHADES[token.author][number % 2])
    return Text(text, style + _SPECIAL if token.special else style)


def _cuts(text: str, room: int) -> list[int]:
    """Return where a piece that is longer than a line is cut."""
    cuts, width = list[int](), 0
    for place, letter in enumerate(text):
        width += cell_len(letter)
        if width > room:
            cuts.append(place)
            width = cell_len(letter)
    return cuts


def _of_one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ignore"
    return text
