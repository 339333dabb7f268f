"""The wheel, built from this tree and installed where nothing of the repository can be reached.

The environment holds the wheel, and links to the packages that `pip install iwopd` brings (the closure of its requirements,
taken from the environment that runs the tests): no extra is there. Every Python process in it refuses to open a file of the
repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from waiting import PATIENCE

ROOT = Path(__file__).parents[1]

GUARD = f"""
import os, sys

INSIDE, SHARED = {str(ROOT) + os.sep!r}, {str(ROOT / ".venv") + os.sep!r}

def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and arguments:
        path = arguments[0]
        if isinstance(path, (str, os.PathLike)):
            path = os.path.join(os.getcwd(), os.fspath(path)) + os.sep
            if path.startswith(INSIDE) and not path.startswith(SHARED):
                raise RuntimeError(f"{{event}} of the repository: {{path}}")

sys.addaudithook(refuse)
"""


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and an empty folder to work in."""

    python: Path
    folder: Path
    site: Path

    def run(self, *words: str, code: int = 0, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """`iwopd WORDS` in the folder."""
        done = self._start([str(self.python.parent / "iwopd"), *words], timeout)
        assert done.returncode == code, f"iwopd {' '.join(words)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def run_python(self, program: str, *words: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        return self._start([str(self.python), "-c", program, *words], timeout)

    def _start(self, command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        environment = {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=timeout)


def build(out: Path) -> tuple[Path, Path]:
    """Wheel and sdist, as `make dist` makes them: the wheel from the sdist. Without a network."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def install(wheel: Path, folder: Path) -> Installed:
    """As pip does it, but that dependencies are linked and not downloaded."""
    venv.create(folder / "environment", symlinks=True)
    python = folder / "environment" / "bin" / "python"
    (site,) = (folder / "environment" / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, text=True, timeout=PATIENCE)
    for one in closure(wheel_requirements(wheel)):
        _link(one, site)
    (site / "iwopd_guard.py").write_text(GUARD)
    (site / "iwopd_guard.pth").write_text("import iwopd_guard\n")
    (folder / "empty").mkdir()
    return Installed(python, folder / "empty", site)


def wheel_requirements(wheel: Path, extra: str = "") -> list[Requirement]:
    """What the wheel asks for, with an extra or without any."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        folder: Any = zipfile.Path(archive, name).parent
        return _wanted(PathDistribution(folder), extra)


def closure(requirements: Iterable[Requirement]) -> list[Distribution]:
    """The installed distributions that satisfy these, and what they ask for in turn."""
    found: dict[tuple[str, str], Distribution] = {}
    waiting = [(one.name, extra) for one in requirements for extra in ("", *one.extras)]
    while waiting:
        name, extra = waiting.pop()
        if (key := (canonicalize_name(name), extra)) in found:
            continue
        found[key] = distribution(name)
        waiting += [(one.name, more) for one in _wanted(found[key], extra) for more in ("", *one.extras)]
    return [one for (_, extra), one in found.items() if not extra]


def _wanted(one: Distribution, extra: str) -> list[Requirement]:
    parsed = (Requirement(text) for text in one.requires or ())
    return [need for need in parsed if need.marker is None or need.marker.evaluate({"extra": extra})]


def _link(one: Distribution, site: Path) -> None:
    tops = {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in sorted(tops):
        source = Path(str(one.locate_file(top)))
        if source.suffix != ".pth" and source.exists() and not (site / top).exists():
            (site / top).symlink_to(source)
