"""A queue of short requests, each for one of a few tools."""

from typing import Any

import numpy as np

from agentrl import Message, Prompt, ToolEnv, tool, tool_call
from agentrl_envs.options import opening, prompt_form, whole_number

_REQUESTS = {
    "refund": "Money back for {}",
    "cancel": "Stop order {}",
    "track": "Where is {}",
    "repair": "Fix item {}",
    "swap": "Change size of {}",
    "bill": "Invoice for {}",
    "rush": "Hurry up {}",
    "hold": "Keep {} for me",
}
"""Requests of a customer, by the tool that serves them."""


class ServiceDesk(ToolEnv):
    """`Money back for 482`: call the right tool with the number copied; the reply is the next request.

    A request is served by one call, right or wrong, and a turn without a call serves it wrong. Each right one earns its
    share of 1. Success means that all were right; the score is the share that was. A call that cannot be carried out
    (an unknown tool, wrong arguments) is answered with an error, and the request stands.
    """

    def __init__(
        self,
        *,
        num_requests: int = 12,
        num_tools: int = 8,
        id_digits: int = 3,
        turn_rewards: bool = True,
        prompt: Prompt = "short",
    ) -> None:
        """Set the difficulty.

        Args:
            num_requests: requests in a row.
            num_tools: tools on offer, and so kinds of requests.
            id_digits: digits of the number to copy.
            turn_rewards: False pays the same total with the last request.
            prompt: `short`, or `full`: a system message with goal, rules, rewards and end. In a recipe it follows the model.
        """
        super().__init__()
        self.num_requests = whole_number("num_requests", num_requests, at_least=1)
        self.num_tools = whole_number("num_tools", num_tools, at_least=2, at_most=len(_REQUESTS))
        self.id_digits = whole_number("id_digits", id_digits, at_least=1, at_most=12)
        self.turn_rewards = turn_rewards
        self.prompt = prompt_form(prompt)
        self.tools = self.tools[:num_tools]
        self.kinds = list(_REQUESTS)[:num_tools]
        self.requests: list[tuple[str, int]] = []
        self.num_served = self.num_right = 0

    def start(self, options: dict[str, Any]) -> str | list[Message]:  # noqa: ARG002 - the task follows from the seed alone
        """Draw the requests."""
        kinds = self.np_random.integers(self.num_tools, size=self.num_requests)
        numbers = self.np_random.integers(10 ** (self.id_digits - 1), 10**self.id_digits, size=self.num_requests)
        self.requests = [(self.kinds[k], number) for k, number in zip(kinds.tolist(), numbers.tolist(), strict=True)]
        self.num_served = self.num_right = 0
        return opening(
            self.prompt,
            self._request(),
            f"You serve {self.num_requests} requests of customers, one after the other. For each, call the one tool that does "
            "what is asked, with the number in the request as its id. The reply is the next request. A request has one try: a "
            "wrong call serves it wrong, and so does text without a call.",
            f"Each request served right earns {1 / self.num_requests:.2g}{'' if self.turn_rewards else ', paid at the end'}.",
            "The task ends after the last request.",
        )

    @tool
    def refund(self, id: int) -> str:
        """Pay an order back."""
        return self._serve(("refund", id))

    @tool
    def cancel(self, id: int) -> str:
        """Cancel an order."""
        return self._serve(("cancel", id))

    @tool
    def track(self, id: int) -> str:
        """Find a parcel."""
        return self._serve(("track", id))

    @tool
    def repair(self, id: int) -> str:
        """Send an item to be repaired."""
        return self._serve(("repair", id))

    @tool
    def swap(self, id: int) -> str:
        """Swap an item for another size."""
        return self._serve(("swap", id))

    @tool
    def bill(self, id: int) -> str:
        """Send an invoice."""
        return self._serve(("bill", id))

    @tool
    def rush(self, id: int) -> str:
        """Speed a delivery up."""
        return self._serve(("rush", id))

    @tool
    def hold(self, id: int) -> str:
        """Keep an item aside."""
        return self._serve(("hold", id))

    def answer(self, text: str) -> str:  # noqa: ARG002 - no text serves a request
        """Go on to the next request: this one got no call."""
        return f"Use a tool. {self._serve(None)}"

    def state_key(self) -> str:
        """Return the place in the queue and the request; later requests are drawn independently of both.

        Without turn rewards the number of right ones so far belongs to it, for it is paid at the end.
        """
        right = "" if self.turn_rewards else f"/{self.num_right}"
        return f"{self.num_served}{right}/{self._request()}"

    def oracle(self, *, skill: float = 1.0, rng: np.random.Generator | None = None) -> Message:
        """Serve the request; wrong turns take another tool or change one digit, half each."""
        rng = np.random.default_rng() if rng is None else rng
        kind, number = self.requests[self.num_served]
        if rng.random() < skill:
            return tool_call(kind, id=number)
        if rng.random() < 0.5:
            others = [other for other in self.kinds if other != kind]
            return tool_call(others[int(rng.integers(len(others)))], id=number)
        digits = str(number)
        place = int(rng.integers(len(digits)))
        others = [digit for digit in "0123456789"[place == 0 :] if digit != digits[place]]
        return tool_call(kind, id=int(digits[:place] + others[int(rng.integers(len(others)))] + digits[place + 1 :]))

    def _request(self) -> str:
        if self.num_served == self.num_requests:
            return "Done."
        kind, number = self.requests[self.num_served]
        return _REQUESTS[kind].format(number)

    def _serve(self, call: tuple[str, int] | None) -> str:
        """Count one request as served, and return the next."""
        is_right = call == self.requests[self.num_served]
        self.num_served += 1
        self.num_right += is_right
        if self.turn_rewards:
            self.reward(is_right / self.num_requests, "request")
        if self.num_served == self.num_requests:
            share = self.num_right / self.num_requests
            if not self.turn_rewards:
                self.reward(share, "all requests")
            self.finish(success=self.num_right == self.num_requests, score=share)
        return self._request()
