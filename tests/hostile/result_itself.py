# Returns a list that holds itself.
def solve(facts):
    loop = []
    loop.append(loop)
    return {"loop": loop, "again": [loop, loop]}
