"""Shared by all tests: the number of examples of property tests, the parts of the slow tests, a check for threads left behind.

`HYPOTHESIS_PROFILE` is `ci` (25 examples a property), `full` (200, what `make test-full` uses) or `nightly` (3000).
"""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from tqdm import tqdm

from tests.support.threads import Guard
from tests.support.tiers import part_of, read_part

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side; this is read when torch is imported
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else threads stay that would keep a pool of processes
# A shell's `&` has Ctrl-C ignored, and what tests start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(20_000, 20, 100)  # workers that have imported everything look for garbage less often
tqdm.monitor_interval = 0  # each class of progress bars would keep a thread

settings.register_profile(
    "ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("full", settings.get_profile("ci"), max_examples=200)
settings.register_profile("nightly", settings.get_profile("ci"), max_examples=3000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


SLOW_FIRST = (
    "test_memory",
    "test_examples",
    "test_run_processes",
    "test_run",
    "test_vllm_server",
    "test_hostile_values",
    "test_processes",
    "test_kill_vllm",
    "test_layout",
    "test_built_in",
    "test_reliability",
    "test_check_engine",
    "test_vllm_servers",
    "test_site",
    "test_architectures",
    "test_cli",
    "test_hostile_files",
    "test_run_vllm",
    "test_mcp",
    "test_families",
    "test_tree_attention",
    "test_rewind",
    "test_rollout_load",
    "test_serve_vllm",
    "test_cli_compare",
    "test_transformers_engine",
)
"""Files that take longest, as they were measured, the longest first: no worker is to be left with one of them at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--part 3/8`, which keeps the third of eight parts of the slow tests."""
    parser.addoption(
        "--part", type=read_part, help="such as 3/8: keep this part of the slow tests; others are not touched"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, and leave out the slow tests of other parts."""
    ranks = {name: rank for rank, name in enumerate(SLOW_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))
    if chosen := config.getoption("--part"):
        part, parts = chosen
        others = [
            item for item in items if item.get_closest_marker("slow") and part_of(item.nodeid, parts=parts) != part
        ]
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]


def pytest_unconfigure() -> None:
    """Let what is left be found: else libraries tell of leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def what_is_imported_is_not_looked_through() -> None:
    """Keep what lasts out of later collections of garbage: a worker that has imported everything took a second for one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread behind."""
    guard = Guard()
    yield
    left = guard.left(timeout_s=60)
    assert not left, f"the test has left threads behind: {left}"
