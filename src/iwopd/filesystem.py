"""Files that survive a crash: locks, synced writes, checksums. Needs a POSIX system."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's content atomically and sync it: a crash leaves the old content or the new, never a part.

    A crash may also leave the draft `.tmp-<name>-<process id>` next to it.
    """
    draft = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        sync(draft)
        draft.replace(path)
        sync(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def follow_umask(*files: Path) -> None:
    """Give files the mode that any new file gets: safetensors makes its own for the owner alone, whatever the umask says."""
    for file in files:
        file.chmod(0o666 & ~_umask())


def _umask() -> int:
    """Without setting it, where the system says it: for a moment another thread would make files with the wrong one."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
    except (OSError, StopIteration, ValueError, IndexError):
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """`mkdir -p`, synced to disk."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder with its content."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def first_free(path: Path) -> Path:
    """`path`, or if it exists, `path` with the first free suffix -2, -3, ..."""
    candidate, number = path, 2
    while os.path.lexists(candidate):
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def sha256(path: Path) -> str:
    """Checksum of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def locked(directory: Path, *, wait: bool = True) -> Iterator[bool]:
    """Lock a folder, without a lock file or write access; yields false if `wait` is off and another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        held = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            held = False
        except OSError as error:
            log.debug("no lock on %s: %s", directory, error)  # a file system without locks
        yield held
    finally:
        os.close(descriptor)


def alive(pid: int) -> bool:
    """Whether a process with this id is running."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it runs, and belongs to another user
    return True
