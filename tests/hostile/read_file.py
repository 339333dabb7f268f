# Reads the secret file.
def solve(facts):
    with open(facts["canary"]) as file:
        return file.read()
