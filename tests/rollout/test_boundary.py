"""Whatever an environment returns is its episode's fault, or comes out of every file as it went in."""

import asyncio
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from agentrl.chat import ChatMLRenderer
from agentrl.credit import Credit
from agentrl.env import MessageEnv, ToolEnv, tool
from agentrl.report.records import groups_of, read_records, records
from agentrl.report.terminal import render
from agentrl.rollout import EnvPlayer, EpisodeContext, Journal, RolloutConfig, RolloutPool, Tasks
from agentrl.rollout.env_driver import MakeEnv
from agentrl.testing import ScriptedEngine
from agentrl.types import Message, StopReason, Trajectory, TrajectoryGroup
from tests.support.each import each
from tests.support.hostile import (
    HOSTILE_ERRORS,
    KEYS,
    OBSERVATIONS,
    RESETS,
    STEPS,
    TOOLS,
    VALUES,
    HangsInWordsError,
    Says,
    SpeechlessError,
    nested,
)

USER = ({"role": "user", "content": "Go on."},)
GOES_ON: Any = (USER, 0.5, False, False, {})


@pytest.fixture(scope="session")
def chatml(tokenizer: Any) -> ChatMLRenderer:
    return ChatMLRenderer(tokenizer)


def pool_of(
    make_env: MakeEnv,
    renderer: ChatMLRenderer,
    *,
    fork: bool = False,
    journal: Path | None = None,
    **config: Any,
) -> RolloutPool:
    stop = renderer.stop_token_ids[0]
    settings = {"mode": "partial", "num_groups": 1, "max_turns": 2, "max_retries": 0, "env_timeout_s": 30.0, **config}
    return RolloutPool(
        player=EnvPlayer(make_env),
        context=EpisodeContext(
            engine=ScriptedEngine(lambda _id, _number: [40, 41, stop]),
            renderer=renderer,
            config=RolloutConfig.model_validate(settings),
        ),
        tasks=Tasks(seed=5),
        fork=fork,
        journal=Journal(journal) if journal else None,
    )


def collect(pool: RolloutPool) -> TrajectoryGroup:
    async def run() -> TrajectoryGroup:
        try:
            (group,) = await pool.collect(1)
            return group
        finally:
            await pool.stop()

    try:
        return asyncio.run(run())
    finally:
        pool.close()


def played(env: MessageEnv, renderer: ChatMLRenderer) -> Trajectory:
    """Play one episode of this environment, beside two that nothing happens to, and read it back from every file."""
    made: list[MessageEnv] = []

    def make() -> MessageEnv:
        made.append(env if not made else Says((USER, {}), GOES_ON))
        return made[-1]

    with tempfile.TemporaryDirectory() as name:
        return read_back(make, renderer, Path(name))


def read_back(make_env: MakeEnv, renderer: ChatMLRenderer, folder: Path) -> Trajectory:
    settings: dict[str, Any] = {"group_size": 3, "max_live_episodes": 1}
    pool = pool_of(make_env, renderer, journal=folder / "journal", **settings)
    before = json.loads(json.dumps(pool.state_dict(), allow_nan=False))
    group = collect(pool)
    killed = pool_of(make_env, renderer, journal=folder / "journal", **settings)
    killed.load_state_dict(before)
    killed.recover()
    after = json.loads(json.dumps(killed.state_dict(), allow_nan=False))
    assert collect(killed) == group
    resumed = pool_of(make_env, renderer, **settings)
    resumed.load_state_dict(after)
    assert collect(resumed) == group
    credits = [[Credit.uniform(t, 1.0) for t in group.trajectories]]
    written = list(records([group], credits, step=1, piece=str))
    path = folder / "rollouts.jsonl"
    path.write_text("".join(record.model_dump_json(exclude_defaults=True) + "\n" for record in written), "utf-8")
    assert groups_of(read_records(path)) == [group]
    Console(file=io.StringIO()).print(render(written[0]))
    return group.trajectories[0]


