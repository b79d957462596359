import argparse
import re

import pytest

from tests.support.tiers import part_of, read_part


def test_a_part_is_read() -> None:
    assert read_part("3/8") == (3, 8)
    assert read_part("1/1") == (1, 1)


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "3/", "/8", "a/8", "-1/8", ""])
def test_another_part_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"got {text!r}")):
        read_part(text)


def test_the_parts_of_a_function_stay_together_and_functions_spread_over_all_parts() -> None:
    name = "tests/learn/test_loss.py::test_loss"
    assert part_of(f"{name}[a-1]", parts=8) == part_of(f"{name}[b::c[0]]", parts=8) == part_of(name, parts=8)
    assert {part_of(f"{name}_{number}", parts=8) for number in range(100)} == set(range(1, 9))
    assert part_of(name, parts=1) == 1
