"""A score of each turn from the user's own callable, the judge."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from agentrl.errors import AgentRLError, ConfigError, UserError
from agentrl.learn.interrupt import check_interrupt
from agentrl.learn.signals.base import Sample, Signal, SignalContext
from agentrl.learn.signals.config import SignalsConfig
from agentrl.plain_data import PlainDataError, abbreviated, plain_data, words_of
from agentrl.registry import import_attribute
from agentrl.rollout.env_thread import EnvThread
from agentrl.types import Trajectory

_ASK_S = 0.1
"""How often to ask whether the update was interrupted, in seconds."""


class TurnScores(Signal):
    """What the callable that `signals.judge` names returns; each process asks it about a share of the trajectories."""

    sample: ClassVar = Sample(start=0.0, step=0.25, by_trajectory=1, by_turn=3, period=5, in_rewards=True)
    is_per_token: ClassVar = False
    hint: ClassVar = "signals.judge to module:function"

    def __init__(self, context: SignalContext) -> None:
        """Import the judge."""
        super().__init__(context)
        assert context.config.judge is not None, "a recipe without one provides no scores"
        self._judge = load_judge(context.config.judge)

    @classmethod
    def is_provided(cls, config: SignalsConfig) -> bool:
        """Whether the recipe names a judge."""
        return bool(config.judge)

    def measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the judge's scores.

        Raises:
            UserError: with the judge's own words.
        """
        from agentrl.distributed.processes import all_gather, num_processes, process_index

        config = self.context.config
        scoring = score_turns(
            self._judge,
            trajectories[process_index() :: num_processes()],
            timeout_s=config.judge_timeout_s,
            num_threads=config.judge_threads,
            max_retries=config.judge_retries,
        )
        scored = {t.trajectory_id: t for t in all_gather(asyncio.run(scoring))}
        return [scored[t.trajectory_id] for t in trajectories]


def load_judge(name: str) -> Callable[[Trajectory], Sequence[float]]:
    """Import `module:function`.

    Raises:
        ConfigError: where there is no such callable.
    """
    judge = import_attribute(name, field="signals.judge", kind="function")
    if not callable(judge):
        raise ConfigError(f"signals.judge: {name!r} is {judge!r}, not a function of a trajectory")
    found: Callable[[Trajectory], Sequence[float]] = judge
    return found


async def score_turns(
    judge: Callable[[Trajectory], Sequence[float]],
    trajectories: Sequence[Trajectory],
    *,
    timeout_s: float,
    num_threads: int,
    max_retries: int,
) -> list[Trajectory]:
    """Return the trajectories with the judge's score at every turn.

    Raises:
        UserError: with the judge's own words, when it does not return one finite number for each turn, or still raises or
            hangs after `max_retries` more calls.
    """
    waiting = [(index, trajectory, 0) for index, trajectory in enumerate(trajectories)]
    found: dict[int, Trajectory] = {}

    async def work() -> None:
        thread = EnvThread()
        try:
            while waiting:
                index, trajectory, retries = waiting.pop()
                where = f"signals.judge, trajectory {trajectory.trajectory_id}"
                try:
                    scores = await thread.call(partial(judge, trajectory), timeout_s=timeout_s)
                except AgentRLError:
                    raise
                except Exception as error:
                    if retries < max_retries:
                        waiting.append((index, trajectory, retries + 1))
                        if thread.is_lost:
                            thread.close()
                            thread = EnvThread()
                        continue
                    if thread.is_lost:
                        raise UserError(f"{where}: no score within signals.judge_timeout_s: {timeout_s:g} s") from error
                    raise UserError(f"{where}: {words_of(error)}") from error
                found[index] = _scored(trajectory, scores, where)
        finally:
            thread.close()

    workers = [asyncio.create_task(work()) for _ in range(min(num_threads, len(trajectories)))]
    try:
        pending = set(workers)
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_ASK_S, return_when=asyncio.FIRST_EXCEPTION)
            for worker in done:
                worker.result()
            check_interrupt()
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[index] for index in range(len(trajectories))]


def _scored(trajectory: Trajectory, scores: Any, where: str) -> Trajectory:
    try:
        plain = plain_data(scores)
    except PlainDataError:
        plain = None
    turns = trajectory.turns
    if not (isinstance(plain, list) and len(plain) == len(turns) and all(isinstance(s, int | float) for s in plain)):
        raise UserError(
            f"{where}: return one finite number for each of its {len(turns)} turns, got {abbreviated(scores)}"
        )
    scored = (
        replace(turn, signals={**turn.signals, "turn_scores": float(score)})
        for turn, score in zip(turns, plain, strict=True)
    )
    return replace(trajectory, turns=tuple(scored))
