"""Programs that some tests need and Debian has: found, or installed where that was asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from filelock import FileLock

from waiting import PATIENCE


def may_install() -> bool:
    """Only a machine that is thrown away, or whose owner asked, gets system packages: CI sets `CI`, others `IWOPD_APT=1`."""
    asked = os.environ.get("IWOPD_APT", os.environ.get("CI", "")).lower()
    return asked not in ("", "0", "false", "no") and os.geteuid() == 0 and shutil.which("apt-get") is not None


@cache
def find(command: str, package: str) -> str | None:
    """Path of a command. If it is missing, its package is installed where that is allowed, with a word before. None: skip."""
    found = shutil.which(command)
    if found is not None or not may_install():
        return found
    with FileLock(Path(tempfile.gettempdir()) / "iwopd-tests-apt.lock"):  # tests run side by side, apt-get does not
        if (found := shutil.which(command)) is not None:
            return found
        print(f"\ntests: installing the system package {package} (apt-get)", file=sys.__stderr__, flush=True)
        for words in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", package]):
            subprocess.run(["apt-get", *words], capture_output=True, check=False, timeout=PATIENCE)
        return shutil.which(command)


def lacking() -> list[str]:
    """The packages that tests would use and that nothing here replaces."""
    browser = os.environ.get("IWOPD_CHROMIUM") or any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    return [*(["bubblewrap"] if shutil.which("bwrap") is None else []), *([] if browser else ["chromium"])]


def missing(package: str) -> str:
    """Why a test is skipped, and what would let it run."""
    return (
        f"{package} is not installed: install it (apt-get install {package}), or let the tests do it with IWOPD_APT=1 as root"
    )
