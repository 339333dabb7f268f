# Reads the secret file by system calls, relative paths and links.
import ctypes
import os


def solve(facts):
    libc = ctypes.CDLL(None, use_errno=True)
    path = facts["canary"]
    for attempt in (path, "/proc/self/root" + path, "../../../../../../../../.." + path, "/.." + path):
        for flags in (0, os.O_CLOEXEC, os.O_NOFOLLOW):
            for file in (libc.open(attempt.encode(), flags), libc.syscall(257, -100, attempt.encode(), flags, 0)):
                if file >= 0:
                    return os.read(file, 1000).decode()
        how = (ctypes.c_uint64 * 3)(0, 0, 0)
        file = libc.syscall(437, -100, attempt.encode(), how, 24)  # openat2
        if file >= 0:
            return os.read(file, 1000).decode()
    return "nothing"
