"""A customer with wishes, a database, and a policy that forbids some of them."""

import functools
import hashlib
import importlib.resources
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from agentrl import Message, ToolEnv, UserError, tool, tool_call
from agentrl_envs.customer_calls import open_steps, say, serve
from agentrl_envs.customer_user import END, UserConfig, speak
from agentrl_envs.customer_world import RULES, Case, Shop, Wish, draw_case
from agentrl_envs.options import share, whole_number

_PATIENCE = 6
"""Useless replies that a customer puts up with, in all."""
_ASKED = {"email": ("email", "e-mail"), "number": ("order", "number"), "detail": ("size", "address", "where")}
"""Facts, and the words of an agent that ask for them."""


class CustomerService(ToolEnv):
    """`Hello, I want to cancel an order.`: ask who it is and for which order, look both up, and do what the policy demands.

    The customer tells a fact when asked for it, has one wish after the other, insists on some that were refused, and
    leaves after too many replies that do not help. Each change or refusal that the policy demands earns its share of
    `turn_reward` when it is made. At the end 1 is earned where the database is as the policy demands it, to the last order:
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
        try:
            self.user = None if user is None else UserConfig.model_validate(user)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise UserError(f"user.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
        self.can_snapshot = self.user is not None  # what a model says does not follow from the seed
        self.has_insisted = False
        self._begin(Case(shop=Shop(orders={}), stock={}, email="", wishes=(), demanded=Shop(orders={})))

    def start(self, options: dict[str, Any]) -> list[Message]:  # noqa: ARG002 - the task follows from the seed alone
        """Draw a shop and a customer."""
        self._begin(draw_case(self.np_random, num_requests=self.num_requests, **self.shares))
        opening = f"Hello, I want to {self._wish.text}."
        self.said += [{"role": "user", "content": "Hello, how can I help you?"}, say(opening)]
        return [{"role": "system", "content": _policy()}, {"role": "user", "content": opening}]

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
        self.place, self.told, self.has_insisted = self.place + 1, self.told & {"email"}, False
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

    def _speak(self, config: UserConfig, text: str, told: set[str]) -> str | None:
        """Let the model play the customer."""
        self.told |= told
        wish = self._wish
        if wish.number and self.shop.is_settled(wish.number, self.case.shop) and self.place < self.num_requests - 1:
            self.place, self.told = self.place + 1, self.told & {"email"}
        self.said.append({"role": "user", "content": text or "(silence)"})
        reply = speak(config, self.case, self.said)
        self.said.append({"role": "assistant", "content": reply})
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
