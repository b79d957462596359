"""Which trajectories of a step go into which minibatch.

`I` trajectories.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MIN_GROUPS = 4
"""Groups that a minibatch has trajectories of, where the step has as many; where groups are ragged, now and then one fewer
(measured: benchmarks/minibatches.py)."""


class Minibatch(NamedTuple):
    """What one optimizer step is made of, as indices."""

    computed: list[int]
    counted: list[int]
    """Without a gradient: in the denominators alone."""


def draw_minibatches(
    group_I: npt.ArrayLike,
    *,
    has_gradient_I: npt.ArrayLike,
    num_minibatches: int,
    rng: np.random.Generator,
    min_groups: int = MIN_GROUPS,
) -> list[Minibatch]:
    """Deal the trajectories of a step out to minibatches at random; some may be left empty.

    Each minibatch gets its share of the trajectories that have a gradient, of the others, and of all: numbers differ by at
    most one. Where no trajectory has a gradient, the first minibatch computes one all the same: what the engine said of it
    is compared.

    Trajectories of a group share a prefix, which is computed once where they are together; but a minibatch of few groups
    has a noisy gradient, or none at all, and a run may collapse by it. So each group is cut into equal parts, which are
    spread evenly over the minibatches: as large as they can be where a minibatch is to hold parts of `min_groups` groups.
    """
    group_I, has_gradient_I = np.asarray(group_I, dtype=np.int64), np.asarray(has_gradient_I, dtype=np.bool_)
    computed, counted = (rng.permutation(np.flatnonzero(chosen_I)) for chosen_I in (has_gradient_I, ~has_gradient_I))
    if not len(computed):
        computed, counted = counted[:1], counted[1:]
    length = max(1, len(computed) // (num_minibatches * min_groups))
    order = np.empty(len(computed))
    for group in np.unique(group_I[computed]):
        members = np.flatnonzero(group_I[computed] == group)
        num_parts = -(-len(members) // length)
        part = np.arange(len(members)) * num_parts // len(members)
        order[members] = (part + rng.random()) / num_parts
    computed = computed[np.argsort(order, kind="stable")]
    # The first minibatches have one more to compute, the last ones one more to count.
    shares = zip(np.array_split(computed, num_minibatches), np.array_split(counted, num_minibatches)[::-1], strict=True)
    return [Minibatch(of_computed.tolist(), of_counted.tolist()) for of_computed, of_counted in shares]
