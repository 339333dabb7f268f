"""Landlock (Linux 5.13): the process permanently gives up access to all files but the named ones; needs no privileges."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every machine
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_IN_FOLDER = 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13  # remove folder and file, make folder and file, move between folders
TRUNCATES = 3
"""From this version on, truncating a file is a right of its own."""
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


def restrict(readable: Iterable[str], writable: Iterable[str]) -> int:
    """Allow this thread to read or to write these files and folders and nothing else. Needs no_new_privs. Gives the version."""
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
            _allow(ruleset, path, _READ_FILE, _READ_DIRECTORY)
        for path in writable:
            _allow(ruleset, path, handled & (_READ_FILE | _WRITE_FILE | _TRUNCATE), handled & (_READ_DIRECTORY | _IN_FOLDER))
        _check(_LIBC.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)), "landlock_restrict_self")
    finally:
        os.close(ruleset)
    return abi


def _allow(ruleset: int, path: str, of_files: int, of_folders: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights = of_files | of_folders if os.path.isdir(path) else of_files  # noqa: PTH112 (pathlib is slow to import)
        rule = struct.pack("<Qi", rights, place)
        _check(_LIBC.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, ctypes.c_uint32(0)), f"landlock_add_rule {path}")
    finally:
        os.close(place)


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
