"""A recorded episode, played again in its environment."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from agentrl.errors import ConfigError
from agentrl.plain_data import plain_data
from agentrl.report.folder import RunFolder
from agentrl.report.records import TrajectoryRecord, TurnRecord, read_records
from agentrl.report.show import said
from agentrl.types import FinishReason, Message


def replay(env: Any, record: TrajectoryRecord) -> Iterator[Text]:
    """Take an episode's recorded actions again; yield the dialogue.

    Raises:
        Exception: whatever the environment raises.
    """
    member = int(record.trajectory_id.rpartition("/")[2])
    yield Text(f"reset(seed={record.seed}, options={{'rollout_index': {member}}})", "dim")
    messages, _ = env.reset(seed=record.seed, options={"rollout_index": member})
    for number, turn in enumerate(record.turns, 1):
        yield from map(said, messages)
        yield from _difference(messages, turn)
        yield said(turn.message)
        if turn.finish_reason is not FinishReason.STOP:
            yield Text("It was cut off here, and never carried out.", "dim")
            return
        messages, reward, terminated, truncated, _ = env.step(turn.message)
        end = "".join(f", {name}" for name, holds in (("terminated", terminated), ("truncated", truncated)) if holds)
        yield Text(f"[turn {number}: reward {reward}{end}]", "dim")
    yield from map(said, messages)


def _difference(messages: Sequence[Message], turn: TurnRecord) -> Iterator[Text]:
    if [plain_data(message) for message in messages] != turn.observation:
        yield Text("The record has other messages here, so the episode is another from here on:", "yellow")
        yield from map(said, turn.observation)


def find(run: Path, episode: str) -> TrajectoryRecord:
    """Return the newest record of an episode: those whose environment failed are looked through first.

    Raises:
        ConfigError: where the run keeps none.
    """
    folder = RunFolder.open(run)
    failed = folder.kept_faults()
    for path in (*sorted(failed, key=lambda path: path.stat().st_mtime, reverse=True), *reversed(folder.rollouts())):
        for record in read_records(path):
            if record.trajectory_id == episode:
                return record
    raise ConfigError(
        f"{run} keeps no episode {episode!r}: it keeps those of the steps that report.rollouts_every says, and some whose "
        f"environment failed (agentrl show {run} --faults)"
    )
