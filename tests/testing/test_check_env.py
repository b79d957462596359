"""Every way to be broken that the check knows has an environment here, and a line of its own."""

import random
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import gymnasium as gym
import numpy as np
import pytest

from agentrl.env import MessageEnv, ToolEnv, tool, tool_call
from agentrl.errors import CheckError
from agentrl.testing.check_env import check_env
from agentrl.types import Message
from tests.support.each import each
from tests.support.threads import hang, wait_until


class Sound(ToolEnv):
    """Press the button that the first message names, twice."""

    def __init__(self, *, num_buttons: int = 100) -> None:
        super().__init__()
        self.num_buttons = num_buttons

    def start(self, options: dict[str, Any]) -> Any:
        self.button = int(self.np_random.integers(self.num_buttons))
        self.presses: list[bool] = []
        return f"Press {self.button} twice."

    @tool
    def press(self, button: int) -> str:
        """Press a button."""
        self.presses.append(button == self.button)
        if len(self.presses) == 2:
            self.reward(sum(self.presses) / 2)
            self.finish(success=all(self.presses))
        return "click"

    def answer(self, text: str) -> Any:
        return "Press it."

    def state_key(self) -> Any:
        return f"{self.button} {self.presses}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Any:
        is_right = rng is None or rng.random() < skill
        return tool_call("press", button=self.button + (not is_right))


class WithoutOracle(ToolEnv):
    def start(self, options: dict[str, Any]) -> str:
        self.total = int(self.np_random.integers(10))
        return "Count."

    @tool
    def add(self, number: int, kind: str = "a", *, more: bool = False, rest: list[int] | None = None) -> str:
        """Add a number."""
        self.total += number
        return f"{self.total}"

    def answer(self, text: str) -> str:
        return "Count."


