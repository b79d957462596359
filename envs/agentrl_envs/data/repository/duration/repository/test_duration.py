import unittest

from duration import read, write


class Duration(unittest.TestCase):
    def test_all_three_parts(self):
        self.assertEqual(read("1h2m3s"), 3723)
        self.assertEqual(write(3723), "1h2m3s")

    def test_what_is_none(self):
        for text in ("", "1", "1m1h", "-1s"):
            with self.assertRaises(ValueError):
                read(text)
