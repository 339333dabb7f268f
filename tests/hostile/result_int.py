# Returns an int of four hundred million digits' length in bits.
def solve(facts):
    return 1 << 1_300_000_000
