"""What `benchmarks/paper.py` makes of ratios, by hand."""

import math

import numpy as np
import pytest

from benchmarks.paper import Ratios, matching

pytestmark = pytest.mark.slow


def test_a_trajectory_is_clipped_as_a_whole_or_token_by_token() -> None:
    ratios = Ratios(
        log_ratio_T=np.array([0.1, 0.3, -0.5]), advantage_T=np.array([1.0, 1.0, -1.0]), unit_T=np.array([0, 0, 1])
    )
    assert ratios.means() == pytest.approx([0.2, -0.5])
    assert ratios.clipped("GSPO") == 1  # e^.2 > 1.0004, e^-.5 < .9997
    assert ratios.clipped("GSPO", scale=1000) == pytest.approx(1 / 3)  # e^.2 < 1.4, e^-.5 < .7
    assert ratios.clipped("GRPO") == pytest.approx(2 / 3)  # e^.1 < 1.27 < e^.3, e^-.5 < .8
    worse = Ratios(log_ratio_T=ratios.log_ratio_T, advantage_T=-ratios.advantage_T, unit_T=ratios.unit_T)
    assert worse.clipped("GSPO") == worse.clipped("GRPO") == 0  # clipping never holds back what goes the other way
    longer = ratios.of_length(2)
    assert (longer.log_ratio_T.tolist(), longer.unit_T.tolist()) == ([0.1, 0.3], [0, 0])
    spreads = ratios.spreads()
    assert spreads["token_spread"] == pytest.approx(np.std([math.exp(0.1), math.exp(0.3), math.exp(-0.5)]))
    assert spreads["sequence_spread"] == pytest.approx((math.exp(0.2) - math.exp(-0.5)) / 2)


def test_where_both_clip_as_in_the_paper_is_read_between_rates() -> None:
    rows = [
        {
            "learning_rate": rate,
            "GSPO": {"clipped": gspo, "second_minibatch": {"sequence_spread": sequences}},
            "GRPO": {"clipped": grpo, "second_minibatch": {"token_spread": tokens}},
        }
        for rate, gspo, sequences, grpo, tokens in ((1e-4, 0.05, 1e-4, 0.0003, 0.01), (1e-2, 0.25, 4e-4, 0.0023, 0.04))
    ]
    found = matching(rows)
    assert found is not None
    assert found["GSPO"] == pytest.approx({"learning_rate": 1e-3, "spread": 2e-4})
    assert found["GRPO"] == pytest.approx({"learning_rate": 1e-3, "spread": 0.02})
    assert found["length"] == pytest.approx(1e4)
    assert matching(rows[:1]) is None
