"""The self-test's attack program. It runs inside a sandbox and lists every forbidden action that succeeded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any


def burgle(canary: str, port: int, parent: int, variables: list[str], packages: list[str]) -> list[str]:
    """Try to reach a file, other packages, the network, other processes, the environment and the system's settings."""
    with contextlib.suppress(OSError):
        Path(f"/tmp/iwopd-self-test-{parent}").touch()  # in a /tmp of its own it may: the evaluator looks at the real one
    attempts: dict[str, Callable[[], Any]] = {
        "read a file": lambda: _opened(canary, os.O_RDONLY),
        "opened a file for writing": lambda: _opened(canary, os.O_WRONLY),
        "made a file": lambda: _made(canary + ".new"),
        "changed a file's mode": lambda: _relabelled(canary),
        "read the password file": lambda: _opened("/etc/passwd", os.O_RDONLY),
        "listed other packages": lambda: [_listed(folder) for folder in packages if _listed(folder)],
        "listed /proc": lambda: _opened("/proc", os.O_RDONLY),
        "opened a system setting": lambda: _opened("/proc/sys/kernel/hostname", os.O_WRONLY),
        "called the network": lambda: socket.create_connection(("127.0.0.1", port), 1.0),
        "made a socket": lambda: socket.socket(socket.AF_UNIX),
        "signalled the parent": lambda: _signalled(parent),
        "signalled everyone": lambda: _signalled(-1),
        "read the environment": lambda: any(name in os.environ for name in variables),
        "executed a program": lambda: ctypes.CDLL(None).access(b"/bin/sh", 1) == 0 and _executed(),
        "made a process": _forked,
    }
    done = []
    for what, action in attempts.items():
        with contextlib.suppress(OSError, ValueError):
            if action():
                done.append(what)
    return done


def _opened(path: str, flags: int) -> bool:
    os.close(os.open(path, flags, 0o600))
    return True


def _listed(folder: str) -> list[str]:
    try:
        return [path.name for path in Path(folder).iterdir()]
    except OSError:
        return []


def _relabelled(path: str) -> bool:
    Path(path).chmod(0o644)
    return True


def _made(path: str) -> bool:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    os.unlink(path)  # noqa: PTH108 - clean up, even if the sandbox failed
    return True


def _signalled(process: int) -> bool:
    os.kill(process, 0)
    return True


def _executed() -> bool:
    return os.posix_spawn("/bin/sh", ["sh", "-c", "exit 0"], {}) > 0


def _forked() -> bool:
    if os.fork() == 0:
        os._exit(0)
    return True
