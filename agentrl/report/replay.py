"""A recorded episode, played again in its environment."""

import re
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from agentrl.env import base_env
from agentrl.errors import ConfigError
from agentrl.report.folder import RunFolder
from agentrl.report.records import TrajectoryRecord, read_records
from agentrl.report.show import said
from agentrl.rollout.env_calls import Env, reset, reset_options, step
from agentrl.rollout.tasks import EnvTask
from agentrl.types import FinishReason


def replay(env: Env, record: TrajectoryRecord) -> Iterator[Text]:
    """Take an episode's recorded actions again; yield the dialogue.

    Raises:
        Exception: whatever the environment raises, and an EnvError where it breaks its contract.
    """
    base, member = base_env(env), int(record.trajectory_id.rpartition("/")[2])
    task = EnvTask(seed=record.seed, split=record.split, index=record.task_index)
    yield Text(f"reset(seed={record.seed}, options={reset_options(task, rollout_index=member)})", "dim")
    reply = reset(env, base, task, rollout_index=member)
    for number, turn in enumerate(record.turns, 1):
        yield from map(said, reply.messages)
        if list(reply.messages) != turn.observation:
            yield Text("The record has other messages here, so the episode is another from here on:", "yellow")
            yield from map(said, turn.observation)
        yield said(turn.message)
        if turn.finish_reason is not FinishReason.STOP:
            yield Text("It was cut off here, and never carried out.", "dim")
            return
        reply = step(env, base, turn.message)
        end = "".join(f", {name}" for name in ("terminated", "truncated") if getattr(reply, name))
        yield Text(f"[turn {number}: reward {reply.reward:g}{end}]", "dim")
    yield from map(said, reply.messages)


def find(run: Path, episode: str) -> TrajectoryRecord:
    """Return the newest record of an episode: those whose environment failed are looked through first.

    Raises:
        ConfigError: where the run keeps none.
    """
    folder = RunFolder.open(run)
    if re.fullmatch(r".+/[0-9]{1,9}", episode) is None:
        raise ConfigError(f"expected the name of an episode, such as train/000012/3, got {episode!r}")
    failed = folder.kept_faults()
    for path in (*sorted(failed, key=lambda path: path.stat().st_mtime, reverse=True), *reversed(folder.rollouts())):
        for record in read_records(path):
            if record.trajectory_id == episode:
                return record
    raise ConfigError(
        f"{run} keeps no episode {episode!r}: it keeps those of the steps that report.rollouts_every says, and some whose "
        f"environment failed (agentrl show {run} --faults)"
    )
