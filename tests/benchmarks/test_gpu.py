"""`benchmarks.gpu short` runs on a CPU, within its time."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.process]


def lines(minutes: float) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.gpu", "short", "--device", "cpu", "--minutes", str(minutes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_part_prints_what_it_found() -> None:
    first, *steps, beside_trl, curve = lines(9)
    assert first["part"] == "trace of 0.6B, 16k"
    assert first["aten_calls"] > 1000
    assert first["host_reads"] == 0  # but for one stacked read, which a profiler of the CPU does not see
    assert {line["part"] for line in steps} >= {"step of 0.6B, 16k", "step of 8B-lora", "step of 8B-lora, packed"}
    assert all(line["tokens_per_s"] > 0 for line in steps)
    # Without TRL, without SmolLM2, or on a busy machine: why there is nothing.
    assert beside_trl["part"] == "a step beside TRL's"
    assert "said" in beside_trl or beside_trl["faster"] > 0
    assert curve["said"].startswith(("grpo", "no time left", "ModuleNotFoundError", "agentrl:", "grpo/uniform"))


def test_parts_for_which_there_is_no_time_say_so() -> None:
    assert {line["said"] for line in lines(0)} == {"no time left"}
