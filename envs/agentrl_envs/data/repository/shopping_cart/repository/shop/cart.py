"""Carts of customers."""

from shop.prices import price_of


class Cart:
    """Items that a customer is going to buy."""

    def __init__(self, customer, items=[]):
        self.customer = customer
        self.items = items

    def add(self, item, count=1):
        """Put something in the cart, `count` times."""
        self.items.extend([item] * count)

    def total(self):
        """Return the price of all in cents."""
        return sum(price_of(item) for item in self.items)
