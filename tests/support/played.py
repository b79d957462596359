"""Episodes that a tiny policy plays, and what a plain pass gives for their tokens."""

import asyncio
import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from agentrl.chat import Renderer, train_tokenizer
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.env import make_env
from agentrl.learn.tokens import Row
from agentrl.policy.config import Layout, LocalModelConfig
from agentrl.policy.model import Policy, make_local_model
from agentrl.rollout import EnvPlayer, EpisodeContext, RolloutConfig, RolloutPool, Tasks
from agentrl.types import Trajectory
from tests.support.renderers import StartsAgain

TOKENIZER = train_tokenizer([], vocab_size=261)
TINY = LocalModelConfig(
    hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=32, initializer_std=0.3
)


def new_policy(seed: int = 0, *, sizes: LocalModelConfig = TINY, layout: Layout = "tree") -> Policy:
    torch.manual_seed(seed)
    return Policy(make_local_model(sizes, TOKENIZER), layout=layout)


def play(
    policy: Policy,
    *,
    env: str = "key_door",
    options: dict[str, Any] | None = None,
    renderer: Renderer | None = None,
    num: int = 6,
    **config: Any,
) -> list[Trajectory]:
    """Play episodes of tasks of their own with the policy's weights."""
    settings = {"group_size": 1, "max_turns": 6, "max_turn_tokens": 64, "max_context_tokens": 1024, **config}
    pool = RolloutPool(
        player=EnvPlayer(partial(make_env, env, options or {})),
        context=EpisodeContext(
            engine=TransformersEngine(copy.deepcopy(policy.model).float()),
            renderer=renderer or StartsAgain(TOKENIZER),
            config=RolloutConfig.model_validate(settings),
        ),
        tasks=Tasks(seed=1),
    )
    try:
        groups = asyncio.run(pool.collect(num))
    finally:
        pool.close()
    return [trajectory for group in groups for trajectory in group.trajectories]


def contexts(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """List what stood before each action, as the types define it."""
    found: list[tuple[int, ...]] = []
    grown: tuple[int, ...] = ()
    for turn in trajectory.turns:
        grown = grown + turn.observation_ids if turn.extends else turn.observation_ids
        found.append(grown)
        grown += turn.action_ids
    return found


def plain_pass(
    policy: Policy, context_ids: Sequence[int], action_ids: Sequence[int], *, temperature: float = 1.0
) -> tuple[list[float], list[float]]:
    """Return log-probability and entropy of each token of an action, from one pass over one row."""
    with torch.no_grad():
        logits_LV = policy.model(torch.tensor([[*context_ids, *action_ids]])).logits[0]
    table_TV = (logits_LV[len(context_ids) - 1 : -1] / temperature).log_softmax(-1)
    logprobs_T = table_TV.gather(1, torch.tensor(action_ids)[:, None])[:, 0]
    return logprobs_T.tolist(), (-(table_TV.exp() * table_TV).sum(1)).tolist()


def plain_scores(
    policy: Policy, trajectory: Trajectory, *, temperature: float = 1.0
) -> tuple[list[float], list[float]]:
    """Return log-probability and entropy of each action token, from one pass over one row for each turn."""
    actions = [turn.action_ids for turn in trajectory.turns]
    return plain_passes(policy, zip(contexts(trajectory), actions, strict=True), temperature=temperature)


def asked(rows: Iterable[Row]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the context of each turn in some rows, and its tokens in question."""
    for row in rows:
        for k in np.unique(row.turn_T):
            positions_T = row.positions_T[row.turn_T == k]
            yield tuple(row.ids_L[: positions_T[0]].tolist()), tuple(row.ids_L[positions_T].tolist())


def plain_passes(
    policy: Policy, turns: Iterable[tuple[tuple[int, ...], tuple[int, ...]]], *, temperature: float = 1.0
) -> tuple[list[float], list[float]]:
    """Return the same for contexts and actions."""
    logprobs: list[float] = []
    entropies: list[float] = []
    for context_ids, action_ids in turns:
        of_turn = plain_pass(policy, context_ids, action_ids, temperature=temperature)
        logprobs += of_turn[0]
        entropies += of_turn[1]
    return logprobs, entropies
