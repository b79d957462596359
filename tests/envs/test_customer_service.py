import itertools
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.env import SimulatedUser, tool_call
from agentrl.errors import EnvironmentFailure, UserError
from agentrl_envs.customer_service import Case, CustomerService, Kind, Order, Shop, Wish, demand, draw_case
from tests.support.baselines import play
from tests.support.each import each
from tests.support.judge_server import judge_server

ORDER = Order(
    number=1001, email="me@x", product="coat", size="M", price=80, status="open", days=0, address="1 Mill Road, Barton"
)
STOCK: dict[str, tuple[str, ...]] = {"coat": ("S",)}


def wish(kind: Kind, detail: str = "", number: int = 1001, *, insists: bool = False) -> Wish:
    return Wish(kind=kind, text=f"{kind} it", number=number, detail=detail, insists=insists)


def service(*wishes: Wish, user: dict[str, Any] | None = None, **order: Any) -> CustomerService:
    """Begin a talk about orders 1001, 1002, ..., all alike."""
    env = CustomerService(num_requests=len(wishes), user=user)
    env.reset(seed=0)
    shop = Shop(orders={n: replace(ORDER, number=n, **order) for n in range(1001, 1001 + max(len(wishes), 2))})
    demanded = shop
    for wish in wishes:
        demanded = demand(demanded, STOCK, "me@x", wish)
    env.case = Case(shop=shop, stock=STOCK, email="me@x", wishes=wishes, demanded=demanded)
    env.shop = shop
    return env


def says(env: CustomerService, action: Any) -> tuple[str, float, bool]:
    observation, reward, terminated, _, _ = env.step(action)
    return (observation[0]["content"] if observation else ""), float(reward), terminated


@each(
    ("kind", "order", "detail", "demanded"),
    [
        ("cancel", {}, "", {"status": "cancelled"}),
        ("cancel", {"status": "sent"}, "", 2),
        ("cancel", {"status": "delivered", "days": 3}, "", 2),
        ("cancel", {"email": "you@x"}, "", 1),
        ("address", {}, "2 Hill", {"address": "2 Hill"}),
        ("address", {"status": "sent"}, "2 Hill", 2),
        ("return", {"status": "delivered", "days": 30}, "", {"status": "returned"}),
        ("return", {"status": "delivered", "days": 31}, "", 3),
        ("return", {"status": "sent"}, "", 3),
        ("return", {"status": "delivered", "days": 3, "price": 300}, "", {"status": "returned"}),
        ("return", {"status": "delivered", "days": 3, "price": 301}, "", None),
        ("return", {"status": "delivered", "days": 3, "price": 301, "email": "you@x"}, "", 1),
        ("exchange", {"status": "delivered", "days": 3}, "S", {"size": "S"}),
        ("exchange", {"status": "delivered", "days": 3}, "L", 4),
        ("exchange", {"status": "delivered", "days": 31}, "S", 4),
        ("exchange", {}, "S", 4),
        ("other", {}, "", None),
    ],
)
def test_the_policy_demands(kind: Kind, order: dict[str, Any], detail: str, demanded: Any) -> None:
    shop = Shop(orders={1001: replace(ORDER, **order)})
    after = demand(shop, STOCK, "me@x", wish(kind, detail))
    if demanded is None:
        assert after == replace(shop, is_transferred=True)
    elif isinstance(demanded, int):
        assert after == replace(shop, refusals=frozenset({(1001, demanded)}))
    else:
        assert after == Shop(orders={1001: replace(ORDER, **(order | demanded))})


def test_the_customer_tells_what_is_asked_for_and_the_right_change_is_paid() -> None:
    env = service(wish("cancel"))
    expected: list[tuple[Any, tuple[str, float, bool]]] = [
        ("Hello!", ("I want to cancel it.", 0.0, False)),
        ("What is your email, and which order is it?", ("me@x, 1001.", 0.0, False)),
        (tool_call("find_customer", email="ME@x "), ("Orders 1001, 1002.", 0.0, False)),
        (tool_call("get_order", order=1001), (str(ORDER), 0.0, False)),
        (tool_call("cancel_order", order=1001), (str(replace(ORDER, status="cancelled")), 0.4, False)),
        (tool_call("cancel_order", order=1001), (str(replace(ORDER, status="cancelled")), 0.0, False)),
        ("Done. Anything else?", ("No, thank you. Goodbye.", 1.0, True)),
    ]
    for action, outcome in expected:
        assert says(env, action) == outcome
    assert str(ORDER) == "Order 1001: coat, size M, 80 euros, open. Customer me@x. To 1 Mill Road, Barton."


