"""Bubblewrap: own namespaces, no network, and a file system that holds only a Python."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

from iwopd.eval.sandbox import interpreter

_ROOT = "/iwopd"
_TMPFS = 16 << 20


def missing() -> str | None:
    """Why it cannot be tried, or None."""
    return None if shutil.which("bwrap") else "bwrap is not installed (Debian, Ubuntu, Fedora: package bubblewrap)"


def command(channel: int, info: int) -> list[str]:
    """Run the child as process 1 of a new PID namespace; when it ends, or we do, everything inside ends."""
    known = _options()
    walls = ["--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    walls += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--info-fd", str(info)]
    if "--disable-userns" in known:  # 0.8; before that the seccomp filter alone forbids it
        walls += ["--disable-userns"]
    for name, value in interpreter.environment().items():
        walls += ["--setenv", name, value]
    if "--size" in known:  # before the rest: the interpreter may itself live in /tmp
        walls += ["--size", str(_TMPFS), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    # There is no /proc, no /dev and no /sys inside: nothing to read about others, no sysctl to write.
    for path in (*interpreter.readable(), interpreter.executable()):
        walls += ["--ro-bind", str(Path(path).resolve()), path]
    walls += ["--ro-bind", str(Path(__file__).resolve().parent), f"{_ROOT}/sandbox"]
    walls += ["--remount-ro", "/"]
    return [str(shutil.which("bwrap")), *walls, "--", *interpreter.command(_ROOT, channel)]


@cache
def _options() -> frozenset[str]:
    told = subprocess.run([str(shutil.which("bwrap")), "--help"], capture_output=True, text=True, check=False)
    return frozenset((told.stdout + told.stderr).split())
