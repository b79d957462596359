import unittest

from sales.rows import rows


class Rows(unittest.TestCase):
    def test_the_head_is_skipped(self):
        self.assertEqual(list(rows("seller,amount\nann,3\nbob,4.5\n")), [("ann", 3.0), ("bob", 4.5)])