def test_one_wish_follows_another_and_each_is_paid_its_share() -> None:
    env = service(wish("cancel"), wish("address", "2 Hill", 1002))
    assert says(env, tool_call("cancel_order", order=1001))[1] == 0.2
    assert says(env, "Done.")[0] == "Yes. I want to address it."
    assert says(env, "Which address?")[0] == "2 Hill."
    assert says(env, tool_call("change_address", order=1002, address=" 2 Hill"))[1] == 0.2
    assert says(env, "Done.") == ("No, thank you. Goodbye.", 1.0, True)


@each(
    ("calls", "score"),
    [
        ([], None),
        ([("refuse", {"order": 1001, "rule": 2})], 1.0),
        ([("refuse", {"order": 1001, "rule": 3})], 0.0),  # the wrong rule
        ([("refuse", {"order": 1001, "rule": 3}), ("refuse", {"order": 1001, "rule": 2})], 0.0),  # cannot be taken back
        ([("refuse", {"order": 1001, "rule": 2}), ("cancel_order", {"order": 1002})], 0.5),  # and something else
        ([("refuse", {"order": 1001, "rule": 2}), ("cancel_order", {"order": 1001})], 0.0),  # gave in
        ([("cancel_order", {"order": 1001})], 0.0),
        ([("refuse", {"order": 1001, "rule": 2}), ("transfer", {})], 0.5),
        ([("transfer", {})], 0.0),
    ],
)
def test_only_the_state_that_the_policy_demands_is_success(calls: list[tuple[str, Any]], score: float | None) -> None:
    env, info = service(wish("cancel"), status="sent"), {}
    for name, arguments in calls:
        info = env.step(tool_call(name, **arguments))[4]
    for _ in range(6):
        if not env._is_over:
            info = env.step("I am afraid this is not possible.")[4]
    assert info["score"] == (score or 0.0)
    assert info["success"] is (score == 1.0)


def test_a_customer_insists_once_after_a_refusal() -> None:
    env = service(wish("cancel", insists=True), status="sent")
    env.step(tool_call("refuse", order=1001, rule=2))
    assert says(env, "I cannot do that.")[0] == "But I really need it. Can you not make an exception?"
    assert says(env, "No, I am sorry.") == ("No, thank you. Goodbye.", 1.0, True)
    env = service(wish("cancel", insists=True))
    env.step(tool_call("cancel_order", order=1001))
    assert says(env, "Done.")[2]  # nothing to insist on


def test_a_customer_leaves_who_is_not_helped() -> None:
    env = service(wish("cancel"))
    said = [says(env, text) for text in ("Well.", "Which order?", "Which order?", "Well.", "Well.", "Well.", "Well.")]
    assert [words for words, _, _ in said] == [
        "I want to cancel it.", "1001.", "1001.", *["I want to cancel it."] * 3, "This does not help me. Goodbye."
    ]  # fmt: skip
    assert said[-1][1:] == (0.0, True)


def test_what_does_not_exist_is_said() -> None:
    env = service(wish("cancel"))
    for name in ("get_order", "cancel_order", "return_order"):
        assert says(env, tool_call(name, order=5))[0] == "No order 5."
    assert says(env, tool_call("refuse", order=5, rule=1))[0] == "No order 5."
    assert says(env, tool_call("find_customer", email="x"))[0] == "No such customer."
    assert says(env, tool_call("get_stock", product="hat"))[0] == "In stock: none."
    assert says(env, tool_call("exchange_order", order=1001, size="XS"))[0].startswith("Error: wrong arguments")


def test_cases_have_the_shares_asked_for_and_nothing_is_right_already() -> None:
    rng, num_forbidden, num_transferred = np.random.default_rng(0), 0, 0
    for _ in range(400):
        case = draw_case(rng, num_requests=3, forbidden=0.5, insists=0.5, transfers=0.3)
        num_forbidden += len(case.demanded.refusals)
        num_transferred += case.demanded.is_transferred
        assert case.served(case.shop) == set()
        assert case.served(case.demanded) == {0, 1, 2}
        numbers = [w.number for w in case.wishes if w.number]
        assert len(set(numbers)) == len(numbers)
    assert 0.25 < num_transferred / 400 < 0.35
    assert 0.45 < num_forbidden / (1200 - num_transferred) < 0.55


def test_refusing_or_granting_everything_solves_few_cases() -> None:
    """Policies that know every fact, and no rule."""
    for refuses in (True, False):
        env, solved = CustomerService(), 0
        for seed in range(200):
            env.reset(seed=seed)
            for wish in env.case.wishes:
                if wish.number:
                    call = tool_call("refuse", order=wish.number, rule=2)
                    details = {"exchange": {"size": wish.detail}, "address": {"address": wish.detail}}.get(
                        wish.kind, {}
                    )
                    tools = dict(zip(("cancel", "address", "return", "exchange"), (
                        "cancel_order", "change_address", "return_order", "exchange_order"), strict=True))  # fmt: skip
                    env.step(call if refuses else tool_call(tools[wish.kind], order=wish.number, **details))
                if not env._is_over:
                    env.step("Done.")
                    if not env._is_over:
                        env.step("No.")
            solved += env._is_over is True and env.shop == env.case.demanded
        assert solved / 200 < (0.1 if refuses else 0.4)


