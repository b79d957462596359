"""Which task the k-th of a split is: it follows from the run's seed and from k, so nothing is kept and a kill loses nothing."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from agentrl.errors import ConfigError
from agentrl.rollout.seeds import derive_seed, held_out_seed, task_seed
from agentrl.types import ENDLESS, NO_HASHES, NumTasks, Split, TaskHashes


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTask:
    """A task as the environment's `reset` is told of it."""

    seed: int
    split: Split = "train"
    index: int | None = None
    """Its number within the split. None: not known."""
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

    def of_stage(self, stage: int) -> "Tasks":
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

    def words_if_fewer(self, asked: int) -> str | None:
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
