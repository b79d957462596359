"""The one place that writes to the terminal: text of models, tools, environments and files cannot steer it."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from rich import console
from rich.console import Group, RenderableType
from rich.panel import Panel as RichPanel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from agentrl.data.files import read_json, write_whole
from agentrl.data.plain import is_number
from agentrl.report.calls import difference_of, kind_of, relation
from agentrl.report.folder import RunFolder
from agentrl.report.records import TrajectoryRecord, TurnRecord, calls_of
from agentrl.types import AmountOrZero, Count, Message, Trajectory

_CONTROL = chain(
    (code for code in range(0x20) if code not in (0x09, 0x0A)),  # C0, but for tabs and ends of lines
    range(0x7F, 0xA0),  # DEL and C1
    (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # which turn the direction of writing
)
_PRINTABLE = dict.fromkeys(_CONTROL) | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # half a letter, as JSON may hold


def printable(text: str) -> str:
    """Return a text without control characters, of which terminals take some for commands."""
    return text.translate(_PRINTABLE)


_LISTENERS: list[Callable[[str], None]] = []


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Pass to a listener, in plain text, whatever any console prints meanwhile; and what is noted for it alone."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def note(text: str) -> None:
    """Pass to listeners what the terminal shows otherwise."""
    for listener in _LISTENERS:
        listener(printable(text))


_ANNOUNCERS: list[Callable[[str], None]] = []


@contextmanager
def announced_by(show: Callable[[str], None]) -> Iterator[None]:
    """Pass to a function what is announced meanwhile."""
    _ANNOUNCERS.append(show)
    try:
        yield
    finally:
        _ANNOUNCERS.remove(show)


def announce(words: str) -> None:
    """Show what a run does next before its steps: loading, proofs and compilation may take minutes."""
    for show in _ANNOUNCERS:
        show(words)


class Console(console.Console):
    """Prints text as it is: no control characters but its own, and no brackets or colons that mean something.

    It prints on the stream of its beginning, whatever an environment puts in the place of that, and nowhere if it is closed.
    """

    def __init__(self, **options: Any) -> None:
        stream = sys.stderr if options.get("stderr") else sys.stdout
        super().__init__(markup=False, emoji=False, highlight=False, **{"file": stream, **options})

    def print(self, *objects: Any, **options: Any) -> None:
        """Print text as it is, and pass it to listeners."""
        if not getattr(self.file, "closed", False):
            super().print(*objects, **options)
        if _LISTENERS and objects and all(isinstance(shown, str | Text | Table) for shown in objects):
            plain = console.Console(
                file=StringIO(), width=160, markup=False, emoji=False, highlight=False, soft_wrap=True
            )
            with plain.capture() as captured:
                plain.print(*objects)
            note(captured.get())

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the pieces of what is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class Panel(BaseModel):
    """The evaluation tasks of a run, in their order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: tuple[str | None, ...]
    """A hash of each, as it showed at its beginning. None: every episode of it failed before that."""
    since: AmountOrZero = 0
    """First step that was evaluated on them like this: a run may be resumed with others."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Temperature of sampling."""
    samples: Count
    """Episodes for each task."""

    def agrees(self, other: Self) -> bool:
        """Return whether these are the same tasks, played alike, as far as both know the tasks."""
        pairs = zip(self.tasks, other.tasks, strict=False)
        is_same_length = len(self.tasks) == len(other.tasks)
        return is_same_length and self.played == other.played and all(a == b or None in (a, b) for a, b in pairs)

    def joined(self, other: Self) -> Self:
        """Return the same tasks, with what either knows of them."""
        tasks = tuple(a or b for a, b in zip(self.tasks, other.tasks, strict=True))
        return self.model_copy(update={"tasks": tasks})

    @property
    def played(self) -> dict[str, float]:
        """Settings with which the tasks were played."""
        return {"temperature": self.temperature, "samples": self.samples}

    @property
    def name(self) -> str:
        """A hash of all tasks."""
        return hashlib.sha256(repr(self.tasks).encode()).hexdigest()[:12]


_PANELS = TypeAdapter(dict[str, Panel])


def read_panels(folder: RunFolder) -> dict[str, Panel]:
    """Return the panel of each environment that a run is evaluated in, by the prefix of its metrics; empty if none is noted."""
    if not os.path.lexists(folder.panel):
        return {}
    return read_json(folder.panel, _PANELS, fix="delete it, and nothing is known of the run's evaluation tasks")


def note_panels(folder: RunFolder, found: Mapping[str, Panel]) -> None:
    """Note the panels of an evaluation; if they are others than before, those before are forgotten."""
    known = read_panels(folder)
    noted = dict(known)
    for prefix, panel in found.items():
        before = known.get(prefix)
        noted[prefix] = before.joined(panel) if before is not None and before.agrees(panel) else panel
    if noted != known:
        write_whole(folder.panel, _PANELS.dump_json(noted, indent=1))


_ROLE_STYLES = {"system": "dim", "user": "cyan", "tool": "magenta", "assistant": "white"}


def advantage_style(advantage: float, scale: float) -> Style:
    """Return a background from red (-scale) over black (0) to green (+scale)."""
    share = max(-1.0, min(1.0, advantage / scale)) if scale > 0 else 0.0
    level = int(40 + 150 * abs(share))
    if share == 0:
        return Style()
    return Style(bgcolor=f"#00{level:02x}00" if share > 0 else f"#{level:02x}0000", color="white")


Decode = Callable[[list[int]], str]


