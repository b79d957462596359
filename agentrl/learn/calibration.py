"""Clip ranges that follow the spread of the ratios: `trust: calibrated`.

A range depends on earlier minibatches only, and on each as a whole, with the same result on every rank: the split of a
minibatch among ranks and passes changes nothing.

`U` ratio units.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log, log1p, pi, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from agentrl.learn.config import DEFAULT_CLIP, CalibratedConfig, LossConfig
from agentrl.learn.metrics import Array, Observations, Sums

Key = tuple[int, int]

RATE = 0.1
"""Weight of the newest minibatch in the spread."""
STEP = 0.3
"""Part of a Newton step by which the share that was clipped corrects the range. The units of a minibatch
are few and move together: a whole step would follow one of them."""
LARGEST_STEP = 3.0
"""Largest correction in one minibatch, in both directions: a one-sided limit would shift the clipped share."""
SETTLED = 8
"""Minibatches after which the spread is known well enough for a correction."""
NARROWEST = 1e-5
"""Smallest width: below it are rounding errors of kernels."""


class ClipTarget(NamedTuple):
    """Target of the calibration, from the recipe."""

    clipped: float
    """Share of the pushed tokens that are to be clipped, on each side."""
    by_length: bool
    """Whether units of other lengths have ranges of their own."""
    start: tuple[float, float]
    """Widths below and above 0, in log s_u, before anything was measured."""
    token: tuple[float, float]
    """Widths of units of one token, which bound those of longer ones."""

    def bounds(self, length_U: Array) -> Array:
        """Return the widest ranges of units of these lengths, below and above: (U, 2)."""
        return np.outer(np.minimum(1, 4 / np.sqrt(length_U)), self.token)

    @classmethod
    def from_config(cls, config: LossConfig) -> "ClipTarget":
        """Return the target that a recipe's loss section sets."""
        asked = config.calibrated or CalibratedConfig()
        return cls(
            asked.clipped, asked.by_length, _in_logs(*DEFAULT_CLIP[config.unit]), _in_logs(*DEFAULT_CLIP["token"])
        )


class Units(NamedTuple):
    """Ratio units as a range sees them: `(U,)` each."""

    staleness_U: Array
    """Mean over the unit's tokens, in policy versions."""
    length_U: Array
    """Tokens."""


class BandStats(NamedTuple):
    """Statistics of a minibatch's units of similar staleness (and length) that an update had moved."""

    distance: Sums = Sums()
    """|log s_u|, but no further than half of the unit's widest range."""
    length: Sums = Sums()
    """Tokens of a unit."""
    down: Sums = Sums()
    """Tokens of negative advantage in a unit."""
    up: Sums = Sums()
    """Tokens of positive advantage."""
    clipped_down: Sums = Sums()
    """Those of them that had left the trust region."""
    clipped_up: Sums = Sums()


ClipStats = Mapping[str, BandStats]
"""Statistics of a minibatch's units, by band."""


