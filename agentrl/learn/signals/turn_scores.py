"""A score of each turn from the user's own callable, the judge."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from agentrl.data.plain import PlainDataError, abbreviated, is_number, plain_data
from agentrl.env import MAX_REWARD
from agentrl.env.background import awaited
from agentrl.errors import ConfigError, UserError
from agentrl.learn.interrupt import unless_interrupted
from agentrl.learn.signals.base import Sample, Signal, SignalContext, SignalsConfig
from agentrl.recipe.registry import import_attribute
from agentrl.rollout.env_driver import EnvThread
from agentrl.rollout.faults import RaisedError
from agentrl.types import Trajectory


class TurnScores(Signal):
    """Scores by the callable that `signals.judge` names; each rank calls it for a share of the trajectories."""

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
        from agentrl.distributed.processes import num_processes, scatter, to_rank_zero

        config = self.context.config
        scoring = score_turns(
            self._judge,
            scatter(lambda: [trajectories[number :: num_processes()] for number in range(num_processes())]),
            timeout_s=config.judge_timeout_s,
            num_threads=config.judge_threads,
            max_retries=config.judge_retries,
        )
        scored = {t.trajectory_id: t for t in to_rank_zero(asyncio.run(scoring))}
        return [scored[t.trajectory_id] for t in trajectories]


def load_judge(name: str) -> Callable[[Trajectory], Sequence[float]]:
    """Import `module:function`.

    Raises:
        ConfigError: if there is no such callable.
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
                    scores = await thread.call(partial(_asked, judge, trajectory, timeout_s), timeout_s=timeout_s)
                except (TimeoutError, RaisedError) as error:
                    if retries < max_retries:
                        waiting.append((index, trajectory, retries + 1))
                        if thread.is_lost:
                            thread.close()
                            thread = EnvThread()
                        continue
                    if isinstance(error, TimeoutError):
                        raise UserError(f"{where}: no score within signals.judge_timeout_s: {timeout_s:g} s") from error
                    raise UserError(f"{where} raised {error.line}") from error
                found[index] = _scored(trajectory, scores, where)
        finally:
            thread.close()

    workers = [asyncio.create_task(work()) for _ in range(min(num_threads, len(trajectories)))]
    try:
        await unless_interrupted(asyncio.gather(*workers))
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[index] for index in range(len(trajectories))]


def _asked(
    judge: Callable[[Trajectory], Sequence[float]], trajectory: Trajectory, timeout_s: float
) -> tuple[list[float] | None, str]:
    """Call the judge with a copy; return its scores, and what it returned in a line. None: they are no scores.

    A coroutine is run.
    """
    returned: object = awaited(judge(copy.deepcopy(trajectory)), "signals.judge", timeout_s=timeout_s)
    try:
        scores = plain_data(returned)
    except PlainDataError:
        scores = None
    fits = isinstance(scores, list) and len(scores) == len(trajectory.turns)
    fits = fits and all(is_number(score) and abs(score) <= MAX_REWARD for score in scores)
    return scores if fits else None, abbreviated(returned)


def _scored(trajectory: Trajectory, asked: tuple[list[float] | None, str], where: str) -> Trajectory:
    turns, (scores, returned) = trajectory.turns, asked
    if scores is None:
        raise UserError(
            f"{where}: return one finite number, at most {MAX_REWARD:g} in size, for each of its {len(turns)} turns, "
            f"got {returned}"
        )
    scored = (
        replace(turn, signals={**turn.signals, "turn_scores": float(score)})
        for turn, score in zip(turns, scores, strict=True)
    )
    return replace(trajectory, turns=tuple(scored))
