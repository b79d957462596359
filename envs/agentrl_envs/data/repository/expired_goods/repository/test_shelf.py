import unittest
from datetime import date

from store.goods import Good
from store.shelf import remove_expired


class Expired(unittest.TestCase):
    def test_one_goes(self):
        shelf = [Good("milk", "2024-05-01"), Good("rice", "2025-01-01")]
        removed = remove_expired(shelf, date(2024, 6, 1))
        self.assertEqual(([good.name for good in removed], [good.name for good in shelf]), (["milk"], ["rice"]))
