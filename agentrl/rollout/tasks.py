"""Tasks and seeds of a run, and the curriculum.

The k-th task of a split follows from the run's seed and k, and every random choice of a rollout from the run's seed and names,
never from the order of events: a resumed run repeats them without stored state. A curriculum lets tasks of a table rest while
there is nothing to learn from them.
"""

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.errors import ConfigError
from agentrl.types import ENDLESS, NO_HASHES, Amount, Count, NumTasks, Split, TaskHashes, TrajectoryGroup

_HALF = 2**30


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all parts."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def task_seed(run_seed: int, index: int) -> int:
    """Return the environment seed of the `index`-th training task: below 2**30."""
    return derive_seed(run_seed, "task", index) % _HALF


def held_out_seed(run_seed: int, index: int) -> int:
    """Return the environment seed of the `index`-th evaluation task: at least 2**30, so never a training seed."""
    return _HALF + derive_seed(run_seed, "held out", index) % _HALF


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTask:
    """A task, as arguments of the environment's `reset`."""

    seed: int
    split: Split = "train"
    index: int | None = None
    """Its number within the split. None: unknown."""
    stage: int = 0
    """Entry of `env.schedule` with which the environment is made, from 1. 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """An entry of `env.schedule`."""

    from_step: int
    num_train: int | None
    """Number of training tasks of the environment in this stage. None: endless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """The tasks of a run, split by split, in their order."""

    seed: int
    """Seed of the run."""
    evaluation_seed: int | None = None
    """Seed of the evaluation tasks (`evaluation.seed`). None: the run's."""
    num: NumTasks = ENDLESS
    """Numbers of tasks that the environment reports."""
    hashes: TaskHashes = NO_HASHES
    """Hashes of the tasks that the environment reports: a resumed run must have the same tasks."""
    stages: tuple[Stage, ...] = ()
    """Stages of `env.schedule`, in order."""
    first: int = 0
    """Index of the first evaluation task of a table."""

    def train(self, index: int, *, place: int | None = None, step: int = 0) -> EnvTask:
        """Return the task of the `index`-th group. Each epoch goes through a table in an order of its own.

        Args:
            index: index of the group, which fixes the seed.
            place: position in the concatenated epochs. None: `index`.
            step: step in which the group is started, which fixes the stage. 0: before all stages.

        Raises:
            ConfigError: if there are no training tasks.
        """
        seed = task_seed(self.seed, index)
        stage = bisect_right([stage.from_step for stage in self.stages], step)
        num = self.stages[stage - 1].num_train if stage else self.num.train
        if num is None:
            return EnvTask(seed=seed, index=index, stage=stage)
        if num == 0:
            raise ConfigError(
                "env: the environment has no training tasks (num_tasks('train') returned 0); give it some (env.options)"
            )
        epoch, nth = divmod(index if place is None else place, num)
        return EnvTask(seed=seed, index=int(_epoch_order(self.seed, epoch, num)[nth]), stage=stage)

    def for_stage(self, stage: int) -> "Tasks":
        """Return the tasks of one stage, counted from 1, as if there were no other."""
        return replace(self, num=self.num._replace(train=self.stages[stage - 1].num_train), stages=())

    def evaluation(self, asked: int) -> list[EnvTask]:
        """Return `asked` evaluation tasks, spread evenly over a table; all of them if there are fewer.

        Raises:
            ConfigError: if there are no evaluation tasks.
        """
        num = self.num.eval
        if num == 0:
            raise ConfigError(
                "env: the environment has no evaluation tasks (num_tasks('eval') returned 0), and every run is evaluated; "
                "give it some (env.options)"
            )
        count = asked if num is None else min(asked, num)
        seed = self.seed if self.evaluation_seed is None else self.evaluation_seed
        return [
            EnvTask(seed=held_out_seed(seed, place), split="eval", index=self._evaluation_index(place, count))
            for place in range(count)
        ]

    def _evaluation_index(self, place: int, count: int) -> int:
        num = self.num.eval
        return place if num is None else (self.first + place * num // count) % num

    def fewer_tasks_warning(self, asked: int) -> str | None:
        """Return a warning if there are fewer evaluation tasks than were asked for."""
        num = self.num.eval
        if num is None or num >= asked:
            return None
        return (
            f"evaluation.num_tasks: {asked} were asked for, and the environment has {num} evaluation "
            f"task{'s' if num > 1 else ''}, which {'are' if num > 1 else 'is'} evaluated once each"
        )

    def check_train(self) -> None:
        """Raise ConfigError if there are no training tasks."""
        self.train(0)


@lru_cache(maxsize=4)
def _epoch_order(run_seed: int, epoch: int, num: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.random.default_rng(derive_seed(run_seed, "epoch", epoch)).permutation(num)


class CurriculumConfig(BaseModel):
    """Tasks that the policy solves nearly always, or hardly ever, rest for some epochs and come back.

    The success rate of a visit is the fraction of the group's episodes with `info["success"]`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    visits: Count = 2
    """Visits over which the mean success rate of a task is taken; after a rest, over as many new ones."""
    rest: Amount = 4
    """Epochs of a rest."""
    low: float | None = Field(default=0.0, ge=0, le=1)
    """A task rests if its rate is at most this. Null: no lower bound."""
    high: float | None = Field(default=1.0, ge=0, le=1)
    """A task rests if its rate is at least this. Null: no upper bound."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low: {self.low} is not below high: {self.high}, so that every task rests; lower it")
        return self

    def rests(self, rate: float) -> bool:
        """Return whether a task with this success rate rests."""
        return (self.low is not None and rate <= self.low) or (self.high is not None and rate >= self.high)


@dataclass(slots=True, kw_only=True)
class CurriculumState:
    """State of a curriculum. It follows from the groups that were started and judged, in their order."""

    place: int = 0
    """Next position in the concatenated epochs."""
    is_reported: bool = False
    """An episode has reported `success`."""
    rates: dict[int, list[float]] = field(default_factory=dict)
    """Success rates of the last visits since the task came back, by task index."""
    until: dict[int, int] = field(default_factory=dict)
    """Epoch in which a resting task comes back, by task index."""


class Curriculum:
    """Goes through the epochs of a table, and skips tasks that rest."""

    def __init__(self, config: CurriculumConfig, tasks: Tasks, *, num_processes: int) -> None:
        """Create a curriculum before its first task.

        Args:
            config: which tasks rest, and how long.
            tasks: tasks of the run.
            num_processes: number of ranks that sample.

        Raises:
            ConfigError: if there is no table, or more than one rank, each of which would see only some of the visits.
        """
        if tasks.num.train is None:
            raise ConfigError(
                "rollout.curriculum: the environment's tasks have no end (num_tasks('train') returned None), so that none "
                "comes back; leave the section out"
            )
        if num_processes > 1:
            raise ConfigError(
                f"rollout.curriculum: {num_processes} processes sample, and none sees all visits of a task; sample in one"
            )
        self._config = config
        self._tasks = tasks
        self._num = tasks.num.train
        self.state = CurriculumState()

    def next(self) -> int:
        """Return the position of the next task that does not rest."""
        place, until = self.state.place, self.state.until
        while until.get(self._task(place), 0) > self._epoch(place):
            place += 1
            if place % self._num == 0 and len(until) == self._num:  # skip epochs in which all rest
                place = max(place, min(until.values()) * self._num)
        return place

    def advance(self, place: int) -> None:
        """Move past the task at a position, which was started."""
        self.state.place = place + 1

    @property
    def num_resting(self) -> int:
        """Number of tasks that rest now."""
        epoch = self._epoch(self.state.place) if self._num else 0
        return sum(until > epoch for until in self.state.until.values())

    def record_visit(self, group: TrajectoryGroup) -> None:
        """Record the success rate of a visit, without failed episodes."""
        state, valid = self.state, group.valid
        state.is_reported |= any("success" in trajectory.metrics for trajectory in valid)
        known = [success for trajectory in valid if (success := trajectory.reported("success")) is not None]
        if not known or not state.is_reported or (task := valid[0].task_index) is None:
            return
        rate = sum(success > 0 for success in known) / len(known)
        rates = [*state.rates.pop(task, []), rate][-self._config.visits :]
        if len(rates) == self._config.visits and self._config.rests(sum(rates) / len(rates)):
            state.until[task] = self._epoch(max(0, state.place - 1)) + 1 + self._config.rest
        else:
            state.rates[task] = rates

    def _epoch(self, place: int) -> int:
        return place // self._num

    def _task(self, place: int) -> int:
        task = self._tasks.train(place).index
        assert task is not None, "a table has numbers"
        return task
