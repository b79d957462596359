"""The stream of tasks: handed out once, in time, and the same after a kill, whatever ends in which order."""

import asyncio
import json
import re
import resource
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from agentrl.data.files import sealed
from agentrl.errors import ConfigError, EnvironmentFailure
from agentrl.rollout import LiveEpisode, RolloutConfig, Tasks
from agentrl.rollout.conversation import Partial
from agentrl.rollout.journal import Ended, Interrupted, Journal, Played, Started
from agentrl.rollout.stream import TaskStream, group_name
from agentrl.rollout.tasks import Stage
from agentrl.types import (
    ENDLESS,
    Completion,
    FinishReason,
    NumTasks,
    StopReason,
    TaskShard,
    Trajectory,
    TrajectoryGroup,
    Turn,
    Turns,
    context_of,
)
from tests.support.trajectories import with_parents

GROUPS, SIZE = 2, 3
Choose = Callable[[int], int]


def stream(
    folder: Path | None = None,
    mode: Literal["sync", "partial", "async"] = "partial",
    *,
    max_staleness: int = 2,
    **config: Any,
) -> TaskStream:
    """Return a stream, with a journal where there is a folder."""
    settings = RolloutConfig(mode=mode, max_staleness=max_staleness, num_groups=GROUPS, group_size=SIZE, **config)
    num = ENDLESS if settings.curriculum is None else NumTasks(train=5, eval=1)
    return TaskStream(settings, tasks=Tasks(seed=3, num=num), journal=Journal(folder) if folder else None)


def turn(number: int, *, reward: float) -> Turn:
    return Turn(
        observation_ids=(number,),
        action_ids=(5, number),
        behavior_logprobs=(-0.1 * number, float(np.float32(-1 / 3))),
        versions=(0, number),
        reward=reward,
        finish_reason=FinishReason.STOP,
        observation=({"role": "user", "content": "é\n"},),
        message={"role": "assistant", "content": ""},
        extras={"score": 0.5, "nothing": None},
    )


def partials(number: int, call: str = "") -> tuple[Partial, ...]:
    completion = Completion(
        token_ids=(7,) * number,
        logprobs=(-1.5,) * number,
        versions=(2,) * number,
        finish_reason=FinishReason.ABORTED,
    )
    return (Partial(completion=completion, call=call),)


def ending(
    episode: LiveEpisode, turns: Turns, *, stop_reason: StopReason = StopReason.TERMINATED, **further: Any
) -> Trajectory:
    """The trajectory of an episode that ends after these turns."""
    return Trajectory(
        group_id=episode.task.group_id,
        trajectory_id=episode.task.trajectory_id,
        env_id="made up",
        seed=episode.task.seed,
        turns=turns,
        stop_reason=stop_reason,
        task_index=episode.task.task_index,
        **further,
    )


