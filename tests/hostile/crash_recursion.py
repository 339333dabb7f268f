# Overflows the C stack.
import sys

sys.setrecursionlimit(10**9)


class Deep:
    def __getattr__(self, name):
        return getattr(self, name + "x")


def solve(facts):
    nest = ()
    for _ in range(1_000_000):
        nest = (nest,)
    return hash(nest) or repr(nest)
