import unittest

from summary import mean, median, spread


class Summary(unittest.TestCase):
    def test_of_three(self):
        self.assertEqual((mean([1, 2, 6]), median([6, 2, 1]), spread([1, 2, 6])), (3, 2, 5))
