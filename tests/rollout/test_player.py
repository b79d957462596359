"""A pool that plays episodes in which there is no environment: whoever plays them is none of its business."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.chat import ChatMLRenderer
from agentrl.engine import Sampler
from agentrl.errors import EngineError
from agentrl.rollout import (
    Conversation,
    End,
    EpisodeContext,
    Journal,
    LiveEpisode,
    Outcome,
    RolloutConfig,
    RolloutPool,
    Tasks,
)
from agentrl.rollout.player import Listeners
from agentrl.testing import ScriptedEngine
from agentrl.types import StopReason, Trajectory

Before = Callable[[Conversation, int], None]


class Asks:
    """An episode of three questions."""

    def __init__(self, conversation: Conversation, listeners: Listeners, before: Before) -> None:
        self._conversation, self._listeners, self._before = conversation, listeners, before
        self.live = conversation.live

    async def play(self) -> Trajectory:
        conversation = self._conversation
        with conversation.context.engine.conversation(conversation.name):
            conversation.begin(conversation.first_dialogue([{"role": "user", "content": "0?"}], []))
            for number in range(1, 4):
                try:
                    self._before(conversation, number)
                    assert await conversation.act() is not None
                except EngineError as error:
                    conversation.fail(End(reason=StopReason.ENGINE_ERROR, error=str(error)))
                    break
                replies = [{"role": "user", "content": f"{number}?"}]
                over = End(reason=StopReason.TERMINATED)
                following = over if number == 3 else conversation.next_dialogue(replies)
                conversation.record_outcome(following, Outcome(reward=float(number)))
        self._listeners.on_count("retries")
        return conversation.trajectory(env_id="questions", metrics={})


class Questions:
    """Asks the policy three questions."""

    def __init__(self, before: Before = lambda _, __: None) -> None:
        self.starts: list[LiveEpisode] = []
        self.is_closed = False
        self._before = before

    def new(
        self, start: LiveEpisode, *, context: EpisodeContext[Sampler], listeners: Listeners, fork: bool = False
    ) -> Asks:
        assert not fork
        self.starts.append(start)
        conversation = Conversation(context, start.task, recorded=start, on_change=listeners.on_change)
        return Asks(conversation, listeners, self._before)

    def close(self) -> None:
        self.is_closed = True


def pool_of(player: Questions, renderer: ChatMLRenderer, **options: Any) -> RolloutPool:
    config = RolloutConfig(num_groups=1, group_size=2, max_turn_tokens=8)
    engine = ScriptedEngine(lambda _, number: [40 + number, renderer.stop_token_ids[0]])
    context = EpisodeContext(engine=engine, renderer=renderer, config=config)
    return RolloutPool(player=player, context=context, tasks=Tasks(seed=5), **options)


def test_a_pool_plays_whatever_its_player_does_and_closes_it(rarely_stopping_renderer: ChatMLRenderer) -> None:
    player = Questions()
    pool = pool_of(player, rarely_stopping_renderer)
    (group,) = asyncio.run(pool.collect())
    assert [(t.env_id, t.reward, len(t.turns)) for t in group.trajectories] == [("questions", 6.0, 3)] * 2
    assert pool.counts["retries"] == 2
    evaluation = pool.with_config(pool.context.config)
    evaluation.close()
    assert not player.is_closed  # it is the first pool's
    pool.close()
    assert player.is_closed


def test_an_episode_whose_engine_failed_is_continued_by_another_of_the_same_player(
    rarely_stopping_renderer: ChatMLRenderer, tmp_path: Path
) -> None:
    failed: list[str] = []

    def fail_once(conversation: Conversation, number: int) -> None:
        if number == 3 and not failed:
            failed.append(conversation.task.trajectory_id)
            raise EngineError("gone")

    player = Questions(fail_once)
    pool = pool_of(player, rarely_stopping_renderer, journal=Journal(tmp_path))
    pool.state_dict()
    (group,) = asyncio.run(pool.collect())
    assert [t.reward for t in group.trajectories] == [6.0, 6.0]
    *_, again = player.starts
    assert again.task.trajectory_id == failed[0]
    assert [len(start.turns) for start in player.starts] == [0, 0, 2]
    assert len([event for event in Journal(tmp_path).read_events(1) if event.kind == "played"]) == 2 * 2
