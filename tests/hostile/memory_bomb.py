# Takes memory in small pieces without end.
def solve(facts):
    kept = []
    while True:
        kept.append(bytearray(1 << 20))
