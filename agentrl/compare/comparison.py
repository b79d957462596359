"""Comparison of recipes by their runs over seeds: levels, paired differences, and their uncertainty."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from pydantic import BaseModel, ConfigDict

from agentrl.compare.curves import Curve
from agentrl.errors import ConfigError
from agentrl.report.statistics import (
    area,
    estimate,
    holm,
    seeds_to_see,
    skewness,
    smallest_seen,
    spread,
    steps_to,
    within,
)
from agentrl.report.terminal import Panel

ALPHA = 0.05
_LOPSIDED, _ENOUGH_TO_TELL = 1.0, 8
"""Skewness of differences beyond which an interval is doubted, and the number of seeds from which it can be told."""


class Level(BaseModel):
    """A mean over seeds, with its 95 % interval."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: float
    low: float | None
    """None: one seed, or seeds without spread."""
    high: float | None
    p: float | None = None
    """p value of a difference: how often one as large comes by chance if there is none."""


class Arm(BaseModel):
    """Result of the runs of one recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    seeds: list[int]
    runs: list[str]
    final: Level
    """At the last step that all have."""
    area: Level | None
    """Mean height of the curve up to there."""
    reached: int
    """Runs that reached the threshold."""
    steps: Level | None
    """Steps to the threshold; a run that never reached it counts with the last step, so that this is a lower bound of its."""
    curves: list[list[float]]
    """The metric of each run at each of the comparison's steps."""
    mean: list[Level]
    """Over the seeds, at each of these steps."""


class Difference(BaseModel):
    """A recipe less another, seed by seed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    against: str
    seeds: list[int]
    final: Level
    p_holm: float | None
    """`final.p`, adjusted for the number of differences (Holm)."""
    differs: bool
    """Whether the adjusted p is below 0.05."""
    area: Level | None
    steps: Level | None
    sd: float | None
    """Standard deviation of the differences of `final`."""
    seen: float | None
    """The smallest true difference that so many seeds show in four of five such comparisons, with this spread."""
    seeds_needed: int | None
    """Seeds that would show the effect asked about in four of five. None: more than 1,000, or no spread is known."""


class Comparison(BaseModel):
    """All of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str
    steps: list[int]
    """Evaluated in all runs; the last one is where `final` is taken."""
    panel: str | None
    """Hash of the evaluation tasks; None if seeds have others, or they are not known."""
    num_tasks: int | None
    threshold: float
    effect: float
    arms: list[Arm]
    differences: list[Difference]
    notes: list[str]
    """Caveats."""


def compare(
    curves: Sequence[Curve],
    *,
    metric: str,
    controls: Mapping[str, str] | None = None,
    threshold: float | None = None,
    effect: float = 0.05,
    notes: Sequence[str] = (),
) -> Comparison:
    """Compare each recipe with the first one, and with its own control where it has one, paired by seed.

    Args:
        curves: of finished runs; the first one's recipe is what the others are compared with.
        metric: their name.
        controls: of each recipe that has one, the name of its control.
        threshold: of the metric, for steps to it. None: halfway from where all runs begin, on average, to where they end.
        effect: the difference for which the number of seeds is given.
        notes: added to the result's.

    Raises:
        ConfigError: if there is nothing that can be compared.
    """
    arms = _by_recipe(curves)
    for (recipe, seed), count in Counter((curve.recipe, curve.seed) for curve in curves).items():
        if count > 1:
            paths = ", ".join(str(curve.path) for curve in curves if (curve.recipe, curve.seed) == (recipe, seed))
            raise ConfigError(f"{paths} are runs of the same recipe and the same seed {seed}; leave all but one out")
    _check_panels(curves)
    steps = _common_steps(curves)
    if threshold is None:
        threshold = float(np.mean([[c.values[steps[0]], c.values[steps[-1]]] for c in curves]))
    controls = dict(controls or {})
    names = [name for name in arms if name not in controls.values()]
    pairs = [(name, names[0]) for name in names[1:]]
    pairs += [(name, control) for name, control in controls.items() if name in arms and control in arms]
    alone = [
        f"{name} and {other} have no seed in common ({sorted(arms[name])}; {sorted(arms[other])}): runs are compared seed by "
        "seed, because those of one seed begin alike"
        for name, other in pairs
        if arms[name].keys().isdisjoint(arms[other])
    ]
    found = [
        _Pair(arms[name], arms[other], steps, threshold) for name, other in pairs if arms[name].keys() & arms[other]
    ]
    if not found:
        raise ConfigError(alone[0] if alone else f"there is nothing to compare: {', '.join(arms)}")
    tested = [index for index, pair in enumerate(found) if pair.final.p is not None]
    adjusted = dict(zip(tested, holm([found[index].final.p or 0.0 for index in tested]), strict=True))
    panel = _shared_panel(curves)
    return Comparison(
        metric=metric,
        steps=steps,
        panel=panel.name if panel else None,
        num_tasks=len(panel.tasks) if panel else None,
        threshold=threshold,
        effect=effect,
        arms=[_arm(name, of, steps, threshold, metric=metric) for name, of in arms.items()],
        differences=[pair.difference(adjusted.get(index), effect) for index, pair in enumerate(found)],
        notes=[*notes, *alone, *_notes(curves, arms, steps, found)],
    )


