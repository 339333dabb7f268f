"""The bare Python inside the sandbox: which files it needs, and how it is started."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent)
"""The folder that holds the `sandbox` package."""
BOOT = "import sys; sys.path.append({root!r}); from sandbox.child import main; sys.path.pop(); main()"
"""Starts `child`; `root` is the folder that holds this folder. Last on the path: our math.py must not hide Python's."""
_PACKAGES = ("site-packages", "dist-packages", "vendor-packages", "ensurepip/_bundled")
"""Folders with packages that are not the standard library; the last holds pip and all that comes with it, as a wheel."""


@cache
def executable() -> str:
    """The interpreter that runs us, with virtual environments and links resolved."""
    return str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())


@cache
def roots() -> tuple[str, ...]:
    """Folders with the standard library and shared libraries. `hidden` names what in them is to be left out."""
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


@cache
def hidden() -> tuple[str, ...]:
    """Folders inside `roots` that hold other packages than the standard library, of any Python there."""
    own = Path(os.__file__).parent
    pythons = {own, *(place for root in map(Path, roots()) for pattern in ("py*", "*/py*") for place in root.glob(pattern))}
    pythons |= {Path(root) for root in roots()}
    found = {place / name for place in pythons for name in _PACKAGES if (place / name).is_dir()}
    return tuple(sorted(map(str, found)))


@cache
def readable() -> tuple[str, ...]:
    """Files and folders, none of which holds anything hidden: `roots` taken apart where something in them is."""
    unwanted = frozenset(os.path.realpath(path) for path in hidden())
    return tuple(dict.fromkeys(path for root in roots() for path in _apart(os.path.realpath(root), unwanted)))


def _apart(path: str, unwanted: frozenset[str]) -> Iterator[str]:
    if path in unwanted:
        return
    if not any(name.startswith(path + os.sep) for name in unwanted):
        yield path
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if not entry.is_symlink():  # what it points to is allowed if it is in here
            yield from _apart(entry.path, unwanted)


@cache
def time_zones() -> str | None:
    """The folder of the system's time zones, or of the package tzdata."""
    system = next(
        (name for name in ("/usr/share/zoneinfo", "/usr/lib/zoneinfo", "/etc/zoneinfo") if Path(name, "UTC").exists()), None
    )
    if system is None and (package := importlib.util.find_spec("tzdata")) is not None and package.origin is not None:
        system = str(Path(package.origin).parent / "zoneinfo")
    return system


def command(root: str, channel: int) -> list[str]:
    """No site packages, no user settings, no byte code written; only the environment below."""
    return [executable(), "-s", "-S", "-P", "-B", "-c", BOOT.format(root=root), str(channel)]


def environment(folder: str) -> dict[str, str]:
    """Nothing from the caller. A fixed hash seed, so that the order of a set is the same in every run. `folder` is private."""
    settings = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PATH": "/nowhere", "TMPDIR": folder, "HOME": folder}
    if zones := time_zones():
        settings["PYTHONTZPATH"] = zones
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        settings["LD_LIBRARY_PATH"] = f"{sys.base_prefix}/lib:{sysconfig.get_config_var('LIBDIR')}"
    return settings
