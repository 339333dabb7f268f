# Takes memory while it is compiled.
VALUE = ((1 << 100_000) - 1) ** 100
TABLE = [0] * (1 << 36)


def solve(facts):
    return TABLE
