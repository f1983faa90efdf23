import subprocess
import unittest


class Tests(unittest.TestCase):
    def test_amounts(self):
        for amount, coins in (("50", "50"), ("37", "20 10 5 2"), ("99", "50 20 20 5 2 2"), ("1", "1")):
            said = subprocess.run(["/app/change.py", amount], capture_output=True, text=True, check=True)
            assert said.stdout == coins + "\n"
