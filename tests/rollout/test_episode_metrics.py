"""Tool calls by name, and what environments log, as metrics of an episode."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from agentrl.credit import Credit
from agentrl.env import MessageEnv, ToolEnv, tool, tool_call
from agentrl.errors import EnvironmentFailure
from agentrl.learn.metrics import rollout_metrics
from agentrl.rollout.conversation import MAX_TOOLS, episode_metrics
from agentrl.rollout.env_driver import reset, step
from agentrl.rollout.evaluation import EvaluationConfig, summarize_evaluation
from agentrl.rollout.tasks import EnvTask
from agentrl.testing import make_group
from agentrl.types import FinishReason, Turn
from tests.support.each import each

TASK = EnvTask(seed=1)
TURN = make_group([[0.0]]).trajectories[0].turns[0]


class Logging(ToolEnv):
    def start(self, options: dict[str, Any]) -> str:
        self.log(begun=1)
        return "Go."

    @tool
    def open(self, box: int) -> str:
        """Open."""
        self.log(opened=1, weight=0.5)
        self.log(opened=1)
        return "opened"

    @tool
    def report(self, value: Any) -> str:
        """Report."""
        self.log(value=value)
        return "reported"

    def answer(self, text: str) -> str:
        return "Hm."


class Bare(MessageEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.log(begun=1)
        return ({"role": "user", "content": "Go."},), {}

    def step(self, action: Any) -> Any:
        self.log(steps=2)
        return (), 0.0, False, False, {"own": 1}


def test_what_is_logged_adds_up_in_a_turn_and_is_gone_with_the_next() -> None:
    env = Logging()
    env.reset(seed=1)
    infos = [env.step(action)[4] for action in (tool_call("open", box=1), "talk", tool_call("open", box=2))]
    assert [info.get("logged") for info in infos] == [
        {"begun": 1.0, "opened": 2.0, "weight": 0.5},
        None,
        {"opened": 2.0, "weight": 0.5},
    ]
    env.log(left_over=1)
    env.reset(seed=1)
    assert env.step("talk")[4]["logged"] == {"begun": 1.0}


def test_an_environment_with_a_step_of_its_own_logs_too() -> None:
    env = Bare()
    env.log(before=1)
    reset(env, env, TASK, rollout_index=0)
    infos = [step(env, env, {"role": "assistant", "content": "a"}).info for _ in range(2)]
    assert infos == [{"own": 1, "logged": {"begun": 1.0, "steps": 2.0}}, {"own": 1, "logged": {"steps": 2.0}}]


class Counting(Logging):
    def step(self, action: Any) -> Any:
        returned = super().step(action)
        self.log(steps=1, opened=1)
        return returned


def test_what_is_logged_after_the_step_of_the_base_adds_to_what_tools_logged() -> None:
    env = Counting()
    reset(env, env, TASK, rollout_index=0)
    step(env, env, tool_call("open", box=1))
    assert step(env, env, tool_call("open", box=1)).info["logged"] == {"opened": 3.0, "weight": 0.5, "steps": 1.0}


def test_a_copy_logs_for_itself() -> None:
    env = Bare()
    env.log(a=1)
    other = copy.copy(env)
    other.log(a=1)
    assert (env.take_logged(), other.take_logged()) == ({"a": 1.0}, {"a": 2.0})


@each("value", ["x", "1", None, float("nan"), float("inf"), [1], 10**400, 1e308])
def test_what_is_no_number_fails_the_episode(value: Any) -> None:
    env = Logging()
    env.reset(seed=1)
    with pytest.raises(EnvironmentFailure, match=r"log\(value=...\) takes a finite number, got "):
        env.step(tool_call("report", value=value))


def test_names_are_bounded_in_length_and_number() -> None:
    env = Logging()
    for name in ("a" * 65, "a b", "ä", "a/b", ""):
        with pytest.raises(EnvironmentFailure, match="is no name"):
            env.log(**{name: 1})
    env.log(**{f"{i:064d}": 1 for i in range(64)})
    env.log(**{f"{1:064d}": 1})
    with pytest.raises(EnvironmentFailure, match="more than 64 names"):
        env.log(another=1)


def turn(*calls: Any, finish: FinishReason = FinishReason.STOP, **extras: Any) -> Turn:
    message = {"role": "assistant", "tool_calls": list(calls)} if calls else {"role": "assistant", "content": "x"}
    return Turn(
        observation_ids=TURN.observation_ids,
        extends=True,
        action_ids=TURN.action_ids,
        behavior_logprobs=TURN.behavior_logprobs,
        versions=TURN.versions,
        reward=0.0,
        finish_reason=finish,
        message=message,
        extras=extras,
    )


def call(name: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {}}}


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "open")]


def test_calls_are_counted_by_the_names_of_tools_and_what_the_model_invents_together() -> None:
    turns = [
        turn(call("look"), call("look"), call("invented"), tool_errors=1),
        turn(call("open"), finish=FinishReason.LENGTH),  # cut off: not carried out
        turn(call("look"), call("other"), call(None), "no call", {"function": 3}, tool_errors=2),
        turn(),
    ]
    assert episode_metrics(turns, TOOLS) == {"tool_errors": 3.0, "tool/look": 3.0, "tool/open": 0.0, "tool/other": 4.0}
    assert episode_metrics(turns, ()) == {"tool_errors": 3.0}


def test_tools_beyond_a_number_are_counted_together() -> None:
    tools = [{"type": "function", "function": {"name": f"t{i}"}} for i in range(MAX_TOOLS + 1)]
    found = episode_metrics([turn(call("t0"), call(f"t{MAX_TOOLS}"))], tools)
    assert (found["tool/t0"], found["tool/other"], len(found)) == (1.0, 1.0, MAX_TOOLS + 2)


def test_what_was_logged_is_summed_over_the_turns() -> None:
    turns = [turn(logged={"a": 1, "b": 0.5}), turn(logged={"a": 2, "odd": "x"}), turn(logged="odd"), turn()]
    assert episode_metrics(turns, ()) == {"tool_errors": 0, "log/a": 3.0, "log/b": 0.5}


def test_steps_and_evaluations_report_means_over_episodes() -> None:
    group = make_group([[0.0, 0.0], [0.0]])
    found = [{"tool/look": 2.0, "log/a": 3.0}, {"tool/look": 1.0}]
    both = zip(group.trajectories, found, strict=True)
    group = replace(group, trajectories=tuple(replace(t, metrics=metrics) for t, metrics in both))
    row = rollout_metrics([group], [[Credit.uniform(t, 0.0) for t in group.trajectories]])
    assert (row["episode/tool/look"], row["episode/log/a"]) == (1.5, 1.5)
    assert (row["episode/turns_max"], row["episode/action_tokens_max"], row["turn/cut_off"]) == (2.0, 2.0, 0.0)
    metrics = summarize_evaluation([group], EvaluationConfig()).metrics
    assert (metrics["tool/look"], metrics["log/a"], metrics["action_tokens"]) == (1.5, 1.5, 1.5)
    assert sum(value for name, value in metrics.items() if name.startswith("stop/")) == 1.0
