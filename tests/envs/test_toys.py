import copy
from typing import Any

import numpy as np
import pytest

from agentrl.env import ToolEnv, tool_call
from agentrl.errors import UserError
from agentrl.testing.check_env import check_env
from agentrl_envs.calculator import Calculator
from agentrl_envs.key_door import KeyDoor
from agentrl_envs.service_desk import ServiceDesk
from tests.support.each import each

BUILTINS: list[tuple[type[ToolEnv], dict[str, Any]]] = [
    (Calculator, {}),
    (Calculator, {"num_operations": 1, "max_operand": 1}),
    (Calculator, {"num_operations": 6, "max_operand": 99, "turn_rewards": False}),
    (ServiceDesk, {}),
    (ServiceDesk, {"num_requests": 1, "num_tools": 2, "id_digits": 1}),
    (ServiceDesk, {"num_requests": 30, "num_tools": 5, "id_digits": 6, "turn_rewards": False}),
    (KeyDoor, {}),
    (KeyDoor, {"num_boxes": 2, "num_distractors": 0}),
    (KeyDoor, {"num_boxes": 9, "num_distractors": 12, "turn_rewards": False}),
    (KeyDoor, {"noise": 0.25}),
]


def calc(text: str) -> dict[str, Any]:
    a, op, b = text.split()
    return tool_call("calc", a=int(a), op=op, b=int(b))


def calculator(expression: Any, **options: Any) -> Calculator:
    env = Calculator(**options)
    env.reset(seed=0)
    env.expression = expression
    return env


def service_desk(*requests: tuple[str, int], **options: Any) -> ServiceDesk:
    env = ServiceDesk(num_requests=len(requests), **options)
    env.reset(seed=0)
    env.requests = list(requests)
    return env


def key_door(**options: Any) -> KeyDoor:
    env = KeyDoor(**options)
    env.reset(seed=0)
    env.where = 1
    return env


def play(env: ToolEnv, seed: int, *, skill: float, rng: np.random.Generator, max_turns: int = 100) -> dict[str, Any]:
    env.reset(seed=seed)
    for _ in range(max_turns):
        _, _, terminated, _, info = env.step(env.oracle(skill=skill, rng=rng))
        if terminated:
            return info
    return {"success": False, "score": 0.0}


@each(("cls", "options"), BUILTINS)
def test_every_builtin_keeps_the_contract(cls: type[ToolEnv], options: dict[str, Any]) -> None:
    check_env(cls, **options)


@each("name", ["calculator", "service_desk", "key_door", "agentrl/KeyDoor-v0"])
def test_every_installed_name_keeps_the_contract(name: str) -> None:
    check_env(name)


@each(("cls", "options"), BUILTINS)
def test_the_oracle_solves_every_task(cls: type[ToolEnv], options: dict[str, Any]) -> None:
    env = cls(**options)
    for seed in range(50):
        info = play(env, seed, skill=1.0, rng=np.random.default_rng(seed))
        assert (info["success"], info["score"]) == (True, 1.0)


def test_the_oracles_skill_is_the_share_of_right_turns() -> None:
    # 600 episodes of 12 requests at skill .25: the share has a standard deviation of sqrt(.25 * .75 / 7200) = .0051.
    rng, desk = np.random.default_rng(0), ServiceDesk()
    shares = [play(desk, seed, skill=0.25, rng=rng)["score"] for seed in range(600)]
    assert np.mean(shares) == pytest.approx(0.25, abs=0.02)
    # One decisive turn: sqrt(.25 / 2000) = .011.
    door = KeyDoor()
    scores = [play(door, seed, skill=0.5, rng=rng)["score"] for seed in range(2000)]
    assert np.mean(scores) == pytest.approx(0.5, abs=0.04)
    # Three right turns of at most four: all three at once, .5**3, or with one wrong call before the first or the second
    # (a wrong answer ends it), 2 * .5 * .5**3: together .25, with a deviation of sqrt(.25 * .75 / 2000) = .010.
    sums = Calculator()
    scores = [play(sums, seed, skill=0.5, rng=rng, max_turns=4)["score"] for seed in range(2000)]
    assert np.mean(scores) == pytest.approx(0.25, abs=0.035)


