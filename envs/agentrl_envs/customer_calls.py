"""What an agent says and calls to serve a customer, for the oracle of `customer_service`."""

from collections.abc import Set

from agentrl import Message, tool_call
from agentrl_envs.customer_world import Case, Wish


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
