"""Who writes into a folder: one process at a time, and the others are told which.

The owner holds a lock of the system (`flock`) on `owner.lock`, which is free again when the process ends in whatever way, and
keeps its host and process id in the file. At a clean end it deletes the file; after `kill -9` the file stays and blocks nobody.

What is promised:

- On one machine: the folder is in use as long as its owner lives, in containers that share it, too.
- On several machines: the same, if the file system passes locks on (NFS 4, Lustre with `flock`, GPFS, CephFS).
- Without locks, or with locks that other machines do not see: the owner writes a counter every `BEAT` seconds. Whoever finds
  an owner of another machine watches the counter for `WATCH` seconds, is refused if it moves, and takes over if it does not.
  An owner that stood still for so long (a stopped process, a network that was gone) finds out before it writes its next line,
  and ends. Of two that start in the same second the one stays that wrote its name last.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from iwopd.filesystem import alive, make_directory
from iwopd.runs.logs import RunError

FILE = "owner.lock"
BEAT = 10.0
"""Seconds between two signs of life."""
WATCH = 3 * BEAT
"""Seconds without a sign of life, after which an owner on another machine is taken for dead."""
PATIENCE = 1.0
"""Seconds to wait for a lock that somebody may only look at."""
REMEDY = "choose another directory with --out"
LARGEST = 4096
"""Bytes of the file that are read at most."""


@dataclass(frozen=True)
class Owner:
    """A process as it is known to others."""

    host: str
    pid: int
    machine: str
    """Changes with every boot."""
    processes: str
    """The namespace in which `pid` means something."""
    started: str
    """Tells two processes with one id apart."""
    since: str
    token: str
    """Of this ownership alone."""
    beat: int = 0

    @classmethod
    def myself(cls) -> Owner:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        host = socket.gethostname()
        return cls(host, os.getpid(), _boot() or host, _namespace(), _started(os.getpid()), since, secrets.token_hex(8))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"

    @property
    def is_local(self) -> bool:
        """Whether this machine knows all its locks."""
        return self.machine == (_boot() or socket.gethostname())

    @property
    def lives(self) -> bool | None:
        """None: only its signs of life can tell."""
        if not self.is_local or self.processes != _namespace():
            return None
        return alive(self.pid) and self.started == _started(self.pid)


class Ownership:
    """Held by this process until `close`, or until the process ends."""

    def __init__(self, folder: Path, descriptor: int, owner: Owner) -> None:
        self.folder, self.descriptor, self.owner = folder, descriptor, owner
        self._closed, self._writing = threading.Event(), threading.Lock()
        self._write()
        _HELD.add(self)
        threading.Thread(target=self._beat, name="iwopd-owner", daemon=True).start()

    def check(self) -> None:
        """Raise if somebody else has taken over, because this process gave no sign of life for a while."""
        found = _read(self.folder / FILE)
        if found is not None and found.token != self.owner.token:
            raise RunError(
                f"{found} has taken {self.folder} over, because this process stood still for longer than {WATCH:g} seconds: "
                "this process ends, the other one goes on"
            )

    def close(self) -> None:
        """Give it up. The file is deleted while the lock is held, so nobody can be about to use it."""
        with self._writing:  # a descriptor that is closed may be another file's a moment later
            if self._closed.is_set():
                return
            self._closed.set()
            path = self.folder / FILE
            with suppress(OSError):
                if (found := _read(path)) is not None and found.token == self.owner.token:
                    path.unlink()
            os.close(self.descriptor)

    def leave(self) -> None:
        """In a forked child: the lock is the parent's, and must not outlive it."""
        if not self._closed.is_set():
            self._closed.set()
            with suppress(OSError):
                os.close(self.descriptor)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            self.owner = replace(self.owner, beat=self.owner.beat + 1)
            with (
                suppress(OSError, RunError),
                self._writing,
            ):  # a full disk, or a network that is gone
                self.check()
                if not self._closed.is_set():
                    self._write()

    def _write(self) -> None:
        content = json.dumps(asdict(self.owner)).encode() + b"\n"
        os.pwrite(self.descriptor, content, 0)
        os.ftruncate(self.descriptor, len(content))
        os.fsync(self.descriptor)


_HELD: weakref.WeakSet[Ownership] = weakref.WeakSet()