class Band(BaseModel):
    """Running statistics of units of similar staleness (and length)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    num_minibatches: int
    spread: float
    """Running mean of |log s_u|."""
    gains: tuple[float, float]
    """log(width / spread), below and above."""


class Calibration(BaseModel):
    """State of the ranges, which a checkpoint holds.

        width = m exp(g), between 1e-5 and b_u = token_width min(1, 4 / sqrt(tokens of unit u))
        m <- m + .1 (mean of min(|log s_u|, b_u / 2) - m)             (the mean of all while these are fewer than ten)
        g <- g + .3 (clipped - target pushed) / (P k phi(k)) from the ninth on
        k = the normal distribution's quantile at 1 - target

    m follows the spread of log s_u. g begins at log(k sqrt(pi / 2)), where it would stay were they normal, and moves by the
    tokens of negative (positive) advantage: those pushed, and those clipped of them, over half of all pushed, P. A Newton
    step, three tenths of it at a time: as long as g is bounded, sums of clipped and of target pushed cannot part, whatever the
    ratios do (adaptive conformal inference, Gibbs and Candes 2021, arXiv:2106.00170). b_u is four standard deviations of a
    mean over independent tokens that each move by the width of a token: it does not depend on what the policy does, so that
    one that runs away cannot take its range along.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bands: Mapping[str, Band] = {}
    """By staleness and length."""

    def widths(self, units: Units, target: ClipTarget) -> tuple[Array, Array]:
        """Return how far log s_u may fall below and rise above 0, of each unit: two arrays (U,)."""
        width_U2 = np.tile(target.start, (len(units.length_U), 1))
        for key, band_U in _bands(*units, by_length=target.by_length):
            if (band := self._nearest(key)) is not None:
                width_U2[band_U] = band.spread * np.exp(band.gains)
        bounded_U2 = width_U2.clip(NARROWEST, target.bounds(units.length_U))
        return bounded_U2[:, 0], bounded_U2[:, 1]

    def updated(self, shown: ClipStats, target: ClipTarget) -> "Calibration":
        """Return the calibration after one more minibatch."""
        bands = dict(self.bands)
        for name in sorted(shown):
            bands[name] = _updated(self._nearest(_key(name)) or _initial(target), shown[name], target)
        return Calibration(bands=bands)

    def _nearest(self, key: Key) -> Band | None:
        """Return the band of these units, else the nearest in length, else in staleness."""
        if not self.bands:
            return None
        distances = {name: tuple(abs(a - b) for a, b in zip(_key(name), key, strict=True)) for name in self.bands}
        return self.bands[min(distances, key=lambda name: (*distances[name], name))]


def clip_stats(observations: Observations, target: ClipTarget, *, version: int, is_updated: bool) -> ClipStats:
    """Return the statistics of the units that `reject` leaves in the loss.

    Args:
        observations: record of the minibatch on this rank.
        target: target of the calibration.
        version: version of the policy before the step.
        is_updated: whether the step has updated the policy. If not, ratios of units that it sampled differ from 1 by
            rounding only.
    """
    return merge_clip_stats(
        _of_pass(part, target, version=version, is_updated=is_updated) for part in observations.passes()
    )


def _of_pass(part: Mapping[str, Array], target: ClipTarget, *, version: int, is_updated: bool) -> ClipStats:
    unit_T, clipped_T = part["unit_T"], part["clipped_T"]
    down_T, up_T = part["advantage_T"] < 0, part["advantage_T"] > 0
    units = units_of(unit_T, version - part["version_T"])
    pushed_U = [_sums(unit_T, tokens_T) for tokens_T in (down_T, up_T, down_T * clipped_T, up_T * clipped_T)]
    # A rejected unit carries no information: no width would keep it.
    is_counted_U = ((units.staleness_U > 0) | is_updated) & (part.get("rejected_U", np.zeros(len(units.length_U))) == 0)
    of_all = (np.log(part["ratio_U"]), *pushed_U)
    return unit_clip_stats(
        Units(*(column_U[is_counted_U] for column_U in units)),
        *(column_U[is_counted_U] for column_U in of_all),
        target=target,
    )


def unit_clip_stats(
    units: Units,
    log_ratio_U: Array,
    down_U: Array,
    up_U: Array,
    clipped_down_U: Array,
    clipped_up_U: Array,
    *,
    target: ClipTarget,
) -> ClipStats:
    """Return the statistics of units by band. Units whose ratio is exactly 1 have not been updated yet, and are left out.

    Args:
        units: units of one pass.
        log_ratio_U: log s_u.
        down_U: tokens of negative advantage of each.
        up_U: tokens of positive advantage.
        clipped_down_U: those of them that had left the trust region.
        clipped_up_U: likewise.
        target: target of the calibration.
    """
    distance_U = np.minimum(np.abs(log_ratio_U), target.bounds(units.length_U).max(axis=1) / 2)
    columns = (distance_U, units.length_U, down_U, up_U, clipped_down_U, clipped_up_U)
    return {
        _name(key): BandStats(*(Sums.from_values(column_U[moved_U]) for column_U in columns))
        for key, band_U in _bands(*units, by_length=target.by_length)
        if (moved_U := band_U & (log_ratio_U != 0)).any()
    }


