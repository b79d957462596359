import unittest

from recent import Cache


class Room(unittest.TestCase):
    def test_the_first_goes_first(self):
        cache = Cache(2)
        for key in "abc":
            cache.put(key, key.upper())
        self.assertEqual([cache.get(key) for key in "abc"], [None, "B", "C"])
