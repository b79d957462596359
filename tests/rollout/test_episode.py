import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from agentrl.chat import ChatMLRenderer, Renderer
from agentrl.engine.batched import Request
from agentrl.engine.transformers.engine import TransformersEngine
from agentrl.env import MessageEnv, make_env
from agentrl.errors import ConfigError
from agentrl.learn.tokens import rows_of
from agentrl.rollout import Episode, EpisodeContext, RolloutConfig, Task
from agentrl.rollout.env_driver import EnvThread, MakeEnv
from agentrl.types import Completion, FinishReason, Message, Sampling, StopReason, Trajectory
from tests.support.each import each
from tests.support.threads import hang

NewEngine = Callable[..., TransformersEngine]


def user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


class Talk(MessageEnv):
    """Numbers its turns, and pays k + 0.5 for turn k."""

    num_turns = 100

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.actions: list[str | Message] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        super().reset(seed=seed)
        self.turn = 0
        return user(f"seed {seed}, number {options}"), {}

    def step(self, action: str | Message) -> Any:
        self.actions.append(action)
        self.turn += 1
        words = "all again" if self.turn % 3 == 0 else f"now {self.turn}"
        return user(words), self.turn - 0.5, self.turn == self.num_turns, False, {"turn": self.turn}

    def state_key(self) -> str:
        return f"s{self.turn}"