def merge_clip_stats(parts: Iterable[ClipStats]) -> ClipStats:
    """Merge the statistics of parts of a minibatch."""
    found: dict[str, BandStats] = {}
    for part in parts:
        for name, alike in part.items():
            found[name] = BandStats(
                *(one.plus(other) for one, other in zip(found.get(name, BandStats()), alike, strict=True))
            )
    return found


def range_metrics(calibration: Calibration, shown: Sequence[ClipStats]) -> dict[str, float]:
    """Return a step's clipped share, of which `clipped` is the target, and the ranges of units that are not stale.

    The share is over tokens with an advantage, in units that an update has moved.
    """
    found = [alike for part in shown for alike in part.values()]
    pushed = sum(alike.down.total + alike.up.total for alike in found)
    clipped = sum(alike.clipped_down.total + alike.clipped_up.total for alike in found)
    metrics = {"clip/pushed_tokens": clipped / pushed if pushed else 0.0}
    if bands := [band for name, band in calibration.bands.items() if _key(name)[1] == 0]:
        widths = [band.spread * np.exp(band.gains) for band in bands]
        metrics |= dict(zip(("clip/width_low", "clip/width_high"), map(float, np.mean(widths, axis=0)), strict=True))
    return metrics


def units_of(unit_T: Array, staleness_T: Array) -> Units:
    """Return staleness and length of the units of a micro-batch."""
    return Units(_sums(unit_T, staleness_T) / _sums(unit_T), _sums(unit_T))


def _in_logs(low: float, high: float) -> tuple[float, float]:
    return -log1p(-low), log1p(high)


def _sums(unit_T: Array, values_T: npt.NDArray[np.generic] | None = None) -> Array:
    return np.bincount(unit_T.astype(np.int64), weights=values_T).astype(np.float64)


def _initial(target: ClipTarget) -> Band:
    gain = log(NormalDist().inv_cdf(1 - target.clipped) * sqrt(pi / 2))
    return Band(num_minibatches=0, spread=0.0, gains=(gain, gain))


def _updated(band: Band, shown: BandStats, target: ClipTarget) -> Band:
    spread = band.spread + max(RATE, 1 / (band.num_minibatches + 1)) * (shown.distance.mean - band.spread)
    quantile = NormalDist().inv_cdf(1 - target.clipped)
    pushed_each_side = (shown.down.total + shown.up.total) / 2
    gains = []
    for gain, pushed, clipped, widest in zip(
        band.gains,
        (shown.down, shown.up),
        (shown.clipped_down, shown.clipped_up),
        target.bounds(np.array([shown.length.mean]))[0],
        strict=True,
    ):
        step = 0.0
        if band.num_minibatches >= SETTLED and pushed_each_side:
            excess = (clipped.total - target.clipped * pushed.total) / pushed_each_side
            step = STEP * excess / (quantile * NormalDist().pdf(quantile))
        # Not beyond where widths are bounded: it would take as long to come back.
        moved = gain + min(max(step, -LARGEST_STEP), LARGEST_STEP)
        gains.append(min(max(moved, log(NARROWEST / spread)), log(widest / spread)))
    return Band(num_minibatches=band.num_minibatches + 1, spread=spread, gains=(gains[0], gains[1]))


def _bands(staleness_U: Array, length_U: Array, *, by_length: bool) -> Iterator[tuple[Key, npt.NDArray[np.bool_]]]:
    """Yield the units that share a range, by key: staleness 0, 1, 2-3, 4-7, ...; with `by_length`, 1, 2-7, 8-31, ... tokens."""
    age_U = np.frexp(np.round(staleness_U))[1]
    size_U = np.frexp(length_U)[1] // 2 if by_length else np.zeros_like(age_U)
    for size, age in sorted(set(zip(size_U.tolist(), age_U.tolist(), strict=True))):
        yield (size, age), (age_U == age) & (size_U == size)


def _name(key: Key) -> str:
    return "/".join(map(str, key))


def _key(name: str) -> Key:
    size, age = name.split("/")
    return int(size), int(age)
