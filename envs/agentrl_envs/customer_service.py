"""A customer with wishes, a database, and a policy that forbids some of them.

The customer is played by rules, or by a language model behind an OpenAI-compatible endpoint.
"""

import functools
import hashlib
import importlib.resources
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import ValidationError

from agentrl import Message, Prompt, SimulatedUser, ToolEnv, UserError, tool, tool_call
from agentrl_envs.options import names, opening, prompt_form, share, whole_number

PRODUCTS = ("boots", "coat", "dress", "jacket", "jeans", "shirt", "socks", "sweater")
SIZES = ("S", "M", "L", "XL")
MAX_DAYS = 30
"""Days after delivery within which an order may be returned or exchanged."""
MAX_PRICE = 300
"""Euros above which a human decides on returns and exchanges."""
_NUM_OWN, _NUM_OTHERS = 8, 5
"""Orders of the customer, and of other people."""
_TRIES = 200
_OTHERS = ("complain about a driver", "have an invoice for my company", "get a discount", "close my account")

Kind: TypeAlias = Literal["cancel", "address", "return", "exchange", "other"]
KINDS: tuple[Kind, ...] = ("cancel", "address", "return", "exchange")
RULES: dict[Kind, int] = {"cancel": 2, "address": 2, "return": 3, "exchange": 4}
"""The rule that allows a wish, and forbids it where its conditions are not met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order, of one product."""

    number: int
    email: str
    product: str
    size: str
    price: int
    status: str
    """open, sent, delivered, cancelled or returned."""
    days: int
    """Since delivery; 0 before."""
    address: str

    def __str__(self) -> str:
        """Return what `get_order` shows."""
        status = f"delivered {self.days} days ago" if self.status == "delivered" else self.status
        return (
            f"Order {self.number}: {self.product}, size {self.size}, {self.price} euros, {status}. "
            f"Customer {self.email}. To {self.address}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """The database: what tools read and change, and what is compared in the end."""

    orders: dict[int, Order]
    refusals: frozenset[tuple[int, int]] = frozenset()
    """Order and rule."""
    is_transferred: bool = False

    def changed(self, number: int, **fields: str) -> "Shop":
        """Return the shop with one order changed."""
        return replace(self, orders=self.orders | {number: replace(self.orders[number], **fields)})  # type: ignore[arg-type]

    def refused(self, number: int, rule: int) -> "Shop":
        """Return the shop with one refusal more."""
        return replace(self, refusals=self.refusals | {(number, rule)})

    def rules(self, number: int) -> set[int]:
        """Return the rules by which something about an order was refused."""
        return {rule for refused, rule in self.refusals if refused == number}

    def is_settled(self, number: int, before: "Shop") -> bool:
        """Return whether anything was done about an order, right or wrong."""
        return bool(self.rules(number)) or self.orders[number] != before.orders[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One thing that a customer wants."""

    kind: Kind
    text: str
    """Words of the customer, without a fact."""
    number: int
    """Number of the order; 0 if it is about none."""
    detail: str
    """The size or the address that is wished; empty if there is none."""
    insists: bool
    """Whether the customer takes no for an answer at the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A task: the shop, a customer with wishes, and the shop as the policy wants it in the end."""

    shop: Shop
    stock: dict[str, tuple[str, ...]]
    """Sizes of each product."""
    email: str
    wishes: tuple[Wish, ...]
    demanded: Shop

    def is_for_human(self, place: int) -> bool:
        """Return whether the policy passes a wish on: the last one, if any, for that ends the talk."""
        return self.demanded.is_transferred and place == len(self.wishes) - 1

    def served(self, shop: Shop) -> set[int]:
        """Return the places of the wishes that were dealt with as the policy demands."""
        return {
            place
            for place, wish in enumerate(self.wishes)
            if (
                shop.is_transferred
                if self.is_for_human(place)
                else shop.orders[wish.number] == self.demanded.orders[wish.number]
                and shop.rules(wish.number) == self.demanded.rules(wish.number)
            )
        }


def demand(shop: Shop, stock: dict[str, tuple[str, ...]], email: str, wish: Wish) -> Shop:
    """Return the shop after a wish, as the policy demands it."""
    if wish.kind == "other":
        return replace(shop, is_transferred=True)
    order = shop.orders[wish.number]
    if order.email != email:
        return shop.refused(order.number, 1)
    if wish.kind in ("return", "exchange") and order.price > MAX_PRICE:
        return replace(shop, is_transferred=True)
    is_recent = order.status == "delivered" and order.days <= MAX_DAYS
    if wish.kind == "cancel" and order.status == "open":
        return shop.changed(order.number, status="cancelled")
    if wish.kind == "address" and order.status == "open":
        return shop.changed(order.number, address=wish.detail)
    if wish.kind == "return" and is_recent:
        return shop.changed(order.number, status="returned")
    if wish.kind == "exchange" and is_recent and wish.detail in stock[order.product]:
        return shop.changed(order.number, size=wish.detail)
    return shop.refused(order.number, RULES[wish.kind])


def draw_case(
    rng: np.random.Generator, *, num_requests: int, forbidden: float, insists: float, transfers: float
) -> Case:
    """Draw a shop, and a customer whose wishes the policy forbids, allows and passes on in the shares asked for."""
    people = names("person")
    emails = [people[i].replace(" ", ".").lower() + "@mail.example" for i in rng.choice(len(people), 1 + _NUM_OTHERS)]
    numbers = 1000 + rng.choice(9000, size=_NUM_OWN + _NUM_OTHERS, replace=False)
    owners = [emails[0]] * _NUM_OWN + emails[1:]
    shop = Shop(orders={n: _order(rng, n, of) for n, of in zip(numbers.tolist(), owners, strict=True)})
    stock = {p: tuple(size for size in SIZES if rng.random() < 0.5) for p in PRODUCTS}
    demanded = shop
    wishes: list[Wish] = []
    for place in range(num_requests):
        is_passed_on = place == num_requests - 1 and bool(rng.random() < transfers)  # it ends the talk
        is_forbidden = not is_passed_on and bool(rng.random() < forbidden)
        is_other = is_passed_on and bool(rng.random() < 0.5)
        for _ in range(_TRIES):
            wish = _wish(rng, shop, emails[0], insists=insists, other=is_other)
            after = demand(demanded, stock, emails[0], wish)
            if (
                wish.number not in [w.number for w in wishes]
                and is_passed_on == after.is_transferred
                and (is_forbidden == (after.refusals != demanded.refusals))
            ):
                break
        else:  # no order of this shop would do
            return draw_case(rng, num_requests=num_requests, forbidden=forbidden, insists=insists, transfers=transfers)
        demanded = after
        wishes.append(wish)
    return Case(shop=shop, stock=stock, email=emails[0], wishes=tuple(wishes), demanded=demanded)


def _order(rng: np.random.Generator, number: int, email: str) -> Order:
    status = ("open", "sent", "delivered", "delivered")[int(rng.integers(4))]
    return Order(
        number=number,
        email=email,
        product=PRODUCTS[int(rng.integers(len(PRODUCTS)))],
        size=SIZES[int(rng.integers(len(SIZES)))],
        price=int(rng.integers(20, 400)),
        status=status,
        days=int(rng.integers(1, 2 * MAX_DAYS)) if status == "delivered" else 0,
        address=_address(rng),
    )


def _address(rng: np.random.Generator) -> str:
    cities = names("city")
    return f"{rng.integers(1, 100)} Mill Road, {cities[int(rng.integers(len(cities)))]}"


def _wish(rng: np.random.Generator, shop: Shop, email: str, *, insists: float, other: bool) -> Wish:
    does_insist = bool(rng.random() < insists)
    if other:
        text = _OTHERS[int(rng.integers(len(_OTHERS)))]
        return Wish(kind="other", text=text, number=0, detail="", insists=does_insist)
    kind = KINDS[int(rng.integers(len(KINDS)))]
    is_own = rng.random() < 0.9
    numbers = [number for number, order in shop.orders.items() if (order.email == email) == is_own]
    number = numbers[int(rng.integers(len(numbers)))]
    sizes = [size for size in SIZES if size != shop.orders[number].size]
    details = {"exchange": sizes[int(rng.integers(len(sizes)))], "address": _address(rng)}
    text = {
        "cancel": "cancel an order",
        "address": "have an order sent to another address",
        "return": "return something and get my money back",
        "exchange": "exchange something for another size",
    }[kind]
    return Wish(kind=kind, text=text, number=number, detail=details.get(kind, ""), insists=does_insist)


END = "[END]"
"""Last message of the customer."""


def script(case: Case) -> str:
    """Return the instructions of the model that plays the customer."""
    wishes = []
    for place, wish in enumerate(case.wishes, start=1):
        facts = (
            f" (order number {wish.number}{', wished: ' + wish.detail if wish.detail else ''})" if wish.number else ""
        )
        insists = " If it is refused, insist once, then let it go." if wish.insists else ""
        wishes.append(f"{place}. You want to {wish.text}{facts}.{insists}")
    return (
        "You are a customer of a shop, writing to its service. Stay in this role, write one or two short sentences at a "
        f"time, and make up nothing. Your email is {case.email}; tell it, order numbers and what you wish instead only when "
        "asked. Your wishes, one after the other, each when the one before is done or refused:\n"
        + "\n".join(wishes)
        + f"\nWhen all are done or refused, write {END} and nothing else."
    )


def open_steps(case: Case, wish: Wish, *, told: Set[str], looked_up: Set[str]) -> list[Message]:
    """List what is left to ask and to look up before a wish can be decided."""
    if not wish.number:
        return []
    asks = {"email": "What is your email?", "number": "Which order number?"}
    looks = {"customer": tool_call("find_customer", email=case.email)}
    looks[str(wish.number)] = tool_call("get_order", order=wish.number)
    if wish.detail:
        asks["detail"] = "Which size?" if wish.kind == "exchange" else "Which address?"
    if wish.kind == "exchange":
        product = case.shop.orders[wish.number].product
        looks[product] = tool_call("get_stock", product=product)
    unknown = [say(question) for fact, question in asks.items() if fact not in told]
    return unknown + [call for name, call in looks.items() if name not in looked_up]


def serve(wish: Wish) -> Message:
    """Return the call that does what the customer wishes, allowed or not."""
    details = {"exchange": {"size": wish.detail}, "address": {"address": wish.detail}}.get(wish.kind, {})
    tools = {
        "cancel": "cancel_order",
        "address": "change_address",
        "return": "return_order",
        "exchange": "exchange_order",
    }
    return tool_call(tools[wish.kind], order=wish.number, **details)


def say(text: str) -> Message:
    """Return a message without a call."""
    return {"role": "assistant", "content": text}


_PATIENCE = 6
"""Useless replies that a customer puts up with, in all."""
_ASKED = {"email": ("email", "e-mail"), "number": ("order", "number"), "detail": ("size", "address", "where")}
"""Facts, and the words of an agent that ask for them."""


class CustomerService(ToolEnv):
    """`Hello, I want to cancel an order.`: ask who it is and for which order, look both up, and do what the policy demands.

    The customer tells a fact when asked for it, has one wish after the other, insists on some that were refused, and
    leaves after too many replies that do not help. Each change or refusal that the policy demands earns its share of
    `turn_reward` when it is made. At the end 1 is earned if the database is as the policy demands it, to the last order:
    every wish done, refused by the right rule or transferred, and nothing else changed.
    """

    def __init__(
        self,
        *,
        num_requests: int = 2,
        forbidden: float = 0.4,
        insists: float = 0.5,
        transfers: float = 0.2,
        turn_reward: float = 0.4,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
        user: dict[str, Any] | None = None,
    ) -> None:
        """Set the difficulty.

        Args:
            num_requests: wishes of the customer.
            forbidden: share of them that the policy forbids.
            insists: share of wishes on which the customer insists once if they are refused.
            transfers: share of customers whose last wish is for a human.
            turn_reward: reward of all demanded changes and refusals together.
            turn_rewards: False pays at the end alone.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
            user: `{url, model}` of an OpenAI-compatible endpoint that plays the customer; by default rules do.

        Raises:
            UserError: for an option outside its range.
        """
        super().__init__()
        self.num_requests = whole_number("num_requests", num_requests, at_least=1, at_most=4)
        self.shares = {
            name: share(name, value)
            for name, value in (("forbidden", forbidden), ("insists", insists), ("transfers", transfers))
        }
        self.turn_reward = share("turn_reward", turn_reward)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        try:
            self.user = None if user is None else SimulatedUser.model_validate(user)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise UserError(f"user.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
        self.can_snapshot = self.user is not None  # what a model says does not follow from the seed
        self.has_insisted = False
        self._begin(Case(shop=Shop(orders={}), stock={}, email="", wishes=(), demanded=Shop(orders={})))

    def start(self, options: dict[str, Any]) -> str | list[Message]:  # noqa: ARG002 - the task follows from the seed alone
        """Draw a shop and a customer."""
        self._begin(draw_case(self.np_random, num_requests=self.num_requests, **self.shares))
        greeting = f"Hello, I want to {self._wish.text}."
        self.said += [say("Hello, how can I help you?"), {"role": "user", "content": greeting}]
        return opening(
            self.prompt,
            greeting,
            f"{_policy()}\n\nIn each turn, either call one tool or write one short message to the customer. Ask for what you "
            "do not know: the email, the number of the order, the size or the address that is wished. Look up the customer and "
            "the order before you decide, and for an exchange the stock.",
            self.turn_rewards and f"Changes and refusals that the policy demands earn {self.turn_reward:g} together.",
            "The talk ends when the customer has no other wish, is transferred or loses patience. It then earns 1 if every "
            "order is exactly as the policy demands it.",
            short=_policy(),
        )

    @tool
    def find_customer(self, email: str) -> str:
        """List the orders of a customer.

        Args:
            email: the customer's.
        """
        if email.strip().lower() == self.case.email:
            self.looked_up.add("customer")
        numbers = [str(order.number) for order in self.shop.orders.values() if order.email == email.strip().lower()]
        return f"Orders {', '.join(numbers)}." if numbers else "No such customer."

    @tool
    def get_order(self, order: int) -> str:
        """Show an order.

        Args:
            order: its number.
        """
        if order not in self.shop.orders:
            return f"No order {order}."
        self.looked_up.add(str(order))
        return str(self.shop.orders[order])

    @tool
    def get_stock(self, product: str) -> str:
        """List the sizes of a product that are in stock.

        Args:
            product: its name.
        """
        if product in self.case.stock:
            self.looked_up.add(product)
        return f"In stock: {', '.join(self.case.stock.get(product, ())) or 'none'}."

    @tool
    def cancel_order(self, order: int) -> str:
        """Cancel an order.

        Args:
            order: its number.
        """
        return self._change(order, status="cancelled")

    @tool
    def return_order(self, order: int) -> str:
        """Take an order back and pay its price back.

        Args:
            order: its number.
        """
        return self._change(order, status="returned")

    @tool
    def exchange_order(self, order: int, size: Literal["S", "M", "L", "XL"]) -> str:
        """Exchange an order for another size.

        Args:
            order: its number.
            size: the size to send.
        """
        return self._change(order, size=size)

    @tool
    def change_address(self, order: int, address: str) -> str:
        """Send an order to another address.

        Args:
            order: its number.
            address: the new address.
        """
        return self._change(order, address=address.strip()[:200])

    @tool
    def refuse(self, order: int, rule: int) -> str:
        """Record that a rule of the policy forbids what the customer wishes.

        Args:
            order: number of the order.
            rule: number of the rule.
        """
        if order not in self.shop.orders:
            return f"No order {order}."
        return self._move(self.shop.refused(order, rule), "Recorded. Tell the customer.")

    @tool
    def transfer(self) -> str:
        """Transfer the customer to a human; this ends the talk."""
        self._move(replace(self.shop, is_transferred=True), "")
        self._end()
        return "Transferred."

    def answer(self, text: str) -> str | None:
        """Let the customer reply."""
        told = {fact for fact, words in _ASKED.items() if any(word in text.lower() for word in words)}
        if self.user is not None:
            return self._speak(self.user, text, told)
        wish = self._wish
        if wish.number and self.shop.is_settled(wish.number, self.case.shop):
            is_refused = self.shop.orders[wish.number] == self.case.shop.orders[wish.number]
            if wish.insists and is_refused and not self.has_insisted:
                self.has_insisted = True
                return "But I really need it. Can you not make an exception?"
            return self._next()
        facts = {"email": self.case.email, "number": str(wish.number or ""), "detail": wish.detail}
        if replies := [facts[fact] for fact in _ASKED if fact in told and facts[fact]]:
            is_new = not told <= self.told
            self.told |= told
            if is_new:
                return f"{', '.join(replies)}."
        self.patience -= 1
        if self.patience == 0:
            self._end()
            return "This does not help me. Goodbye."
        return f"{', '.join(replies)}." if replies else f"I want to {wish.text}."

    def state_key(self) -> str:
        """Return the case and all that has changed in it: the database, the talk, and what was looked up."""
        case, shop = self.case, self.shop
        moment = (
            case.email, case.wishes, case.stock, case.shop.orders, shop.orders, sorted(shop.refusals), shop.is_transferred,
            self.place, sorted(self.told), sorted(self.looked_up), self.has_insisted, self.patience, sorted(self.paid),
            self._is_over, self.said,
        )  # fmt: skip
        return hashlib.sha256(repr(moment).encode(errors="replace")).hexdigest()[:24]

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Ask for what is not known, look it up, act, and go on; wrong turns act against the policy, or ask for nothing."""
        rng = np.random.default_rng() if rng is None else rng
        wish, is_right = self._wish, bool(rng.random() < skill)
        if wish.number and self.shop.is_settled(wish.number, self.case.shop):
            is_refused = self.shop.orders[wish.number] == self.case.shop.orders[wish.number]
            return say(f"{'I cannot do that.' if is_refused else 'Done.'} Is there anything else?")
        if steps := open_steps(self.case, wish, told=self.told, looked_up=self.looked_up):
            return steps[0] if is_right else say("One moment.")
        rule = next((rule for number, rule in self.case.demanded.refusals if number == wish.number), None)
        if self.case.is_for_human(self.place):
            return tool_call("transfer") if is_right or not wish.number else serve(wish)
        if is_right == (rule is not None):
            return tool_call("refuse", order=wish.number, rule=RULES[wish.kind] if rule is None else rule)
        return serve(wish)

    def _begin(self, case: Case) -> None:
        self.case, self.shop = case, case.shop
        self.place, self.patience = 0, _PATIENCE
        self.has_insisted = False
        self.told: set[str] = set()
        self.looked_up: set[str] = set()
        self.paid: set[int] = set()
        self.said: list[Message] = []

    @property
    def _wish(self) -> Wish:
        return self.case.wishes[self.place]

    def _change(self, number: int, **fields: str) -> str:
        if number not in self.shop.orders:
            return f"No order {number}."
        moved = self.shop.changed(number, **fields)
        return self._move(moved, str(moved.orders[number]))

    def _move(self, shop: Shop, said: str) -> str:
        """Change the database, and pay each wish that is served for the first time."""
        self.shop = shop
        for place in self.case.served(shop) - self.paid:
            self.paid.add(place)
            if self.turn_rewards:
                self.reward(self.turn_reward / self.num_requests, "request")
        return said

    def _next(self) -> str:
        """Come to the next wish, or leave after the last."""
        self.place = self.place + 1
        self.told = self.told & {"email"}
        self.has_insisted = False
        if self.place == self.num_requests:
            self._end()
            return "No, thank you. Goodbye."
        return f"Yes. I want to {self._wish.text}."

    def _end(self) -> None:
        """Compare the database with what the policy demands."""
        is_right = self.shop == self.case.demanded
        self.reward(float(is_right), "database")
        self.finish(
            success=is_right, score=1.0 if is_right else len(self.case.served(self.shop)) / (self.num_requests + 1)
        )

    def _speak(self, user: SimulatedUser, text: str, told: set[str]) -> str | None:
        """Let the model play the customer."""
        self.told |= told
        wish = self._wish
        if wish.number and self.shop.is_settled(wish.number, self.case.shop) and self.place < self.num_requests - 1:
            self.place, self.told = self.place + 1, self.told & {"email"}
        self.said.append({"role": "assistant", "content": text})
        reply = user.reply(script(self.case), self.said, seed=int(self.np_random.integers(2**31)))
        self.said.append({"role": "user", "content": reply})
        if END in reply:
            self._end()
        return reply.partition(END)[0].strip() or None


@functools.cache
def _policy() -> str:
    return (
        importlib.resources.files("agentrl_envs.data")
        .joinpath("customer_policy.md")
        .read_text(encoding="utf-8")
        .strip()
    )
