"""Prices in cents."""

PRICES = {"apple": 30, "bread": 250, "milk": 120}


def price_of(item):
    """Return the price of a thing.

    Raises:
        KeyError: if the shop does not sell it.
    """
    return PRICES[item]
