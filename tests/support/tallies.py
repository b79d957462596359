"""What a minibatch of given tokens would have shown."""

import torch

from agentrl.learn.metrics import MinibatchStats, Observations

_OF_TOKENS = (
    "token_T",
    "entropy_T",
    "unit_T",
    "clipped_T",
    "advantage_T",
    "log_ratio_T",
    "moved_T",
    "engine_difference_T",
    "version_T",
    "trajectory_T",
)


def add_pass(observations: Observations, **columns: list[float]) -> None:
    """Add a pass in which all columns of tokens but these are 0, and all ratios but these 1."""
    num = max(len(column) for column in columns.values())
    units = {"ratio_U": [1.0] * (1 + int(max(columns.get("unit_T", [0.0]))))}
    columns = {name: [0.0] * num for name in _OF_TOKENS} | units | columns
    observations.add(**{name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()})


def make_tally(**columns: list[float]) -> MinibatchStats:
    """Return the tally of one pass, as `add_pass` makes it."""
    observations = Observations()
    add_pass(observations, **columns)
    return MinibatchStats.from_observations(observations)
