"""Bubblewrap: own namespaces, no network, and a file system that holds only a Python."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

from iwopd.eval.sandbox import interpreter, private_folder

_ROOT = "/iwopd"
FOLDER = "/tmp"
"""The private folder inside."""


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
    for name, value in interpreter.environment(FOLDER).items():
        walls += ["--setenv", name, value]
    if "--size" in known:  # before the rest: the interpreter may itself live in /tmp
        walls += ["--size", str(private_folder.BYTES), "--tmpfs", FOLDER, "--chdir", FOLDER]
    # There is no /proc and no /sys inside, and only /dev/null in /dev: nothing to read about others, no sysctl to write.
    walls += ["--dev-bind", "/dev/null", "/dev/null"]
    for path in (*interpreter.roots(), interpreter.executable()):
        walls += ["--ro-bind", str(Path(path).resolve()), path]
    for path in interpreter.hidden():  # an empty file system in front of it
        walls += ["--tmpfs", path, "--remount-ro", path]
    if zones := interpreter.time_zones():
        walls += ["--ro-bind", str(Path(zones).resolve()), zones]
    walls += ["--ro-bind", str(Path(__file__).resolve().parent), f"{_ROOT}/sandbox"]
    walls += ["--remount-ro", "/"]
    return [str(shutil.which("bwrap")), *walls, "--", *interpreter.command(_ROOT, channel)]


@cache
def _options() -> frozenset[str]:
    told = subprocess.run([str(shutil.which("bwrap")), "--help"], capture_output=True, text=True, check=False)
    return frozenset((told.stdout + told.stderr).split())
