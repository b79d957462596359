"""Metrics over the steps as a picture, where matplotlib is installed."""

from collections.abc import Sequence
from typing import Any

from agentrl.errors import ConfigError, UserError
from agentrl.report.reported import with_unreported

CURVES = ("reward/mean", "episode/success", "eval/success", "entropy", "clip/tokens")
"""What is drawn where nothing is named and the run has it."""


def shown(rows: Sequence[dict[str, float]]) -> list[str]:
    """Return which of `CURVES` a run has."""
    return [name for name in CURVES if any(name in row for row in rows)]


def draw(rows: Sequence[dict[str, float]], names: Sequence[str]) -> Any:
    """Return a matplotlib figure with a curve beside the other.

    Raises:
        UserError: where matplotlib is not installed, or there is no such metric.
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise UserError("plot() needs matplotlib: pip install matplotlib") from error
    known = {name for row in rows for name in row}
    rows = with_unreported(rows, known)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"plot: the run has no metric {unknown[0]!r}; it has {', '.join(sorted(known))}")
    figure = plt.figure(figsize=(3.2 * max(len(names), 1), 2.6), layout="constrained")
    for place, name in enumerate(names, start=1):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes = figure.add_subplot(1, len(names), place, title=name, xlabel="step")
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 12 else None)
    plt.close(figure)  # a notebook shows what a cell returns, and would show an open one once more
    return figure
