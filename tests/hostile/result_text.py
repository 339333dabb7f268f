# Returns half a gigabyte of text.
def solve(facts):
    return "x" * (1 << 29)