@each(("cls", "options"), BUILTINS)
def test_without_skill_nothing_is_played_right(cls: type[ToolEnv], options: dict[str, Any]) -> None:
    env, rng = cls(**options), np.random.default_rng(1)
    for seed in range(50):
        env.reset(seed=seed)
        for turn in range(100):
            _, reward, terminated, _, info = env.step(env.oracle(skill=0.0, rng=rng))
            earned = reward - info["reward_components"].get("chance", 0.0)
            assert (earned, info["tool_errors"]) == (0.0, 0), f"turn {turn} of seed {seed}"
            if terminated:
                assert (info["success"], info["score"]) == (False, 0.0)
                break
            if cls is KeyDoor and turn == 50:  # it keeps talking at the door
                break


@each(
    ("cls", "options", "words"),
    [
        (Calculator, {"num_operations": 0}, "num_operations: give a whole number from 1 to 100, got 0"),
        (Calculator, {"max_operand": 2.5}, "max_operand: give a whole number from 1 to 1000000000, got 2.5"),
        (Calculator, {"turn_reward": "much"}, "turn_reward: give a number from 0 to 1, got 'much'"),
        (ServiceDesk, {"num_tools": 9}, "num_tools: give a whole number from 2 to 8, got 9"),
        (ServiceDesk, {"num_requests": True}, "num_requests: give a whole number of 1 or more, got True"),
        (ServiceDesk, {"id_digits": 0}, "id_digits: give a whole number from 1 to 12, got 0"),
        (KeyDoor, {"num_boxes": 1}, "num_boxes: give a whole number of 2 or more, got 1"),
        (KeyDoor, {"num_distractors": -1}, "num_distractors: give a whole number of 0 or more, got -1"),
        (KeyDoor, {"key_reward": 2}, "key_reward: give a number from 0 to 1, got 2"),
        (
            KeyDoor,
            {"noise": 0.5, "turn_rewards": False},
            "noise: 0.5 is paid turn by turn; set turn_rewards: true, or noise: 0",
        ),
    ],
)
def test_an_impossible_option_is_named_with_what_it_takes(
    cls: type[ToolEnv], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        cls(**options)
    assert str(caught.value) == words


def test_the_calculator_asks_for_a_bracketed_expression() -> None:
    env = Calculator(num_operations=3)
    texts = [env.reset(seed=seed)[0][0]["content"] for seed in range(200)]
    assert all(text.endswith(")=?") and text.count("(") == text.count(")") == 3 for text in texts)
    assert len(set(texts)) == 200
    for seed, text in enumerate(texts):
        env.reset(seed=seed)
        while (action := env.oracle())["content"] == "":
            env.step(action)
        assert action["content"] == str(eval(text.removesuffix("=?")))


def test_a_right_call_reduces_the_expression_and_is_paid() -> None:
    env = calculator(((3, "+", 4), "*", (9, "-", 2)))
    expected: list[tuple[str, str, float, str]] = [
        # the call, what it says, what it earns, what is left
        ("9 - 2", "7", 0.2, "((3+4)*7)"),  # any operation whose operands are known
        ("3 + 5", "8", 0.0, "((3+4)*7)"),  # not in the expression
        ("4 + 3", "7", 0.0, "((3+4)*7)"),  # not as it stands there
        ("9 - 2", "7", 0.0, "((3+4)*7)"),  # computed before
        ("3 + 4", "7", 0.2, "(7*7)"),
        ("7 * 7", "49", 0.2, "49"),
    ]
    for call, says, earns, left in expected:
        observation, reward, terminated, _, _ = env.step(calc(call))
        assert (observation[0]["content"], reward, terminated, env.state_key()) == (says, earns, False, left)
    _, reward, terminated, _, info = env.step("49")
    assert (reward, terminated, info["success"], env.state_key()) == (1.0, True, True, "answered")


def test_the_calculators_oracle_finds_a_wrong_call_where_every_plain_one_is_right() -> None:
    env = calculator((((1, "+", 1), "-", (1, "*", 1)), "*", (1, "-", 1)))
    assert env.oracle(skill=0.0, rng=np.random.default_rng(0)) == calc("2 + 1")


def test_an_operation_is_replaced_wherever_it_stands() -> None:
    env = calculator(((2, "-", 5), "*", (2, "-", 5)))
    assert env.step(calc("2 - 5"))[1] == 0.2
    assert env.state_key() == "(-3*-3)"
    assert env.step(calc("-3 * -3"))[:2] == (
        ({"role": "tool", "name": "calc", "content": "9", "tool_call_id": "call_0"},),
        0.2,
    )


@each(
    ("text", "reward"),
    [("-3", 1), ("It is -3.", 1), ("2-5 = -3", 1), ("3", 0), ("-3 or 4", 0), ("", 0), ("9" * 9999, 0)],
)
def test_the_last_number_is_the_answer_and_ends_the_task(text: str, reward: float) -> None:
    observation, got, terminated, _, info = calculator((2, "-", 5)).step(text)
    assert (observation, got, terminated, info["score"]) == ((), reward, True, reward)


def test_the_calculator_without_turn_rewards_pays_for_the_answer_alone() -> None:
    env = calculator((3, "+", 4), turn_rewards=False)
    assert [env.step(calc("3 + 4"))[1], env.step("7")[1]] == [0.0, 1.0]


def test_a_request_is_served_by_one_call_right_or_wrong() -> None:
    env = service_desk(("refund", 101), ("track", 202), ("hold", 303), ("rush", 404))
    assert env.state_key() == "0/Money back for 101"
    expected: list[tuple[Any, str, float]] = [
        (tool_call("refund", id=101), "Where is 202", 0.25),
        (tool_call("track", id=220), "Keep 303 for me", 0.0),
        ("Gladly.", "Use a tool. Hurry up 404", 0.0),
    ]
    for action, says, reward in expected:
        observation, got, terminated, _, _ = env.step(action)
        assert (observation[0]["content"], got, terminated) == (says, reward, False)
    observation, reward, terminated, _, info = env.step(tool_call("rush", id=404))
    assert (observation[0]["content"], reward, terminated) == ("Done.", 0.25, True)
    assert (info["success"], info["score"]) == (False, 0.5)


def test_a_call_that_cannot_be_carried_out_leaves_the_request_standing() -> None:
    env = service_desk(("refund", 101), ("track", 202))
    for action in (tool_call("pay", id=101), tool_call("refund"), tool_call("refund", id="x")):
        observation, reward, _, _, info = env.step(action)
        assert observation[0]["content"].startswith("Error:")
        assert (reward, info["tool_errors"], env.state_key()) == (0.0, 1, "0/Money back for 101")
    assert env.step(tool_call("refund", id=101))[1] == 0.5


def test_the_service_desk_without_turn_rewards_pays_the_same_at_the_end() -> None:
    env = service_desk(("refund", 101), ("track", 202), ("bill", 303), ("swap", 404), turn_rewards=False)
    actions: list[Any] = [tool_call("refund", id=101), tool_call("bill", id=202), tool_call("bill", id=303), "?"]
    assert [env.step(action)[1] for action in actions] == [0.0, 0.0, 0.0, 0.5]


def test_fewer_tools_are_offered_and_asked_for() -> None:
    env = ServiceDesk(num_tools=3, num_requests=50)
    env.reset(seed=0)
    assert [t["function"]["name"] for t in env.tools] == ["refund", "cancel", "track"]
    assert {kind for kind, _ in env.requests} == {"refund", "cancel", "track"}
    assert env.step(tool_call("bill", id=1))[0][0]["content"].startswith("Error: unknown tool 'bill'")
    assert len(ServiceDesk.tools) == len(ServiceDesk().tools) == 8


def test_numbers_have_the_digits_asked_for() -> None:
    env = ServiceDesk(num_requests=2000, id_digits=2)
    env.reset(seed=0)
    numbers = [number for _, number in env.requests]
    assert (min(numbers), max(numbers)) == (10, 99)


def test_a_wrong_turn_at_the_service_desk_is_one_slip() -> None:
    env, rng, slips = service_desk(("refund", 100)), np.random.default_rng(0), set()
    for _ in range(400):
        function = env.oracle(skill=0.0, rng=rng)["tool_calls"][0]["function"]
        name, number = function["name"], str(function["arguments"]["id"])
        num_wrong = (name != "refund") + sum(a != b for a, b in zip(number, "100", strict=True))
        assert num_wrong == 1
        slips.add((name, number))
    assert len(slips) == 7 + 8 + 9 + 9  # other tools; digits of the first place but 1 and 0; of the others but 0


def test_only_the_first_turn_takes_the_key_and_the_door_pays_for_it() -> None:
    env = key_door(num_distractors=2)
    expected: list[tuple[Any, str, float, str]] = [
        (tool_call("open_box", box=1), "A key! Nice day?", 0.2, "1/True"),
        (tool_call("open_door"), "No door here. Long way?", 0.0, "2/True"),
        ("Yes.", "Well. The door.", 0.0, "3/True"),
        ("Yes.", "Well. The door.", 0.0, "3/True"),
    ]
    assert env.state_key() == "0/1"
    for action, says, reward, key in expected:
        observation, got, terminated, _, _ = env.step(action)
        assert (observation[0]["content"], got, terminated, env.state_key()) == (says, reward, False, key)
    observation, reward, terminated, _, info = env.step(tool_call("open_door"))
    assert (observation[0]["content"], reward, terminated, info["success"]) == ("Open.", 1.0, True, True)


@each("first", [tool_call("open_box", box=2), tool_call("look"), "Hello."])
def test_a_key_that_is_not_taken_at_once_is_lost(first: Any) -> None:
    env = key_door(num_distractors=1)
    rewards = [env.step(a)[1] for a in (first, tool_call("open_box", box=1), tool_call("open_box", box=1))]
    observation, reward, terminated, _, info = env.step(tool_call("open_door"))
    assert (rewards, reward, terminated) == ([0.0] * 3, 0.0, True)
    assert (observation[0]["content"], info["success"]) == ("Locked.", False)


def test_the_noise_of_the_key_door_differs_within_a_group_and_spares_key_and_door() -> None:
    def rewards(rollout_index: int) -> list[float]:
        env = KeyDoor(num_distractors=12, noise=0.25)
        env.reset(seed=7, options={"rollout_index": rollout_index})
        return [float(env.step(env.oracle())[1]) for _ in range(14)]

    first, second = rewards(0), rewards(1)
    assert first == rewards(0)
    assert first[1:-1] != second[1:-1]
    assert set(first[1:-1]) == {0.25, -0.25}
    assert (first[0], first[-1]) == (0.2, 1.0)


def test_the_key_door_without_turn_rewards_pays_at_the_door_alone() -> None:
    env = key_door(num_distractors=0, turn_rewards=False)
    assert [env.step(tool_call("open_box", box=1))[1], env.step(tool_call("open_door"))[1]] == [0.0, 1.0]


@pytest.mark.slow
@each(("cls", "options"), BUILTINS)
def test_equal_state_keys_have_equal_futures(cls: type[ToolEnv], options: dict[str, Any]) -> None:
    """Within one task, moments of one key must reward the same actions the same, whatever happened before."""
    rng = np.random.default_rng(0)
    for seed in range(5):
        moments: dict[str, list[ToolEnv]] = {}
        for _ in range(20):
            env = cls(**options)
            env.reset(seed=seed)
            for _ in range(8):
                key = env.state_key()
                assert key is not None
                moments.setdefault(key, []).append(copy.deepcopy(env))
                if env.step(env.oracle(skill=0.5, rng=rng))[2]:
                    break
        for alike in moments.values():
            plan_seed = int(rng.integers(1000))
            assert len({str(future(env.fork(), plan_seed)) for env in alike[:6]}) == 1


def future(env: ToolEnv, seed: int) -> list[tuple[float, bool, str | None]]:
    rng, seen = np.random.default_rng(seed), []
    for _ in range(40):
        _, reward, terminated, _, _ = env.step(env.oracle(skill=0.7, rng=rng))
        seen.append((reward, terminated, env.state_key()))
        if terminated:
            break
    return seen