def run_of(path: Path) -> Path | None:
    """Return the folder of the run that a file of rollouts, or the folder itself, belongs to. None: there is none."""
    named = Path(os.path.abspath(path)).parents[:3]  # also of a file that links elsewhere
    candidates = (path, *named, *path.resolve().parents[:3])
    return next((folder for folder in candidates if (folder / "config.yaml").is_file()), None)


def decoder(run: Path | None) -> Decode | None:
    """Return what decodes a run's tokens, control tokens included. None: its tokenizer is not there, or has another form."""
    file = run / "tokenizer" / "tokenizer.json" if run else None
    if file is None or not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - tokenizers raises nothing narrower; messages are shown instead
        return None
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def render(record: TrajectoryRecord, decode: Decode | None = None) -> RenderableType:
    """Return a panel: what the model read, its actions token by token, with the reward and the advantage of each turn.

    Args:
        record: what to show.
        decode: turns tokens into text: what was read is shown so, as the template wrote it, with system text, tool schemas and
            control tokens. None: messages as they came.
    """
    scale = max((abs(a) for turn in record.turns for a in turn.advantages), default=0.0)
    parts = [
        part
        for number, turn in enumerate(record.turns)
        for part in (*_read(turn, number, decode), _action(turn, number + 1, scale, record.fault is None))
    ]
    if record.error:
        parts.append(Text(record.error, style="bold red"))
    if record.fault and record.fault.traceback:
        parts.append(Text(record.fault.traceback, style="red"))
    if metrics := "  ".join(f"{name} {value:g}" for name, value in record.metrics.items() if name != "env_s"):
        parts.append(Text(metrics, style="dim"))
    title = f"{record.trajectory_id}  reward {record.reward:g}  {record.stop_reason}"
    # As Text, because names may hold brackets, which a str would lose as markup.
    return RichPanel(Group(*parts), title=Text(title), title_align="left")


def legend() -> Text:
    """Return one line that explains the colours."""
    return Text.assemble(
        "advantage: ", (" negative ", advantage_style(-1, 1)), " 0 ", (" positive ", advantage_style(1, 1))
    )


def said(message: Message) -> Text:
    """Return one message, its tool calls included, in the colour of its role."""
    role = str(message.get("role"))
    style = _ROLE_STYLES.get(role, "white")
    words = [str(message.get("content") or ""), *calls_of(message)]
    return Text.assemble((f"{role}: ", f"bold {style}"), (" ".join(filter(None, words)), style))


_MAX_SHOWN = 12
"""Messages of a dialogue that are shown in short."""
_MAX_CHARS = 300
"""Characters of each."""


def in_short(trajectory: Trajectory) -> Iterator[Text]:
    """Yield an episode as it is printed beside figures: its first messages, cut, and how it ended."""
    yield Text(f"{trajectory.trajectory_id} of {trajectory.env_id}", "bold")
    messages = [message for turn in trajectory.turns for message in (*turn.observation, turn.message)]
    for message in messages[:_MAX_SHOWN]:
        words = said(message)
        if left := max(0, len(words) - _MAX_CHARS):
            words = words[:_MAX_CHARS].append(f" [{left} more characters]", "dim")
        yield words
    more = f"{len(messages) - _MAX_SHOWN} more messages, " if len(messages) > _MAX_SHOWN else ""
    success = "" if (found := trajectory.reported("success")) is None else f", success {found:g}"
    result = trajectory.error if trajectory.failed else f"reward {trajectory.reward:g}{success}"
    yield Text(f"[{more}{trajectory.stop_reason}, {len(trajectory.turns)} turns, {result}]", "dim")


def _read(turn: TurnRecord, number: int, decode: Decode | None) -> Iterator[Text]:
    """Yield what a turn's tokens, or its messages, said before the action."""
    if kind_of(turn):
        difference = f"; {words}" if (words := difference_of(turn)) else ""
        yield Text(f"[{relation(turn, number)}{difference}]", "dim")
    elif turn.parent is not None:
        yield Text(f"[after turn {turn.parent + 1}]", "dim")
    if decode is None or not turn.observation_ids:
        yield from map(said, turn.observation)
        return
    if not turn.extends and kind_of(turn) != "root":
        yield Text("[the history was rewritten: this is the whole context]", "dim")
    yield Text(decode(turn.observation_ids), "cyan")


def _action(turn: TurnRecord, number: int, scale: float, is_trained: bool) -> Text:
    line = Text.assemble((f"{turn.agent or 'assistant'}: ", "bold"))
    for piece, advantage, is_kept in zip(turn.action_pieces, turn.advantages, turn.keep, strict=True):
        left_out = Style(strike=True, dim=True) if is_trained else Style()
        line.append(piece, advantage_style(advantage, scale) if is_kept else left_out)
    if not turn.action_ids:  # an endpoint shows no tokens
        line.append(str(turn.message.get("content") or ""))
    mean = sum(turn.advantages) / len(turn.advantages) if turn.advantages else 0.0
    credited = f", advantage {mean:+.3f}" if is_trained else ""
    components = turn.extras.get("reward_components")
    named = components if isinstance(components, dict) and components.keys() != {"reward"} else {}
    parts = ", ".join(f"{name} {amount:g}" for name, amount in named.items() if is_number(amount))
    if calls := calls_of(turn.message):
        line.append(f"\n  called {'; '.join(calls)}")
    line.append(f"   [turn {number}: reward {turn.reward:g}{f' ({parts})' if parts else ''}{credited}]", "dim")
    return line
