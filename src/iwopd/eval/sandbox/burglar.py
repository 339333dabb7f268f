"""The self-test's attack program. It runs inside a sandbox and lists every forbidden action that succeeded."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Any


def burgle(canary: str, port: int, parent: int, variables: list[str]) -> list[str]:
    """Try to reach a file, the network, other processes, the environment and the system's settings."""
    done = []

    def attempt(what: str, action: Any) -> None:
        try:
            if action():
                done.append(what)
        except (OSError, ValueError):
            pass

    attempt("read a file", lambda: _opened(canary, os.O_RDONLY))
    attempt("opened a file for writing", lambda: _opened(canary, os.O_WRONLY))
    attempt("made a file", lambda: _made(canary + ".new"))
    attempt("made a file in /tmp", lambda: _made(f"/tmp/iwopd-self-test-{parent}"))
    attempt("read the password file", lambda: _opened("/etc/passwd", os.O_RDONLY))
    attempt("listed /proc", lambda: _opened("/proc", os.O_RDONLY))
    attempt("opened a system setting", lambda: _opened("/proc/sys/kernel/hostname", os.O_WRONLY))
    attempt("called the network", lambda: socket.create_connection(("127.0.0.1", port), 1.0))
    attempt("made a socket", lambda: socket.socket(socket.AF_UNIX))
    attempt("signalled the parent", lambda: _signalled(parent))
    attempt("signalled everyone", lambda: _signalled(-1))
    attempt("read the environment", lambda: any(name in os.environ for name in variables))
    attempt("executed a program", lambda: ctypes.CDLL(None).access(b"/bin/sh", 1) == 0 and _executed())
    attempt("made a process", _forked)
    return done


def _opened(path: str, flags: int) -> bool:
    os.close(os.open(path, flags, 0o600))
    return True


def _made(path: str) -> bool:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    os.unlink(path)  # noqa: PTH108 - clean up, even if the sandbox failed
    return True


def _signalled(process: int) -> bool:
    os.kill(process, 0)
    return True


def _executed() -> bool:
    os.posix_spawn("/bin/sh", ["sh", "-c", "exit 0"], {})
    return True


def _forked() -> bool:
    if os.fork() == 0:
        os._exit(0)
    return True
