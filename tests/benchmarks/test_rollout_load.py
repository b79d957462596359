"""A thousand episodes at once, and twenty thousand one after the other, leave nothing behind."""

import psutil
import pytest

from benchmarks.rollout_load import load
from tests.support.processes import in_process

pytestmark = [pytest.mark.slow, pytest.mark.process]


def loaded() -> tuple[int, list[dict[str, float]]]:
    """Return how many threads there were before, and what `load` has counted."""
    return psutil.Process().num_threads(), load(1000, 20_000, marks=5)


def test_nothing_grows_over_twenty_thousand_episodes_a_thousand_at_once() -> None:
    before, rows = in_process(loaded)  # where other tests leave nothing that might end meanwhile
    first, last = rows[0], rows[-1]
    assert last["episodes"] >= 20_000
    for name in ("process/threads", "process/open_files", "process/children"):
        assert last[name] == first[name]
    assert first["process/threads"] < before + 1100
    assert last["process/memory_bytes"] < 1.05 * first["process/memory_bytes"]
    assert last["lag_s"] < 10  # a hanging loop, not a slow machine
