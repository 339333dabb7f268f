"""The bare Python inside the sandbox: which files it needs, and how it is started."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from pathlib import Path

PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent)
"""The folder that holds the `sandbox` package."""
BOOT = "import sys; sys.path.append({root!r}); from sandbox.child import main; sys.path.pop(); main()"
"""Starts `child`; `root` is the folder that holds this folder. Last on the path: our math.py must not hide Python's."""


@cache
def executable() -> str:
    """The interpreter that runs us, with virtual environments and links resolved."""
    return str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())


@cache
def readable() -> tuple[str, ...]:
    """Folders with the standard library and shared libraries, without user files and virtual environments."""
    prefixes = {Path(sys.base_prefix), Path(sys.base_exec_prefix)}
    wanted = [prefix / name for prefix in prefixes for name in ("lib", "lib64")]
    wanted += [Path(os.__file__).parent]
    wanted += [Path(name) for name in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")]
    if library := sysconfig.get_config_var("LIBDIR"):
        wanted.append(Path(library))
    kept: list[Path] = []
    for path in sorted(set(wanted), key=lambda path: len(path.parts)):
        if os.access(path, os.R_OK) and not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return tuple(map(str, kept))


def command(root: str, channel: int) -> list[str]:
    """No site packages, no user settings, no byte code written; only the environment below."""
    return [executable(), "-s", "-S", "-P", "-B", "-c", BOOT.format(root=root), str(channel)]


def environment() -> dict[str, str]:
    """Nothing from the caller. A fixed hash seed, so that the order of a set is the same in every run."""
    settings = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PATH": "/nowhere"}
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        settings["LD_LIBRARY_PATH"] = f"{sys.base_prefix}/lib:{sysconfig.get_config_var('LIBDIR')}"
    return settings
