"""Programs that some tests need and Debian has: found, or installed where this process may."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache


@cache
def find(command: str, package: str) -> str | None:
    """Path of a command; as root on Debian its package is installed if it is missing. None if it cannot be had."""
    found = shutil.which(command)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for words in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", package]):
            subprocess.run(["apt-get", *words], capture_output=True, check=False, timeout=600)
        found = shutil.which(command)
    return found