class Driver:
    """Plays a stream: what the pool and the trainer do to it, one thing at a time."""

    def __init__(self, subject: TaskStream, folder: Path, choose: Choose, *, fails: bool = False) -> None:
        self.stream, self.folder, self.choose, self.fails = subject, folder, choose, fails
        self.version = 0
        self.live: dict[str, LiveEpisode] = {}
        self.ages: list[int] = []
        self.handed_out: list[str] = []
        self.state = json.dumps(self.stream.state_dict())
        self.stream.begin_step(None)

    def begin(self) -> bool:
        episode = self.stream.next(version=self.version)
        if episode is not None:
            self.live[episode.task.trajectory_id] = episode
        return episode is not None

    def play(self) -> None:
        if self.live:
            name = sorted(self.live)[self.choose(len(self.live))]
            episode = self.live[name]
            new = self.turn_of(episode, len(episode.turns))
            snapshot = "bmV3" if self.choose(2) else None
            self.live[name] = played = LiveEpisode(
                task=episode.task, turns=(*episode.turns, new), observation=new.observation, snapshot=snapshot
            )
            self.stream.record_progress(played)

    def turn_of(self, episode: LiveEpisode, number: int) -> Turn:
        new = turn(number, reward=float(self.choose(2)))
        if (num := len(episode.turns)) and self.choose(4) == 0:  # another agent's, or a fork
            new = replace(new, parent=self.choose(num))
        if num and self.choose(3) == 0:  # its template rewrites the end of its history
            parent = num - 1 if new.parent is None else new.parent
            context = (*context_of(episode.turns, parent), *episode.turns[parent].action_ids)
            new = replace(new, extends=False, observation_ids=(*context[: self.choose(len(context) + 1)], 9))
        return new

    def begin_again(self) -> None:
        if self.live:
            name = sorted(self.live)[self.choose(len(self.live))]
            task = replace(self.live[name].task, attempt=self.live[name].task.attempt + 1)
            # Until it has sampled anything, the earlier attempt is what is remembered: nothing is lost by a kill.
            self.live[name] = LiveEpisode(task=task, observation=())
            if self.choose(2):
                self.live[name] = replace(self.live[name], turns=(turn(0, reward=1.0),))
            else:
                self.live[name] = replace(self.live[name], partials=partials(2))
            self.stream.record_progress(self.live[name])

    def end(self) -> None:
        if self.live:
            episode = self.live.pop(sorted(self.live)[self.choose(len(self.live))])
            turns = episode.turns
            if not turns or self.choose(2):  # else it ends for want of room, after a turn like any other
                self.stream.record_progress(replace(episode, partials=partials(2)))
                turns = (*turns, self.turn_of(episode, 9))
            forks, reason = self.choose(5) == 0, StopReason.TERMINATED
            if self.fails and self.choose(8) == 7:
                reason = StopReason.ENGINE_ERROR if self.choose(2) else StopReason.ENV_ERROR
            turns = tuple(replace(t, branch_rewards=((1.0,),)) for t in turns) if forks else turns
            metrics = {"success": (float("nan"), 1.0, 1.0)[self.choose(3)]}
            self.stream.record_end(ending(episode, turns, stop_reason=reason, metrics=metrics))

    def give_up(self) -> None:
        if self.choose(5) == 0:
            self.stream.give_up()

    def hold(self) -> None:
        said = ({"role": "user", "content": "and?"},)
        self.live = {
            name: replace(episode, partials=partials(1 + self.choose(3)), observation=episode.observation or said)
            for name, episode in self.live.items()
        }
        for episode in self.live.values():
            self.stream.record_progress(episode)

    def step(self) -> list[TrajectoryGroup] | None:
        groups = self.stream.hand_out(version=self.version)
        if groups is not None:
            self.handed_out += [group.group_id for group in groups]
            began = self.began
            self.ages += [self.version - min(began[group.group_id] for group in groups)]
            while self.choose(3) and self.begin():  # while the step is trained on
                pass
            self.version += 1
            self.stream.begin_step(None)
        return groups

    @property
    def began(self) -> dict[str, int]:
        events = [event for event in Journal(self.folder).read_events(1) if event.kind == "begun"]
        return {f"train/{event.index:06d}": event.version for event in events}

    def seen(self) -> dict[str, Any]:
        state = self.stream.state_dict()
        return json.loads(json.dumps({**state, "journal": None}))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "mode", [pytest.param("sync", marks=pytest.mark.slow), pytest.param("partial", marks=pytest.mark.slow), "async"]
)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), staleness=st.integers(1, 3))
def test_every_group_is_handed_out_once_and_none_too_old(
    mode: Literal["sync", "partial", "async"], seed: int, staleness: int
) -> None:
    rng = np.random.default_rng(seed)
    slow = set(rng.choice(60, size=20, replace=False).tolist())
    with TemporaryDirectory() as folder:
        driver = Driver(
            stream(Path(folder), mode, max_staleness=staleness), Path(folder), lambda num: int(rng.integers(num))
        )
        for _ in range(12):
            while (groups := driver.step()) is None:
                while len(driver.live) < 5 and driver.begin():
                    pass
                quick = [n for n in driver.live if int(n.split("/")[1]) not in slow or rng.random() < 0.05]
                assert driver.live, "nothing can be waited for"
                if quick:
                    kept = {n: driver.live.pop(n) for n in list(driver.live) if n != quick[0]}
                    driver.end()
                    driver.live |= kept
            assert len(groups) == GROUPS
        assert len(set(driver.handed_out)) == len(driver.handed_out)
        assert max(driver.ages) <= (0 if mode == "sync" else staleness)
        names = sorted(driver.began)
        assert names == [f"train/{i:06d}" for i in range(len(names))]
        assert len(set(names) - set(driver.handed_out)) <= GROUPS * (1 + staleness)


