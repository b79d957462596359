"""How the tasks of a run are dealt out to its processes."""

from typing import NamedTuple


class Share(NamedTuple):
    """What one process collects."""

    num_groups: int
    """Of a step. 0: it only trains."""
    first: int = 0
    """Its first task."""
    stride: int = 1
    """From one of its tasks to the next; those in between are other processes'."""
