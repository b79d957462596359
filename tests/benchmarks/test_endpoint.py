"""Benchmarks of the endpoint, each in a small version."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.env.background import BackgroundWork

openai: Any = pytest.importorskip("openai", reason="comes with the extra of vLLM")

from benchmarks.endpoint_agents import figures as agents  # noqa: E402 - they import openai
from benchmarks.endpoint_clients import figures as clients  # noqa: E402
from benchmarks.endpoint_clients import python_with  # noqa: E402
from benchmarks.endpoint_kills import kill_clients, kill_trainer  # noqa: E402
from benchmarks.endpoint_learning import figures as learning  # noqa: E402
from benchmarks.endpoint_overhead import figures as overhead  # noqa: E402
from benchmarks.endpoint_pause import figures as pause  # noqa: E402
from benchmarks.endpoint_wires import CLIENTS  # noqa: E402

pytestmark = pytest.mark.process

LIGHT = ("anthropic", "openai")
OF_NPM = ("claude-code", "codex", "opencode")


@pytest.fixture(scope="module", autouse=True)
def threads_of_the_shared_loop() -> None:
    """Start the threads that openai's client uses for a moment: a loop keeps them."""

    async def start() -> None:
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.1) for _ in range(32)))

    BackgroundWork(start()).future.result()


def test_light_sdks_train_on_what_was_sampled() -> None:
    names = ["openai", "openai-responses", "anthropic-stream"]
    found = clients(names, python=python_with(LIGHT))
    assert found["identical"] == len(names), found
    assert (found["turns"], found["masked"]) == (found["calls"], 0)


@pytest.mark.slow
def test_all_sdks_train_on_what_was_sampled() -> None:
    names = [name for name in CLIENTS if name not in OF_NPM]
    found = clients(names, python=python_with())
    assert found["identical"] == len(names), found
    assert (found["turns"], found["masked"]) == (found["calls"], 0)


def test_a_client_waits_through_a_pause_only_with_signs_of_life() -> None:
    found = pause(pause_s=5.0, read_timeout_s=2.0, heartbeat_s=0.25)
    assert (found["samples_a_call"], found["retries"], found["errors"]) == (1.0, 0, 0)
    assert found["spanning"] > 0
    assert pause(pause_s=2.0, read_timeout_s=0.5, heartbeat_s=1000.0)["retries"] > 0


def test_calls_of_agents_beside_each_other_are_delivered_once_and_written_once() -> None:
    found = agents(num_turns=20)
    assert (found["delivered_share"], found["identical"], found["rows"]) == (1.0, True, 4.0)
    assert (found["trained_twice"], found["masked"], found["errors"]) == (0, 0, [])
    assert found["journal_ratio"] < 1.3 < found["without_parents"]


def test_programs_that_are_killed_lose_no_episode() -> None:
    found = kill_clients("partial", 2, random.Random(0))
    assert found["kills"] == 2
    assert found["within_an_action"] >= 2
    assert [found[name] for name in ("sampled_again", "trained_twice", "masked", "lost", "diverged")] == [0] * 5


@pytest.mark.slow
def test_a_killed_trainer_answers_its_programs_from_the_journal(tmp_path: Path) -> None:
    found = kill_trainer("partial", 1, random.Random(0), tmp_path)
    assert found["under_way"] > 0
    assert [found[name] for name in ("lost", "diverged", "programs_that_survived")] == [0, 0, 0]


@pytest.mark.slow
def test_the_same_dialogue_is_played_as_an_environment_and_through_the_endpoint() -> None:
    found = overhead(sessions=4, turns=2, engine_seconds=0.1)
    assert 0 < found["throughput"] < 2
    assert found["cpu_ms"] < 200


def test_the_same_tokens_give_the_same_update() -> None:
    found = learning()
    assert found["tokens"] > 100
    assert [found[name] for name in ("same_rows", "same_rewards", "same_loss", "same_weights")] == [True] * 4
