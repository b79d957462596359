"""A main agent, two sub-agents at the same time and a compaction in one session: is every call trained on, and once?

    python -m benchmarks.endpoint_agents [--turns 200]

The main agent asks two sub-agents, whose calls interleave, goes on with what they say, has its dialogue summed up, and goes on
from the summary. `delivered_share` is turns over completions of the engine, `rows` those of an episode, of which four are
lines of calls; `trained_twice` and `masked` count tokens. `journal_ratio` is the tokens that the journal holds over the tokens
of the turns, each of which has only what is new in its context: a journal without parents would hold each context whole.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from agentrl.agent.session import AgentSession
from agentrl.rollout import Journal
from agentrl.rollout.journal import Ended, Played
from agentrl.types import Message, Trajectory, Turn, chains_of, path_to
from benchmarks.endpoint_pools import MessageEngine, agent_player, num_trained, open_pool, sampled, text

GROUP_SIZE = 2
FILLER = "lorem ipsum " * 15


def user(words: str) -> dict[str, Any]:
    """Return a message to the policy."""
    return {"role": "user", "content": words}


async def talk(client: AsyncOpenAI, messages: list[Any], *, turns: int) -> list[Any]:
    """Let the policy speak so many times; return the whole dialogue."""
    for number in range(turns):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, user(f"{number} {FILLER}")]
    return messages


async def solve(task: dict[str, Any], session: AgentSession) -> float:
    """Play a main agent with two others, and sum up in between."""
    share = task["turns"] // 10
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        main = await talk(client, [user("You are the main agent.")], turns=share)
        others = [talk(client, [user(f"You are the {name}.")], turns=4 * share) for name in ("reader", "writer")]
        for dialogue in await asyncio.gather(*others):
            main.append(user(dialogue[-2].content))
        main = await talk(client, [*main, user("Sum up.")], turns=1)
        await talk(client, [user(f"So far: {main[-2].content}")], turns=task["turns"] - 9 * share - 1)
    return 1.0


def say(name: str, prompt: str) -> Message:
    """Say something that fits the prompt alone."""
    return text(f"{name[-1]} answers {len(prompt)}")


def num_tokens(turns: Sequence[Turn]) -> int:
    """Return the number of tokens that turns hold."""
    return sum(len(turn.observation_ids) + len(turn.action_ids) for turn in turns)


def num_contexts(trajectory: Trajectory) -> int:
    """Return the number of tokens of all turns, each with its whole context wherever the turn before is not its parent."""
    turns = trajectory.turns
    jumps = [n for n, turn in enumerate(turns) if turn.extends and turn.parent is not None]
    return num_tokens(turns) + sum(num_tokens([turns[k] for k in path_to(turns, n)[:-1]]) for n in jumps)


def figures(*, num_turns: int) -> dict[str, Any]:
    """Return the figures of a group of episodes."""
    engine = MessageEngine(say)
    agent = {
        "run": "benchmarks.endpoint_agents:solve",
        "tasks": {"tasks": [{"turns": num_turns}], "eval_share": 0},
    }
    with tempfile.TemporaryDirectory() as name:
        journal = Journal(Path(name))
        player = agent_player(agent)
        with open_pool(player, engine, journal=journal, num_groups=1, group_size=GROUP_SIZE) as (runner, pool):
            pool.state_dict()  # the journal begins
            (group,) = runner.run(pool.collect())
        events = list(Journal(Path(name)).read_events(journal.number))
        num_bytes = sum(path.stat().st_size for path in Path(name).iterdir())
    played, turns = group.trajectories, [turn for t in group.trajectories for turn in t.turns]
    in_journal = [event.turn for event in events if isinstance(event, Played)]
    in_journal += [turn for event in events if isinstance(event, Ended) for turn in event.trajectory.turns]
    said = sorted((prompt, completion.token_ids) for prompt, completion in engine.said)
    num_sampled = sum(len(ids) for _, ids in said)
    chains = [chains_of(trajectory.turns) for trajectory in played]
    return {
        "turns": len(turns) // GROUP_SIZE,
        "delivered_share": len(turns) / len(said),
        "identical": said == sorted(pair for trajectory in played for pair in sampled(trajectory)),
        "rows": sum(map(len, chains)) / GROUP_SIZE,
        "trained_twice": sum(len(turn.action_ids) for turn in turns) - num_sampled,
        "masked": num_sampled - num_trained(played),
        "journal_ratio": round(num_tokens(in_journal) / num_tokens(turns), 3),
        "without_parents": round(sum(map(num_contexts, played)) / num_tokens(turns), 1),
        "journal_bytes_a_token": round(num_bytes / num_tokens(turns), 2),
        "errors": [trajectory.error for trajectory in played if trajectory.error],
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=200)
    print(json.dumps(figures(num_turns=parser.parse_args().turns)))


if __name__ == "__main__":
    main()
