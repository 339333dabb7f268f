"""Which backends work on this machine: a program tries to break out of each, once per process."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import tempfile
import threading
from pathlib import Path

from iwopd.eval.sandbox import bubblewrap, interpreter, landlock, seccomp, wire
from iwopd.eval.sandbox.backends import Backend
from iwopd.eval.sandbox.run import Program, Report, SandboxError, run

_BURGLAR = Path(__file__).with_name("burglar.py")
_HARMLESS = {"PYTHONHASHSEED", "LC_ALL", "PATH", "LD_LIBRARY_PATH", "PWD", "TMPDIR", "HOME", "PYTHONTZPATH"}
"""Variables that the sandbox sets itself."""
_found: dict[str, str | None] = {}
_lock = threading.Lock()


def choose(*, unsafe: bool = False, name: str | None = None) -> Backend:
    """The best backend that passes its test; with `name`, that one. Else `SandboxError`, or with `unsafe` no sandbox."""
    if name == "none" and unsafe:
        return Backend("none")
    for backend in (Backend("bubblewrap"), Backend("landlock")):
        if name in (None, backend.name):
            problem = examine(backend)
            if problem is None:
                return backend
            if name is not None:
                raise SandboxError(f"the {name} sandbox does not work here: {problem}")
    if unsafe:
        return Backend("none")
    if name is not None:
        raise SandboxError(f"no sandbox is called {name!r}; there are bubblewrap and landlock")
    reasons = "; ".join(f"{tried}: {problem}" for tried, problem in findings().items())
    raise SandboxError(
        "no sandbox works here, and programs of a model are not run without one. "
        "Install bubblewrap (apt-get install bubblewrap) or use a Linux kernel from 5.13 on with Landlock; "
        f"or pass --unsafe-no-sandbox (unsafe=True) if this machine holds nothing of value. Tried: {reasons}"
    )


def description(*, unsafe: bool = False) -> str:
    """The backend that `choose` gives, in words for records."""
    name = choose(unsafe=unsafe).name
    if name == "none":
        return "none: programs ran unprotected (--unsafe-no-sandbox)"
    return f"{name} (--unsafe-no-sandbox was given, but a sandbox works)" if unsafe else name


def findings() -> dict[str, str | None]:
    """Why each backend cannot be used; None: it can."""
    return {backend.name: examine(backend) for backend in (Backend("bubblewrap"), Backend("landlock"))}


def examine(backend: Backend) -> str | None:
    """Why this backend does not work, or None. Tested at the first call."""
    with _lock:
        if backend.name not in _found:
            _found[backend.name] = _missing(backend) or self_test(backend)
        return _found[backend.name]


def self_test(backend: Backend) -> str | None:
    """Run the attack program. It must run as a program, and every attack must fail."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        canary = Path(folder) / "canary"
        canary.write_text(secret := secrets.token_hex(8))
        os.chmod(folder, 0o755)  # noqa: PTH101 - so that only the sandbox can hide it
        asked = [str(canary), server.getsockname()[1], os.getpid(), sorted(set(os.environ) - _HARMLESS)]
        asked.append(list(interpreter.hidden()))
        reports: list[Report] = []
        job = Program(_BURGLAR.read_text(), "burgle", [wire.encode_plain(asked)], [5.0], 5.0)

        def receive(report: Report) -> bool:
            reports.append(report)
            return True

        try:
            end = run(job, backend, receive)
        except SandboxError as error:
            return str(error)
        if end.status != "complete" or reports[0].error:
            return f"the self-test did not run: {end.detail or reports[0].error or end.status}"
        if reports[0].value != []:
            return f"the self-test broke out: {reports[0].value}"
        if canary.read_text() != secret:
            return "the self-test changed a file outside"
        if (stray := Path(f"/tmp/iwopd-self-test-{os.getpid()}")).exists():
            stray.unlink()
            return "the self-test made a file in /tmp"
    return None


def _missing(backend: Backend) -> str | None:
    if not sys.platform.startswith("linux"):
        return f"needs Linux, this is {sys.platform}"
    if problem := seccomp.supported():
        return problem
    if backend.name == "bubblewrap":
        return bubblewrap.missing()
    if landlock.version() == 0:
        return "this kernel has no Landlock, or it is not switched on (lsm=landlock)"
    return None
