"""The core of an episode, driven by a client that calls it: no environment, no thread."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.chat import ChatMLRenderer, Dialogue, HistoryConfig
from agentrl.rollout import Conversation, End, EpisodeContext, LiveEpisode, Outcome, RolloutConfig, Task
from agentrl.rollout.conversation import Partial, ReplayError
from agentrl.testing import ScriptedEngine
from agentrl.types import Completion, FinishReason, Message, Sampling, StopReason, Trajectory

TASK = Task(group_id="client", rollout_index=0, seed=3, sampling_seed=1)
CONFIG = RolloutConfig(max_turns=4, max_turn_tokens=32)


class Deterministic(ScriptedEngine):
    """Says to a prompt what it always says to it."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        ids = (40 + sum(prompt_ids) % 20, sampling.stop_token_ids[0])
        return Completion(token_ids=ids, logprobs=(-1.0,) * 2, versions=(0, 0), finish_reason=FinishReason.STOP)


class Interrupted(ScriptedEngine):
    """Is paused in the middle of every action, and has other weights when it is resumed."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        stop = sampling.stop_token_ids[0]
        if sampling.drawn:
            return Completion(
                token_ids=(42, stop), logprobs=(-2.0,) * 2, versions=(1, 1), finish_reason=FinishReason.STOP
            )
        return Completion(token_ids=(40, 41), logprobs=(-1.0,) * 2, versions=(0, 0), finish_reason=FinishReason.ABORTED)


class Chatty(ScriptedEngine):
    """Never comes to an end of its own."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        num = sampling.max_tokens
        return Completion(
            token_ids=(40,) * num, logprobs=(-1.0,) * num, versions=(0,) * num, finish_reason=FinishReason.LENGTH
        )


def user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def conversation(renderer: ChatMLRenderer, engine: Any = None, **config: Any) -> Conversation:
    engine = engine or Deterministic(lambda _, __: [])
    settings = CONFIG.model_copy(update=config)
    return Conversation(EpisodeContext(engine=engine, renderer=renderer, config=settings), TASK)


async def drive(conversation: Conversation, questions: Sequence[str], **outcome: Any) -> Trajectory:
    """Do as a client's program does: ask, take the answer, ask on; at the end say what it was worth."""
    conversation.begin(conversation.first_dialogue(user(questions[0]), []), state_key="0")
    for number, question in enumerate((*questions[1:], None), start=1):
        if await conversation.act() is None:
            break
        over = End(reason=StopReason.TERMINATED)
        following = over if question is None else conversation.next_dialogue(user(question))
        conversation.record_outcome(following, Outcome(reward=float(number), state_key=str(number), **outcome))
    return conversation.trajectory(env_id="client", metrics={})


def play(conversation: Conversation, *questions: str, **outcome: Any) -> Trajectory:
    return asyncio.run(drive(conversation, questions, **outcome))


@pytest.fixture
def chatml(rarely_stopping_renderer: ChatMLRenderer) -> ChatMLRenderer:
    return rarely_stopping_renderer


def test_a_client_drives_it_to_its_end(chatml: ChatMLRenderer) -> None:
    trajectory = play(conversation(chatml), "one", "two", "three")
    assert (trajectory.stop_reason, trajectory.truncated) == (StopReason.TERMINATED, False)
    assert [turn.reward for turn in trajectory.turns] == [1.0, 2.0, 3.0]
    assert [(turn.state_key, turn.next_state_key) for turn in trajectory.turns] == [("0", "1"), ("1", "2"), ("2", "3")]
    assert [turn.observation for turn in trajectory.turns] == [user("one"), user("two"), user("three")]
    dialogue = Dialogue.begin(user("one"), [], chatml)
    for turn, question in zip(trajectory.turns, ("two", "three", "four"), strict=True):
        assert turn.observation_ids == dialogue.observation_ids
        dialogue = dialogue.after(turn.action_ids, turn.message, user(question), chatml)


def test_an_action_that_was_interrupted_is_continued_with_the_versions_that_sampled_it(chatml: ChatMLRenderer) -> None:
    (turn,) = play(conversation(chatml, Interrupted(lambda _, __: [])), "one").turns
    assert turn.action_ids == (40, 41, 42, chatml.stop_token_ids[0])
    assert turn.versions == (0, 0, 1, 1)
    assert turn.behavior_logprobs == (-1.0, -1.0, -2.0, -2.0)


def test_limits_end_it_whoever_drives(chatml: ChatMLRenderer) -> None:
    trajectory = play(conversation(chatml, max_turns=2), "one", "two", "three")
    assert (trajectory.stop_reason, trajectory.truncated, len(trajectory.turns)) == (StopReason.MAX_TURNS, True, 2)
    trajectory = play(conversation(chatml, max_episode_tokens=2), "one", "two")
    assert (trajectory.stop_reason, trajectory.truncated, len(trajectory.turns)) == (StopReason.MAX_TOKENS, True, 1)
    trajectory = play(conversation(chatml, max_context_tokens=20), "one", "far too long a question for that")
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.CONTEXT_OVERFLOW, 0)
    assert trajectory.failed
    assert trajectory.error is not None
    assert trajectory.error.startswith("rollout.max_context_tokens: 20 leaves no room after the first prompt")