def _leave_all() -> None:
    for held in list(_HELD):
        held.leave()


os.register_at_fork(after_in_child=_leave_all)


@contextmanager
def owned(folder: Path, notify: Callable[[str], None], remedy: str = REMEDY) -> Iterator[Ownership]:
    """Own a folder, which is made if it is not there; refused with the name of its owner. `notify`: why it takes a while;
    `remedy`: how to have another folder.
    """
    ownership = _take(folder, notify, remedy)
    try:
        yield ownership
    finally:
        ownership.close()


def owner_of(folder: Path) -> Owner | None:
    """Who is known to write there just now; says nothing about other machines whose locks are not seen here."""
    path = folder / FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(path)
    except OSError:  # a file system without locks
        return found if (found := _read(path)) is not None and found.lives else None
    finally:
        os.close(descriptor)
    return None


def last_owner(folder: Path) -> Owner | None:
    """Whom the file names, alive or not; None: nobody, or who wrote last has ended cleanly."""
    return _read(folder / FILE)


def refuse_owned(folder: Path) -> None:
    """Raise if somebody is known to write there, before anything is loaded."""
    if (owner := owner_of(folder)) is not None:
        raise _refusal(folder, owner)


def _take(folder: Path, notify: Callable[[str], None], remedy: str) -> Ownership:
    path, deadline = folder / FILE, time.monotonic() + PATIENCE
    while True:
        try:
            make_directory(folder)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(f"cannot write to {folder}: {error.strerror or error}; {remedy}") from None
        taken = False
        try:
            locks = _lock(descriptor)
            if locks is False and time.monotonic() > deadline:
                raise _refusal(folder, _read(path), remedy)
            if locks is not False and _is_same(descriptor, path):
                _refuse_living(folder, locks is True, notify, remedy)
                ownership = Ownership(folder, descriptor, Owner.myself())
                taken = True
                return _settled(folder, ownership, locks is True, remedy)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror or error}; make room, or {remedy}") from None
        finally:
            if not taken:
                os.close(descriptor)
        time.sleep(0.05)


def _lock(descriptor: int) -> bool | None:
    """Whether the lock was free; None: the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _refuse_living(folder: Path, locks: bool, notify: Callable[[str], None], remedy: str) -> None:
    """The file names somebody whose lock is not seen: does it live?"""
    path = folder / FILE
    found = _read(path)
    if found is None or (locks and found.is_local):
        return
    if (lives := found.lives) is None:
        notify(f"{folder} was last written by {found}: watching for {WATCH:g} seconds whether it lives")
        deadline = time.monotonic() + WATCH
        while time.monotonic() < deadline:
            time.sleep(min(1.0, WATCH / 10))
            if (now := _read(path)) is not None and (now.token, now.beat) != (found.token, found.beat):
                raise _refusal(folder, now, remedy)
        notify(f"{found} gave no sign of life: {folder} is taken over")
    elif lives:
        raise _refusal(folder, found, remedy)


def _settled(folder: Path, ownership: Ownership, locks: bool, remedy: str) -> Ownership:
    """Without locks two may have written their names at once: the last one stays."""
    if not locks:
        time.sleep(PATIENCE)
        try:
            ownership.check()
        except RunError:
            ownership.close()
            raise _refusal(folder, _read(folder / FILE), remedy) from None
    return ownership


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether the file that was locked is still the one with this name: its last owner may have deleted it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read(path: Path) -> Owner | None:
    """Opened anew each time: on NFS only that shows what others have written."""
    try:
        with path.open("rb") as file:
            values: Any = json.loads(file.read(LARGEST))
        return Owner(**{name: kind(values[name]) for name, kind in _FIELDS.items()})
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("host", "machine", "processes", "started", "since", "token"), str),
    "pid": int,
    "beat": int,
}


def _refusal(folder: Path, owner: Owner | None, remedy: str = REMEDY) -> RunError:
    who = "another process" if owner is None else str(owner)
    return RunError(f"{folder} is in use by {who}: wait until it ends, end it, or {remedy}")


def _boot() -> str:
    """Identifies this boot of this machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, in ticks since boot; empty where the system does not say."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]  # a dead process keeps its id until its parent asks for it
    except (OSError, ValueError, IndexError):
        return ""
