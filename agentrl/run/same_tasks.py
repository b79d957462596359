"""The tasks of a run stay what they were: their hashes stand in its folder from the beginning."""

import json

from pydantic import TypeAdapter

from agentrl.errors import ConfigError
from agentrl.files import read_json, write_whole
from agentrl.report.folder import RunFolder
from agentrl.rollout import Tasks
from agentrl.types import TaskHashes

_HASHES = TypeAdapter(TaskHashes)


def keep_hashes(tasks: Tasks, folder: RunFolder) -> None:
    """Write the hashes of the tasks with which a run begins, where the environment gives some."""
    if any(tasks.hashes):
        write_whole(folder.tasks, json.dumps(tasks.hashes._asdict()))


def check_hashes(tasks: Tasks, folder: RunFolder) -> None:
    """Compare the tasks with those of the beginning, where there are hashes of both.

    Raises:
        ConfigError: naming the split whose tasks are others.
    """
    if not folder.tasks.is_file():
        return
    before = read_json(folder.tasks, _HASHES, fix="delete it, and nothing is compared")
    for split, had, has in zip(TaskHashes._fields, before, tasks.hashes, strict=True):
        if None not in (had, has) and had != has:
            raise ConfigError(
                f"env: the tasks of the {split} split are not those with which {folder.path} began; resume with that table, or "
                "begin another run"
            )
