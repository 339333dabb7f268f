# Announces a message of 4 GiB and sends it: the reader must not make room for it.
import os


def channels():
    """Every pipe this process can write to."""
    for number in range(3, 64):
        try:
            os.write(number, b"")
            yield number
        except OSError:
            pass


def solve(facts):
    for channel in channels():
        os.write(channel, b"\xff\xff\xff\xff")
    while True:
        for channel in channels():
            os.write(channel, b"N" * 65536)
