"""The exact-advantage bench, in small: the process is the one described, and schemes do what docs/credit.md says of them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "credit_exact.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("credit_exact", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_exact_values_are_those_worked_out_by_hand(bench: ModuleType) -> None:
    process = bench.KeyDoor(0.0)
    # The key is held with .4 * .9 and opens for .6 * .95; the third room pays .1 half of the time. Taking the key is worth
    # .9 * .57 of it, and the state's mean is .36 * .57.
    states = [bench.State("key room", False), bench.State("door", True), bench.State("room 2", False)]
    start, door, room = map(bench.STATES.index, states)
    assert process.values[states[0]] == pytest.approx(0.36 * 0.57 + 0.05, abs=1e-12)
    assert process.advantages_SA[start] == pytest.approx([0.54 * 0.57, -0.36 * 0.57], abs=1e-12)
    assert process.advantages_SA[door] == pytest.approx([0.4 * 0.95, -0.6 * 0.95], abs=1e-12)
    assert process.advantages_SA[room] == pytest.approx([0.05, -0.05], abs=1e-12)


def test_bootstrapped_and_forked_credit_doubles_the_signal_to_noise_ratio_of_leave_one_out(bench: ModuleType) -> None:
    process = bench.KeyDoor(0.0)
    batch = bench.sample(process, seed=0, num_groups=300, group_size=8, num_branches=4)

    def measured(**recipe: Any) -> dict[str, float]:
        columns: dict[str, float] = bench.measure(process, batch, batch.groups, recipe).columns
        return columns

    uniform = measured(scheme="uniform", normalize="leave_one_out")
    assert 0.5 < uniform["SNR"] < 0.75
    for recipe in (
        {"scheme": "group_gae", "lam": 0.0},
        {"scheme": "action_values", "gamma": 1.0, "lam": 0.0},
        {"scheme": "redistribute", "then": {"scheme": "group_gae", "lam": 0.0}},
        {"scheme": "tree"},
    ):
        found = measured(**recipe)
        assert found["SNR"] > 2 * uniform["SNR"], recipe
        assert found["cos"] > 0.95, recipe


def test_keys_that_call_different_situations_equal_bias_what_bootstraps_on_them(bench: ModuleType) -> None:
    process = bench.KeyDoor(0.0)
    batch = bench.sample(process, seed=0, num_groups=300, group_size=8, num_branches=0)
    recipe = {"scheme": "group_gae", "lam": 0.0}
    assert bench.measure(process, batch, bench.aliased(batch.groups), recipe).columns["cos"] < 0.7
