"""The stream of training tasks: which episodes are started, which groups are handed out, what is remembered of both.

Groups of episodes and their names.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from pydantic import TypeAdapter

from agentrl.errors import ConfigError, EnvironmentFailure
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.conversation import LiveEpisode, Task
from agentrl.rollout.journal import Dropped, Ended, Event, HandedOut, Interrupted, Journal, Played, Restarted, Started
from agentrl.rollout.tasks import Curriculum, CurriculumState, EnvTask, Tasks, derive_seed
from agentrl.types import StopReason, TaskShard, Trajectory, TrajectoryGroup, lengthen, shorten


def group_name(index: int) -> str:
    """Return the name of the group with a number in the stream."""
    return f"train/{index:06d}"


def group_index(name: str) -> int:
    """Return a group's number in the stream."""
    return int(name.rpartition("/")[2])


def group_tasks(name: str, task: EnvTask, *, size: int, run_seed: int) -> list[Task]:
    """Return the tasks of a group's episodes."""
    first = Task(
        group_id=name,
        rollout_index=0,
        seed=task.seed,
        sampling_seed=derive_seed(run_seed, "sampling"),
        split=task.split,
        task_index=task.index,
        stage=task.stage,
    )
    return [replace(first, rollout_index=index) for index in range(size)]


def make_group(name: str, trajectories: Iterable[Trajectory]) -> TrajectoryGroup:
    """Return a group of trajectories in their order, in whatever order they ended."""
    ordered = sorted(trajectories, key=lambda t: int(t.trajectory_id.rpartition("/")[2]))
    return TrajectoryGroup(group_id=name, trajectories=tuple(ordered))


@dataclass(slots=True, kw_only=True)
class _Group:
    """A task that was started and not handed out yet."""

    began: int
    """Policy version when it was started."""
    waiting: list[LiveEpisode]
    """Episodes that are not played at the moment."""
    done: list[Trajectory] = field(default_factory=list)
    is_trainable: bool = False
    """It is complete, and was found to be fit to train on."""


@dataclass(slots=True, kw_only=True)
class _State:
    """Where the stream stands."""

    next_group: int
    counts: dict[str, int]
    groups: dict[str, _Group] = field(default_factory=dict)
    handed_out: list[list[TrajectoryGroup]] = field(default_factory=list)
    """What steps were given before the run was killed, and of which the weights know nothing."""
    journal: int | None = None
    """Number of the journal's file that continues from here."""
    share: tuple[int, int] = (0, 1)
    """First task, and from one task to the next."""
    curriculum: CurriculumState | None = None
    to_restart: list[int] = field(default_factory=list)
    """Groups that another recipe starts again, and that are not yet, oldest first."""


_STATE = TypeAdapter(_State)


