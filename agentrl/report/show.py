"""A rollout in the terminal, its sampled tokens coloured by advantage."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel as RichPanel
from rich.style import Style
from rich.text import Text
from tokenizers import Tokenizer

from agentrl.plain_data import is_number
from agentrl.report.records import TrajectoryRecord, TurnRecord
from agentrl.types import Message

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
    return next((folder for folder in (path, *path.resolve().parents[:3]) if (folder / "config.yaml").is_file()), None)


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
        for number, turn in enumerate(record.turns, 1)
        for part in (*_read(turn, decode), _action(turn, number, scale, record.fault is None))
    ]
    if record.error:
        parts.append(Text(record.error, style="bold red"))
    if record.fault and record.fault.traceback:
        parts.append(Text(record.fault.traceback, style="red"))
    metrics = "  ".join(f"{name} {value:g}" for name, value in record.metrics.items() if name != "env_s")
    title = f"{record.trajectory_id}  reward {record.reward:g}  {record.stop_reason}"
    return RichPanel(  # as Text, because names may hold brackets, which a str would lose as markup
        Group(*parts), title=Text(title), subtitle=Text(metrics) or None, title_align="left", subtitle_align="left"
    )


def legend() -> Text:
    """Return one line that explains the colours."""
    return Text.assemble(
        "advantage: ", (" negative ", advantage_style(-1, 1)), " 0 ", (" positive ", advantage_style(1, 1))
    )


def said(message: Message) -> Text:
    """Return one message, its tool calls included, in the colour of its role."""
    role = str(message.get("role"))
    style = _ROLE_STYLES.get(role, "white")
    calls = message.get("tool_calls") or []
    calls = [json.dumps(call, ensure_ascii=False) for call in (calls if isinstance(calls, list) else [calls])]
    words = [str(message.get("content") or ""), *calls]
    return Text.assemble((f"{role}: ", f"bold {style}"), (" ".join(filter(None, words)), style))


def _read(turn: TurnRecord, decode: Decode | None) -> Iterator[Text]:
    """Yield what a turn's tokens, or its messages, said before the action."""
    if decode is None or not turn.observation_ids:
        yield from map(said, turn.observation)
        return
    if not turn.extends:
        yield Text("[the history was rewritten: this is the whole context]", "dim")
    yield Text(decode(turn.observation_ids), "cyan")


def _action(turn: TurnRecord, number: int, scale: float, is_trained: bool) -> Text:
    line = Text.assemble(("assistant: ", "bold"))
    for piece, advantage, is_kept in zip(turn.action_pieces, turn.advantages, turn.keep, strict=True):
        left_out = Style(strike=True, dim=True) if is_trained else Style()
        line.append(piece, advantage_style(advantage, scale) if is_kept else left_out)
    mean = sum(turn.advantages) / len(turn.advantages) if turn.advantages else 0.0
    credited = f", advantage {mean:+.3f}" if is_trained else ""
    components = turn.extras.get("reward_components")
    named = components if isinstance(components, dict) and components.keys() != {"reward"} else {}
    parts = ", ".join(f"{name} {amount:g}" for name, amount in named.items() if is_number(amount))
    line.append(f"   [turn {number}: reward {turn.reward:g}{f' ({parts})' if parts else ''}{credited}]", "dim")
    return line
