"""Limits besides files and system calls: resources, privileges, dying with the parent."""

from __future__ import annotations

import ctypes
import os
import resource
import struct

_SET_PDEATHSIG, _CAPBSET_DROP, _SET_NO_NEW_PRIVS, _CAP_AMBIENT = 1, 24, 38, 47
_SIGKILL = 9
_LIBC = ctypes.CDLL(None, use_errno=True)


def set_rlimits(memory: int, cpu_seconds: int, file_bytes: int) -> None:
    """`memory`: bytes of address space; `file_bytes`: of one file. CPU seconds are a backstop: the parent is stricter."""
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 1),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_STACK, 64 << 20),
    ):
        hard = resource.getrlimit(limit)[1]
        capped = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (capped, capped))


def no_new_privileges() -> None:
    """No executed program can gain privileges."""
    if _prctl(_SET_NO_NEW_PRIVS, 1) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs refused")


def drop_capabilities() -> None:
    """Drop all capabilities, so that root has no more rights than a user."""
    for capability in range(64):  # out of the bounding set; errors (unknown, not permitted) are ignored
        _prctl(_CAPBSET_DROP, capability)
    _prctl(_CAP_AMBIENT, 4)  # clear all
    header = struct.pack("<Ii", 0x20080522, 0)
    if _LIBC.capset(header, struct.pack("<6I", *[0] * 6)) != 0:
        raise OSError(ctypes.get_errno(), "capset refused")


def die_with_parent(parent: int) -> None:
    """SIGKILL when the thread that started us ends, or at once if it has ended."""
    _prctl(_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> int:
    zero = ctypes.c_ulong(0)
    return int(_LIBC.prctl(option, ctypes.c_ulong(value), zero, zero, zero))
