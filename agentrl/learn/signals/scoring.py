"""Numbers for the action tokens of trajectories, from forward passes that train nothing.

`T` action tokens, all turns of a trajectory in a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.chat import Renderer
from agentrl.credit import Credit
from agentrl.distributed.processes import all_gather, num_processes, process_index
from agentrl.learn.batch import FloatArray, make_batch
from agentrl.learn.plan import MicroBatch, micro_batches
from agentrl.policy.layout import Layout
from agentrl.types import Message, Trajectory, Turn

Score = Callable[[MicroBatch], Tensor]
"""Returns one number for each action token of a micro-batch."""


@torch.no_grad()
def score_tokens(
    score: Score, trajectories: Sequence[Trajectory], *, layout: Layout, max_tokens: int, device: torch.device
) -> list[FloatArray]:
    """Score every action token of each trajectory, in the context in which it was sampled: (T,) each.

    Every process scores its share, and gets all scores.
    """
    credits = [Credit.uniform(t, 0.0) for t in trajectories]
    batch = make_batch(trajectories, credits, unit="trajectory", aggregation="token-mean")
    found_T = np.empty(len(batch.target_T))
    process, count = process_index(), num_processes()
    passes = micro_batches(
        batch, max_tokens=max_tokens, layout=layout, device=device, process=process, num_processes=count
    )
    for token_T, scores_T in all_gather([(micro.token_T, score(micro).double().cpu().numpy()) for micro in passes]):
        found_T[token_T] = scores_T
    return np.split(found_T, np.cumsum([t.num_action_tokens for t in trajectories])[:-1])


def with_tokens(trajectory: Trajectory, name: str, column_T: FloatArray) -> Trajectory:
    """Return the trajectory with a field that holds one number for each action token."""
    ends = np.cumsum([len(turn.action_ids) for turn in trajectory.turns])
    pieces: list[dict[str, Any]] = [{name: tuple(piece.tolist())} for piece in np.split(column_T, ends[:-1])]
    turns = (replace(turn, **piece) for turn, piece in zip(trajectory.turns, pieces, strict=True))
    return replace(trajectory, turns=tuple(turns))


def with_hindsight(trajectory: Trajectory, renderer: Renderer, tools: Sequence[dict[str, Any]]) -> Trajectory:
    """Return the trajectory as if its first message had said how it ends, and the answer where there is a known one.

    Every action stays as it was sampled; each context that was begun anew is rendered with the hint in it.
    """
    answer = "" if trajectory.gold_answer is None else f" The right answer is: {trajectory.gold_answer}"
    hint = f"(In hindsight: the total reward was {trajectory.reward:.3g}.{answer})"
    history: list[Message] = []
    turns = []
    for k, turn in enumerate(trajectory.turns):
        observation = list(turn.observation)
        if k == 0 and not observation:
            observation = [{"role": "user", "content": hint}]
        elif k == 0:
            observation[-1] = {**observation[-1], "content": f"{observation[-1].get('content') or ''}\n{hint}"}
        history += observation
        if k == 0 or not turn.extends:
            turn = replace(turn, observation_ids=renderer.start(history, tools))
        turns.append(turn)
        history.append(turn.message)
    return replace(trajectory, turns=tuple(turns))


def answered_at_each_turn(trajectory: Trajectory, renderer: Renderer) -> list[Trajectory]:
    """Return one made-up trajectory of a single turn for each turn: its context, then the task's known answer.

    The stop token after the answer is left out: it tells nothing of what the policy knows.
    """
    assert trajectory.gold_answer is not None
    answer_ids = renderer.encode({"role": "assistant", "content": trajectory.gold_answer})
    while answer_ids and answer_ids[-1] in renderer.stop_token_ids:
        answer_ids = answer_ids[:-1]
    zeros = (0,) * len(answer_ids)
    context_ids: tuple[int, ...] = ()
    answered = []
    for turn in trajectory.turns:
        context_ids = context_ids + turn.observation_ids if turn.extends else turn.observation_ids
        attempt = Turn(
            observation_ids=context_ids,
            action_ids=answer_ids,
            behavior_logprobs=zeros,
            versions=zeros,
            reward=0.0,
        )
        answered.append(replace(trajectory, turns=(attempt,)))
        context_ids += turn.action_ids
    return answered
