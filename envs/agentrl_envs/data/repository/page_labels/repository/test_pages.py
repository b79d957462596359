import unittest

from catalog.pages import num_pages, page


class Pages(unittest.TestCase):
    def test_a_part_of_a_page_is_a_page(self):
        self.assertEqual(num_pages(25, 10), 3)

    def test_pages_follow_one_another(self):
        self.assertEqual([page("abcde", number, 2) for number in (1, 2, 3)], ["ab", "cd", "e"])