def test_an_action_that_the_limit_of_a_turn_cuts_off_is_carried_out_if_asked(chatml: ChatMLRenderer) -> None:
    limits = {"max_turn_tokens": 4, "max_episode_tokens": 10}
    ended = play(conversation(chatml, Chatty(lambda _, __: []), **limits), "one", "two", "three")
    assert (ended.stop_reason, [turn.reward for turn in ended.turns]) == (StopReason.MAX_TOKENS, [0.0])
    played = play(conversation(chatml, Chatty(lambda _, __: []), cut_off="act", **limits), "one", "two", "three")
    assert (played.stop_reason, [turn.reward for turn in played.turns]) == (StopReason.MAX_TOKENS, [1.0, 2.0, 0.0])
    assert [len(turn.action_ids) for turn in played.turns] == [4, 4, 2]  # the last by the limit of the episode
    assert [turn.finish_reason for turn in played.turns] == [FinishReason.LENGTH] * 3
    assert played.turns[1].extends
    assert played.turns[1].observation_ids[0] == chatml.stop_token_ids[0]  # which the model did not sample


def test_it_is_told_where_it_stands_and_continues_from_there(chatml: ChatMLRenderer) -> None:
    states: list[LiveEpisode] = []
    engine = Deterministic(lambda _, __: [])
    context = EpisodeContext(engine=engine, renderer=chatml, config=CONFIG)
    whole = play(Conversation(context, TASK, on_change=states.append), "one", "two", "three")
    assert [len(state.turns) for state in states] == [1, 2, 2]
    assert [state.partials == () for state in states] == [True, True, False]
    for state in states:
        assert play(Conversation(context, TASK, recorded=state), "one", "two", "three") == whole
    with pytest.raises(ReplayError, match="replayed, turn 1 has another observation"):
        play(Conversation(context, TASK, recorded=states[1]), "one", "2", "three")
    with pytest.raises(ReplayError, match="replayed, it has before turn 2"):
        play(Conversation(context, TASK, recorded=states[2]), "one", "two", "3")


def test_it_continues_from_anywhere_with_the_history_that_was_shown(chatml: ChatMLRenderer) -> None:
    states: list[LiveEpisode] = []
    config = CONFIG.model_copy(update={"history": HistoryConfig(turns=1), "max_turns": 5})
    context = EpisodeContext(engine=Deterministic(lambda _, __: []), renderer=chatml, config=config)
    questions = ("one", "two", "three", "four", "five")
    whole = play(Conversation(context, TASK, on_change=states.append), *questions)
    assert [turn.extends for turn in whole.turns] == [True, True, False, False, False]
    for state in states:
        conversation = Conversation(context, TASK, recorded=state)
        assert play(conversation, *questions) == whole
        played = len(state.turns)
        restored = Conversation(context, TASK, recorded=state).restored_dialogue([])
        assert (restored.observation_ids, restored.extends) == (
            whole.turns[played].observation_ids,
            whole.turns[played].extends,
        )


class TellsExperts(Interrupted):
    """Tells of each token from where it was asked to the last but one its position, as its only expert."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        done = await super().generate(prompt_ids, sampling, request_id)
        return replace(done, experts=bytes(range(sampling.experts_from, len(prompt_ids) + len(done.token_ids) - 1)))


def test_experts_of_each_token_are_told_once_and_of_the_last_one_never(chatml: ChatMLRenderer) -> None:
    told = play(conversation(chatml, TellsExperts(lambda _, __: [])), "one", "two", "three").turns
    end = 0
    for number, turn in enumerate(told):
        begin, end = max(0, end - 1), end + len(turn.observation_ids) + len(turn.action_ids)
        assert list(turn.experts) == list(range(begin, end - 1)), number


def test_a_context_that_was_rewritten_has_experts_of_its_own(chatml: ChatMLRenderer) -> None:
    rewriting = HistoryConfig(turns=1)
    told = play(conversation(chatml, TellsExperts(lambda _, __: []), history=rewriting), "one", "two", "three").turns
    assert not told[-1].extends
    assert list(told[-1].experts) == list(range(len(told[-1].observation_ids) + len(told[-1].action_ids) - 1))


def test_an_action_of_which_a_part_was_read_from_a_file_has_no_experts(chatml: ChatMLRenderer) -> None:
    partial = Completion(token_ids=(40, 41), logprobs=(-1.0,) * 2, versions=(0, 0), finish_reason=FinishReason.ABORTED)
    context = EpisodeContext(engine=TellsExperts(lambda _, __: []), renderer=chatml, config=CONFIG)
    recorded = LiveEpisode(task=TASK, partials=(Partial(completion=partial),))
    first, second = play(Conversation(context, TASK, recorded=recorded), "one", "two").turns
    assert (first.action_ids[:2], first.experts) == ((40, 41), b"")
    assert len(second.experts) == len(second.observation_ids) + len(second.action_ids)


def test_an_episode_that_goes_on_in_this_process_keeps_its_experts(chatml: ChatMLRenderer) -> None:
    context = EpisodeContext(engine=TellsExperts(lambda _, __: []), renderer=chatml, config=CONFIG)
    whole = play(Conversation(context, TASK), "one", "two", "three")
    recorded = LiveEpisode(task=TASK, turns=whole.turns[:2])
    assert play(Conversation(context, TASK, recorded=recorded), "one", "two", "three") == whole
