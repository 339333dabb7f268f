# Loops for ever inside the interpreter, where no Python handler runs.
def solve(facts):
    return len(str(7 ** (10**9)))
