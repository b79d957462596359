"""The stream of training tasks: which episodes are started and which groups are handed out.

`TaskStream` runs nothing itself: the pool takes episodes from it (`next`), reports their progress and their end, and asks for
groups (`hand_out`). Every change is an event of the journal; a checkpointed state and the events after it restore the stream.
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
from agentrl.rollout.journal import (
    Dropped,
    Ended,
    Event,
    HandedOut,
    Interrupted,
    Journal,
    Late,
    Played,
    Restarted,
    Started,
)
from agentrl.rollout.tasks import Curriculum, CurriculumState, EnvTask, Tasks, derive_seed
from agentrl.types import StopReason, TaskShard, Trajectory, TrajectoryGroup, Turn, lengthen, shorten


def group_name(index: int) -> str:
    """Return the name of the group with an index in the stream."""
    return f"train/{index:06d}"


def group_index(name: str) -> int:
    """Return a group's index in the stream."""
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
    """Return a group of trajectories, sorted by their number within it."""
    ordered = sorted(trajectories, key=lambda t: int(t.trajectory_id.rpartition("/")[2]))
    return TrajectoryGroup(group_id=name, trajectories=tuple(ordered))


def _late(turn: Turn) -> Late:
    return Late(reward=turn.reward, next_state_key=turn.next_state_key)


def _with_late(turn: Turn, late: Late) -> Turn:
    return replace(turn, reward=late.reward, next_state_key=late.next_state_key)


@dataclass(slots=True, kw_only=True)
class _Group:
    """A group that was started and not handed out yet."""

    began: int
    """Policy version at its start."""
    waiting: list[LiveEpisode]
    """Episodes that are not being played now."""
    done: list[Trajectory] = field(default_factory=list)
    is_trainable: bool = False
    """The group is complete, and can be trained on."""


@dataclass(slots=True, kw_only=True)
class _State:
    """State of the stream, as checkpoints hold it."""

    next_group: int
    counts: dict[str, int]
    groups: dict[str, _Group] = field(default_factory=dict)
    handed_out: list[list[TrajectoryGroup]] = field(default_factory=list)
    """Groups handed out to steps whose updates were lost when the run was killed."""
    journal: int | None = None
    """Number of the journal file that continues this state."""
    share: tuple[int, int] = (0, 1)
    """Rank among those that sample, and their number."""
    curriculum: CurriculumState | None = None
    to_restart: list[int] = field(default_factory=list)
    """Groups still to be restarted under a changed recipe, oldest first."""


_STATE = TypeAdapter(_State)