class Recording(TransformersEngine):
    """The real engine, with a list of what went in and came out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[tuple[int, ...], Sampling, Completion]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        completion = await super().generate(prompt_ids, sampling, request_id)
        self.calls.append((tuple(prompt_ids), sampling, completion))
        return completion


@pytest.fixture
def recording(new_engine: NewEngine) -> Recording:
    engine = new_engine(Recording)
    assert isinstance(engine, Recording)
    return engine


TASK = Task(group_id="train/000000", rollout_index=3, seed=11, sampling_seed=1)
OPTIONS = {"rollout_index": 3, "split": "train", "task_index": None}


async def played(
    make_env: MakeEnv, engine: TransformersEngine, renderer: Renderer, *, task: Task = TASK, **config: Any
) -> Trajectory:
    settings = {"max_turns": 8, "max_turn_tokens": 64, "max_context_tokens": 2048, **config}
    thread = EnvThread()
    try:
        episode = Episode(
            task,
            context=EpisodeContext(engine=engine, renderer=renderer, config=RolloutConfig.model_validate(settings)),
            thread=thread,
        )
        return await episode.play(make_env)
    finally:
        thread.close()


def play(*args: Any, **kwargs: Any) -> Trajectory:
    return asyncio.run(played(*args, **kwargs))


def context_of_each_turn(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """List what stood before each action, as the types define it."""
    contexts: list[tuple[int, ...]] = []
    grown: tuple[int, ...] = ()
    for turn in trajectory.turns:
        grown = grown + turn.observation_ids if turn.extends else turn.observation_ids
        contexts.append(grown)
        grown += turn.action_ids
    return contexts


def test_tokens_and_logprobs_are_those_the_engine_sampled(recording: Recording, renderer: Renderer) -> None:
    trajectory = play(Talk, recording, renderer, max_turns=6)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(trajectory.turns) == len(recording.calls) == 6
    assert len({turn.action_ids for turn in trajectory.turns}) == 6
    for turn, context, (prompt, _, completion) in zip(
        trajectory.turns, context_of_each_turn(trajectory), recording.calls, strict=True
    ):
        assert turn.extends
        assert context == prompt
        assert turn.action_ids == completion.token_ids
        assert turn.behavior_logprobs == completion.logprobs
        assert turn.versions == completion.versions == (0,) * len(turn.action_ids)


def test_a_rewritten_history_begins_a_row_of_its_own_with_the_tokens_sampled_in_it(
    recording: Recording, forking_renderer: Renderer
) -> None:
    trajectory = play(Talk, recording, forking_renderer, max_turns=8)
    assert [turn.extends for turn in trajectory.turns] == [True, True, True, False, True, True, False, True]
    prompts = [prompt for prompt, _, _ in recording.calls]
    assert context_of_each_turn(trajectory) == prompts
    messages: list[Message] = []
    for turn in trajectory.turns[:4]:
        messages += [*turn.observation, turn.message]
    assert trajectory.turns[3].observation_ids == forking_renderer.start(messages[:-1], [])
    rows = rows_of(trajectory.turns)
    last_of_rows = (2, 5, 7)
    assert [tuple(row.ids_L.tolist()) for row in rows] == [
        prompts[k] + recording.calls[k][2].token_ids for k in last_of_rows
    ]
    sampled = [token for _, _, completion in recording.calls for token in completion.token_ids]
    logprobs = [logprob for _, _, completion in recording.calls for logprob in completion.logprobs]
    assert [int(row.ids_L[position]) for row in rows for position in row.positions_T] == sampled
    assert [logprob for turn in trajectory.turns for logprob in turn.behavior_logprobs] == logprobs


class Interrupted(Recording):
    """Is paused after every third token."""

    async def _advance(self, waiting: list[Request]) -> None:
        await super()._advance(waiting)
        if self._step % 3 == 0:
            await self.pause()
            self.resuming = asyncio.create_task(self.resume())


def test_a_paused_and_resumed_episode_equals_the_uninterrupted_one(new_engine: NewEngine, renderer: Renderer) -> None:
    engine = new_engine(Interrupted)
    assert isinstance(engine, Interrupted)
    whole, parts = play(Talk, new_engine(), renderer), play(Talk, engine, renderer)
    aborted = [completion for _, _, completion in engine.calls if completion.finish_reason is FinishReason.ABORTED]
    assert len([completion for completion in aborted if completion.token_ids]) >= 3
    for turn, other in zip(whole.turns, parts.turns, strict=True):
        assert turn.action_ids == other.action_ids
        # A resumed turn computes its whole prompt again, in another shape: float32 rounds otherwise.
        np.testing.assert_allclose(turn.behavior_logprobs, other.behavior_logprobs, rtol=1e-5)
        assert turn.observation_ids == other.observation_ids
        assert (turn.reward, turn.state_key, turn.finish_reason) == (other.reward, other.state_key, other.finish_reason)


def test_a_resumed_turn_keeps_to_the_budget_of_one_turn(
    recording: Recording, rarely_stopping_renderer: Renderer
) -> None:
    async def interrupted() -> Trajectory:
        episode = asyncio.create_task(played(Talk, recording, rarely_stopping_renderer, max_turn_tokens=20))
        while not episode.done():
            for _ in range(6):
                await asyncio.sleep(0)
            await recording.pause()
            await recording.resume()
        return episode.result()

    trajectory = asyncio.run(interrupted())
    assert len(recording.calls) >= 2
    assert [len(turn.action_ids) for turn in trajectory.turns] == [20]


def test_each_turn_draws_with_a_seed_of_its_own(recording: Recording, renderer: Renderer) -> None:
    play(Talk, recording, renderer, max_turns=4)
    again = Task(group_id=TASK.group_id, rollout_index=3, seed=11, sampling_seed=1, attempt=1)
    play(Talk, recording, renderer, task=again, max_turns=4)
    sibling = Task(group_id=TASK.group_id, rollout_index=4, seed=11, sampling_seed=1)
    play(Talk, recording, renderer, task=sibling, max_turns=4)
    assert len({sampling.seed for _, sampling, _ in recording.calls}) == 12
    assert {sampling.temperature for _, sampling, _ in recording.calls} == {1.0}


def test_rewards_keys_and_info_stand_at_their_turn(new_engine: NewEngine, renderer: Renderer) -> None:
    env = Talk()
    trajectory = play(lambda: env, new_engine(), renderer, max_turns=4)
    assert [turn.reward for turn in trajectory.turns] == [0.5, 1.5, 2.5, 3.5]
    assert trajectory.reward == 8.0
    assert [turn.state_key for turn in trajectory.turns] == ["s0", "s1", "s2", "s3"]
    assert [turn.next_state_key for turn in trajectory.turns] == ["s1", "s2", "s3", "s4"]
    assert [turn.extras["turn"] for turn in trajectory.turns] == [1, 2, 3, 4]
    first = f"seed 11, number {OPTIONS}"
    said = [turn.observation[0]["content"] for turn in trajectory.turns]
    assert said == [first, "now 1", "now 2", "all again"]
    assert [turn.message for turn in trajectory.turns] == env.actions
    assert [renderer.parse(turn.action_ids) for turn in trajectory.turns] == env.actions
    assert [turn.action_key for turn in trajectory.turns] == [turn.message["content"] for turn in trajectory.turns]
    assert (trajectory.seed, trajectory.env_id, trajectory.group_id) == (11, "Talk", "train/000000")
    assert trajectory.trajectory_id == "train/000000/3"
    assert trajectory.metrics["turn"] == 4


def ends(*, terminated: bool, truncated: bool) -> type[Talk]:
    class Ends(Talk):
        def step(self, action: str | Message) -> Any:
            messages, reward, _, _, info = super().step(action)
            return messages, reward, terminated, truncated, info

    return Ends


@each(
    ("make_env", "config", "reason", "truncated"),
    [
        (ends(terminated=True, truncated=False), {}, StopReason.TERMINATED, False),
        (ends(terminated=False, truncated=True), {}, StopReason.TERMINATED, True),
        (ends(terminated=True, truncated=True), {}, StopReason.TERMINATED, False),
        (ends(terminated=True, truncated=False), {"max_turns": 1}, StopReason.TERMINATED, False),
        (Talk, {"max_turns": 1}, StopReason.MAX_TURNS, True),
    ],
)
def test_the_environment_ends_an_episode_or_the_limit_of_turns_does(
    make_env: MakeEnv,
    config: dict[str, int],
    reason: StopReason,
    truncated: bool,
    new_engine: NewEngine,
    renderer: Renderer,
) -> None:
    trajectory = play(make_env, new_engine(), renderer, **config)
    assert (trajectory.stop_reason, trajectory.truncated, len(trajectory.turns)) == (reason, truncated, 1)
    assert trajectory.turns[0].reward == 0.5
    assert not trajectory.failed


def test_an_unfinished_action_is_recorded_and_never_carried_out(
    new_engine: NewEngine, rarely_stopping_renderer: Renderer
) -> None:
    env = Talk()
    trajectory = play(lambda: env, new_engine(), rarely_stopping_renderer, max_turn_tokens=5)
    assert (trajectory.stop_reason, trajectory.truncated) == (StopReason.MAX_TOKENS, True)
    (turn,) = trajectory.turns
    assert (len(turn.action_ids), turn.finish_reason) == (5, FinishReason.LENGTH)
    assert (turn.reward, turn.state_key, turn.next_state_key, turn.extras) == (0.0, "s0", None, {})
    assert env.actions == []


def test_the_budget_of_an_episode_is_spent_to_the_last_token_and_no_further(
    recording: Recording, renderer: Renderer
) -> None:
    for seed in range(6):
        task = Task(group_id="g", rollout_index=0, seed=0, sampling_seed=seed)
        trajectory = play(Talk, recording, renderer, task=task, max_turns=50, max_turn_tokens=24, max_episode_tokens=24)
        assert (trajectory.stop_reason, trajectory.truncated) == (StopReason.MAX_TOKENS, True)
        assert trajectory.num_action_tokens == 24
        assert len(trajectory.turns) > 1


def test_the_context_never_grows_past_its_limit(recording: Recording, renderer: Renderer) -> None:
    first = len(renderer.start(user(f"seed 0, number {OPTIONS | {'rollout_index': 0}}"), []))
    for seed in range(6):
        task = Task(group_id="g", rollout_index=0, seed=0, sampling_seed=seed)
        limit = first + 70
        trajectory = play(Talk, recording, renderer, task=task, max_context_tokens=limit)
        assert (trajectory.stop_reason, trajectory.truncated) == (StopReason.CONTEXT_OVERFLOW, True)
        assert max(len(prompt) + len(completion.token_ids) for prompt, _, completion in recording.calls) <= limit
        assert len(trajectory.turns) > 1


def test_an_action_ends_where_the_context_is_full(new_engine: NewEngine, rarely_stopping_renderer: Renderer) -> None:
    first = len(rarely_stopping_renderer.start(user(f"seed 11, number {OPTIONS}"), []))
    trajectory = play(Talk, new_engine(), rarely_stopping_renderer, max_context_tokens=first + 5, max_turn_tokens=8)
    assert (trajectory.stop_reason, trajectory.truncated) == (StopReason.CONTEXT_OVERFLOW, True)
    assert [len(turn.action_ids) for turn in trajectory.turns] == [5]


def test_a_first_prompt_that_fills_the_context_leaves_the_loss(new_engine: NewEngine, renderer: Renderer) -> None:
    num_tokens = len(renderer.start(user(f"seed 11, number {OPTIONS}"), []))
    trajectory = play(Talk, new_engine(), renderer, max_context_tokens=num_tokens, max_turn_tokens=8)
    assert (trajectory.stop_reason, trajectory.turns, trajectory.failed) == (StopReason.CONTEXT_OVERFLOW, (), True)
    assert trajectory.error == (
        f"rollout.max_context_tokens: {num_tokens} leaves no room after the first prompt of {num_tokens} tokens; raise it"
    )
    trajectory = play(Talk, new_engine(), renderer, max_context_tokens=num_tokens + 1, max_turn_tokens=8)
    assert (trajectory.stop_reason, trajectory.num_action_tokens) == (StopReason.CONTEXT_OVERFLOW, 1)


def raises() -> None:
    raise KeyError("door")


def breaks(method: str, how: Callable[[], None], *, at_call: int = 1) -> MakeEnv:
    """Make an environment that does `how` at the given call of a method."""

    class Broken(Talk):
        pass

    calls = 0

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            how()
        return getattr(Talk, method)(self, *args, **kwargs)

    setattr(Broken, method, broken)
    return Broken


@each(
    ("method", "where", "num_turns"),
    [
        ("__init__", "environment: construction", 0),
        ("reset", "environment Broken: reset()", 0),
        ("state_key", "environment Broken: reset()", 0),
        ("action_key", "environment Broken: step()", 1),  # the turn at which it broke
        ("step", "environment Broken: step()", 1),
        ("close", "environment Broken: close()", 2),
    ],
)
def test_an_environment_that_raises_or_hangs_is_an_error_in_its_words(
    method: str, where: str, num_turns: int, new_engine: NewEngine, renderer: Renderer
) -> None:
    raised = play(breaks(method, raises), new_engine(), renderer, max_turns=2)
    assert (raised.stop_reason, raised.truncated) == (StopReason.ENV_ERROR, False)
    line = raises.__code__.co_firstlineno + 1
    assert raised.error == f"{where} raised KeyError: 'door' (test_episode.py:{line})"
    assert raised.fault is not None
    assert raised.fault.kind == f"KeyError at test_episode.py:{line}"
    assert 'raise KeyError("door")' in raised.fault.traceback
    assert "agentrl/rollout" not in raised.fault.traceback
    hung = play(breaks(method, hang), new_engine(), renderer, max_turns=2, env_timeout_s=1.0)
    assert hung.stop_reason is StopReason.ENV_ERROR
    assert hung.error == f"{where} did not return within rollout.env_timeout_s: 1 s"
    assert hung.fault is not None
    assert ", in hang\n" in hung.fault.traceback
    assert len(raised.turns) == len(hung.turns) == num_turns


def test_a_failure_at_a_later_turn_keeps_the_action_that_failed_and_the_turns_before_it(
    new_engine: NewEngine, renderer: Renderer
) -> None:
    trajectory = play(breaks("step", raises, at_call=3), new_engine(), renderer)
    whole = play(Talk, new_engine(), renderer)
    assert [turn.reward for turn in trajectory.turns] == [0.5, 1.5, 0.0]
    assert [turn.message for turn in trajectory.turns] == [turn.message for turn in whole.turns[:3]]
    assert trajectory.failed


def test_what_went_wrong_first_is_what_is_told(new_engine: NewEngine, renderer: Renderer) -> None:
    closed = []

    class BreaksTwice(Talk):
        def step(self, action: str | Message) -> Any:
            raise ValueError("no such lever")

        def close(self) -> None:
            closed.append(True)
            raise RuntimeError("already broken")

    trajectory = play(BreaksTwice, new_engine(), renderer)
    assert trajectory.error is not None
    assert trajectory.error.startswith(
        "environment BreaksTwice: step() raised ValueError: no such lever (test_episode.py:"
    )
    assert closed == [True]


def returns(method: str, value: Any) -> MakeEnv:
    return type("Odd", (Talk,), {method: lambda *_, **__: value})


SAID = user("hm")
FINITE = "return a finite float, at most 1e+15 in size"
ROLE = (
    "return a dict with role (system, user, assistant, tool) and content (a str); tool_calls, where it has any, are a list of "
    '{"type": "function", "function": {"name": ..., "arguments": ...}}'
)


@each(
    ("method", "value", "words"),
    [
        ("reset", SAID, "reset() of Odd returned tuple ({'role': 'user', 'content': 'hm'},); return (messages, info)"),
        (
            "reset",
            ("hm", {}),
            "reset() of Odd returned str 'hm' as messages; return a tuple of them",
        ),
        (
            "reset",
            (({"role": "narrator", "content": "hm"},), {}),
            f"reset() of Odd returned dict {{'role': 'narrator', 'content': 'hm'}} as a message; {ROLE}",
        ),
        *(
            (
                "reset",
                (({"role": "user", "content": "hm", "tool_calls": calls},), {}),
                f"reset() of Odd returned dict {{'role': 'user', 'content': 'hm', 'tool_calls': {calls!r}}} "
                f"as a message; {ROLE}",
            )
            for calls in (1, ["x"], [{"name": "x"}], [{"function": {"name": 1}}])
        ),
        (
            "step",
            (SAID, 0.0, False, {}),
            "step() of Odd returned tuple (({'role': 'user', 'content': 'hm'},), 0.0, False, {}); "
            "return (messages, reward, terminated, truncated, info)",
        ),
        (
            "step",
            (SAID[0], 0.0, False, False, {}),
            "step() of Odd returned dict {'role': 'user', 'content': 'hm'} as messages; return a tuple of them",
        ),
        ("step", (SAID, "1", False, False, {}), f"step() of Odd returned the reward str '1'; {FINITE}"),
        (
            "step",
            (SAID, None, False, False, {}),
            f"step() of Odd returned the reward NoneType None; {FINITE}. None is for the last turn of an episode that nothing "
            "can score",
        ),
        (
            "step",
            (SAID, float("nan"), False, False, {}),
            f"step() of Odd returned the reward float nan; {FINITE}",
        ),
        (
            "step",
            (SAID, float("-inf"), False, False, {}),
            f"step() of Odd returned the reward float -inf; {FINITE}",
        ),
        ("step", (SAID, 0.0, False, False, None), "step() of Odd returned NoneType None as info; return a dict"),
        (
            "step",
            (SAID, 0.0, False, False, {"steps": {(0, 1): 2}}),
            "step() of Odd: info['steps'] has the key tuple (0, 1); its keys must be strings",
        ),
        ("reset", (SAID, None), "reset() of Odd returned NoneType None as info; return a dict"),
        (
            "reset",
            (SAID, {None: 0}),
            "reset() of Odd: info has the key NoneType None; its keys must be strings",
        ),
        ("state_key", 7, "state_key() of Odd returned int 7; return a str, or None where there is none"),
        (
            "action_key",
            ("go", 1),
            "action_key() of Odd returned tuple ('go', 1); return a str, or None where there is none",
        ),
    ],
)
def test_a_broken_contract_is_told_in_plain_words(
    method: str, value: Any, words: str, new_engine: NewEngine, renderer: Renderer
) -> None:
    trajectory = play(returns(method, value), new_engine(), renderer)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert trajectory.error == words


def test_a_state_key_that_breaks_its_contract_later_is_told_too(new_engine: NewEngine, renderer: Renderer) -> None:
    class Odd(Talk):
        def state_key(self) -> Any:
            return self.turn if self.turn == 2 else None

    trajectory = play(Odd, new_engine(), renderer)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.ENV_ERROR, 2)
    assert trajectory.error == "state_key() of Odd returned int 2; return a str, or None where there is none"
    assert trajectory.turns[0].state_key is None


class Flaky(Talk):
    """Asks a backend in its constructor, and gets half an answer."""

    def __init__(self) -> None:
        super().__init__()
        json.loads('{"task": ')


def test_a_constructor_that_fails_in_mid_run_is_a_failed_episode_not_a_mistake_in_the_recipe(
    new_engine: NewEngine, renderer: Renderer
) -> None:
    with pytest.raises(ConfigError, match=r"^env\.options: "):
        make_env(f"{__name__}:Flaky")
    trajectory = play(partial(make_env, f"{__name__}:Flaky"), new_engine(), renderer)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert trajectory.error == (
        "environment: construction raised JSONDecodeError: Expecting value: line 1 column 10 (char 9) "
        f"(test_episode.py:{Flaky.__init__.__code__.co_firstlineno + 2})"
    )


def test_a_mistake_in_the_recipe_that_shows_at_construction_keeps_its_words(
    new_engine: NewEngine, renderer: Renderer
) -> None:
    trajectory = play(partial(make_env, f"{__name__}:Talk", {"speed": 2}), new_engine(), renderer)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert trajectory.error is not None
    assert trajectory.error.startswith("environment: construction raised ConfigError: env.options.speed: ")


def test_numbers_of_numpy_are_numbers(new_engine: NewEngine, renderer: Renderer) -> None:
    info = {"success": np.bool_(True), "score": np.float32(0.5), "steps": np.int64(3), "note": "fine"}
    env = returns("step", (SAID, np.float32(0.25), np.bool_(True), np.bool_(False), info))
    trajectory = play(env, new_engine(), renderer)
    assert (trajectory.stop_reason, trajectory.reward, trajectory.error) == (StopReason.TERMINATED, 0.25, None)
    reported = {name: trajectory.metrics.get(name) for name in info}
    assert reported == {"success": 1.0, "score": 0.5, "steps": 3.0, "note": None}


def test_an_info_dict_that_the_environment_keeps_writing_to_is_kept_as_it_was(
    new_engine: NewEngine, renderer: Renderer
) -> None:
    class OneDict(Talk):
        info: dict[str, Any] = {}  # noqa: RUF012 - the mistake at hand

        def step(self, action: str | Message) -> Any:
            messages, reward, terminated, truncated, info = super().step(action)
            self.info.update(info, tool_errors=self.turn)
            return messages, reward, terminated, truncated, self.info

    trajectory = play(OneDict, new_engine(), renderer, max_turns=3)
    assert [turn.extras["turn"] for turn in trajectory.turns] == [1, 2, 3]
    assert trajectory.metrics["tool_errors"] == 1 + 2 + 3


def test_an_engine_that_does_not_answer_is_an_engine_error(new_engine: NewEngine, renderer: Renderer) -> None:
    async def stuck() -> Trajectory:
        engine = new_engine()
        await engine.pause()
        return await played(Talk, engine, renderer, engine_timeout_s=0.1)

    trajectory = asyncio.run(stuck())
    assert (trajectory.stop_reason, trajectory.failed) == (StopReason.ENGINE_ERROR, True)
    assert trajectory.error == "no completion within rollout.engine_timeout_s: 0.1"


class Where(ChatMLRenderer):
    """Tells on which threads it renders, and how long the longest message was."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.threads: set[str] = set()
        self.longest = 0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(range(261))  # an action is one token

    def start(self, messages: Sequence[Message], tools: Any) -> tuple[int, ...]:
        self._note(messages)
        return super().start(messages, tools)

    def extend(
        self, context_ids: Sequence[int], action_ids: Sequence[int], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        self._note(messages)
        return super().extend(context_ids, action_ids, messages)

    def _note(self, messages: Sequence[Message]) -> None:
        self.threads.add(threading.current_thread().name)
        self.longest = max([self.longest, *(len(message["content"]) for message in messages)])


class Floods(Talk):
    """Says ten million characters at its third turn, or at once."""

    def __init__(self, *, at_once: bool = False) -> None:
        super().__init__()
        self.at_once = at_once

    def reset(self, **kwargs: Any) -> tuple[tuple[Message, ...], dict[str, Any]]:
        messages, info = super().reset(**kwargs)
        return (({"role": "user", "content": "x" * 10**7},) if self.at_once else messages), info

    def step(self, action: str | Message) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = super().step(action)
        said = "x" * (10**7 if self.turn == 3 else 10)
        return ({"role": "user", "content": said},), reward, terminated and self.turn > 3, truncated, info


def test_messages_are_rendered_beside_the_event_loop(new_engine: NewEngine, tokenizer: Any) -> None:
    renderer = Where(tokenizer)
    play(Talk, new_engine(), renderer, max_turns=4)
    assert renderer.threads == {"agentrl-env"}


def test_what_no_context_can_hold_ends_the_episode_before_it_is_rendered(new_engine: NewEngine, tokenizer: Any) -> None:
    renderer = Where(tokenizer)
    trajectory = play(Floods, new_engine(), renderer)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.CONTEXT_OVERFLOW, 3)
    assert trajectory.truncated
    assert renderer.longest < 1000
    trajectory = play(partial(Floods, at_once=True), new_engine(), renderer)
    assert (trajectory.stop_reason, trajectory.failed) == (StopReason.CONTEXT_OVERFLOW, True)
    assert "leaves no room after the first prompt of more than 2048 tokens" in str(trajectory.error)
    assert renderer.longest < 1000
