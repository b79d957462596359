from typing import Any

import numpy as np
import pytest

from agentrl.env import ToolEnv, tool, tool_call
from agentrl_envs.key_door import KeyDoor
from tests.support.baselines import always, constant_actions, oracle, play, random_action


class Many(ToolEnv):
    """Has a tool of many arguments, and counts the calls that it could carry out."""

    def start(self, options: dict[str, Any]) -> str:
        self.calls: list[dict[str, Any]] = []
        self.options = options
        return "Count the 417 blue lamps."

    @tool
    def many(self, number: int, share: float, word: str, flag: bool, numbers: list[int], maybe: int | None) -> str:
        """Take many things."""
        self.calls.append({"number": number, "share": share, "word": word, "numbers": numbers, "maybe": maybe})
        return "Noted."

    def answer(self, text: str) -> str:
        return "Hm."


def test_a_random_policy_calls_with_arguments_of_the_right_types_and_words_of_the_dialogue() -> None:
    env, rng = Many(), np.random.default_rng(0)
    played = play(env, random_action, seed=0, max_turns=200, rng=rng)
    assert (len(played.rewards), played.is_over, played.success) == (200, False, False)
    assert 130 < len(env.calls) < 190  # four of five turns: 160, with a deviation of 5.7
    assert {call["word"] for call in env.calls} == {"Count", "the", "blue", "lamps", "Noted", "Hm"}
    assert {*range(10), 417} == {call["number"] for call in env.calls}
    assert {len(call["numbers"]) for call in env.calls} == {0, 1, 2, 3}
    assert None in {call["maybe"] for call in env.calls}


def test_constant_actions_are_texts_and_each_value_of_each_tool() -> None:
    env = KeyDoor()
    env.reset(seed=0)
    calls = [action for action in constant_actions(env, max_values=3) if not isinstance(action, str)]
    assert calls == [tool_call("open_box", box=box) for box in (1, 0, 2)] + [tool_call("look"), tool_call("open_door")]


@pytest.mark.parametrize(("split", "num_tasks", "expected"), [("eval", 4, 2), ("train", None, None)])
def test_an_episode_is_played_on_a_task_of_its_split(split: str, num_tasks: int | None, expected: int | None) -> None:
    class Table(Many):
        def num_tasks(self, split: str) -> int | None:
            return num_tasks

    env = Table()
    play(env, always("Hm."), seed=6, max_turns=1, rng=np.random.default_rng(0), split=split)
    assert env.options == {"rollout_index": 0, "split": split, "task_index": expected}


def test_what_was_played_is_told() -> None:
    rng = np.random.default_rng(0)
    played = play(KeyDoor(num_distractors=0), oracle, seed=0, max_turns=9, rng=rng)
    assert (played.rewards, played.is_over, played.success, played.score) == ([0.2, 1.0], True, True, 1.0)
    assert [message["role"] for message in played.messages] == ["user", "assistant", "tool", "assistant", "tool"]
    cut = play(KeyDoor(num_distractors=0), oracle, seed=0, max_turns=1, rng=rng)
    assert (cut.rewards, cut.is_over, cut.success, cut.score) == ([0.2], False, False, 0.0)
