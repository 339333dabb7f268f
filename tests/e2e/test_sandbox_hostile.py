"""Programs that attack the checker: none passes, none does harm, nothing is left, for every backend and kind of user.

The programs are in tests/hostile, what is looked at afterwards in tests/hostile/harness.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import debian
from iwopd.eval.sandbox import probe
from iwopd.eval.sandbox.backends import Backend
from waiting import PATIENCE, wait_until

HOSTILE = Path(__file__).parent.parent / "hostile"
PROGRAMS = sorted(path.stem for path in HOSTILE.glob("*.py") if path.stem != "harness")
NOBODY = 65534
SOURCE = Path(__file__).parent.parent.parent / "src"


@pytest.fixture(scope="module")
def interpreter() -> Iterator[dict[bool, str]]:
    """A Python that every user may run: ours, or a copy of it where ours is under somebody's home."""
    ours = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    library = Path(os.__file__).parent
    if all(folder.stat().st_mode & 0o1 for folder in (*ours.parents, *library.parents)):
        yield {True: str(ours)}
        return
    place = Path(tempfile.mkdtemp(prefix="iwopd-python-"))
    place.chmod(0o755)
    skip = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "ensurepip", "config-*", "*.a")
    shutil.copytree(library, place / "lib" / library.name, ignore=skip)
    for shared in Path(sysconfig.get_config_var("LIBDIR")).glob("libpython*.so*"):
        shutil.copy(shared, place / "lib")
    (place / "bin").mkdir()
    shutil.copy(ours, place / "bin")
    yield {True: str(place / "bin" / ours.name)}
    shutil.rmtree(place)


_done: dict[tuple[str, str], dict[str, Any]] = {}


@pytest.fixture(params=["root", "ordinary"])
def user(request: pytest.FixtureRequest) -> str:
    if request.param == "root" and os.getuid() != 0:
        pytest.skip("these tests run as an ordinary user: the sandbox was not exercised as root")
    return str(request.param)


@pytest.fixture(params=["bubblewrap", "landlock"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "bubblewrap" and debian.find("bwrap", "bubblewrap") is None:
        pytest.skip(f"bubblewrap was not exercised: {debian.missing('bubblewrap')}")
    problem = probe.examine(Backend(request.param))
    if problem is not None:
        pytest.skip(f"{request.param} was not exercised: {problem}")
    return str(request.param)


def _python(code: list[str], user: str, interpreter: dict[bool, str]) -> dict[str, Any]:
    """Arguments for `subprocess` to run our Python as that user."""
    packages = os.pathsep.join([str(SOURCE), sysconfig.get_path("purelib")])
    environment = {"PYTHONPATH": packages, "PATH": os.environ["PATH"], "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
    if user == "ordinary" and os.getuid() == 0:
        python = interpreter[True]
        environment["LD_LIBRARY_PATH"] = str(Path(python).parent.parent / "lib")
        # No shared group either, and a session of its own: what it kills is itself.
        who: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    else:
        python, who = sys.executable, {}
    return {"args": [python, *code], "env": environment, "cwd": "/", "start_new_session": True} | who


@pytest.fixture
def attack(backend: str, user: str, interpreter: dict[bool, str]) -> dict[str, Any]:
    """What the harness saw with this backend as this user: all programs in one process, once."""
    if (backend, user) not in _done:
        programs = [str(HOSTILE / f"{name}.py") for name in PROGRAMS]
        run = _python([str(HOSTILE / "harness.py"), backend, *programs], user, interpreter)
        told = subprocess.run(**run, capture_output=True, text=True, timeout=PATIENCE, check=False)
        if "SandboxError" in told.stderr and user == "ordinary":
            _done[backend, user] = {"skip": told.stderr.strip().splitlines()[-1]}
        else:
            assert told.returncode == 0, f"the evaluator died: {told.returncode}\n{told.stderr[-2000:]}"
            _done[backend, user] = json.loads(told.stdout)
    found = _done[backend, user]
    if "skip" in found:
        pytest.skip(f"{backend} was not exercised as an ordinary user: {found['skip']}")
    return found


def test_there_are_enough_programs() -> None:
    assert len(PROGRAMS) >= 68
    for name in PROGRAMS:
        assert (HOSTILE / f"{name}.py").read_text().startswith("# "), f"{name} does not say what it tries"


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_hostile_program_passes(attack: dict[str, Any], program: str) -> None:
    seen = attack["results"][program]
    assert seen["status"] in ("fail", "error", "timeout"), seen
    assert seen["harm"] == [], seen
    assert "broke out" not in seen["detail"], seen
    a_second = attack["results"]["endless_loop"]["seconds"]  # that is how long one of CPU time takes on this machine now
    assert seen["seconds"] < 60.0 * max(1.0, a_second), seen


@pytest.mark.slow
def test_the_evaluator_is_unharmed(attack: dict[str, Any], user: str) -> None:
    assert (attack["user"] == 0) == (user == "root")
    assert attack["children"] == [], "something is left running"
    assert attack["changed"] == {}, "settings, limits or open files of the evaluator changed"
    assert attack["strays"] == [], "files were written, or a private folder was left"
    assert attack["memory_mib"] < 64.0, f"the evaluator grew by {attack['memory_mib']:.0f} MiB"


@pytest.mark.slow
def test_a_killed_evaluator_takes_its_programs_along(backend: str, user: str, interpreter: dict[bool, str]) -> None:
    code = (
        "from iwopd.eval.code import check_code\n"
        "def check(body, **named):\n"
        f"    check_code('import time\\ndef f():\\n    ' + body, 'f', [([], 1)], backend={backend!r}, **named)\n"
        "check('return 1')\n"
        "print('ready', flush=True)\n"
        "check('while True: time.sleep(1)', timeout=300)\n"
    )
    with subprocess.Popen(
        **_python(["-c", code], user, interpreter), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as evaluator:
        assert evaluator.stdout is not None
        assert evaluator.stderr is not None
        if evaluator.stdout.readline() != "ready\n":
            pytest.skip(f"{backend} was not exercised: {evaluator.stderr.read()[-300:]}")
        wanted = 2 if backend == "bubblewrap" else 1  # bwrap and the program, or the program
        inside = wait_until(lambda: found if len(found := _descendants(evaluator.pid)) >= wanted else None)
        time.sleep(0.5)  # let it get past its own start
        evaluator.send_signal(signal.SIGKILL)
        evaluator.wait()
    wait_until(lambda: not any(map(_alive, inside)))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
