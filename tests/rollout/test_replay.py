"""An episode that was interrupted anywhere and resumed elsewhere is the one that was not."""

import asyncio
import base64
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from agentrl.chat import Renderer
from agentrl.chat.renderer import Tools
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.rollout import Episode, EpisodeContext, LiveEpisode, RolloutConfig
from agentrl.rollout.conversation import Partial
from agentrl.rollout.env_driver import EnvThread, MakeEnv
from agentrl.types import Completion, FinishReason, Message, StopReason, Trajectory, Turn
from tests.support.dice import TASK, Dice
from tests.support.each import each
from tests.support.renderers import OftenStops

NewEngine = Callable[..., TransformersEngine]
CONFIG = RolloutConfig(
    max_turns=8, max_turn_tokens=64, max_context_tokens=2048, env_timeout_s=5.0, branches={"num": 1, "every": 2}
)


class Table:
    """Where episodes are played: an engine, and a thread for each."""

    def __init__(self, engine: TransformersEngine, renderer: Renderer, *, fork: bool = False) -> None:
        self.engine, self.renderer, self.fork = engine, renderer, fork

    def episode(
        self, recorded: LiveEpisode | None = None, *, on_change: Callable[[LiveEpisode], None] | None = None
    ) -> tuple[Episode, EnvThread]:
        thread = EnvThread()
        context = EpisodeContext(engine=self.engine, renderer=self.renderer, config=CONFIG)
        return Episode(
            TASK, context=context, thread=thread, fork=self.fork, recorded=recorded, on_change=on_change
        ), thread

    def play(self, recorded: LiveEpisode | None = None, *, make_env: MakeEnv = Dice) -> Trajectory:
        async def played() -> Trajectory:
            episode, thread = self.episode(recorded)
            try:
                async with asyncio.timeout(200):
                    return await episode.play(make_env)
            finally:
                thread.close()

        return asyncio.run(played())


def timeless(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, metrics={k: v for k, v in trajectory.metrics.items() if k != "env_s"})


def under_way(turn: Turn, num: int) -> tuple[Partial, ...]:
    """The first tokens of a turn's action, as a pause returns them."""
    is_whole = num == len(turn.action_ids)
    sampled = Completion(
        token_ids=turn.action_ids[:num],
        logprobs=turn.behavior_logprobs[:num],
        versions=turn.versions[:num],
        finish_reason=turn.finish_reason if is_whole else FinishReason.ABORTED,
    )
    return (Partial(completion=sampled),)


@each("fork", [False, True])
def test_wherever_it_was_interrupted_it_ends_as_the_uninterrupted_one(
    fork: bool, new_engine: NewEngine, renderer: Renderer
) -> None:
    whole = Table(new_engine(), renderer, fork=fork).play()
    assert len(whole.turns) == 5
    assert max(len(turn.action_ids) for turn in whole.turns) > 2
    states = [LiveEpisode(task=TASK, turns=whole.turns[:k]) for k in range(6)]
    for k, turn in enumerate(whole.turns):
        lengths = {1, len(turn.action_ids) // 2, len(turn.action_ids)} - {0}
        states += [
            LiveEpisode(task=TASK, turns=whole.turns[:k], partials=under_way(turn, num)) for num in sorted(lengths)
        ]
    for state in states:
        # What is recorded is without what forks earned, which is played again.
        turns = tuple(replace(turn, branch_rewards=None) for turn in state.turns)
        found = Table(new_engine(), renderer, fork=fork).play(replace(state, turns=turns))
        for turn, expected in zip(found.turns, whole.turns, strict=True):
            # Prompts are computed at once where they were decoded token by token: float32 rounds otherwise.
            assert turn.behavior_logprobs == pytest.approx(expected.behavior_logprobs, rel=1e-5, abs=1e-5)
            assert replace(turn, behavior_logprobs=expected.behavior_logprobs) == expected
        assert replace(timeless(found), turns=()) == replace(timeless(whole), turns=())


class Chancy(Dice):
    """Does not follow from its seed: another process would draw other numbers."""

    resets = 0

    def reset(self, **settings: Any) -> Any:
        type(self).resets += 1
        super().reset(**settings)
        self.secret = int.from_bytes(os.urandom(4))
        return ({"role": "user", "content": f"secret {self.secret}"},), {}

    def draw(self) -> float:
        return int.from_bytes(os.urandom(4)) / 2**32

    def state_key(self) -> str:
        return f"{self.secret}: {self.drawn}"


class Saved(Chancy):
    """Is pickled after every step."""

    can_snapshot = True

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "tell"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, tell=lambda _what, _env: None)


