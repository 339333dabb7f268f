# Returns a list nested a hundred thousand deep.
def solve(facts):
    nest = []
    for _ in range(100_000):
        nest = [nest]
    return nest
