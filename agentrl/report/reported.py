"""What environments report at the end of episodes: a step in which none came to its end tells none of it, which is 0."""

from collections.abc import Iterable, Mapping, Sequence


def with_unreported(rows: Sequence[Mapping[str, float]], names: Iterable[str]) -> list[dict[str, float]]:
    """Return rows of metrics in which success, score and pass@k are 0 where episodes were played and none came to report them.

    Args:
        rows: metrics of steps.
        names: metrics of the run, or of others with the same recipe: a run whose every episode is cut off reports nothing.
    """
    reported = [name for name in names if _is_reported(name)]
    return [{**{name: 0.0 for name in reported if _counts(name, row)}, **row} for row in rows]


def _is_reported(name: str) -> bool:
    measure = name.rpartition("/")[2]
    return measure in ("success", "score") or measure.startswith("pass@")


def _counts(name: str, row: Mapping[str, float]) -> bool:
    theme, _, measure = name.rpartition("/")
    if theme == "episode":
        return "reward/mean" in row
    is_too_few = measure.startswith("pass@") and f"{theme}/success" in row  # every task has fewer than k episodes
    return row.get(f"{theme}/episodes", 0.0) > 0 and not is_too_few
