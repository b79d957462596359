"""What an environment returns to its own oracle is held to the contract, as what it returns to the policy is."""

import asyncio
from typing import Any

import pytest

from agentrl.errors import EnvironmentFailure
from agentrl.rollout import RolloutConfig, Tasks
from agentrl.rollout.demonstrations import demonstrations, oracle_ends
from agentrl_envs.key_door import KeyDoor
from tests.support.played import TOKENIZER
from tests.support.renderers import OftenStops


class Careless(KeyDoor):
    """Returns a reward that is no number."""

    def step(self, action: Any) -> Any:
        messages, _, terminated, truncated, info = super().step(action)
        return messages, "much", terminated, truncated, info


def test_an_environment_that_breaks_the_contract_with_its_oracle_is_told_which_part_of_it() -> None:
    words = r"step\(\) of Careless returned the reward str 'much'; return a finite float"
    config = RolloutConfig(max_turns=4, env_timeout_s=10)
    playing = demonstrations(Careless, OftenStops(TOKENIZER), count=1, skill=1.0, config=config, tasks=Tasks(seed=0))
    with pytest.raises(EnvironmentFailure, match=rf"^a demonstration with the environment's oracle\(\): {words}"):
        asyncio.run(playing)
    with pytest.raises(EnvironmentFailure, match=rf"oracle\(\), task seed \d+: {words}"):
        asyncio.run(oracle_ends(Careless, max_turns=4, timeout_s=10, tasks=Tasks(seed=0)))
