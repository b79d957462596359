"""How a run shows itself in a terminal while it trains, and at its end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agentrl.api.notebook import line_display
from agentrl.report import terminal
from agentrl.report.terminal import Console

if TYPE_CHECKING:
    from agentrl.config import Recipe
    from agentrl.report.folder import RunFolder


@contextmanager
def progress(console: Console, *, verbose: bool = False) -> Iterator[Any]:
    """Show one bar a phase; in a notebook, a line that changes; elsewhere, a line now and then. The log has a line a step.

    `verbose`: print what each step shows, too.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    tell = line_display() if console.is_jupyter and not console.quiet else None
    with Progress(*columns, console=console, disable=not console.is_terminal or console.quiet) as progress:
        bars: dict[str, Any] = {}

        def on_progress(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
            note = _note(metrics)
            line = f"{phase} {step}/{total}  {note}"
            if tell is not None:
                tell(line)
                terminal.note(line)
                return
            if phase not in bars:
                bars[phase] = progress.add_task(phase, total=total, note="")
            progress.update(bars[phase], completed=step, note=note)
            if not console.is_terminal and (step == total or step % max(1, total // 20) == 0):
                console.print(line)
            else:
                terminal.note(line)
            if verbose and phase == "training":
                console.print("\n".join(f"  {words}" for words in details(metrics)))

        yield on_progress


def print_end(console: Console, folder: "RunFolder", recipe: "Recipe") -> None:
    """Print what a run came to, and where it is."""
    console.print(summary(folder.metrics(), recipe.evaluation.samples))
    console.print(f"run folder: {folder.path}")


def summary(rows: list[dict[str, float]], samples: int) -> str:
    """Compare the first and the last evaluation, of so many episodes a task, in a line for each environment."""
    found = [name for row in rows for name in row if name.startswith("eval/") and name.endswith("/episodes")]
    prefixes = dict.fromkeys(name.removesuffix("episodes") for name in found)
    lines = [_summary(rows, samples, prefix) for prefix in prefixes]
    return "\n".join(lines) or "no result: nothing was evaluated"


def _summary(rows: list[dict[str, float]], samples: int, prefix: str) -> str:
    """Compare the evaluations of one environment; one whose every episode failed has no means."""
    evaluations = [row for row in rows if f"{prefix}episodes" in row]
    played = [row for row in evaluations if f"{prefix}reward" in row]
    of = f"{prefix.split('/')[1]}: " if prefix != "eval/" else ""
    number = (evaluations[-1][f"{prefix}episodes"] + evaluations[-1].get(f"{prefix}failed", 0.0)) / samples
    tasks = f"{number:.0f} evaluation task{'s' if number > 1 else ''}"
    if not played:
        return f"{of}no result on {tasks}: every episode of them failed"
    first, last = played[0], played[-1]

    def change(name: str, form: str) -> str:
        before, after = first[f"{prefix}{name}"], last[f"{prefix}{name}"]
        return f"{name} {before:{form}} -> {after:{form}}"

    shares = [name for name in ("score", "success") if f"{prefix}{name}" in first and f"{prefix}{name}" in last]
    parts = [*(change(name, ".1%") for name in shares), change("reward", ".3f")]
    words = f"{of}{', '.join(parts)} on {tasks}, {rows[-1]['step']:.0f} steps"
    if len(played) == len(evaluations):
        return words
    steps = ", ".join(f"{row['step']:.0f}" for row in evaluations if f"{prefix}reward" not in row)
    return f"{words}; left out, because every episode of them failed: step {steps}"


_DETAILS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/",)),
    ("episodes", ("episode/", "turn/")),
    ("ended by", ("stop/",)),
    ("groups", ("groups/", "credit/", "pool/")),
    ("update", ("loss", "ratio/", "clip/", "kl/", "entropy", "grad_norm", "learning_rate", "staleness/", "first/")),
    ("time", ("time/",)),
    ("evaluation", ("eval/",)),
)


def details(metrics: dict[str, float]) -> Iterator[str]:
    """Yield the metrics of a step, in a line for each theme; what is 0 is left out."""
    for theme, prefixes in _DETAILS:
        shown = {name: value for name, value in metrics.items() if name.startswith(prefixes) and value}
        if shown:
            theirs = prefixes[0] if prefixes[0].endswith("/") else ""
            yield f"{theme}: " + ", ".join(f"{name.removeprefix(theirs)} {value:.4g}" for name, value in shown.items())


def _note(metrics: dict[str, float]) -> str:
    faults = f"  faults {metrics['pool/faults']:.0f}" if metrics.get("pool/faults") else ""
    shown = {"loss": "loss", "reward/mean": "reward", "episode/score": "score", "clip/tokens": "clipped"}
    if "reward/mean" in metrics:
        del shown["loss"]
    return "  ".join(f"{word} {metrics[name]:.3f}" for name, word in shown.items() if name in metrics) + faults
