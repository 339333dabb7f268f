# Fills files that have no name any more, as many as can be open.
import os


def solve(facts):
    kept = []
    while True:
        try:
            file = os.open(facts["mark"], os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.unlink(facts["mark"])
            kept.append(file)
            os.write(file, b"x" * (32 << 20))
        except OSError:
            if len(kept) > 30:
                return "full"
