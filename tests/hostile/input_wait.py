# Waits for input that nobody gives.
import sys


def solve(facts):
    return input() or sys.stdin.read()
