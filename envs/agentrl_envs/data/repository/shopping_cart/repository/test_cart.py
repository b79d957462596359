import unittest

from shop.cart import Cart


class Total(unittest.TestCase):
    def test_prices_add_up(self):
        cart = Cart("ann", ["bread"])
        cart.add("apple", 2)
        self.assertEqual(cart.total(), 310)
