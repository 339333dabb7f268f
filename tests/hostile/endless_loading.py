# Never finishes loading.
while True:
    pass


def solve(facts):
    return None
