"""The same tokens give the same update, whether an environment or a program has played.

    python -m benchmarks.endpoint_learning

A dialogue is played as an environment, and by openai's client; an engine says the same words to both. Both groups update the
same small model. `same_rows` compares contexts, actions and selected tokens, `same_loss` all metrics of the update, its loss
among them, and `same_weights` all weights afterwards, to the bit.
"""

import argparse
import json
import zlib
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI

from agentrl import Credit, TrajectoryGroup
from agentrl.agent.session import AgentSession
from agentrl.learn.tokens import TokenBatch
from agentrl.rollout import EnvPlayer, Player
from agentrl.rollout.tasks import EnvTask
from agentrl.types import Message
from benchmarks.endpoint_overhead import REPLY, Dialogue
from benchmarks.endpoint_pools import MessageEngine, agent_player, open_pool, text
from tests.support.learners import make_learner, weights

TURNS, GROUP_SIZE = 3, 4


async def solve(task: dict[str, Any], session: AgentSession) -> None:
    """Play the dialogue, and pay for each answer."""
    messages: list[Any] = [REPLY]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for _ in range(task["turns"]):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            session.reward(1.0)
            messages += [answer.choices[0].message, REPLY]


def say(name: str, prompt: str) -> Message:
    """Say something that follows from the episode's number and the prompt."""
    return text("a" * (1 + zlib.crc32(f"{name.partition('#')[0]} {prompt}".encode()) % 40))


def play(player: Player) -> TrajectoryGroup:
    """Return a group of dialogues."""
    with open_pool(player, MessageEngine(say)) as (runner, pool):
        (group,) = runner.run(pool.play({"learning/0": EnvTask(seed=0, index=0)}, group_size=GROUP_SIZE))
    return group


def update(group: TrajectoryGroup) -> tuple[dict[str, float], torch.Tensor]:
    """Return the metrics of one update by a group, and all weights after it."""
    learner = make_learner(num_minibatches=1)
    credits = [
        Credit.from_tokens(trajectory, np.full(trajectory.num_action_tokens, (-1.0) ** number))
        for number, trajectory in enumerate(group.trajectories)
    ]
    return dict(learner.update([group], [credits], version=1)), weights(learner)


def rows(group: TrajectoryGroup) -> list[list[int]]:
    """Return contexts, actions and selected tokens."""
    batch = TokenBatch.from_trajectories(group.trajectories)
    return [*(row.tolist() for row in batch.rows), batch.position_T.tolist(), batch.target_T.tolist()]


def figures() -> dict[str, Any]:
    """Return the figures."""
    agent = {"run": "benchmarks.endpoint_learning:solve", "tasks": {"tasks": [{"turns": TURNS}], "eval_share": 0}}
    groups = [play(EnvPlayer(lambda: Dialogue(turns=TURNS, stagger_s=0))), play(agent_player(agent))]
    (in_env, env_weights), (by_agent, agent_weights) = map(update, groups)
    return {
        "tokens": sum(len(turn.action_ids) for t in groups[1].trajectories for turn in t.turns),
        "same_rows": rows(groups[0]) == rows(groups[1]),
        "same_rewards": [[turn.reward for turn in t.turns] for t in groups[0].trajectories]
        == [[turn.reward for turn in t.turns] for t in groups[1].trajectories],
        "same_loss": in_env == by_agent,
        "same_weights": bool(torch.equal(env_weights, agent_weights)),
    }


def main() -> None:
    """Print the figures."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(json.dumps(figures()))


if __name__ == "__main__":
    main()
