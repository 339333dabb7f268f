"""Run hostile programs and look at what they left behind. A process of its own, so that it can be another user and be killed.

    python harness.py BACKEND PROGRAM...        prints one JSON object

Each program gets a secret to go for: a readable file, an environment variable, a server on the loopback that answers with it,
and the evaluator's memory all hold it, and it is the expected output. A program that gets hold of it passes; none may.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import secrets
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from iwopd.eval.code import check_code

VARIABLE = "IWOPD_HOSTILE_SECRET"
if VARIABLE not in os.environ:  # it must be there from the start to be in /proc/PID/environ
    os.execve(sys.executable, sys.orig_argv, os.environ | {VARIABLE: "sesame" + secrets.token_hex(12)})
MARK = os.environ[VARIABLE][:-16]
SETTINGS = ("kernel/hostname", "vm/swappiness", "kernel/core_pattern", "fs/file-max", "kernel/domainname")
PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run")


def main() -> None:
    backend, *programs = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="iwopd-harness-") as folder:
        Path(folder).chmod(0o755)
        tempfile.tempdir = folder  # private folders of programs come here, and are gone in the end
        _main(backend, programs, Path(folder))


def _main(backend: str, programs: list[str], place: Path) -> None:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # subreaper: whatever loses its parent becomes our child, and is seen
    check_code("def f():\n    return 1", "f", [([], 1)], backend=backend, unsafe=backend == "none")  # self-test, imports
    kept = tempfile.TemporaryFile()  # noqa: SIM115 - open to the end, for programs that look for what we left open
    kept.write(os.environ[VARIABLE].encode())
    kept.flush()
    os.set_inheritable(kept.fileno(), True)
    before = _state()
    settled = _memory(reset=True)
    with ThreadPoolExecutor(3) as pool:
        results = dict(pool.map(lambda path: (Path(path).stem, _attack(Path(path), backend)), programs))
    grown = _memory() - settled
    print(
        json.dumps(
            {
                "user": os.getuid(),
                "results": results,
                "memory_mib": grown / 1024,
                "children": _children(),
                "changed": {name: [value, now] for name, value in before.items() if (now := _state()[name]) != value},
                "strays": [str(path) for place in PLACES for path in Path(place).glob(f"*{MARK}*")]
                + [str(path) for path in place.iterdir()],
            }
        )
    )


def _attack(program: Path, backend: str) -> dict[str, Any]:
    secret = os.environ[VARIABLE]
    with tempfile.TemporaryDirectory() as folder, _Server(secret) as server:
        canary = Path(folder) / "canary"
        canary.write_text(secret)
        canary.chmod(0o644)
        Path(folder).chmod(0o755)
        looked = (canary.stat().st_mode, canary.stat().st_mtime_ns, Path(folder).stat().st_mode)
        facts = {"canary": str(canary), "folder": folder, "port": server.port, "parent": os.getpid(), "mark": MARK}
        source = program.read_text().replace("@NUL@", "\0\ud800")
        start = time.monotonic()
        tests = [([facts | {"variable": VARIABLE}], secret)]
        outcome = check_code(source, "solve", tests, timeout=1.0, backend=backend, unsafe=backend == "none")
        seconds = time.monotonic() - start
        harm = []
        if sorted(path.name for path in Path(folder).iterdir()) != ["canary"]:
            harm.append("the folder's contents changed")
        elif canary.read_text() != secret:
            harm.append("the file's contents changed")
        elif looked != (canary.stat().st_mode, canary.stat().st_mtime_ns, Path(folder).stat().st_mode):
            harm.append("the file's properties changed")
        if server.calls:
            harm.append("the server was called")
    return {"status": outcome.status, "detail": outcome.detail, "harm": harm, "seconds": round(seconds, 2)}


class _Server:
    """Answers every caller with the secret."""

    def __init__(self, secret: str) -> None:
        self.calls = 0
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self.tcp.getsockname()[1]
        threading.Thread(target=self._serve, args=(self.tcp, secret), daemon=True).start()

    def _serve(self, listener: socket.socket, secret: str) -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            self.calls += 1
            line.sendall(secret.encode())
            line.close()

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.tcp.shutdown(socket.SHUT_RDWR)
        self.tcp.close()


def _state() -> dict[str, Any]:
    state: dict[str, Any] = {name: Path("/proc/sys", name).read_text() for name in SETTINGS}
    state["limits"] = [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)]
    state["priority"] = os.getpriority(os.PRIO_PROCESS, 0)
    state["processors"] = sorted(os.sched_getaffinity(0))
    state["name"] = platform.node()
    state["descriptors"] = len(list(Path("/proc/self/fd").iterdir()))
    return state


def _children() -> list[int]:
    """Processes that are still there after a moment's patience, zombies included."""
    for _ in range(20):
        found = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
        if not found:
            break
        time.sleep(0.1)
    return found


def _memory(reset: bool = False) -> int:
    """The most memory this process ever had since the reset, in KiB."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
