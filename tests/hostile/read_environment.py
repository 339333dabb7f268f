# Looks for the secret in the environment, its own and its ancestors'.
import os


def solve(facts):
    found = [os.environ.get(facts["variable"], "")]
    for process in ("self", "1", str(os.getppid()), str(facts["parent"])):
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                found.append(file.read().decode("latin-1"))
        except OSError:
            pass
    for text in found:
        place = text.find(facts["mark"])
        if place >= 0:
            return text[place:].split("\0")[0]
    return "nothing"