class TaskStream:
    """Starts groups in their order, for a bounded number of steps ahead, and hands each out once."""

    def __init__(
        self, config: RolloutConfig, *, tasks: Tasks, shard: TaskShard | None = None, journal: Journal | None = None
    ) -> None:
        """Create a stream before its first task.

        Args:
            config: limits, group size and staleness.
            tasks: tasks of the run; their seed also fixes the sampling seeds.
            shard: training tasks of this rank. None: all.
            journal: records events from the first `state_dict` on. None: nothing is written.
        """
        self._config = config
        self._tasks = tasks
        self._journal = journal
        self._shard = shard or TaskShard(config.num_groups)
        self._staleness_bound = config.staleness_bound
        self._next_group = self._shard.process
        self._to_restart: list[int] = []
        self._groups: dict[str, _Group] = {}
        """Groups that were started and not handed out, oldest first."""
        self._open: deque[_Group] = deque()
        """Groups that may have episodes left to play, oldest first."""
        self._to_judge: list[str] = []
        """Complete groups of which it is not decided yet whether they are trainable."""
        self._playing: dict[str, LiveEpisode] = {}
        """Last recorded state of each episode that is being played."""
        self._engine_failures: list[Trajectory] = []
        """Episodes that ended in an engine failure; given up only once the engine is known to work."""
        self._handed_out: deque[list[TrajectoryGroup]] = deque()
        self._journaled_since: int | None = None
        """Number of the journal file that continues the loaded state."""
        names = ("faults", "retries", "failed_episodes", "unscored_episodes", "replaced_groups", "zero_spread_groups")
        self.counts = dict.fromkeys((*names, "lost_threads"), 0)
        self._curriculum: Curriculum | None = None
        if config.curriculum is not None:
            self._curriculum = Curriculum(config.curriculum, tasks, num_processes=self._shard.num_processes)
            self.counts["resting_tasks"] = 0
        self.begin_step(None)

    @property
    def is_replaying(self) -> bool:
        """True while groups that were handed out before the run was killed are left to return."""
        return bool(self._handed_out)

    def hand_out_again(self) -> list[TrajectoryGroup]:
        """Return the groups that a step got before the run was killed."""
        return self._handed_out.popleft()

    def begin_step(self, num_groups: int | None) -> None:
        """Prepare to hand out `num_groups` groups. None: as many as a step takes."""
        self._num_groups = self._shard.num_groups if num_groups is None else num_groups
        self._replaced_in_a_row = 0
        self._replaceable = self._config.dynamic_sampling
        self._is_waited_for = True
        self._may_hand_out = True  # False: nothing has changed since there was nothing to hand out

    def next(self, *, version: int) -> LiveEpisode | None:
        """Return the next episode: of the oldest group that has one left, else of a new group. None: none may be started."""
        while self._open:
            if self._open[0].waiting:
                return self._take_out(self._open[0])
            self._open.popleft()
        # A new group is handed out after all of these: at this version if a step waits for groups, else at a later one.
        if len(self._groups) >= self._num_groups * (self._staleness_bound + self._is_waited_for):
            return None
        index = self._to_restart[0] if self._to_restart else self._next_group
        place = self._curriculum.next() if self._curriculum else None
        started = Started(index=index, version=version, place=place)
        self._write(started)
        return self._take_out(self._start(started))

    def record_progress(self, live: LiveEpisode) -> None:
        """Record that an episode finished turns, or else parts of its next actions."""
        task, turns = live.task, live.turns
        before = self._playing[task.trajectory_id]
        num_known = len(before.turns) if before.task.attempt == task.attempt else 0
        for number in range(num_known, len(turns)):
            turn, shared = shorten(turns[number], turns[:number])
            snapshot = live.snapshot if number == len(turns) - 1 else None
            played = Played(task=task, turn=turn, shared=shared, observation=live.observation, snapshot=snapshot)
            self._write(played)
        begun = tuple(partial for partial in live.partials if partial.completion.token_ids)
        if begun and num_known == len(turns):
            self._write(Interrupted(task=task, observation=live.observation, partials=begun))
        self._playing[task.trajectory_id] = live

    @property
    def has_engine_failures(self) -> bool:
        """True if there are engine failures that are not given up yet."""
        return bool(self._engine_failures)

    def record_end(self, trajectory: Trajectory) -> None:
        """Add a finished episode to its group; an engine failure waits for `give_up`."""
        if trajectory.stop_reason is StopReason.ENGINE_ERROR:
            self._engine_failures.append(trajectory)
        else:
            self._put(trajectory)

    def give_up(self) -> None:
        """Add the engine failures to their groups as failed: the engine works, so they were at fault."""
        engine_failures, self._engine_failures = self._engine_failures, []
        for trajectory in engine_failures:
            self._put(trajectory)

    def _put(self, trajectory: Trajectory) -> None:
        recorded = self._playing.pop(trajectory.trajectory_id).turns
        played = len(recorded)
        kept = [_with_late(turn, _late(other)) for turn, other in zip(trajectory.turns, recorded, strict=False)]
        if kept != list(recorded) or any(turn.parent is not None for turn in trajectory.turns[played:]):
            played = 0  # recorded turns lack the rewards of their forks; parents are numbers of the whole
        late = tuple(map(_late, trajectory.turns[:played]))
        if late == tuple(map(_late, recorded)):
            late = ()
        if not trajectory.failed:
            rest, shared = trajectory.turns[played:], 0
            if rest:
                first, shared = shorten(rest[0], trajectory.turns[:played])
                rest = (first, *rest[1:])
            self._write(Ended(trajectory=replace(trajectory, turns=rest), played=played, shared=shared, late=late))
        group = self._groups[trajectory.group_id]
        group.done.append(trajectory)
        if self._is_complete(group):
            self._to_judge.append(trajectory.group_id)
            self._may_hand_out = True

    def hand_out(self, *, version: int) -> list[TrajectoryGroup] | None:
        """Return the oldest complete groups. None: there are too few, or another group would become too old.

        Complete groups that are not trainable are dropped, so that others can be started.

        Raises:
            EnvironmentFailure: after too many groups in a row with too many failures.
        """
        if not self._may_hand_out:
            return None
        self._may_hand_out = False
        if self._config.waits_for_all and not all(map(self._is_complete, self._groups.values())):
            return None  # groups are dropped in their order, so that a run is reproducible
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
        # Until now, a resumed run would have retried failed episodes.
        for failed in (t for group in groups for t in group.trajectories if t.failed):
            self._write(Ended(trajectory=failed, played=0))
        self._write(HandedOut(groups=tuple(names), counts=dict(self.counts)))
        return groups

    def _would_be_too_old(self, names: Sequence[str], *, version: int) -> bool:
        """Return whether a group would be too old when it is handed out, if these are handed out at this version.

        Its age is the policy version at which it would be trained, minus the version at which it was started.
        """
        given = set(names)
        left = [group for name, group in self._groups.items() if name not in given]
        # Each later step takes as many of the remaining groups as this one.
        ages = (version + 1 + rank // len(names) - group.began for rank, group in enumerate(left))
        return any(age > self._staleness_bound for age in ages) and not all(map(self._is_complete, left))

    def recover(self, *, ignore: bool, settings: str = "") -> bool:
        """Replay the journal of a killed run on the loaded state; return whether its groups are sampled again.

        Args:
            ignore: the state is from another recipe: restart all of its groups.
            settings: hash of the recipe; events recorded under another recipe are dropped.
        """
        journal = self._journal
        since = self._journaled_since
        is_others = ignore
        is_begun = bool(self._groups)
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
        """Return the state of the stream, and start a new journal file."""
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
        """Continue from a `state_dict`; no episode may be live.

        Raises:
            ConfigError: if the tasks were sharded differently.
        """
        loaded = _STATE.validate_python(state)
        if loaded.share != (self._shard.process, self._shard.num_processes):
            raise ConfigError(
                "this run's tasks were dealt out to other engines; resume with as many (engine.server.url, .processes)"
            )
        self._next_group = loaded.next_group
        self._groups = loaded.groups
        self._to_restart = loaded.to_restart
        self.counts |= loaded.counts
        if self._curriculum is not None:
            self._curriculum.state = loaded.curriculum or CurriculumState(place=self._next_group)
        self._handed_out, self._journaled_since = deque(loaded.handed_out), loaded.journal
        self._index_groups()

    def drop_old_journal(self) -> None:
        """Delete journal files from before the last `state_dict`, once that is saved."""
        if self._journal is not None:
            self._journal.drop(before=self._journal.number)

    def flush(self) -> None:
        """Flush the journal to the operating system."""
        if self._journal is not None:
            self._journal.flush()

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()

    def _take_out(self, group: _Group) -> LiveEpisode:
        episode = group.waiting.pop(0)
        self._playing[episode.task.trajectory_id] = episode
        return episode

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
        """Find the groups with episodes left to play, and those that are complete."""
        self._may_hand_out = True
        self._open = deque(self._groups.values())
        self._to_judge = [name for name, g in self._groups.items() if self._is_complete(g) and not g.is_trainable]

    def _is_complete(self, group: _Group) -> bool:
        return len(group.done) == self._config.group_size

    def _is_trainable(self, group: TrajectoryGroup) -> bool:
        """Return whether a complete group can be trained on; count it if not."""
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
                f"{self._replaced_in_a_row} groups in a row had too few episodes to train on; the last: {last}"
            )
        return False

    def _note_visits(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Record groups with the curriculum, in the order in which they were judged."""
        if self._curriculum is not None:
            for group in groups:
                self._curriculum.record_visit(group)
            self.counts["resting_tasks"] = self._curriculum.num_resting

    def _write(self, event: Event) -> None:
        if self._journal is not None:
            self._journal.write(event)

    def _apply(self, event: Event) -> None:
        """Apply an event of the journal."""
        match event:
            case Started():
                self._start(event)
            case Played(task=task, turn=turn, shared=shared, observation=observation, snapshot=snapshot):
                before = self._waiting(task.trajectory_id)
                known = before if before.task.attempt == task.attempt else LiveEpisode(task=task)
                after = LiveEpisode(
                    task=task,
                    turns=(*known.turns, lengthen(turn, known.turns, shared)),
                    observation=observation,
                    snapshot=snapshot,
                    partials=tuple(partial for partial in known.partials if partial.call != turn.call),
                )
                self._replace(before, after)
            case Interrupted(task=task, observation=observation, partials=partials):
                before = self._waiting(task.trajectory_id)
                after = before if before.task.attempt == task.attempt else LiveEpisode(task=task)
                self._replace(before, replace(after, observation=observation, partials=partials))
            case Ended(trajectory=rest, played=num_played, shared=shared, late=late):
                group = self._groups[rest.group_id]
                if any(t.trajectory_id == rest.trajectory_id for t in group.done):
                    return  # a failed one that the checkpoint has already
                episode = self._waiting(rest.trajectory_id)
                group.waiting.remove(episode)
                played = episode.turns[:num_played]
                first = tuple(lengthen(turn, played, shared) for turn in rest.turns[:1])
                played = (
                    tuple(_with_late(turn, its) for turn, its in zip(played, late, strict=True)) if late else played
                )
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
