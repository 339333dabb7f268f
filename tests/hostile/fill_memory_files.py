# Fills memory files, which no limit on address space counts.
import ctypes
import os


def solve(facts):
    libc = ctypes.CDLL(None, use_errno=True)
    made = [libc.syscall(319, f"f{number}".encode(), 0) for number in range(20)]  # memfd_create
    for file in [number for number in made if number >= 0]:
        for _ in range(50):
            os.write(file, b"x" * (1 << 20))
        open(facts["canary"], "a")
        raise RuntimeError("memory file made")
    while True:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        os.write(writing, b"x" * (1 << 20))
