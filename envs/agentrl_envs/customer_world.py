"""The shop of `customer_service`: its orders, what customers wish, and what the policy demands then."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from agentrl_envs.names import names

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
        """Tell whether anything was done about an order, right or wrong."""
        return bool(self.rules(number)) or self.orders[number] != before.orders[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One thing that a customer wants."""

    kind: Kind
    text: str
    """How the customer says it, without a fact."""
    number: int
    """Of the order; 0 where it is about none."""
    detail: str
    """The size or the address that is wished; empty where there is none."""
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
        """Tell whether the policy passes a wish on: the last one, if any, for that ends the talk."""
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
