import unittest

from settings import read_settings


class Settings(unittest.TestCase):
    def test_the_example(self):
        with open("example.conf", encoding="utf-8") as file:
            self.assertEqual(read_settings(file.read()), {"host": "localhost", "port": "8080"})