def _by_recipe(curves: Sequence[Curve]) -> dict[str, dict[int, Curve]]:
    arms: dict[str, dict[int, Curve]] = {}
    for curve in curves:
        arms.setdefault(curve.recipe, {})[curve.seed] = curve
    if len(arms) < 2:
        raise ConfigError(f"there is nothing to compare: all runs are of one recipe, {next(iter(arms), 'none')!r}")
    return arms


def _check_panels(curves: Sequence[Curve]) -> None:
    """Refuse runs of a pair that were evaluated on different tasks, or in different ways."""
    for a, b in combinations(curves, 2):
        if a.seed == b.seed and a.panel is not None and b.panel is not None and not a.panel.agrees(b.panel):
            raise ConfigError(
                f"{a.path} and {b.path} were not evaluated alike ({_words(a.panel)}; {_words(b.panel)}); give both the same "
                "evaluation (seed, num_tasks, env, temperature, samples)"
            )


def _words(panel: Panel) -> str:
    played = [f"{name} {value:g}" for name, value in panel.played.items()]
    return ", ".join([f"{len(panel.tasks)} tasks {panel.name}", *played])


def _shared_panel(curves: Sequence[Curve]) -> Panel | None:
    """Return the tasks that all runs were evaluated on, alike. None: there are no such, or they are not known."""
    shared: Panel | None = None
    for panel in (curve.panel for curve in curves):
        if panel is None or (shared is not None and not shared.agrees(panel)):
            return None
        shared = panel if shared is None else shared.joined(panel)
    return shared


def _common_steps(curves: Sequence[Curve]) -> list[int]:
    steps = sorted(set.intersection(*(set(curve.values) for curve in curves)))
    if not steps or (steps == [0] and any(set(curve.values) != {0} for curve in curves)):
        raise ConfigError(
            "the runs have no evaluated step in common after their beginning; give them the same "
            "train.steps and evaluation.every"
        )
    return steps


class _Pair:
    """Two recipes, seed by seed."""

    def __init__(self, arm: dict[int, Curve], other: dict[int, Curve], steps: list[int], threshold: float) -> None:
        self.names = next(iter(arm.values())).recipe, next(iter(other.values())).recipe
        self.seeds = [seed for seed in arm if seed in other]
        self.finals = [arm[seed].values[steps[-1]] - other[seed].values[steps[-1]] for seed in self.seeds]
        self.final = _level(self.finals)
        self._areas = [_area(arm[seed], steps) - _area(other[seed], steps) for seed in self.seeds if len(steps) > 1]
        self._steps = [
            _restricted(arm[seed], steps, threshold) - _restricted(other[seed], steps, threshold) for seed in self.seeds
        ]
        self._is_reached = any(
            _reached(of[seed], steps, threshold) is not None for of in (arm, other) for seed in self.seeds
        )

    def difference(self, p_holm: float | None, effect: float) -> Difference:
        sd = spread(self.finals) or None
        return Difference(
            name=self.names[0],
            against=self.names[1],
            seeds=self.seeds,
            final=self.final,
            p_holm=p_holm,
            differs=p_holm is not None and p_holm < ALPHA,
            area=_level(self._areas) if self._areas else None,
            steps=_level(self._steps) if self._is_reached else None,
            sd=sd,
            seen=smallest_seen(sd=sd, num=len(self.seeds)) if sd else None,
            seeds_needed=seeds_to_see(effect, sd=sd) if sd else None,
        )


