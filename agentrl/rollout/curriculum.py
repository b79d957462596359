"""Which tasks of a table rest for a while, because there is nothing to learn from them at the moment."""

from dataclasses import dataclass, field
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.errors import ConfigError
from agentrl.rollout.tasks import Tasks
from agentrl.types import Amount, Count, TrajectoryGroup


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

    def started(self, place: int) -> None:
        """Go on after the task at a place, which was started."""
        self.state.place = place + 1

    @property
    def num_resting(self) -> int:
        """How many tasks rest at the moment."""
        epoch = self._epoch(self.state.place) if self._num else 0
        return sum(until > epoch for until in self.state.until.values())

    def note(self, group: TrajectoryGroup) -> None:
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
