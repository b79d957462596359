"""A rollout in the terminal, its sampled tokens coloured by advantage."""

import json
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.text import Text

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


def render(record: TrajectoryRecord) -> RenderableType:
    """Return a panel: messages as they came, actions token by token, with the reward and the advantage of each turn."""
    scale = max((abs(a) for turn in record.turns for a in turn.advantages), default=0.0)
    parts = [
        part for number, turn in enumerate(record.turns, 1) for part in _turn(turn, number, scale, record.fault is None)
    ]
    if record.error:
        parts.append(Text(record.error, style="bold red"))
    if record.fault and record.fault.traceback:
        parts.append(Text(record.fault.traceback, style="red"))
    metrics = "  ".join(f"{name} {value:g}" for name, value in record.metrics.items() if name != "env_s")
    title = f"{record.trajectory_id}  reward {record.reward:g}  {record.stop_reason}"
    return Panel(  # as Text, because names may hold brackets, which a str would lose as markup
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
    calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
    words = [str(message.get("content") or ""), *calls]
    return Text.assemble((f"{role}: ", f"bold {style}"), (" ".join(filter(None, words)), style))


def _turn(turn: TurnRecord, number: int, scale: float, is_trained: bool) -> Iterator[Text]:
    yield from map(said, turn.observation)
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
    yield line
