# Returns a list of fifty million elements.
def solve(facts):
    return [None] * 50_000_000