def test_what_would_become_too_old_is_waited_for_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    for rule in ("wait", "mask", "keep"):
        driver = Driver(stream(tmp_path / rule, max_staleness=1, stale=rule), tmp_path / rule, lambda _: 0)
        while driver.begin():
            pass
        slow = {name: driver.live.pop(name) for name in list(driver.live) if name < "train/000001"}
        while driver.live:
            driver.end()
        assert [group.group_id for group in driver.step() or []] == ["train/000001", "train/000002"]
        while driver.begin():
            pass
        while driver.live:
            driver.end()
        # One of four is left that was begun under version 0; the others are complete.
        groups = driver.step()
        if rule == "wait":
            assert groups is None
            driver.live = slow
            while driver.live:
                driver.end()
            assert [group.group_id for group in driver.step() or []] == ["train/000000", "train/000003"]
        else:
            assert [group.group_id for group in groups or []] == ["train/000003", "train/000004"]


def test_what_began_under_late_weights_is_no_older_for_it(tmp_path: Path) -> None:
    driver = Driver(stream(tmp_path, max_staleness=1, stale="wait"), tmp_path, lambda _: 0)
    driver.version = 20
    while driver.begin():
        pass
    slow = {name: driver.live.pop(name) for name in list(driver.live) if name >= "train/000003"}
    while driver.live:
        driver.end()
    assert len({name.rpartition("/")[0] for name in slow}) == 1  # one group is left, of this version
    assert [group.group_id for group in driver.step() or []] == ["train/000000", "train/000001"]


