"""Numbers for tokens, from forward passes that train nothing.

`T` tokens of a trajectory, all turns in a row, `K` turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agentrl.distributed.processes import num_processes, scatter, to_rank_zero
from agentrl.learn.interrupt import check_interrupt
from agentrl.learn.plan import MicroBatch, Planner
from agentrl.learn.signals.base import SignalContext
from agentrl.learn.tokens import FloatArray, TokenBatch
from agentrl.policy.model import Policy
from agentrl.types import Trajectory

Score = Callable[[MicroBatch], Tensor]
"""Returns one number for each token of a micro-batch."""


@torch.no_grad()
def score_tokens(score: Score, tokens: TokenBatch, *, planner: Planner) -> list[FloatArray]:
    """Score the tokens of each trajectory, each in its own context: (T,) each.

    Rank 0 scatters its tokens over the ranks, and gets all scores; the others, which have no tokens, get none.
    """
    found_T, own = np.empty(len(tokens)), []
    for of_pass in scatter(lambda: planner.assign(tokens, num_processes=num_processes())):
        check_interrupt()
        own.append((of_pass.token_T, score(planner.lay_out(of_pass)).double().cpu().numpy()))
    for token_T, scores_T in to_rank_zero(own):
        found_T[token_T] = scores_T
    parts = np.split(found_T, np.searchsorted(tokens.trajectory_T, np.arange(1, tokens.num_trajectories)))
    return parts[: tokens.num_trajectories]


def logprobs(context: SignalContext, tokens: TokenBatch, *, policy: Policy | None = None) -> list[FloatArray]:
    """Return the log-probability of every token under a policy, by default the one in training."""
    scored = policy or context.policy

    def score(micro: MicroBatch) -> Tensor:
        with context.autocast():
            found: tuple[Tensor, Tensor] = scored(micro.inputs, micro.slot_T, micro.target_T, context.temperature)
        return found[0]

    device = next(context.policy.parameters()).device
    planner = Planner.for_policy(scored, max_tokens=context.max_tokens, device=device)
    return score_tokens(score, tokens, planner=planner)


def with_tokens(trajectories: Sequence[Trajectory], name: str, columns: Sequence[FloatArray]) -> list[Trajectory]:
    """Return the trajectories with a signal of one number for each action token."""
    found = []
    for trajectory, column_T in zip(trajectories, columns, strict=True):
        ends = np.cumsum([len(turn.action_ids) for turn in trajectory.turns])
        pieces = [tuple(piece.tolist()) for piece in np.split(column_T, ends[:-1])]
        found.append(with_turns(trajectory, name, pieces))
    return found


def with_turns(trajectory: Trajectory, name: str, values_K: Sequence[float | tuple[float, ...]]) -> Trajectory:
    """Return the trajectory with a signal of one value for each turn."""
    turns = zip(trajectory.turns, values_K, strict=True)
    return replace(trajectory, turns=tuple(replace(turn, signals={**turn.signals, name: x}) for turn, x in turns))
