"""Which task the k-th of a split is: it follows from the run's seed and from k, so nothing is kept and a kill loses nothing.

Every random choice of a rollout follows from the run's seed and from names, never from the order of events.

Which tasks of a table rest for a while, because there is nothing to learn from them at the moment.
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
    """Return the environment seed of the `index`-th evaluation task: at least 2**30, so never one of training."""
    return _HALF + derive_seed(run_seed, "held out", index) % _HALF


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTask:
    """A task as the environment's `reset` is told of it."""

    seed: int
    split: Split = "train"
    index: int | None = None
    """Its number within the split. None: not known, as in what an earlier version wrote."""
    stage: int = 0
    """Which entry of `env.schedule` the environment is made with, from 1. 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """An entry of `env.schedule`."""

    from_step: int
    num_train: int | None
    """How many training tasks the environment has then. None: without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """The tasks of a run, split by split, in their order."""

    seed: int
    """The run's."""
    evaluation_seed: int | None = None
    """Of the evaluation tasks (`evaluation.seed`). None: the run's."""
    num: NumTasks = ENDLESS
    """As the environment says."""
    hashes: TaskHashes = NO_HASHES
    """As the environment says: what a run is resumed on must be what it began with."""
    stages: tuple[Stage, ...] = ()
    """The schedule, in its order."""
    first: int = 0
    """Of a table, which evaluation task comes first."""

    def train(self, index: int, *, place: int | None = None, step: int = 0) -> EnvTask:
        """Return the task of the `index`-th group: of a table, the next one of an epoch, each epoch in its own order.

        Args:
            index: of the group; the seed follows from it.
            place: in the order of the epochs, one after the other. None: the same.
            step: in which the group is started: the schedule goes by it. 0: before all of them.

        Raises:
            ConfigError: where there is none.
        """
        seed, stage = task_seed(self.seed, index), bisect_right([stage.from_step for stage in self.stages], step)
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
        """Return the tasks that the environment has with an entry of the schedule, from 1, as if there were no other."""
        return replace(self, num=self.num._replace(train=self.stages[stage - 1].num_train), stages=())

    def evaluation(self, asked: int) -> list[EnvTask]:
        """Return the evaluation tasks: of a table as many as were asked for, spread evenly over it, or all, each once.

        Raises:
            ConfigError: where there is none.
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
        """Return what to tell where there are fewer evaluation tasks than were asked for."""
        num = self.num.eval
        if num is None or num >= asked:
            return None
        return (
            f"evaluation.num_tasks: {asked} were asked for, and the environment has {num} evaluation "
            f"task{'s' if num > 1 else ''}, which {'are' if num > 1 else 'is'} evaluated once each"
        )

    def check_train(self) -> None:
        """Refuse to train without tasks.

        Raises:
            ConfigError: where there are none.
        """
        self.train(0)


@lru_cache(maxsize=4)
def _epoch_order(run_seed: int, epoch: int, num: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.random.default_rng(derive_seed(run_seed, "epoch", epoch)).permutation(num)


class CurriculumConfig(BaseModel):
    """Tasks that the policy solves nearly always, or hardly ever, rest for some epochs and come back.

    What counts is `info["success"]`: the success rate of a visit is the share of the group's episodes that succeeded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    visits: Count = 2
    """A task is judged by its mean success rate over so many visits; when it comes back from a rest, by as many again."""
    rest: Amount = 4
    """Epochs that it rests."""
    low: float | None = Field(default=0.0, ge=0, le=1)
    """It rests where the rate is at most this. Null: however low it is, it does not."""
    high: float | None = Field(default=1.0, ge=0, le=1)
    """It rests where the rate is at least this. Null: however high it is, it does not."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low: {self.low} is not below high: {self.high}, so that every task rests; lower it")
        return self

    def rests(self, rate: float) -> bool:
        """Tell whether there is nothing to learn from a task with this success rate."""
        return (self.low is not None and rate <= self.low) or (self.high is not None and rate >= self.high)


@dataclass(slots=True, kw_only=True)
class CurriculumState:
    """Where a curriculum stands. It follows from the groups that were started and judged, in their order."""

    place: int = 0
    """The next place in the order of the epochs, one after the other."""
    is_reported: bool = False
    """An episode has said whether it was a success: before that, nothing is known of any task."""
    rates: dict[int, list[float]] = field(default_factory=dict)
    """By the number of a task: the success rates of its last visits since it came back."""
    until: dict[int, int] = field(default_factory=dict)
    """By the number of a task that rests: the epoch in which it comes back."""


class Curriculum:
    """Goes through the epochs of a table, and leaves out the tasks that rest."""

    def __init__(self, config: CurriculumConfig, tasks: Tasks, *, num_processes: int) -> None:
        """Begin before the first task.

        Args:
            config: which tasks rest, and how long.
            tasks: of the run.
            num_processes: how many processes share the tasks.

        Raises:
            ConfigError: where there is no table, or each process would see some of the visits only.
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
        self._config, self._tasks, self._num = config, tasks, tasks.num.train
        self.state = CurriculumState()

    def next(self) -> int:
        """Return the place of the next task that does not rest."""
        place, until = self.state.place, self.state.until
        while until.get(self._task(place), 0) > self._epoch(place):
            place += 1
            if place % self._num == 0 and len(until) == self._num:  # an epoch in which all rest is not gone through
                place = max(place, min(until.values()) * self._num)
        return place

    def advance(self, place: int) -> None:
        """Go on after the task at a place, which was started."""
        self.state.place = place + 1

    @property
    def num_resting(self) -> int:
        """How many tasks rest at the moment."""
        epoch = self._epoch(self.state.place) if self._num else 0
        return sum(until > epoch for until in self.state.until.values())

    def record_visit(self, group: TrajectoryGroup) -> None:
        """Take note of how a visit went; failed episodes say nothing."""
        state, valid = self.state, group.valid
        state.is_reported |= any("success" in trajectory.metrics for trajectory in valid)
        if not valid or not state.is_reported or (task := valid[0].task_index) is None:
            return
        rate = sum(trajectory.metrics.get("success", 0.0) > 0 for trajectory in valid) / len(valid)
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
