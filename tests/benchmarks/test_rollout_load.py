"""A thousand episodes at once, and twenty thousand one after the other, leave nothing behind."""

import psutil

from benchmarks.rollout_load import load


def test_nothing_grows_over_twenty_thousand_episodes_a_thousand_at_once() -> None:
    before = psutil.Process().num_threads()  # of tests that ran earlier
    rows = load(1000, 20_000, marks=5)
    first, last = rows[0], rows[-1]
    assert last["episodes"] >= 20_000
    for name in ("process/threads", "process/open_files", "process/children"):
        assert last[name] == first[name]
    assert first["process/threads"] < before + 1100
    assert last["process/memory_bytes"] < 1.05 * first["process/memory_bytes"]
    assert last["lag_s"] < 10  # a hanging loop, not a slow machine
