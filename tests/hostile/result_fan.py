# Returns a small object that unfolds to a thousand million elements.
def solve(facts):
    fan = [1] * 10
    for _ in range(8):
        fan = [fan] * 10
    return fan