@pytest.mark.parametrize("curriculum", [None, {"visits": 1, "rest": 1}])
@settings(max_examples=max(60, settings().max_examples))
@given(seed=st.integers(0, 2**32 - 1))
def test_killed_anywhere_it_is_what_it_was(curriculum: dict[str, int] | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with TemporaryDirectory() as folder:
        subject = stream(Path(folder), dynamic_sampling=2, curriculum=curriculum)
        driver = Driver(subject, Path(folder), lambda num: int(rng.integers(num)), fails=True)
        state, steps = driver.state, 0
        actions = [driver.begin, driver.play, driver.end, driver.end, driver.hold, driver.begin_again, driver.give_up]
        for _ in range(int(rng.integers(200))):
            actions[int(rng.integers(len(actions)))]()
            steps += driver.step() is not None
            if rng.random() < 0.05:
                state, steps = json.dumps(driver.stream.state_dict()), 0
        if rng.random() < 0.5:  # killed in the middle of a line
            last = sorted(Path(folder).iterdir())[-1]
            last.write_bytes(last.read_bytes() + b'{"kind":"begun","ind')
        killed = stream(Path(folder), dynamic_sampling=2, curriculum=curriculum)
        killed.load_state_dict(json.loads(state))
        killed.recover(ignore=False)
        again = stream(dynamic_sampling=2, curriculum=curriculum)
        again.load_state_dict(json.loads(json.dumps(killed.state_dict())))
        for replayed in (again, killed):
            assert replayed.is_replaying == (steps > 0)
            handed = [group.group_id for _ in range(steps) for group in replayed.hand_out_again()]
            assert handed == driver.handed_out[len(driver.handed_out) - 2 * steps :]
        found, expected = json.loads(json.dumps(killed.state_dict())), driver.seen()
        assert list(found["groups"]) == list(expected["groups"])
        for name, group in expected["groups"].items():
            # Those that had failed are tried again: until their group is handed out, nobody has said that they are given up.
            failed = {t["trajectory_id"] for t in group["done"] if t["stop_reason"].endswith("error")}
            for one in (group, found["groups"][name]):
                assert len(one["waiting"]) + len(one["done"]) == SIZE
                one["waiting"] = [e for e in one["waiting"] if f"{name}/{e['task']['rollout_index']}" not in failed]
                one["done"] = [t for t in one["done"] if t["trajectory_id"] not in failed]
                one["is_trainable"] = None  # is found out again
        assert {**found, "journal": None} == expected


def played_on(subject: TaskStream, live: list[LiveEpisode], *, version: int) -> list[tuple[str, list[Turns]]]:
    """What three more steps are given, where episodes end as they stand."""
    given = list[tuple[str, list[Turns]]]()
    for step in range(3):
        while (groups := subject.hand_out(version=version + step)) is None:
            while (episode := subject.next(version=version + step)) is not None:
                live.append(episode)
            assert live, "nothing can be waited for"
            for one in live:
                subject.record_end(ending(one, (*one.turns, turn(9, reward=float(one.task.rollout_index)))))
            live.clear()
        given += [(group.group_id, [t.turns for t in group.trajectories]) for group in groups]
        subject.begin_step(None)
    return given


@pytest.mark.parametrize("curriculum", [None, {"visits": 1, "rest": 1}])
@settings(max_examples=max(60, settings().max_examples))
@given(seed=st.integers(0, 2**32 - 1))
def test_a_resumed_stream_hands_out_what_an_unbroken_one_does(curriculum: dict[str, int] | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with TemporaryDirectory() as folder:
        subject = stream(Path(folder), curriculum=curriculum)
        driver = Driver(subject, Path(folder), lambda num: int(rng.integers(num)))
        actions = [driver.begin, driver.play, driver.end, driver.end, driver.step]
        for _ in range(int(rng.integers(60))):
            actions[int(rng.integers(len(actions)))]()
        driver.stream.begin_step(None)
        resumed = stream(curriculum=curriculum)
        resumed.begin_step(None)
        assert resumed.hand_out(version=0) is None
        resumed.load_state_dict(json.loads(json.dumps(driver.stream.state_dict())))
        live = list(driver.live.values())
        assert played_on(resumed, [], version=driver.version) == played_on(driver.stream, live, version=driver.version)


def test_a_second_kill_before_the_next_checkpoint_loses_nothing_either(tmp_path: Path) -> None:
    driver = Driver(stream(tmp_path), tmp_path, lambda _: 0)
    for _ in range(3):
        driver.begin()
        driver.play()
    for _ in range(2):
        subject = stream(tmp_path)
        subject.load_state_dict(json.loads(driver.state))
        subject.recover(ignore=False)
        driver.stream, before = subject, driver.live
        assert [subject.next(version=0) for _ in range(3)] == [before[name] for name in sorted(before)]
        driver.play()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_journal_that_does_not_fit_the_recipe_is_dropped(tmp_path: Path) -> None:
    driver = Driver(stream(tmp_path), tmp_path, lambda _: 0)
    state = json.dumps(driver.stream.state_dict())
    driver.begin()
    driver.play()
    subject = stream(tmp_path)
    subject.load_state_dict(json.loads(state))
    subject.recover(ignore=True)
    assert subject.next(version=4) == stream().next(version=4)
    assert [event.kind for event in Journal(tmp_path).read_events(2)] == ["restarted", "begun"]
    again = stream(tmp_path)
    again.load_state_dict(json.loads(state))
    again.recover(ignore=False)
    group = again.state_dict()["groups"]["train/000000"]
    assert (group["began"], group["waiting"][0]["turns"]) == (4, [])


def test_what_a_recipe_has_sampled_is_for_that_recipe_alone(tmp_path: Path) -> None:
    def resumed(settings: str, *, ignore: bool) -> TaskStream:
        subject = stream(tmp_path)
        subject.load_state_dict(json.loads(state))
        subject.recover(ignore=ignore, settings=settings)
        return subject

    driver = Driver(stream(tmp_path), tmp_path, lambda _: 0)
    driver.begin()
    state = json.dumps(driver.stream.state_dict())  # a checkpoint of recipe A
    driver.play()
    other = resumed("B", ignore=True)
    assert other.next(version=4) is not None
    other.flush()
    # Killed, and resumed with B once more: nothing of it is lost, though the checkpoint is still of A.
    assert resumed("B", ignore=True).state_dict()["groups"]["train/000000"]["began"] == 4
    # With A: what B has sampled is not taken for A's, and what A has in its checkpoint is A's.
    for _ in range(2):
        assert resumed("A", ignore=False).state_dict()["groups"].keys() == {"train/000000"}
        assert resumed("A", ignore=False).state_dict()["groups"]["train/000000"]["began"] == 0


def test_a_journal_that_cannot_be_read_says_where(tmp_path: Path) -> None:
    driver = Driver(stream(tmp_path), tmp_path, lambda _: 0)
    driver.begin()
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    (tmp_path / "notes.jsonl").write_text("of a user, and no file of the journal")
    for line, words in (
        (sealed('{"kind": "ended"}'), "ended.trajectory: Field required"),
        (sealed('{"kind": "begun", "index": 1, "version": "x"}').replace("x", "0"), "it is damaged"),
        (sealed('{"kind": "dropped", "group": "train/000009", "counts": {}}'), "it does not follow on what was noted"),
        (sealed("[" * 3000 + "]" * 3000), "it nests deeper than 200"),
        ("\udcff", "it is damaged"),
    ):
        path.write_bytes((whole + line + "\n").encode(errors="surrogateescape"))
        subject = stream(tmp_path)
        subject.load_state_dict(json.loads(driver.state))
        with pytest.raises(ConfigError, match=rf"000001\.jsonl, line 2: {words}.*; if {tmp_path} is deleted"):
            subject.recover(ignore=False)


def test_what_was_cut_off_is_left_out_even_within_a_letter(tmp_path: Path) -> None:
    driver = Driver(stream(tmp_path), tmp_path, lambda _: 0)
    driver.begin()
    driver.play()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + '{"kind": "played", "task": "é'.encode()[:-1])
    assert [event.kind for event in Journal(tmp_path).read_events(1)] == ["begun", "played"]


def test_nothing_is_written_after_half_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin()
    journal.write(Started(index=0, version=0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = next(tmp_path.iterdir()).stat().st_size
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            journal.write(Started(index=1, version=0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, heard)
    with pytest.raises(OSError, match="File too large"):  # so that no step is trained on groups that nobody noted
        journal.write(Started(index=2, version=0))
    journal.close()
    assert list(Journal(tmp_path).read_events(1)) == [Started(index=0, version=0)]


def test_one_round_of_the_event_loop_is_written_at_once_and_flushed_on_demand(tmp_path: Path) -> None:
    events = [Started(index=index, version=0) for index in range(4)]
    journal = Journal(tmp_path)

    def written() -> list[Any]:
        return list(Journal(tmp_path).read_events(1))

    async def main() -> None:
        journal.write(events[0])
        journal.write(events[1])
        assert written() == []
        await asyncio.sleep(0)
        assert written() == events[:2]
        journal.write(events[2])
        journal.flush()
        assert written() == events[:3]
        journal.write(events[3])

    journal.begin()
    asyncio.run(main())
    journal.close()
    assert written() == events


def test_a_write_that_failed_between_two_rounds_is_told_to_the_next_writer(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unexpected: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unexpected.append(context))
        journal.write(Started(index=0, version=0))
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="File too large"):
            journal.flush()
        with pytest.raises(OSError, match="File too large"):
            journal.write(Started(index=1, version=0))

    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        asyncio.run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, heard)
    assert unexpected == []
    journal.close()


def test_a_journal_that_was_deleted_is_started_where_the_checkpoint_looks_for_it(tmp_path: Path) -> None:
    driver = Driver(stream(tmp_path), tmp_path, lambda _: 0)
    driver.stream.state_dict()
    state = json.dumps(driver.stream.state_dict())
    shutil.rmtree(tmp_path)
    for num_turns in range(2):
        subject = stream(tmp_path)
        subject.load_state_dict(json.loads(state))
        subject.recover(ignore=False)
        driver.stream = subject
        episode = subject.next(version=0)
        assert episode is not None
        assert len(episode.turns) == num_turns
        driver.live = {episode.task.trajectory_id: episode}
        driver.play()


def test_under_another_recipe_what_was_started_is_restarted(tmp_path: Path) -> None:
    driver = Driver(stream(tmp_path), tmp_path, lambda _: 0)
    while driver.begin():
        driver.play()
    for _ in range(8):
        driver.end()
    assert driver.step() is not None
    begun = list(driver.began)
    state = json.dumps(driver.stream.state_dict())
    config = RolloutConfig(mode="partial", num_groups=1, group_size=5)
    for number in range(2):  # and again, when that is killed
        subject = TaskStream(config, tasks=Tasks(seed=3), journal=Journal(tmp_path))
        subject.load_state_dict(json.loads(state))
        subject.recover(ignore=number == 0)
        seen = subject.state_dict()
        to_restart = [group_name(index) for index in seen["to_restart"]]
        assert (seen["groups"], sorted([*to_restart, *driver.handed_out])) == ({}, begun)
    episodes = [subject.next(version=7) for _ in range(5)]
    assert [e and (e.task.group_id, e.task.rollout_index) for e in episodes] == [(to_restart[0], n) for n in range(5)]
    assert all(e is not None and not e.turns for e in episodes)
    assert subject.state_dict()["groups"][to_restart[0]]["began"] == 7


def test_a_run_that_is_resumed_as_sync_trains_on_fresh_tokens_alone(tmp_path: Path) -> None:
    ahead = stream(tmp_path, "async")
    state = ahead.state_dict()
    while ahead.next(version=0):
        pass
    subject, given = stream(tmp_path, "sync"), []
    subject.load_state_dict(state)
    subject.recover(ignore=True)
    for version in range(4):
        subject.begin_step(None)
        while (episode := subject.next(version=version)) is not None:
            subject.record_end(ending(episode, (replace(turn(0, reward=0.0), versions=(version, version)),)))
        groups = subject.hand_out(version=version) or []
        assert {v for g in groups for t in g.trajectories for turn in t.turns for v in turn.versions} == {version}
        given += [group.group_id for group in groups]
    assert given == [group_name(index) for index in range(4 * GROUPS)]


def test_what_is_sampled_after_an_older_checkpoint_is_known_at_the_next_kill(tmp_path: Path) -> None:
    subject = stream(tmp_path)
    older = subject.state_dict()
    subject.state_dict()
    subject.drop_old_journal()  # the newer checkpoint is damaged, and is deleted
    for known in (0, 1):
        resumed = stream(tmp_path)
        resumed.load_state_dict(older)
        resumed.recover(ignore=False)
        assert len(resumed._groups) == known
        resumed.begin_step(None)
        resumed.next(version=0)
        resumed.flush()


def ended(
    subject: TaskStream, *, failed: bool = False, rewards: Sequence[float | None] = (0.0, 1.0, 2.0), **further: Any
) -> None:
    """Begin a group, and let its episodes end, each with a turn; those without a reward fail."""
    for reward in (None,) * SIZE if failed else rewards:
        episode = subject.next(version=0)
        assert episode is not None
        turns = (turn(0, reward=reward or 0.0),)
        subject.record_progress(replace(episode, turns=turns))
        reason = StopReason.ENV_ERROR if reward is None else StopReason.TERMINATED
        error = f"the lamp of {episode.task.trajectory_id} is out" if reward is None else None
        subject.record_end(ending(episode, turns, stop_reason=reason, error=error, **further))


def test_as_many_groups_in_a_row_as_the_recipe_says_may_be_replaced_and_no_more() -> None:
    subject = stream(max_consecutive_failures=3)
    subject.begin_step(2)
    for failed in (True, True, False, True, True):  # one that is fit in between begins the count again
        ended(subject, failed=failed)
        assert subject.hand_out(version=0) is None
    assert subject.counts["replaced_groups"] == 4
    subject.begin_step(2)  # and so does a step
    for _ in range(2):
        ended(subject, failed=True)
        assert subject.hand_out(version=0) is None
    ended(subject, failed=True)
    with pytest.raises(EnvironmentFailure) as caught:
        subject.hand_out(version=0)
    assert str(caught.value) == (
        "3 groups in a row had too few episodes to train on; the last: the lamp of train/000007/2 is out"
    )
    assert subject.counts["replaced_groups"] == 7


def test_groups_that_earned_the_same_are_replaced_as_often_in_a_step_as_the_recipe_says() -> None:
    subject = stream(dynamic_sampling=2)
    for step in range(2):
        subject.begin_step(1)
        for number in (1, 2):
            ended(subject, rewards=(None, 0.5, 0.5))
            assert subject.hand_out(version=0) is None
            assert subject.counts["zero_spread_groups"] == 2 * step + number
        ended(subject, rewards=(None, 0.5, 0.5))
        assert [group.group_id for group in subject.hand_out(version=0) or ()] == [f"train/{3 * step + 2:06d}"]


def test_tasks_that_rest_are_counted_and_left_out_for_as_long() -> None:
    subject = stream(curriculum={"visits": 1, "rest": 1, "low": None})
    assert subject.counts["resting_tasks"] == 0
    found, seeds = list[int | None](), set[int]()
    for number in range(5 + 3 + 5):
        subject.begin_step(1)
        # Those of the first two visits are solved; nobody solves the others.
        ended(subject, metrics={"success": float(number < 2)})
        groups = subject.hand_out(version=0)
        assert groups is not None
        (group,) = groups
        found.append(group.trajectories[0].task_index)
        seeds.add(group.trajectories[0].seed)
        if number < 5:
            assert subject.counts["resting_tasks"] == min(number + 1, 2)
    assert set(found[:5]) == set(found[8:]) == {0, 1, 2, 3, 4}
    assert set(found[5:8]) == set(found[2:5])
    assert len(seeds) == len(found)


def test_the_schedule_goes_by_the_step_in_which_a_group_is_started() -> None:
    config = RolloutConfig(mode="async", num_groups=1, group_size=1)
    subject = TaskStream(config, tasks=Tasks(seed=3, stages=(Stage(from_step=2, num_train=None),)))
    subject.begin_step(None)
    begun = [subject.next(version=version) for version in range(3)]
    assert [episode and episode.task.stage for episode in begun] == [0, 1, 1]


def test_runs_of_other_seeds_sample_otherwise() -> None:
    config = RolloutConfig(num_groups=GROUPS, group_size=SIZE)
    seeds = set[int]()
    for seed in (3, 3, 4):
        subject = TaskStream(config, tasks=Tasks(seed=seed))
        subject.begin_step(None)
        episode = subject.next(version=0)
        assert episode is not None
        seeds.add(episode.task.sampling_seed)
    assert len(seeds) == 2


def test_the_millionth_group_comes_after_those_before_it() -> None:
    subject = stream(dynamic_sampling=1)
    subject.load_state_dict({**subject.state_dict(), "next_group": 999_999})
    subject.begin_step(1)
    for _ in range(2):
        ended(subject, rewards=(0.5, 0.5, 0.5))
    state = subject.state_dict()
    assert [group.group_id for group in subject.hand_out(version=0) or ()] == ["train/1000000"]
    restarted = stream()
    restarted.load_state_dict(state)
    restarted.recover(ignore=True)
    episode = restarted.next(version=0)
    assert episode is not None
    assert episode.task.group_id == "train/999999"


def test_what_had_failed_is_given_again_with_its_group(tmp_path: Path) -> None:
    subject = stream(tmp_path)
    state = subject.state_dict()
    subject.begin_step(1)
    ended(subject, rewards=(None, 0.0, 1.0))
    given = subject.hand_out(version=0)
    again = stream(tmp_path)
    again.load_state_dict(state)
    again.recover(ignore=False)
    assert again.hand_out_again() == given


def test_groups_are_asked_as_they_end_and_not_all_of_them_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, counts = [], []
    is_complete = TaskStream._is_complete

    def watched(self: TaskStream, group: Any) -> bool:
        asked.append(group)
        return is_complete(self, group)

    monkeypatch.setattr(TaskStream, "_is_complete", watched)
    for num in (100, 400):
        asked.clear()
        settings = RolloutConfig(mode="async", num_groups=num, group_size=SIZE, max_live_episodes=num * SIZE)
        subject = TaskStream(settings, tasks=Tasks(seed=3))
        subject.begin_step(num)
        for number in range(num):
            assert subject.hand_out(version=0) is None, number
            ended(subject, failed=False)
        assert len(subject.hand_out(version=0) or ()) == num
        counts.append(len(asked))
    assert counts[1] < 6 * counts[0]


def test_files_of_a_journal_are_numbered_on_from_the_last_and_dropped_below_a_number(tmp_path: Path) -> None:
    def files() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    journal = Journal(tmp_path)
    assert [journal.begin(), journal.begin(), journal.begin(at_least=2)] == [1, 2, 3]
    assert journal.begin(at_least=7) == journal.number == 7
    assert Journal(tmp_path).begin() == 8
    assert files() == ["000001.jsonl", "000002.jsonl", "000003.jsonl", "000007.jsonl", "000008.jsonl"]
    journal.drop(before=7)
    assert files() == ["000007.jsonl", "000008.jsonl"]
    journal.drop()
    assert files() == []
    assert journal.begin() == 1
    journal.close()


def test_what_an_earlier_run_left_is_dropped_where_nothing_is_resumed(tmp_path: Path) -> None:
    Driver(stream(tmp_path), tmp_path, lambda _: 0).begin()
    stream(tmp_path).recover(ignore=False)
    assert list(tmp_path.iterdir()) == []


def test_a_journal_is_flushed_forgotten_before_a_checkpoint_that_is_safe_and_closed(tmp_path: Path) -> None:
    driver = Driver(stream(tmp_path), tmp_path, lambda _: 0)

    async def main() -> None:
        driver.begin()
        assert list(Journal(tmp_path).read_events(1)) == []
        driver.stream.flush()
        assert list(Journal(tmp_path).read_events(1)) == [Started(index=0, version=0)]

    asyncio.run(main())
    driver.stream.state_dict()
    assert len(list(tmp_path.iterdir())) == 2
    driver.stream.drop_old_journal()
    assert [path.name for path in tmp_path.iterdir()] == ["000002.jsonl"]
    driver.stream.close()
    while driver.begin():
        pass
    assert list(Journal(tmp_path).read_events(2)) == []
    for unwritten in (stream().drop_old_journal, stream().flush, stream().close):
        unwritten()


def test_tasks_that_were_dealt_out_otherwise_are_refused() -> None:
    tasks, settings = Tasks(seed=3), RolloutConfig(num_groups=GROUPS, group_size=SIZE)
    state = TaskStream(settings, tasks=tasks, shard=TaskShard(1, process=1, num_processes=2)).state_dict()
    words = "this run's tasks were dealt out to other engines; resume with as many (engine.server.url, .processes)"
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
        TaskStream(settings, tasks=tasks).load_state_dict(state)


def test_a_state_that_knows_fewer_counts_and_no_curriculum_is_resumed() -> None:
    unplanned = TaskStream(RolloutConfig(mode="sync", num_groups=GROUPS, group_size=SIZE), tasks=Tasks(seed=3))
    unplanned.begin_step(None)
    ended(unplanned, failed=False)
    subject = stream(curriculum={"visits": 1, "rest": 1})
    expected = {**subject.counts, "faults": 2}
    subject.load_state_dict({**unplanned.state_dict(), "counts": {"faults": 2}})
    assert subject.counts == expected
    assert subject.state_dict()["curriculum"]["place"] == 1


def begun(folder: Path) -> tuple[TaskStream, LiveEpisode, str]:
    """Return a stream that is journaled, its first episode, and its state before."""
    subject = stream(folder)
    state = json.dumps(subject.state_dict())
    subject.begin_step(None)
    episode = subject.next(version=0)
    assert episode is not None
    return subject, episode, state


def after_a_kill(folder: Path, state: str) -> dict[str, Any]:
    """Return the one group of a stream that recovers what was journaled since a state."""
    killed = stream(folder)
    killed.load_state_dict(json.loads(state))
    killed.recover(ignore=False)
    (group,) = json.loads(json.dumps(killed.state_dict()))["groups"].values()
    return group  # type: ignore[no-any-return]


def test_a_turn_is_written_without_what_it_repeats(tmp_path: Path) -> None:
    subject, episode, _ = begun(tmp_path)
    turns: Turns = (turn(0, reward=0.0), turn(1, reward=0.0))
    context = tuple(token for t in turns for token in (*t.observation_ids, *t.action_ids))
    turns += (replace(turn(2, reward=0.0), extends=False, observation_ids=(*context, 9)),)
    subject.record_progress(replace(episode, turns=turns))
    *_, written = Journal(tmp_path).read_events(1)
    assert isinstance(written, Played)
    assert (written.turn.observation_ids, written.shared) == ((9,), len(context))


def test_calls_under_way_are_known_after_a_kill_until_each_is_answered(tmp_path: Path) -> None:
    subject, episode, state = begun(tmp_path)
    first, second, empty = partials(2, "a/0"), partials(1, "b/0"), partials(0, "c/0")
    subject.record_progress(replace(episode, partials=(*first, *second, *empty)))
    answered = replace(turn(3, reward=0.0), call="a/0")
    other = replace(turn(4, reward=1.0), call="d/0", parent=0)
    subject.record_progress(replace(episode, turns=(answered, other), partials=(*second, *empty)))
    held = replace(episode, turns=(answered, other), partials=(*partials(3, "b/0"), *empty))
    for live, expected in ((None, second), (held, partials(3, "b/0"))):
        if live is not None:
            subject.record_progress(live)
        copied = Path(shutil.copytree(tmp_path, tmp_path.with_name(f"killed {len(expected[0].completion.token_ids)}")))
        (waiting, *_) = TypeAdapter(list[LiveEpisode]).validate_python(after_a_kill(copied, state)["waiting"])
        assert (waiting.turns, waiting.partials) == ((answered, other), expected)
    kinds = [type(event) for event in Journal(tmp_path).read_events(1)]
    assert kinds == [Started, Interrupted, Played, Played, Interrupted]


def test_agents_that_take_turns_are_journaled_without_what_the_other_said(tmp_path: Path) -> None:
    """80 turns, 356,000 tokens in their contexts, of which 12,700 were observed: 1.3 times that is written at most."""
    played = with_parents([None, None, *range(78)], sizes=[(500, 50)] * 2 + [(150, 50)] * 78)
    observed = sum(len(turn.observation_ids) for turn in played.turns)
    contexts = [context_of(played.turns, number) for number in range(80)]
    assert (observed, sum(len(ids) for ids in contexts)) == (12_700, 352_000)
    subject, episode, state = begun(tmp_path)
    for number in range(80):
        subject.record_progress(replace(episode, turns=played.turns[: number + 1]))
    subject.record_end(ending(episode, played.turns))
    events = list(Journal(tmp_path).read_events(1))
    turns = [event.turn for event in events if isinstance(event, Played)]
    turns += [turn for event in events if isinstance(event, Ended) for turn in event.trajectory.turns]
    assert sum(len(turn.observation_ids) for turn in turns) <= 1.3 * observed
    (done,) = TypeAdapter(list[Trajectory]).validate_python(after_a_kill(tmp_path, state)["done"])
    assert [context_of(done.turns, number) for number in range(80)] == contexts