class TextOnly(MessageEnv):
    """The smallest environment without tools."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return ({"role": "user", "content": "Say something."},), {}

    def step(self, action: str | Message) -> Any:
        return ({"role": "user", "content": "More."},), 0.0, False, False, {}


class Slow(Sound):
    def start(self, options: dict[str, Any]) -> Any:
        time.sleep(0.02)
        return super().start(options)


def problems(make: str | type[MessageEnv] | Callable[..., Any], **options: Any) -> list[str]:
    with pytest.raises(CheckError) as caught:
        check_env(make, **options)
    first, *lines = str(caught.value).splitlines()
    assert first.endswith(f"{len(lines)} problem{'s' if len(lines) > 1 else ''}")
    assert all(line.startswith("- ") for line in lines)
    return [line.removeprefix("- ") for line in lines]


def only_problem(make: type[MessageEnv] | Callable[..., Any], **options: Any) -> str:
    lines = problems(make, **options)
    assert len(lines) == 1, lines
    return lines[0]


@each("cls", [Sound, WithoutOracle, TextOnly])
def test_a_sound_environment_passes(cls: type[MessageEnv]) -> None:
    check_env(cls)


@pytest.mark.slow
def test_short_deadlines_are_those_of_a_call_and_not_of_what_is_looked_at_last() -> None:
    check_env(Slow, timeout_s=1.0, seeds=range(2))


def test_one_task_for_all_seeds_is_fine() -> None:
    check_env(Sound, num_buttons=1)


def test_wrappers_are_looked_through() -> None:
    check_env(lambda **options: gym.wrappers.TimeLimit(Sound(**options), 5), num_buttons=3)


class Deaf(gym.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        raise ValueError(f"cannot hear {action['content']}")


class Mute(gym.Wrapper[Any, Any, Any, Any]):
    def reset(self, **told: Any) -> Any:
        return self.env.reset(**told)[0]


def test_wrappers_in_which_nothing_can_be_played_are_told() -> None:
    assert only_problem(lambda: Deaf(TextOnly())) == "step() in its wrappers raised ValueError: cannot hear Hello."
    assert only_problem(lambda: Mute(TextOnly())).startswith(
        "reset() in its wrappers raised EnvError: reset() of TextOnly"
    )


def test_the_global_random_numbers_are_left_as_they_were() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    check_env(Sound)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    check_env(Sound)
    wait_until(lambda: threading.active_count() == before)


# What cannot be made


class NotMessages(gym.Env[Any, Any]):
    pass


class NoSuper(TextOnly):
    def __init__(self) -> None:
        pass


def test_what_is_no_message_environment() -> None:
    assert only_problem(NotMessages) == (
        "NotMessages is no agentrl.MessageEnv; subclass agentrl.ToolEnv or agentrl.MessageEnv"
    )
    assert only_problem(lambda: 3).startswith("int is no agentrl.MessageEnv")


def test_a_constructor_without_super() -> None:
    assert only_problem(NoSuper) == "__init__() leaves the spaces unset; call super().__init__() in its first line"


class Unwilling(Sound):
    @property
    def unwrapped(self) -> Any:
        raise RuntimeError("no")


class Spaceless(Sound):
    @property
    def action_space(self) -> Any:
        raise RuntimeError("no")

    @action_space.setter
    def action_space(self, space: Any) -> None:
        pass


class Forkless(Sound):
    @property
    def can_fork(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")


class Snapless(Sound):
    @property
    def can_snapshot(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")


@each("cls", [Unwilling, Spaceless, Forkless, Snapless])
def test_a_property_that_raises(cls: type[MessageEnv]) -> None:
    assert any(problem.endswith("raised RuntimeError: no") for problem in problems(cls))


def test_no_seeds_would_prove_everything() -> None:
    with pytest.raises(ValueError, match="seeds: give at least one"):
        check_env(Sound, seeds=())


def test_a_constructor_that_raises() -> None:
    assert only_problem(Sound, colour="red").startswith("__init__() raised TypeError: ")
    assert problems("calculator", max_operand=0) == [
        "__init__() raised ConfigError: env.options: 'calculator' could not be made: "
        "max_operand: give a whole number from 1 to 1000000000, got 0"
    ]


# reset()


class ListReset(TextOnly):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        messages, info = super().reset(seed=seed)
        return list(messages), info


class TextReset(TextOnly):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return "Say something."


class Unfriendly(Sound):
    def start(self, options: dict[str, Any]) -> Any:
        raise LookupError("no tasks left")


class NoMessages(WithoutOracle):
    def start(self, options: dict[str, Any]) -> Any:
        super().start(options)
        return ()


class NoContent(WithoutOracle):
    def start(self, options: dict[str, Any]) -> Any:
        super().start(options)
        return ({"role": "user", "text": "Count."},)


class ExtraObject(WithoutOracle):
    def start(self, options: dict[str, Any]) -> Any:
        super().start(options)
        return ({"role": "user", "content": "Count.", "when": time.struct_time, "id": {1}},)


class SeedForgotten(TextOnly):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return ({"role": "user", "content": str(np.random.randint(10**9))},), {}


class Counts(Sound):
    num_episodes = 0

    def start(self, options: dict[str, Any]) -> Any:
        self.num_episodes += 1
        return f"Episode {self.num_episodes}: {super().start(options)}"


class IndexDecidesTask(Sound):
    def start(self, options: dict[str, Any]) -> Any:
        return f"{super().start(options)} You are number {options.get('rollout_index')}."


def test_messages_in_a_list() -> None:
    lines = problems(ListReset)
    assert lines[0] == "reset() returned a list of messages; return a tuple"
    assert lines[1].startswith("Gymnasium's check_env raised AssertionError: ")


def test_a_reset_without_info() -> None:
    assert any(line.startswith("reset() returned str ") for line in problems(TextReset))


def test_a_reset_that_raises_is_said_once() -> None:
    assert only_problem(Unfriendly) == "reset() raised LookupError: no tasks left"


def test_no_first_message() -> None:
    assert only_problem(NoMessages) == "reset() returned no messages; the first says what the task is"


def test_a_message_without_content() -> None:
    lines = problems(NoContent)
    assert lines[0].startswith(
        "reset() returned dict {'role': 'user', 'text': 'Count.'} as a message; return a dict with role "
        "(system, user, assistant, tool) and content (a str); "
    )


def test_a_message_that_is_no_plain_data() -> None:
    line = problems(ExtraObject)[0]
    assert line.startswith("reset(): messages[0]['when'] is ")
    assert line.endswith("; give plain data: text, numbers, lists and dicts")


def test_a_seed_that_is_not_used() -> None:
    lines = problems(SeedForgotten)
    assert lines[0].startswith("reset(): seed 0 began different tasks in two environments (")
    assert lines[0].endswith("); call super().reset(seed=seed) and draw from self.np_random alone")
    assert len([line for line in lines if "seed 0 began different tasks" in line]) == 1


def test_a_task_that_remembers_the_last_one() -> None:
    lines = problems(Counts)
    assert lines[0].startswith("reset(): seed 0 began another task the second time (")
    assert lines[0].endswith("); set everything again in reset(), keep nothing of the last episode")


def test_a_rollout_index_that_decides_the_task() -> None:
    assert only_problem(IndexDecidesTask) == (
        "reset(): options['rollout_index'] changed the first messages; the task follows from seed, and only what comes "
        "later may follow from the index"
    )


# step()


class Returns(TextOnly):
    """Returns something else than it should, where `part` says."""

    def __init__(self, *, part: int = 0, value: Any = None) -> None:
        super().__init__()
        self.part, self.value = part, value

    def step(self, action: str | Message) -> Any:
        result = list(super().step(action))
        result[self.part] = self.value
        return tuple(result)


class ShortStep(TextOnly):
    def step(self, action: str | Message) -> Any:
        return super().step(action)[:4]


class History(TextOnly):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.messages, info = super().reset(seed=seed)
        return self.messages, info

    def step(self, action: str | Message) -> Any:
        new, *rest = super().step(action)
        self.messages = (*self.messages, *new)
        return self.messages, *rest


class WrongSum(Sound):
    def step(self, action: str | Message) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward + 1, *rest


class HatesText(Sound):
    def answer(self, text: str) -> Any:
        return f"{int(text)}?"


class HatesCalls(TextOnly):
    def step(self, action: str | Message) -> Any:
        if not isinstance(action, str) and "tool_calls" in action:
            raise TypeError("what is\nthis?")
        return super().step(action)


class OwnCalls(Sound):
    def _call(self, call: Any) -> Message:
        return {**super()._call(call), "tool_call_id": None, "content": "no"}


class Chatterbox(Sound):
    max_error_chars = 5

    def step(self, action: str | Message) -> Any:
        observation, *rest = super().step(action)
        return tuple({**m, "content": m["content"].ljust(70)} for m in observation), *rest


class GlobalRandom(Sound):
    @tool
    def press(self, button: int) -> str:
        """Press a button."""
        return f"{super().press(button)} {random.random()}"


class EarlyReward(Sound):
    turn_rewards = False

    @tool
    def press(self, button: int) -> str:
        """Press a button."""
        said = super().press(button)
        self.reward(0.5)
        return said


class WrongTools(TextOnly):
    tools = [{"type": "function", "function": {"name": "press it", "parameters": {"type": "string"}}}, {"name": "look"}]  # noqa: RUF012


class OddSchemas(TextOnly):
    tools = [  # noqa: RUF012
        {
            "type": "function",
            "function": {
                "name": "press",
                "description": "Press.",
                "parameters": {"type": "object", "properties": {"any": True, "either": {"type": ["string", "null"]}}},
            },
        }
    ]


class OffersNothing(TextOnly):
    def provides(self) -> Any:
        return None


class Stuck(Sound):
    is_stuck = False

    def start(self, options: dict[str, Any]) -> Any:
        first = super().start(options)
        return "stuck" if self.is_stuck else first

    def finish(self, *, success: bool | None = None, score: float | None = None) -> None:
        super().finish(success=success, score=score)
        self.is_stuck = True


@each(
    ("part", "value", "line"),
    [
        (0, "More.", "step() returned str 'More.' as messages; return a tuple of them"),
        (0, ({"content": "More."},), "step() returned dict {'content': 'More.'} as a message; return a dict with role"),
        (1, "1", "step() returned the reward str '1'; return a finite float, at most 1e+15 in size"),
        (1, float("nan"), "step() returned the reward float nan; return a finite float, at most 1e+15 in size"),
        (1, True, "step() returned the reward bool True; return a float"),
        (2, None, "step() returned None as terminated; return a bool"),
        (3, 0, "step() returned 0 as truncated; return a bool"),
        (4, None, "step() returned NoneType None as info; return a dict"),
        (1, 10**400, "step(): the reward is an integer beyond what a float can hold"),
        (4, {"n": 10**400}, "step(): info['n'] is an integer beyond what a float can hold"),
        (4, {"board": object()}, "step(): info['board'] is object <object"),
        (4, {"reward_components": 3}, "step() returned reward_components int 3; map names to numbers"),
        (4, {"success": True}, "info['success'] is given before the end; give it with the last step alone"),
        (4, {"success": 1}, "info['success'] is 1; give a bool"),
        (4, {"score": 12.0}, "info['score'] is 12.0; give a number from 0 to 1"),
    ],
)
def test_a_wrong_part_of_a_step(part: int, value: Any, line: str) -> None:
    assert any(found.startswith(line) for found in problems(Returns, part=part, value=value))


def test_a_step_of_four_parts() -> None:
    line = problems(ShortStep)[0]
    assert line.startswith("step() returned tuple (")
    assert line.endswith("; return (messages, reward, terminated, truncated, info)")


def test_a_step_that_returns_the_whole_dialogue() -> None:
    assert (
        "step() returns the dialogue so far; return only the messages that are new since the last action"
        in problems(History)
    )


def test_parts_of_a_reward_that_do_not_add_up() -> None:
    assert any(
        line.startswith("step() returned the reward 1.0 but reward_components {}; the parts must add up to it")
        for line in problems(WrongSum)
    )


def test_what_a_model_writes_must_not_raise() -> None:
    lines = problems(HatesText)
    assert lines[0] == (
        "step() raised ValueError: invalid literal for int() with base 10: 'hello' when the action was plain text, "
        "empty text, unicode text and 1 more; answer whatever the model writes with a message"
    )
    lines = problems(HatesCalls)
    assert lines == [
        "step() raised TypeError: what is this? when the action was a message with content None and a call, an "
        "unknown tool, an unknown tool with a very long name and 1 more; answer whatever the model writes with a message"
    ]


def test_tool_calls_without_ids_and_without_errors() -> None:
    lines = problems(OwnCalls)
    assert "step() answers a tool call without its id; copy call['id'] to the tool message's 'tool_call_id'" in lines
    assert any(
        line.startswith(
            "step() must answer an unknown tool with a tool message that begins with 'Error:', got ({'role'"
        )
        for line in lines
    )


def test_errors_without_bounds() -> None:
    assert "step() answers an unknown tool with an error of 70 characters; keep it within 65" in problems(Chatterbox)


def test_global_random_numbers_in_a_step() -> None:
    line = only_problem(GlobalRandom)
    assert line.startswith(
        "step(): the same seed and actions gave different results in two environments (content 'click 0.13436424411240122'"
    )
    assert line.endswith("draw from self.np_random alone, and read no clock and no global random numbers")


def test_turn_rewards_that_are_said_to_be_off() -> None:
    assert only_problem(EarlyReward) == (
        "step(): turn 0 has a reward of 0.5 although turn_rewards is False; pay at the end alone, or set turn_rewards = True"
    )


def test_wrong_schemas_of_tools() -> None:
    lines = problems(WrongTools)
    assert "tools: 'press it' is no tool name; use 1 to 64 letters, digits, '_' and '-'" in lines
    assert "tools: 'press it' has no description; the first line of the method's docstring becomes one" in lines
    assert "tools: parameters of 'press it' must be a JSON schema of type 'object'" in lines
    assert any("tools[1] is dict {'name': 'look'}, which is no OpenAI-style schema; give" in line for line in lines)


def test_schemas_that_are_rare_and_right() -> None:
    check_env(OddSchemas)


def test_an_environment_that_does_not_say_what_it_provides() -> None:
    assert (
        "environment OffersNothing: provides() returned NoneType None; return a frozenset of agentrl.Need"
        in problems(OffersNothing)
    )


def test_a_reset_that_does_not_bring_it_back() -> None:
    assert "reset() after the end begins another task; set everything again in it" in problems(Stuck)


# state_key(), fork(), oracle(), pickle, close()


class IntKey(Sound):
    def state_key(self) -> Any:
        return 3


class RestlessKey(Sound):
    num_asked = 0

    def state_key(self) -> Any:
        self.num_asked += 1
        return f"{super().state_key()} {self.num_asked}"


class ShallowFork(Sound):
    def fork(self) -> Self:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy


class ForgetfulFork(Sound):
    def fork(self) -> Self:
        copy = super().fork()
        copy.presses.clear()
        return copy


class FreshRandomFork(WithoutOracle):
    """Its copies continue with other random numbers."""

    @tool
    def add(self) -> str:  # type: ignore[override]
        """Draw."""
        return str(self.np_random.integers(10**9))

    def fork(self) -> Self:
        copy = super().fork()
        copy.np_random = np.random.default_rng()
        return copy


class SelfFork(Sound):
    def fork(self) -> Self:
        return self


class Locked(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class LockedSnapshot(Locked):
    can_snapshot = True


class BrokenFork(Sound):
    def fork(self) -> Self:
        raise RuntimeError("broken")


class OpenDatabase(Sound):
    def start(self, options: dict[str, Any]) -> Any:
        self.database = sqlite3.connect(":memory:")
        return super().start(options)

    def close(self) -> None:
        if hasattr(self, "database"):
            self.database.close()


class NotToFork(Sound):
    can_fork = False

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one of it")


class UnpickledState(Sound):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "presses": []}

    def fork(self) -> Self:
        copy = type(self)()
        copy.__dict__.update(self.__dict__ | {"presses": list(self.presses)})
        return copy


class PoorOracle(Sound):
    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Any:
        return tool_call("press", button=-1)


class EndlessOracle(Sound):
    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Any:
        return {"role": "assistant", "content": "Hm."}


class MutteringOracle(Sound):
    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Any:
        return 3


class DrawingOracle(Sound):
    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Any:
        self.np_random.random()
        return super().oracle(skill=skill, rng=rng)


class SlamsTwice(Sound):
    is_closed = False

    def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("already closed")
        self.is_closed = True


def test_a_key_that_is_no_text() -> None:
    assert "state_key() returned int 3; return a str, or None where there is none" in problems(IntKey)


def test_a_key_that_changes_by_asking() -> None:
    assert any(
        line.startswith("state_key() returned ") and line.endswith("it only looks, it changes nothing")
        for line in problems(RestlessKey)
    )


def test_a_copy_that_shares_what_changes() -> None:
    line = only_problem(ShallowFork)
    assert line.startswith("fork(): stepping the copy moved the original (state_key() ")
    assert line.endswith("; copy everything that changes, self.np_random included")


def test_a_copy_that_forgets() -> None:
    assert only_problem(ForgetfulFork).startswith("fork(): state_key() of the copy is ")


def test_a_copy_with_other_random_numbers() -> None:
    assert only_problem(FreshRandomFork).startswith(
        "fork(): the copy and the original answer the same action differently (content '"
    )


def test_a_copy_that_is_none() -> None:
    assert only_problem(SelfFork) == "fork() returned the environment itself; return an independent SelfFork"


def test_what_cannot_be_copied_or_pickled() -> None:
    for kind in (Locked, OpenDatabase):
        found = check_env(kind)
        assert sum(line.startswith("no copies by ") for line in found.lines) == 2
        assert not [
            line for line in found.lines if "play like the original" in line or line.endswith("may read branches")
        ]
        assert any(line.startswith("credit schemes may not read ") and "branches" in line for line in found.lines)
    assert (
        "no copies by fork() (TypeError: cannot pickle '_thread.lock' object): schemes that read branches (tree) cannot be "
        "used; override fork(), or set can_fork = False"
    ) in check_env(Locked).lines
    assert only_problem(LockedSnapshot) == (
        "pickle raised TypeError: cannot pickle '_thread.lock' object; can_snapshot is True: define its class at the top of "
        "a module and keep no open handles in it"
    )
    assert only_problem(BrokenFork).startswith("fork() raised RuntimeError: broken; override fork()")


def test_what_says_that_it_cannot_be_forked_is_not() -> None:
    assert "copies by pickle play like the original" in check_env(NotToFork).lines


def test_a_pickle_that_forgets() -> None:
    assert only_problem(UnpickledState).startswith("pickle: state_key() of the copy is ")


def test_an_oracle_that_does_not_solve_the_task() -> None:
    assert only_problem(PoorOracle) == (
        "oracle(): seed 0 ends without success; play right at every turn when skill is 1"
    )
    assert only_problem(EndlessOracle) == "oracle(): seed 0 is not solved within 100 turns; play right at every turn"


def test_an_oracle_may_return_text() -> None:
    class Speaks(Sound):
        def answer(self, text: str) -> Any:
            self.reward(1.0)
            self.finish(success=text == "press")

        def oracle(self, **_: Any) -> Any:
            return "press"

    assert "the oracle ends each task that was tried" in check_env(Speaks).lines


def test_an_oracle_that_returns_no_message() -> None:
    assert only_problem(MutteringOracle) == (
        "oracle() returned int 3; return text, or an assistant message (agentrl.env.tool_call makes one)"
    )


def test_a_tool_without_type_hints_is_found() -> None:
    class Untyped(Sound):
        @tool
        def hold(self, button, seconds: int = 1) -> str:  # type: ignore[no-untyped-def]
            """Hold a button."""
            return f"held for {seconds} s" if button == self.button else "nothing"

    assert only_problem(Untyped) == (
        "tools: parameter 'button' of 'hold' has no type hint, so the model is not told what to give and any value reaches "
        "the tool; write one, such as button: int"
    )


def test_an_oracle_that_draws_from_the_environment() -> None:
    assert only_problem(DrawingOracle) == "oracle() changed the environment; it only looks, and draws from `rng`"


def test_closing_twice() -> None:
    assert "close() called again raised RuntimeError: already closed; closing twice must be harmless" in problems(
        SlamsTwice
    )


# What hangs


class Hangs(Sound):
    def __init__(self, *, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "__init__":
            hang()

    def start(self, options: dict[str, Any]) -> Any:
        if self.where == "reset":
            hang()
        return super().start(options)

    def answer(self, text: str) -> Any:
        if self.where == "step":
            hang()
        return super().answer(text)


@pytest.mark.slow
@each("where", ["__init__", "reset", "step"])
def test_a_call_that_hangs_ends_the_check_with_what_was_found(where: str) -> None:
    assert problems(Hangs, where=where, timeout_s=2.0)[-1] == (
        f"{where}() did not return within 2 s; give whatever can block a deadline of its own"
    )


def test_everything_wrong_is_listed_at_once() -> None:
    class AllWrong(IntKey, SlamsTwice, HatesText):
        can_snapshot = True

        def state_key(self) -> Any:
            return None

    lines = problems(AllWrong)
    for words in ("step() raised ValueError", "pickle raised ", "close() called again raised RuntimeError"):
        assert sum(line.startswith(words) for line in lines) == 1, (words, lines)