class TaskStream:
    """Begins groups in their order, for a bounded number of steps ahead, and hands each out once.

    Everything that happens is written to a journal, where there is one: a state and the events after it are the stream.
    """

    def __init__(
        self, config: RolloutConfig, *, tasks: Tasks, shard: TaskShard | None = None, journal: Journal | None = None
    ) -> None:
        """Begin before the first task.

        Args:
            config: how episodes are played.
            tasks: of the run, in their order; samples follow from their seed.
            shard: the tasks that are dealt out to this process. None: all.
            journal: takes what happens from the first `state_dict` on. None: nothing is written.
        """
        self._config, self._tasks, self._journal = config, tasks, journal
        self._shard = shard or TaskShard(config.num_groups)
        self._staleness_bound = config.staleness_bound
        self._next_group = self._shard.process
        self._to_restart: list[int] = []
        self._groups: dict[str, _Group] = {}
        """Groups under way, oldest first."""
        self._open: deque[_Group] = deque()
        """Groups that may have episodes that are not played yet, oldest first."""
        self._to_judge: list[str] = []
        """Groups that are complete, and not judged yet: whether they are trainable."""
        self._playing: dict[str, LiveEpisode] = {}
        """Episodes that were taken out to be played, as they stood when that was last noted."""
        self._engine_failures: list[Trajectory] = []
        """Episodes that the engine failed: given up only once it is known that it was not down."""
        self._handed_out: deque[list[TrajectoryGroup]] = deque()
        self._journaled_since: int | None = None
        """Number of the journal's file that continues the state that was loaded."""
        names = ("faults", "retries", "failed_episodes", "replaced_groups", "zero_spread_groups", "lost_threads")
        self.counts = dict.fromkeys(names, 0)
        self._curriculum: Curriculum | None = None
        if config.curriculum is not None:
            self._curriculum = Curriculum(config.curriculum, tasks, num_processes=self._shard.num_processes)
            self.counts["resting_tasks"] = 0
        self.begin_step(None)

    @property
    def is_replaying(self) -> bool:
        """True while there are groups that were handed out before the run was killed."""
        return bool(self._handed_out)

    def hand_out_again(self) -> list[TrajectoryGroup]:
        """Return what a step was given before the run was killed."""
        return self._handed_out.popleft()

    def begin_step(self, num_groups: int | None) -> None:
        """Prepare to hand out so many groups; None: a step's share."""
        self._num_groups = self._shard.num_groups if num_groups is None else num_groups
        self._replaced_in_a_row, self._replaceable = 0, self._config.dynamic_sampling
        self._is_waited_for = self._may_hand_out = True
        # The latter is false where nothing has changed since there was nothing to hand out.

    def next(self, *, version: int) -> LiveEpisode | None:
        """Take the next episode: of the oldest group that has one left, else of a new one, as far as one may be started."""
        while self._open:
            if self._open[0].waiting:
                return self._take_out(self._open[0])
            self._open.popleft()
        # A new one is handed out after all of these: at this version if a step waits for groups, else at the next or later.
        if len(self._groups) >= self._num_groups * (self._staleness_bound + self._is_waited_for):
            return None
        started = self._starting(self._to_restart[0] if self._to_restart else self._next_group, version=version)
        self._write(started)
        return self._take_out(self._start(started))

    def record_progress(self, live: LiveEpisode) -> None:
        """Remember that an episode was played to the end of a turn, or what was sampled of its next action."""
        task, observation = live.task, live.observation
        if live.partial is None:
            turn, shared = shorten(live.turns[-1], live.turns[:-1])
            snapshot = live.snapshot
            self._write(Played(task=task, turn=turn, shared=shared, observation=observation, snapshot=snapshot))
        elif live.partial.token_ids:
            self._write(Interrupted(task=task, observation=observation, partial=live.partial))
        self._playing[task.trajectory_id] = live

    @property
    def has_engine_failures(self) -> bool:
        """True where the engine has failed episodes that are not given up yet."""
        return bool(self._engine_failures)

    def record_end(self, trajectory: Trajectory) -> None:
        """Put a finished episode to its group; one that the engine failed waits for `give_up`."""
        if trajectory.stop_reason is StopReason.ENGINE_ERROR:
            self._engine_failures.append(trajectory)
        else:
            self._put(trajectory)

    def give_up(self) -> None:
        """Put the episodes that the engine failed to their groups: it was their own fault."""
        engine_failures, self._engine_failures = self._engine_failures, []
        for trajectory in engine_failures:
            self._put(trajectory)

    def _put(self, trajectory: Trajectory) -> None:
        played = len(self._playing.pop(trajectory.trajectory_id).turns)
        if any(turn.branch_rewards is not None for turn in trajectory.turns):
            played = 0  # what forks have earned was not known then
        if not trajectory.failed:
            rest, shared = trajectory.turns[played:], 0
            if rest:
                first, shared = shorten(rest[0], trajectory.turns[:played])
                rest = (first, *rest[1:])
            self._write(Ended(trajectory=replace(trajectory, turns=rest), played=played, shared=shared))
        group = self._groups[trajectory.group_id]
        group.done.append(trajectory)
        if self._is_complete(group):
            self._to_judge.append(trajectory.group_id)
            self._may_hand_out = True

    def hand_out(self, *, version: int) -> list[TrajectoryGroup] | None:
        """Return the oldest groups that are complete; None: there are too few, or another would become too old.

        Complete groups that are not trainable are dropped, so that others can be started.

        Raises:
            EnvironmentFailure: after too many groups in a row with too many failures.
        """
        if not self._may_hand_out:
            return None
        self._may_hand_out = False
        if self._config.waits_for_all and not all(map(self._is_complete, self._groups.values())):
            return None  # groups are dropped in their order, so that a run repeats
        to_judge, self._to_judge = sorted(self._to_judge, key=group_index), []
        for name in to_judge:
            group = self._groups[name]
            judged = make_group(name, group.done)
            group.is_trainable = self._is_trainable(judged)
            if not group.is_trainable:
                del self._groups[name]
                self._note_visits([judged])
                self._write(Dropped(group=name, counts=dict(self.counts)))
        num = self._num_groups
        names = list(islice((name for name, group in self._groups.items() if group.is_trainable), num))
        if len(names) < num:
            return None
        if self._config.stale == "wait" and self._would_be_too_old(names, version=version):
            return None
        self._is_waited_for = False
        groups = [make_group(name, self._groups.pop(name).done) for name in names]
        self._note_visits(groups)
        # Until now, a restarted run would have tried those again that failed.
        for failed in (t for group in groups for t in group.trajectories if t.failed):
            self._write(Ended(trajectory=failed, played=0))
        self._write(HandedOut(groups=tuple(names), counts=dict(self.counts)))
        return groups

    def _would_be_too_old(self, names: Sequence[str], *, version: int) -> bool:
        """Tell whether a group is too old when its turn comes, if these are handed out at this version.

        Its age is the policy version that it would be trained at, less the version at which it was started.
        """
        given = set(names)
        left = [group for name, group in self._groups.items() if name not in given]
        # The next step takes the first of those that are left, as many as now, and the one after it as many again.
        ages = (version + 1 + rank // len(names) - group.began for rank, group in enumerate(left))
        return any(age > self._staleness_bound for age in ages) and not all(map(self._is_complete, left))

    def recover(self, *, ignore: bool, settings: str = "") -> bool:
        """Take over what a killed run has written down since the state that was loaded; return whether it is sampled again.

        Args:
            ignore: the state is of another recipe: restart every group of it.
            settings: a hash of the recipe; what another one has written down since is dropped.
        """
        journal, since, is_others, is_begun = self._journal, self._journaled_since, ignore, bool(self._groups)
        if journal is not None:
            if since is not None and (sampled := journal.settings(since)):
                ignore, is_others = ignore and sampled != settings, sampled != settings
            if since is None or is_others or not journal.has(since):
                journal.drop()
            if since is not None:
                journal.replay(since, self._apply)
                journal.begin(at_least=since)
        if ignore:
            self._apply(event := Restarted(settings=settings))
            self._write(event)
        self._index_groups()
        return is_others and (is_begun or journal is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands; what follows goes into a new file."""
        waiting = {name: [*group.waiting] for name, group in self._groups.items()}
        for episode in self._playing.values():
            waiting[episode.task.group_id].append(episode)
        for episodes in waiting.values():
            episodes.sort(key=lambda episode: episode.task.rollout_index)
        groups = {name: replace(group, waiting=waiting[name]) for name, group in self._groups.items()}
        state = _State(
            next_group=self._next_group,
            counts=self.counts,
            groups=groups,
            handed_out=list(self._handed_out),
            journal=None if self._journal is None else self._journal.begin(),
            share=(self._shard.process, self._shard.num_processes),
            curriculum=None if self._curriculum is None else self._curriculum.state,
            to_restart=self._to_restart,
        )
        dumped: dict[str, Any] = _STATE.dump_python(state, mode="json")
        return dumped

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; nothing may be under way.

        Raises:
            ConfigError: for tasks that were dealt out to processes otherwise.
        """
        loaded = _STATE.validate_python(state)
        if loaded.share != (self._shard.process, self._shard.num_processes):
            raise ConfigError(
                "this run's tasks were dealt out to other engines; resume with as many (engine.server.url, .processes)"
            )
        self._next_group, self._groups, self._to_restart = loaded.next_group, loaded.groups, loaded.to_restart
        self.counts |= loaded.counts
        if self._curriculum is not None:
            self._curriculum.state = loaded.curriculum or CurriculumState(place=self._next_group)
        self._handed_out, self._journaled_since = deque(loaded.handed_out), loaded.journal
        self._index_groups()

    def drop_old_journal(self) -> None:
        """Drop what was written before the last `state_dict`, which is safe now."""
        if self._journal is not None:
            self._journal.drop(before=self._journal.number)

    def flush(self) -> None:
        """Hand the journal to the operating system, whatever happens next."""
        if self._journal is not None:
            self._journal.flush()

    def close(self) -> None:
        """Write no more."""
        if self._journal is not None:
            self._journal.close()

    def _take_out(self, group: _Group) -> LiveEpisode:
        episode = group.waiting.pop(0)
        self._playing[episode.task.trajectory_id] = episode
        return episode

    def _starting(self, index: int, *, version: int) -> Started:
        return Started(index=index, version=version, place=self._curriculum.next() if self._curriculum else None)

    def _start(self, event: Started) -> _Group:
        name = group_name(event.index)
        if self._curriculum is not None and event.place is not None:
            self._curriculum.advance(event.place)
        task = self._tasks.train(event.index, place=event.place, step=event.version + 1)
        tasks = group_tasks(name, task, size=self._config.group_size, run_seed=self._tasks.seed)
        group = _Group(began=event.version, waiting=[LiveEpisode(task=task) for task in tasks])
        self._groups[name] = group
        if event.index in self._to_restart[:1]:
            del self._to_restart[0]
        self._next_group = max(self._next_group, event.index + self._shard.num_processes)
        self._open.append(group)
        return group

    def _index_groups(self) -> None:
        """Find out which groups have episodes left to play, and which are complete."""
        self._may_hand_out = True
        self._open = deque(self._groups.values())
        self._to_judge = [name for name, g in self._groups.items() if self._is_complete(g) and not g.is_trainable]

    def _is_complete(self, group: _Group) -> bool:
        return len(group.done) == self._config.group_size

    def _is_trainable(self, group: TrajectoryGroup) -> bool:
        """Tell whether a complete group can be trained on; count it where not."""
        if len(group.valid) >= min(2, self._config.group_size):
            self._replaced_in_a_row = 0
            if self._replaceable and len(group.valid) > 1 and group.zero_spread:
                self._replaceable -= 1
                self.counts["zero_spread_groups"] += 1
                return False
            return True
        self.counts["replaced_groups"] += 1
        self._replaced_in_a_row += 1
        if self._replaced_in_a_row >= self._config.max_consecutive_failures:
            last = [t.error for t in group.trajectories if t.failed][-1]
            raise EnvironmentFailure(
                f"{self._replaced_in_a_row} groups in a row had too many failures; the last: {last}"
            )
        return False

    def _note_visits(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Tell the curriculum how groups went, in the order in which they were judged."""
        if self._curriculum is not None:
            for group in groups:
                self._curriculum.record_visit(group)
            self.counts["resting_tasks"] = self._curriculum.num_resting

    def _write(self, event: Event) -> None:
        if self._journal is not None:
            self._journal.write(event)

    def _apply(self, event: Event) -> None:
        """Do again what happened before the run was killed."""
        match event:
            case Started():
                self._start(event)
            case Played(task=task, turn=turn, shared=shared, observation=observation, snapshot=snapshot):
                before = self._waiting(task.trajectory_id)
                played = before.turns if before.task.attempt == task.attempt else ()
                turns = (*played, lengthen(turn, played, shared))
                after = LiveEpisode(task=task, turns=turns, observation=observation, snapshot=snapshot)
                self._replace(before, after)
            case Interrupted(task=task, observation=observation, partial=partial):
                before = self._waiting(task.trajectory_id)
                after = before if before.task.attempt == task.attempt else LiveEpisode(task=task)
                self._replace(before, replace(after, observation=observation, partial=partial))
            case Ended(trajectory=rest, played=num_played, shared=shared):
                group = self._groups[rest.group_id]
                if any(t.trajectory_id == rest.trajectory_id for t in group.done):
                    return  # it failed, was in the checkpoint, and was written down when its group was handed out
                episode = self._waiting(rest.trajectory_id)
                group.waiting.remove(episode)
                played = episode.turns[:num_played]
                first = tuple(lengthen(turn, played, shared) for turn in rest.turns[:1])
                group.done.append(replace(rest, turns=(*played, *first, *rest.turns[1:])))
            case Dropped(group=name, counts=counts):
                self._note_visits([make_group(name, self._groups.pop(name).done)])
                self.counts |= counts
            case HandedOut(groups=names, counts=counts):
                groups = [make_group(name, self._groups.pop(name).done) for name in names]
                self._note_visits(groups)
                self._handed_out.append(groups)
                self.counts |= counts
            case Restarted():
                started = {*self._groups} | {group.group_id for step in self._handed_out for group in step}
                self._to_restart = sorted({*self._to_restart, *map(group_index, started)})
                self._groups = {}
                self._handed_out.clear()

    def _waiting(self, trajectory_id: str) -> LiveEpisode:
        waiting = self._groups[trajectory_id.rpartition("/")[0]].waiting
        return {episode.task.trajectory_id: episode for episode in waiting}[trajectory_id]

    def _replace(self, before: LiveEpisode, after: LiveEpisode) -> None:
        waiting = self._groups[before.task.group_id].waiting
        waiting[waiting.index(before)] = after
