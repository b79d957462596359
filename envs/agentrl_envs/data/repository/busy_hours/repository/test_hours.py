import unittest

from hours import free, merged


class Hours(unittest.TestCase):
    def test_meetings_that_overlap(self):
        self.assertEqual(merged([(9, 11), (10, 12), (14, 15)]), [(9, 12), (14, 15)])

    def test_free_hours(self):
        self.assertEqual(free([(10, 12)]), [(9, 10), (12, 17)])
