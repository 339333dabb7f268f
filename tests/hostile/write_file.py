# Overwrites the secret file.
def solve(facts):
    with open(facts["canary"], "w") as file:
        file.write("gone")
    return "done"