@example(reset=(({"tool_calls": 1, "role": "system", "content": ""},), {}))
@given(reset=RESETS)
def test_whatever_reset_returns(chatml: ChatMLRenderer, reset: Any) -> None:
    played(Says(reset, GOES_ON), chatml)


@given(step=STEPS)
def test_whatever_step_returns(chatml: ChatMLRenderer, step: Any) -> None:
    played(Says((USER, {}), step), chatml)


@given(messages=OBSERVATIONS, info=VALUES)
def test_whatever_messages_and_info_hold(chatml: ChatMLRenderer, messages: Any, info: Any) -> None:
    played(Says((messages, {}), (messages, 1.0, False, False, {"tool_errors": info, "x": info})), chatml)


@given(tools=st.just([]) | TOOLS, key=st.none() | KEYS, action_key=st.none() | KEYS)
def test_whatever_tools_and_keys_are(chatml: ChatMLRenderer, tools: Any, key: Any, action_key: Any) -> None:
    played(Says((USER, {}), GOES_ON, tools=tools, key=key, action_key=action_key), chatml)


@each(
    ("step", "words"),
    [
        ((USER, 1.0, False, False, {"deep": nested(300)}), r"info\['deep'\].* nests more than 64 deep"),
        (((USER[0] | {"deep": nested(300)},), 1.0, False, False, {}), "messages.* nests more than 64 deep"),
        ((USER, 1.0, False, False, {"n": 10**400}), r"info\['n'\] is an integer beyond what a float can hold"),
        ((USER, 10**400, False, False, {}), "the reward is an integer beyond what a float can hold"),
        ((USER, 1e300, False, False, {}), "the reward float 1e.300; return a finite float"),
        (
            (USER, 1.0, True, False, {"success": 7}),
            r"step\(\) of \w+ returned info\['success'\] = int 7; return a bool",
        ),
        ((USER, 1.0, True, False, {"success": 0.5}), r"info\['success'\] = float 0.5; return a bool, and a share as "),
        ((USER, 1.0, True, False, {"success": -1.0}), r"info\['success'\] = float -1.0; return a bool"),
        ((USER, 1.0, True, False, {"success": float("nan")}), r"info\['success'\] = str 'NaN'; return a bool"),
        ((USER, 1.0, True, False, {"score": 1e308}), r"returned float 1e\+308 in info as 'score'; .* at most 1e\+50"),
        ((USER, 1.0, False, False, {"logged": {"n": -1e60}}), r"returned float -1e\+60 in info as 'n'; "),
        ((USER, 1.0, False, False, {"reward_components": {"n": 10**60}}), r"returned int 10+\.+0+ in info as 'n'; "),
        ((({"role": "user", "content": b"x"},), 1.0, False, False, {}), r"messages\[0\]\['content'\] is bytes b'x'"),
        (SpeechlessError(), r"step\(\) raised SpeechlessError: \(its __str__ raised RuntimeError\)"),
        (ValueError("\ud800\x1b[2J" + "x" * 10**6), r"step\(\) raised ValueError: \?\\x1b\[2Jxxx"),
    ],
)
def test_what_no_file_can_hold_is_that_episodes_fault(step: Any, words: str, chatml: ChatMLRenderer) -> None:
    trajectory = played(Says((USER, {}), step), chatml)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert trajectory.error is not None
    assert len(trajectory.error) < 3000
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(trajectory.error)


@each("error", HOSTILE_ERRORS)
def test_an_exception_that_cannot_be_described_is_that_episodes_fault(error: Exception, chatml: ChatMLRenderer) -> None:
    for env in (Says(error, GOES_ON), Says((USER, {}), error)):
        trajectory = played(env, chatml)
        assert trajectory.stop_reason is StopReason.ENV_ERROR
        assert f"raised {type(error).__name__}" in str(trajectory.error)
        assert trajectory.fault is not None
        assert trajectory.fault.kind.startswith(f"{type(error).__name__} at hostile.py:")
        assert "hostile.py" in trajectory.fault.traceback