@each(
    ("options", "words"),
    [
        ({"num_requests": 5}, "num_requests: give a whole number from 1 to 4, got 5"),
        ({"forbidden": 1.5}, "forbidden: give a number from 0 to 1, got 1.5"),
        ({"user": {"url": "http://x"}}, "user.model: Field required"),
        ({"user": {"url": "http://x", "model": "m", "top_p": 1}}, "user.top_p: Extra inputs are not permitted"),
    ],
)
def test_an_impossible_option_of_the_service_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        CustomerService(**options)
    assert str(caught.value) == words


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a process of its own."""
    command = [sys.executable, "-m", "tests.support.chat_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        server.kill()


@pytest.mark.process
def test_a_model_plays_the_customer(url: str) -> None:
    env = service(wish("cancel"), user={"url": url, "model": "m"})
    assert env.can_snapshot
    assert says(env, "What is your email?")[0] == "It is me@x"
    before = env.state_key()
    copies = [env.fork(), pickle.loads(pickle.dumps(env))]
    assert says(env, "Which order?")[0] == "It is 1001"
    assert env.state_key() != before
    assert [says(copy, "Which order?")[0] for copy in copies] == ["It is 1001"] * 2
    assert says(env, tool_call("cancel_order", order=1001))[1] == 0.4
    assert says(env, "Done.") == ("Thank you.", 1.0, True)


@pytest.mark.process
def test_the_oracle_serves_a_customer_that_a_model_plays(url: str) -> None:
    env = CustomerService(num_requests=1, transfers=0.0, insists=0.0, user={"url": url, "model": "m"})
    rng = np.random.default_rng(0)
    for seed in range(5):
        assert play(env, lambda env, _, rng: env.oracle(rng=rng), seed=seed, max_turns=20, rng=rng).success


@pytest.mark.slow
@each(
    ("user", "words"),
    [
        ({"model": "broken", "max_retries": 1}, "did not answer as it should; the last time: HTTP 500: "),
        ({"model": "unknown"}, "refused the request: HTTP 404: "),
        ({"model": "empty"}, "no chat completion"),
        ({"model": "slow", "timeout_s": 0.2, "max_retries": 0}, "the last time: ReadTimeout"),
        ({"model": "m", "url": "http://127.0.0.1:1/v1", "max_retries": 1}, "the last time: ConnectError"),
        ({"model": "keyed", "api_key_env": "NO_SUCH_API_KEY"}, "set the environment variable NO_SUCH_API_KEY"),
        ({"model": "keyed"}, "refused the request: HTTP 401: "),
    ],
)
def test_a_customer_that_fails_is_a_fault_of_the_environment(url: str, user: dict[str, Any], words: str) -> None:
    env = service(wish("cancel"), user={"url": url} | user)
    begin = time.monotonic()
    with pytest.raises(EnvironmentFailure) as caught:
        env.step("What is your email?")
    assert words in str(caught.value)
    assert time.monotonic() - begin < 10


def test_a_request_is_made_again_and_a_key_is_sent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert says(service(wish("cancel"), user={"url": url, "model": "once"}), "Your email?")[0] == "It is me@x"
    monkeypatch.setenv("TEST_API_KEY", "secret")
    keyed = {"url": url, "model": "keyed", "api_key_env": "TEST_API_KEY"}
    assert says(service(wish("cancel"), user=keyed), "Your email?")[0] == "It is me@x"


def test_a_simulated_user_is_sent_what_was_spoken() -> None:
    said = {"role": "user", "content": "Hello."}
    dialogue = [
        {"role": "system", "content": "Rules."},
        said,
        tool_call("look"),
        {"role": "tool", "content": "A secret."},
    ]
    with judge_server("Fine.") as server:
        user = SimulatedUser(url=server.url, model="m")
        assert user.reply("Be kind.", [*dialogue, {"role": "assistant", "content": ""}], seed=0) == "Fine."
    assert [(each["role"], each["content"]) for each in server.requests[0]["messages"]] == [
        ("system", "Be kind."),
        ("assistant", "Hello."),
        ("user", "(silence)"),
    ]


def test_a_case_is_named_by_its_state_key() -> None:
    env = CustomerService()
    keys = set()
    for seed, played in itertools.product(range(5), range(2)):
        env.reset(seed=seed)
        keys.add(env.state_key())
        if played:
            env.step("What is your email?")
            keys.add(env.state_key())
    assert len(keys) == 10
