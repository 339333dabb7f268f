"""The folder that a program may write to: how full it may get, and how it is removed whatever is in it.

Under bubblewrap it is a file system of its own, which is gone with the program; its size is limited by the kernel. Under
Landlock it is a folder of ours. No limit of the kernel counts folders and names there, so the evaluator looks at it
every few hundredths of a second and ends a program that has too much in it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

BYTES = 64 << 20
"""All files together."""
FILE_BYTES = 8 << 20
"""One file; this is the kernel's limit. With 64 open files it also bounds those that have no name any more."""
NAMES = 1_000


@contextlib.contextmanager
def private_folder() -> Iterator[str]:
    """A new folder, removed at the end."""
    path = tempfile.mkdtemp(prefix="iwopd-sandbox-")
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # without a sandbox it may hold anything; a verdict is worth more
            remove(path)


def overfull(path: str) -> str | None:
    """Why a folder holds too much, or None. Stops counting at the limit."""
    names = size = 0
    waiting = [path]
    while waiting:
        place = waiting.pop()
        try:
            for entry in list(os.scandir(place)):
                names += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
        except (FileNotFoundError, NotADirectoryError):  # it was there a moment ago
            continue
        except OSError as error:  # nested too deeply for a path, or closed to us
            return f"a folder that cannot be looked into: {error.strerror}"
        if names > NAMES or size > BYTES:
            return _too_much(names, size)
    return None


def overfull_mount(path: str) -> str | None:
    """The same for a file system of its own."""
    with contextlib.suppress(OSError):  # it has ended
        use = os.statvfs(path)
        names, size = use.f_files - use.f_ffree, (use.f_blocks - use.f_bfree) * use.f_frsize
        if names > NAMES or size > BYTES:
            return _too_much(names, size)
    return None


def _too_much(names: int, size: int) -> str:
    return f"{names} names and {size >> 20} MiB in its folder; the limits are {NAMES} and {BYTES >> 20} MiB"


def remove(path: str) -> None:
    """Remove a folder in which a program that has ended could write: folders may be nested without end, and closed to us."""
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(top, 0o700)
        while entries := [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in os.scandir(top)]:
            for name, is_folder in entries:
                if is_folder:
                    _flatten(top, name)
                else:
                    os.unlink(name, dir_fd=top)
    finally:
        os.close(top)
    Path(path).rmdir()


def _flatten(top: int, name: str) -> None:
    """Move what is in a folder one level up, and remove the folder. No path gets longer than a name."""
    os.chmod(name, 0o700, dir_fd=top)  # no links can be made inside, so this is the folder itself
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=folder)
            os.rename(entry.name, secrets.token_hex(12), src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)
