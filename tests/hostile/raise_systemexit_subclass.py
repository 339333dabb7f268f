# Raises a BaseException whose text cannot be made: the reporter must not fall over.
class Slippery(BaseException):
    def __str__(self):
        raise SystemExit(0)


def solve(facts):
    raise Slippery
