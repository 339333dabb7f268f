"""Landlock (Linux 5.13): the process permanently gives up access to all files but the named ones; needs no privileges."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every machine
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_PATH_BENEATH = 1

# File rights known to each version; all that the kernel knows are removed.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NETWORK_RIGHTS = 3  # TCP bind and connect, since version 4
_SCOPES = 3  # abstract sockets and signals, since version 6
_LIBC = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Landlock's version in this kernel; 0 if there is none."""
    found = _LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(0, int(found))


def restrict(readable: Iterable[str]) -> int:
    """Allow this thread to read these files and folders and nothing else. Needs no_new_privs. Returns the version."""
    abi = version()
    if abi == 0:
        raise OSError("this kernel has no Landlock")
    handled = _FILE_RIGHTS[min(abi, max(_FILE_RIGHTS))]
    attributes = struct.pack("<Q", handled)
    if abi >= 4:
        attributes += struct.pack("<Q", _NETWORK_RIGHTS)
    if abi >= 6:
        attributes += struct.pack("<Q", _SCOPES)
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    _check(ruleset, "landlock_create_ruleset")
    try:
        for path in readable:
            _allow_reading(ruleset, path)
        _check(_LIBC.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)), "landlock_restrict_self")
    finally:
        os.close(ruleset)
    return abi


def _allow_reading(ruleset: int, path: str) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights = _READ_FILE | _READ_DIRECTORY if os.path.isdir(path) else _READ_FILE  # noqa: PTH112 (pathlib is slow to import)
        rule = struct.pack("<Qi", rights, place)
        _check(_LIBC.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, ctypes.c_uint32(0)), f"landlock_add_rule {path}")
    finally:
        os.close(place)


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
