"""Each test computes where it says."""

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def no_accelerator_is_set() -> None:
    """Forget device and precision of the test before."""
    AcceleratorState._reset_state(reset_partial_state=True)