class Patchy(Saved):
    """Loses what it drew when it is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"drawn": []}


class Hollow(Saved):
    """Is restored as what is no environment."""

    def __reduce__(self) -> Any:
        return int, (3,)


class Torn(Saved):
    """Cannot say any more whether it may be restored."""

    @property
    def can_snapshot(self) -> bool:  # type: ignore[override]
        raise RuntimeError("no idea")


def stations(table: Table, make_env: MakeEnv) -> tuple[Trajectory, list[LiveEpisode]]:
    """Play an episode; return it, and where it stood after each turn, and before it took its last action."""
    found: list[LiveEpisode] = []

    async def played() -> Trajectory:
        episode, thread = table.episode(on_change=found.append)
        try:
            return await episode.play(make_env)
        finally:
            thread.close()

    return asyncio.run(played()), found


@each("rewrites", [False, True])
def test_an_environment_that_saves_itself_resumes_from_its_snapshot(
    rewrites: bool, new_engine: NewEngine, renderer: Renderer, forking_renderer: Renderer
) -> None:
    class Rewrites(Saved):
        def step(self, action: Any) -> Any:
            (said,), *rest = super().step(action)
            return ({**said, "content": f"again {said['content']}"},), *rest

    table = Table(new_engine(), forking_renderer if rewrites else renderer)
    globals()["Rewrites"] = Rewrites  # pickled by its name
    Rewrites.__qualname__ = "Rewrites"
    make_env: MakeEnv = Rewrites if rewrites else Saved
    whole, found = stations(table, make_env)
    assert [turn.extends for turn in whole.turns[1:]] == [not rewrites] * 4
    assert [len(state.turns) for state in found] == [1, 2, 3, 4, 4]
    for k, state in enumerate(found[:-1], start=1):
        before = (Saved.resets, Rewrites.resets)
        kept = TypeAdapter(LiveEpisode).validate_json(TypeAdapter(LiveEpisode).dump_json(state))
        partials = under_way(whole.turns[k], 1)
        ended = table.play(replace(kept, partials=partials), make_env=make_env)
        assert (Saved.resets, Rewrites.resets) == before
        assert ended.turns[:k] == whole.turns[:k]
        # The same words before the next action, and so the same action; then chance goes its own way.
        assert ended.turns[k].observation_ids == whole.turns[k].observation_ids
        assert ended.turns[k].action_ids == whole.turns[k].action_ids
        assert ended.turns[k].state_key == whole.turns[k].state_key
        assert len(ended.turns) == 5
        assert not ended.failed
    last = found[-1]
    (partial,) = last.partials
    assert partial.completion.token_ids == whole.turns[4].action_ids
    assert table.play(last, make_env=make_env).turns[4].action_ids == whole.turns[4].action_ids
    assert (Saved.resets, Rewrites.resets) == before


class Intruder:
    """Whose pickle runs a command."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def test_a_snapshot_is_unpickled_only_where_the_recipes_environment_says_so(
    tmp_path: Path, new_engine: NewEngine, renderer: Renderer
) -> None:
    table = Table(new_engine(), renderer)
    whole, found = stations(table, Dice)
    snapshot = base64.b64encode(pickle.dumps(Intruder(tmp_path / "made"))).decode()
    ended = table.play(replace(found[1], snapshot=snapshot))
    assert [(t.observation_ids, t.action_ids) for t in ended.turns] == [
        (t.observation_ids, t.action_ids) for t in whole.turns
    ]
    assert not (tmp_path / "made").exists()


def test_an_environment_that_neither_repeats_nor_saves_itself_fails_in_so_many_words(
    new_engine: NewEngine, renderer: Renderer
) -> None:
    table = Table(new_engine(), renderer)
    whole, found = stations(table, Chancy)
    assert found[1].snapshot is None
    ended = table.play(found[1], make_env=Chancy)
    assert ended.error is not None
    assert ended.error.startswith("environment Chancy: replayed, turn 0 has another observation")
    # Even where nothing but a part of the first action was recorded.
    first = LiveEpisode(task=TASK, observation=whole.turns[0].observation, partials=under_way(whole.turns[0], 1))
    ended = table.play(first, make_env=Chancy)
    assert ended.error is not None
    assert ended.error.startswith("environment Chancy: replayed, it has before turn 0 ")
    _, found = stations(table, Patchy)
    ended = table.play(found[1], make_env=Patchy)
    assert ended.error is not None
    assert "its snapshot has the state_key" in ended.error
    assert ended.error.endswith("let pickling keep all of its state")


@each(
    ("env", "words"),
    [
        (Hollow, "its snapshot is restored as int 3; let pickling keep the environment"),
        (Torn, "environment Torn: can_snapshot raised RuntimeError: no idea (test_replay.py:"),
    ],
)
def test_one_that_cannot_be_restored_fails_its_episode_alone(
    env: type[Saved], words: str, new_engine: NewEngine, renderer: Renderer
) -> None:
    table = Table(new_engine(), renderer)
    _, found = stations(table, Hollow)
    ended = table.play(found[1], make_env=env)
    assert ended.stop_reason is StopReason.ENV_ERROR
    assert words in str(ended.error)


