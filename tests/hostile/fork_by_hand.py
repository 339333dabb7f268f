# Makes processes by raw system calls; a child would remove the secret file.
import ctypes
import os


def solve(facts):
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17)
    for make in (
        libc.fork,
        lambda: libc.syscall(57),
        lambda: libc.syscall(56, 17, 0, 0, 0, 0),
        lambda: libc.syscall(56, 0x100 | 17, 0, 0, 0, 0),
        lambda: libc.syscall(435, arguments, 64),
        lambda: libc.syscall(220, 17, 0, 0, 0, 0),
    ):
        if make() == 0:
            while True:
                os.remove(facts["canary"])
    return "nothing"
