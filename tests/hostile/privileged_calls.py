# Mounts, unshares, changes root and user, loads programs into the kernel.
import ctypes
import os
import socket


def solve(facts):
    libc = ctypes.CDLL(None, use_errno=True)
    done = []
    for name, call in {
        "unshare": lambda: libc.unshare(0x10000000 | 0x20000),
        "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
        "umount": lambda: libc.umount2(b"/tmp", 2),
        "chroot": lambda: libc.chroot(b"/"),
        "setuid": lambda: libc.setuid(0) if os.getuid() else -1,
        "setns": lambda: libc.setns(3, 0),
        "bpf": lambda: libc.syscall(321, 0, 0, 0),
        "keyctl": lambda: libc.syscall(250, 0, -3, 1),
        "reboot": lambda: libc.syscall(169, 0, 0, 0),
        "perf": lambda: libc.syscall(298, ctypes.create_string_buffer(120), 0, -1, -1, 0),
        "sethostname": lambda: libc.sethostname(b"hacked", 6),
        "settime": lambda: libc.settimeofday(None, ctypes.create_string_buffer(8)),
        "prctl": lambda: libc.prctl(1, 0, 0, 0, 0),
        "userfaultfd": lambda: libc.syscall(323, 0),
        "shmget": lambda: libc.shmget(0, 1 << 20, 0o1600),
        "mknod": lambda: libc.mknod(f"{facts['folder']}/device".encode(), 0o60600, 0x0801),
    }.items():
        if call() >= 0:
            done.append(name)
    if done or socket.gethostname() == "hacked":
        with open(facts["canary"], "a") as file:
            file.write(str(done))
    return done or "nothing"
