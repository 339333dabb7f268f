# Writes gigabytes to its outputs.
import os
import sys


def solve(facts):
    block = b"x" * (1 << 20)
    while True:
        for number in (1, 2):
            os.write(number, block)
        sys.stdout.write("y" * 4096)
        sys.stderr.write("y" * 4096)