def test_an_exception_whose_words_take_for_ever_misses_the_deadline_of_its_call(chatml: ChatMLRenderer) -> None:
    makes = iter([Says((USER, {}), HangsInWordsError())])
    pool = pool_of(
        lambda: next(makes, Says((USER, {}), GOES_ON)), chatml, group_size=3, max_live_episodes=1, env_timeout_s=2.0
    )
    ended = [trajectory.stop_reason for trajectory in collect(pool).trajectories]
    assert sorted(ended) == [StopReason.ENV_ERROR, StopReason.MAX_TURNS, StopReason.MAX_TURNS]


@each("count", [None, "many", [1]])
def test_a_count_of_errors_that_is_no_number_counts_nothing(count: Any, chatml: ChatMLRenderer) -> None:
    trajectory = played(Says((USER, {}), (USER, 1.0, False, False, {"tool_errors": count})), chatml)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.metrics["tool_errors"] == 0


class Reuses(MessageEnv):
    """Says everything with one dict, and writes into the action it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.said: Message = {"role": "user", "content": ""}
        self.turn = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._say()

    def step(self, action: Any) -> Any:
        action["content"] = "rewritten"
        return self._say()[0], 0.0, False, False, self.said

    def _say(self) -> Any:
        self.turn += 1
        self.said["content"] = str(self.turn)
        return (self.said,), {}


def test_what_was_said_and_done_is_recorded_as_it_was_then(chatml: ChatMLRenderer) -> None:
    turns = played(Reuses(), chatml).turns
    assert [turn.observation[0]["content"] for turn in turns] == ["1", "2"]
    assert [turn.extras["content"] for turn in turns] == ["2", "3"]
    assert not any(turn.message["content"] == "rewritten" for turn in turns)


class Raises(ToolEnv):
    """Has a tool that raises what has no words."""

    def start(self, options: dict[str, Any]) -> str:
        return "Go on."

    def answer(self, text: str) -> str:
        self.reward("much")  # type: ignore[arg-type]
        return "no"

    @tool
    def fall(self) -> str:
        """Fall."""
        raise SpeechlessError


def test_an_exception_without_words_in_a_tool_is_an_answer() -> None:
    env = Raises()
    env.reset(seed=0)
    call = {"id": "0", "type": "function", "function": {"name": "fall", "arguments": {}}}
    (reply,), *_ = env.step({"role": "assistant", "content": "", "tool_calls": [call]})
    assert reply["content"] == "Error: SpeechlessError: (its __str__ raised RuntimeError)"


def test_a_reward_that_is_no_number_fails_its_episode_alone(chatml: ChatMLRenderer) -> None:
    trajectory = played(Raises(), chatml)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert "reward() takes a finite number, or None, got str 'much'" in str(trajectory.error)


class Sheep(Says):
    """Cannot be copied."""

    def fork(self) -> Any:
        return None


def test_a_fork_that_is_none_is_that_episodes_fault(chatml: ChatMLRenderer) -> None:
    pool = pool_of(lambda: Sheep((USER, {}), GOES_ON), chatml, fork=True)
    with pytest.raises(Exception, match=r"fork\(\) of Sheep must return a copy, got NoneType None"):
        collect(pool)


class Alternates(ChatMLRenderer):
    """Refuses two messages of one role in a row, as some templates do."""

    def extend(self, context_ids: Any, action_ids: Any, messages: Any) -> Any:
        raise ZeroDivisionError("roles must alternate")


def test_messages_that_a_template_cannot_render_are_that_episodes_fault(tokenizer: Any) -> None:
    pool = pool_of(lambda: Says((USER, {}), GOES_ON), Alternates(tokenizer), max_consecutive_failures=2)
    with pytest.raises(
        Exception, match="environment Says: its messages cannot be rendered: ZeroDivisionError: roles must"
    ):
        collect(pool)


def test_a_fault_of_several_lines_is_told_in_one(chatml: ChatMLRenderer) -> None:
    error = played(Says((USER, {}), ValueError("one\ntwo\x1b[31m")), chatml).error
    assert str(error).startswith(r"environment Says: step() raised ValueError: one two\x1b[31m (hostile.py:")
