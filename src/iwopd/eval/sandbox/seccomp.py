"""A seccomp filter, assembled by hand: only the system calls that a running Python program needs.

No process or thread can be created, nothing executed, no socket opened but a pair that is connected to itself, no signal sent
to another process, no limit raised. Which files can be written is up to Landlock or the mounts; what those do not control
(modes, owners, times, attributes, links) cannot be changed at all. Other calls fail with EPERM, so the program gets an
exception and is not killed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_EPERM, _ENOSYS = 1, 38

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45  # BPF_JMP | BPF_K | BPF_JEQ, BPF_JGE, BPF_JSET
_RETURN = 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_X32 = 0x40000000  # x86's third table of calls, under the same architecture

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# name: numbers on x86-64 and arm64 (None: that machine has no such call)
_PLAIN: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67),
    "readv": (19, 65), "writev": (20, 66), "access": (21, None), "pipe": (22, None), "select": (23, None),
    "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None),
    "pause": (34, None), "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103),
    "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17), "readlink": (89, None),
    "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153),
    "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173),
    "sigaltstack": (131, 132), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "restart_syscall": (219, 128), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94), "newfstatat": (262, 79),
    "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "dup3": (292, 24), "pipe2": (293, 59), "getrandom": (318, 278),
    "membarrier": (324, 283), "statx": (332, 291), "rseq": (334, 293), "faccessat2": (439, 439),
    # asyncio's loop: epoll, and its pair of sockets
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51, 204), "getsockopt": (55, 209),
    # folders and file systems, without changing them
    "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166), "statfs": (137, 43), "fstatfs": (138, 44),
    "fadvise64": (221, 223), "flock": (73, 32),
}  # fmt: skip

# Calls that write, where something else says which files.
_WRITES: dict[str, tuple[int | None, int | None]] = {
    "pwrite64": (18, 68), "sendfile": (40, 71), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46),
    "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None), "unlink": (87, None), "mkdirat": (258, 34),
    "unlinkat": (263, 35), "renameat": (264, 38), "renameat2": (316, 276), "copy_file_range": (326, 285),
}  # fmt: skip

# Calls reported as missing, so that the C library uses older ones, which can be filtered.
_ABSENT: dict[str, tuple[int, int]] = {"clone3": (435, 435), "openat2": (437, 437)}

# Calls allowed for some values of one argument. kill and tgkill: see `build`.
# DUPFD, GETFD, SETFD, GETFL, SETFL, GETLK, SETLK, SETLKW, DUPFD_CLOEXEC: not SETOWN, which sends signals.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
_UNIX, _STREAM = 1, (0o1, 0o4001, 0o2000001, 0o2004001)  # the last three: not blocking, closed on exec, both
_IOCTL = (0x5401, 0x5413, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONBIO, FIONCLEX, FIOCLEX
_NAMELESS = 0o20000000  # O_TMPFILE's own bit: files without a name are harder to count
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | _NAMELESS


def supported() -> str | None:
    """Why there is no filter for this machine, or None."""
    if platform.machine() not in _MACHINES:
        return f"no seccomp filter is written for {platform.machine()}, only for {' and '.join(_MACHINES)}"
    return None


def build(pid: int, machine: str | None = None, writes: bool = False) -> bytes:
    """The filter's program for the process `pid` (the only one it may signal). `writes`: files may be opened for writing."""
    architecture, column = _MACHINES[machine or platform.machine()]
    program = _Program()
    program.load(_ARCHITECTURE)
    program.unless(_EQUAL, architecture, _KILL)
    program.load(_NUMBER)
    if column == 0:
        program.when(_AT_LEAST, _X32, _ERRNO | _ENOSYS)
    for numbers in (*_PLAIN.values(), *(_WRITES.values() if writes else ())):
        if (number := numbers[column]) is not None:
            program.when(_EQUAL, number, _ALLOW)
    for absent in _ABSENT.values():
        program.when(_EQUAL, absent[column], _ERRNO | _ENOSYS)
    program.call((72, 25)[column], 1, _FCNTL)
    program.call((16, 29)[column], 1, _IOCTL)
    program.call((62, 129)[column], 0, (pid,))  # kill
    program.call((234, 131)[column], 0, (pid,))  # tgkill
    program.call((302, 261)[column], 2, (0,), wide=True)  # prlimit64: to read a limit, not to set one
    program.call((44, 206)[column], 4, (0,), wide=True)  # sendto: over a pair of sockets, to nobody else
    program.pair((53, 199)[column])
    forbidden = _NAMELESS if writes else _WRITING
    program.without((257, 56)[column], 2, forbidden)  # openat
    if column == 0:
        program.without(2, 1, forbidden)  # open
    program.back(_ERRNO | _EPERM)
    return bytes(program.code)


def install(program: bytes) -> None:
    """Apply the filter to this thread and everything it starts. Needs no_new_privs."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    code = ctypes.create_string_buffer(program, len(program))
    whole = Program(len(program) // 8, ctypes.cast(code, ctypes.c_void_p))
    if ctypes.CDLL(None, use_errno=True).prctl(22, 2, ctypes.byref(whole), 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp filter refused: {os.strerror(error)}")


class _Program:
    def __init__(self) -> None:
        self.code = bytearray()

    def op(self, code: int, value: int, yes: int = 0, no: int = 0) -> None:
        self.code += struct.pack("<HBBI", code, yes, no, value)

    def load(self, offset: int) -> None:
        self.op(_LOAD, offset)

    def back(self, action: int) -> None:
        self.op(_RETURN, action)

    def when(self, test: int, value: int, action: int) -> None:
        self.op(test, value, 0, 1)
        self.back(action)

    def unless(self, test: int, value: int, action: int) -> None:
        self.op(test, value, 1, 0)
        self.back(action)

    def call(self, number: int, argument: int, values: tuple[int, ...], wide: bool = False) -> None:
        """Allow call `number` if the low 32 bits of its argument are one of these values (`wide`: and the high ones 0)."""
        body = _Program()
        if wide:
            body.load(16 + 8 * argument + 4)
            body.unless(_EQUAL, 0, _ERRNO | _EPERM)
        body.load(16 + 8 * argument)
        for value in values:
            body.when(_EQUAL, value, _ALLOW)
        body.back(_ERRNO | _EPERM)
        self._only(number, body)

    def without(self, number: int, argument: int, bits: int) -> None:
        """Allow call `number` if none of these bits is in its flags."""
        body = _Program()
        body.load(16 + 8 * argument)
        body.when(_ANY_BIT, bits, _ERRNO | _EPERM)
        body.back(_ALLOW)
        self._only(number, body)

    def pair(self, number: int) -> None:
        """Allow call `number`, socketpair, for two ends of one stream: neither can ever reach anybody else."""
        body = _Program()
        body.load(16)
        body.unless(_EQUAL, _UNIX, _ERRNO | _EPERM)
        body.load(16 + 8)
        for kind in _STREAM:
            body.when(_EQUAL, kind, _ALLOW)
        body.back(_ERRNO | _EPERM)
        self._only(number, body)

    def _only(self, number: int, body: _Program) -> None:
        self.op(_EQUAL, number, 0, len(body.code) // 8)
        self.code += body.code  # every path of it returns