def test_what_was_recorded_is_not_sampled_again(new_engine: NewEngine, renderer: Renderer) -> None:
    whole = Table(new_engine(), renderer).play()
    made_up = [
        replace(t, behavior_logprobs=(-9.0,) * len(t.action_ids), versions=(7,) * len(t.action_ids))
        for t in whole.turns
    ]
    partials = under_way(made_up[3], 1)
    found = Table(new_engine(), renderer).play(LiveEpisode(task=TASK, turns=tuple(made_up[:3]), partials=partials))
    assert [turn.behavior_logprobs for turn in found.turns[:3]] == [turn.behavior_logprobs for turn in made_up[:3]]
    assert [turn.versions for turn in found.turns[:3]] == [turn.versions for turn in made_up[:3]]
    assert found.turns[3].behavior_logprobs[0] == -9.0
    assert -9.0 not in found.turns[3].behavior_logprobs[1:]
    assert found.turns[3].versions[0] == 7
    assert set(found.turns[3].versions[1:]) <= {0}
    assert found.turns[3].action_ids == whole.turns[3].action_ids


class Tomorrow(OftenStops):
    """Opens every dialogue with another date."""

    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        return super().start([{"role": "system", "content": "Tomorrow."}, *messages], tools)


def test_what_was_recorded_is_not_rendered_again(new_engine: NewEngine, renderer: Renderer, tokenizer: Any) -> None:
    whole, states = stations(Table(new_engine(), renderer), Dice)
    for state in states:
        found = Table(new_engine(), Tomorrow(tokenizer)).play(state)
        assert (found.stop_reason, found.error) == (whole.stop_reason, None)
        assert [(t.observation_ids, t.action_ids) for t in found.turns] == [
            (t.observation_ids, t.action_ids) for t in whole.turns
        ]


def test_a_live_episode_tells_where_it_stands_at_every_pause(new_engine: NewEngine, renderer: Renderer) -> None:
    whole = Table(new_engine(), renderer).play()

    async def interrupted() -> list[LiveEpisode]:
        table = Table(new_engine(), renderer)
        episode, thread = table.episode()
        assert episode.live() == LiveEpisode(task=TASK)
        task = asyncio.create_task(episode.play(Dice))
        found = []
        while not task.done():
            busy_s = table.engine.busy_s
            while table.engine.busy_s == busy_s and not task.done():  # until a token or more was sampled
                await asyncio.sleep(0)
            await table.engine.pause()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            found.append(episode.live())
            await table.engine.resume()
        thread.close()
        assert timeless(await task).turns[-1].action_ids == whole.turns[-1].action_ids
        return found

    states = asyncio.run(interrupted())
    assert any(p.completion.finish_reason is FinishReason.ABORTED for state in states for p in state.partials)
    assert len({len(state.turns) for state in states}) >= 3
    for state in states[:: max(1, len(states) // 6)]:
        found = Table(new_engine(), renderer).play(state)
        assert [turn.action_ids for turn in found.turns] == [turn.action_ids for turn in whole.turns]
        # One that is still being played again stands where it was recorded.
        episode, thread = Table(new_engine(), renderer).episode(state)
        assert episode.live() == state
        thread.close()


class Forgetful(Dice):
    """Pays otherwise than it did."""

    def draw(self) -> float:
        return super().draw() / 2 if len(self.drawn) == 1 else super().draw()


class Renamed(Dice):
    """Has other keys than it had."""

    def state_key(self) -> str:
        return f"{len(self.drawn) + 1}"


class Short(Dice):
    """Ends earlier than it did."""

    num_turns = 1


@each(
    ("env", "words"),
    [
        (Short, "environment Short: replayed, it ends with turn 0, and was recorded with more"),
        (Forgetful, "environment Forgetful: replayed, turn 1 has another reward: float 0."),
        (Renamed, "environment Renamed: replayed, turn 0 has another state_key: str '1', and was recorded with "),
    ],
)
def test_an_environment_that_goes_another_way_fails_its_episode_in_so_many_words(
    env: MakeEnv, words: str, new_engine: NewEngine, renderer: Renderer
) -> None:
    whole = Table(new_engine(), renderer).play()
    found = Table(new_engine(), renderer).play(LiveEpisode(task=TASK, turns=whole.turns[:3]), make_env=env)
    assert found.stop_reason is StopReason.ENV_ERROR
    assert found.error is not None
    assert found.error.startswith(words)
    assert found.error.endswith("; make it depend on its seed and the actions alone, or set can_snapshot")
