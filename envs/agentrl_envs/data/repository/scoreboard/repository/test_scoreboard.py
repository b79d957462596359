import unittest

from scoreboard import board


class Board(unittest.TestCase):
    def test_the_best_is_first(self):
        self.assertEqual(board("ann: 10\nbob: 20"), ["1. bob 20", "2. ann 10"])

    def test_blank_lines_are_skipped(self):
        self.assertEqual(board("\nann: 10\n\n"), ["1. ann 10"])