def _arm(name: str, of: dict[int, Curve], steps: list[int], threshold: float, *, metric: str) -> Arm:
    curves = [[curve.values[step] for step in steps] for curve in of.values()]
    reached = [_reached(curve, steps, threshold) is not None for curve in of.values()]
    return Arm(
        name=name,
        seeds=list(of),
        runs=[str(curve.path) for curve in of.values()],
        final=_level([values[-1] for values in curves], metric),
        area=_level([area(steps, values) for values in curves], metric) if len(steps) > 1 else None,
        reached=sum(reached),
        steps=_level([_restricted(curve, steps, threshold) for curve in of.values()]) if any(reached) else None,
        curves=curves,
        mean=[_level([values[index] for values in curves], metric) for index in range(len(steps))],
    )


def _level(values: Sequence[float], metric: str = "") -> Level:
    """Return what values of a metric came to; of no metric: of differences and of steps."""
    found = estimate(values)
    return Level(mean=found.mean, low=within(metric, found.low), high=within(metric, found.high), p=found.p)


def _area(curve: Curve, steps: list[int]) -> float:
    return area(steps, [curve.values[step] for step in steps])


def _reached(curve: Curve, steps: list[int], threshold: float) -> float | None:
    return steps_to(steps, [curve.values[step] for step in steps], threshold=threshold)


def _restricted(curve: Curve, steps: list[int], threshold: float) -> float:
    """Return min(steps to the threshold, last step): its mean is the restricted mean time, whatever comes after."""
    found = _reached(curve, steps, threshold)
    return steps[-1] if found is None else found


def _notes(
    curves: Sequence[Curve], arms: Mapping[str, Mapping[int, Curve]], steps: list[int], pairs: Sequence[_Pair]
) -> list[str]:
    notes = []
    if len(ends := {max(curve.values) for curve in curves}) > 1:
        notes.append(
            f"runs end at steps {', '.join(map(str, sorted(ends)))}: all are compared at {steps[-1]}, the last that all have"
        )
    if len(episodes := {curve.episodes for curve in curves}) > 1:
        notes.append(
            f"a step is {' or '.join(map(str, sorted(episodes)))} episodes: the same step is not the same budget"
        )
    missing = [
        f"{name}: {', '.join(map(str, sorted(gone)))}"
        for name, of in arms.items()
        if (gone := {curve.seed for curve in curves} - of.keys())
    ]
    if missing:
        notes.append(f"seeds that are not there leave their pairs out ({'; '.join(missing)})")
    if any(curve.panel is None for curve in curves):
        notes.append(
            "the evaluation tasks of some runs are not known (their panel.json is gone): see that they are the same"
        )
    elif len({str(curve.panel.played) for curve in curves if curve.panel}) > 1:
        notes.append(
            "seeds were evaluated at different temperatures, or with different evaluation.samples (the same for all recipes): "
            "a mean over seeds mixes them"
        )
    elif _shared_panel(curves) is None:
        notes.append("each seed has evaluation tasks of its own (evaluation.seed is not set), the same for all recipes")
    for pair in pairs:
        name, against = pair.names
        if len(pair.seeds) == 1:
            notes.append(f"{name} against {against}: one seed says nothing of others; take four at least (--seeds)")
        elif pair.final.p is None:
            notes.append(f"{name} against {against}: all seeds differ by the same, so there is no spread to judge by")
        elif len(pair.seeds) >= _ENOUGH_TO_TELL and abs(skewness(pair.finals)) > _LOPSIDED:
            notes.append(
                f"{name} against {against}: the differences trail off to one side; the interval covers nearer 90 % than 95 %"
            )
    if len(pairs) > 1:
        notes.append(
            f"each interval covers 95 % by itself; what is said to differ allows for {len(pairs)} differences (Holm)"
        )
    return notes
