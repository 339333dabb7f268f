"""`iwopd` commands in processes of their own that need not begin with seconds of imports.

One process imports the package once and forks a child for every command, with its own words, environment and output. What is
left out is the start of an interpreter: `python -m iwopd` itself, other hash seeds. Where those count, start a process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

from waiting import PATIENCE

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Of the process that imports: what is read when packages are imported."""
PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of prctl: nothing outlives the tests."""

spent = 0.0
"""CPU seconds of all commands that have ended."""


class Forked:
    """A command that runs, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, words: Sequence[object], env: Mapping[str, str], stdout: int, stderr: int, before: str = "") -> None:
        status, theirs = os.pipe()
        self.args = [str(word) for word in words]
        request = {"words": self.args, "env": dict(env), "cwd": str(Path.cwd()), "before": before}
        _ask(request, (stdout, stderr, theirs))
        os.close(theirs)
        self._status = os.fdopen(status, "rb", buffering=0)
        self.stdout: IO[str] | None = None
        self.returncode: int | None = None
        self.pid = int(self._line()["pid"])

    def _line(self) -> dict[str, Any]:
        line = self._status.readline()
        assert line, "the process that forks has died"
        return cast("dict[str, Any]", json.loads(line))

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._end()
        return self.returncode

    def _end(self) -> None:
        global spent
        ended = self._line()
        self.returncode = int(ended["code"])
        spent += ended["seconds"]
        self._status.close()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if timeout is not None and not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, None]:
        """All that it says until it ends."""
        assert self.stdout is not None
        overdue = threading.Timer(timeout, self.kill)
        overdue.start()
        with self.stdout:
            said = self.stdout.read()
        overdue.cancel()
        self.wait()
        return said, None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(*words: object, env: Mapping[str, str] = os.environ, quiet: bool = False, before: str = "") -> Forked:
    """`iwopd WORDS` under way; both its outputs come in `stdout`, or nowhere. `before`: code that it runs first."""
    if quiet:
        with Path(os.devnull).open("w") as nowhere:
            return Forked(words, env, nowhere.fileno(), nowhere.fileno(), before)
    ours, theirs = os.pipe()
    begun = Forked(words, env, theirs, theirs, before)
    os.close(theirs)
    begun.stdout = os.fdopen(ours, errors="replace")
    return begun


def run(*words: object, env: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    """`iwopd WORDS` to its end."""
    files = stdout, stderr = os.memfd_create("stdout"), os.memfd_create("stderr")
    try:
        code = Forked(words, env, stdout, stderr).wait(PATIENCE)
        said = []
        for file in files:
            os.lseek(file, 0, os.SEEK_SET)
            with os.fdopen(os.dup(file), errors="replace") as content:
                said.append(content.read())
    finally:
        for file in files:
            os.close(file)
    return subprocess.CompletedProcess([str(word) for word in words], code, *said)


@cache
def _line_to_parent() -> socket.socket:
    """To the process that forks, which is started with the first command of a session."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, **ENVIRONMENT}
    words = [sys.executable, __file__, str(theirs.fileno())]
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()

    def close() -> None:
        ours.close()
        process.wait()

    atexit.register(close)
    assert ours.recv(100) == b"ready", "the process that forks has not come up; its words are above"
    return ours


def _ask(request: dict[str, Any], files: tuple[int, ...]) -> None:
    line = _line_to_parent()
    data = json.dumps(request).encode()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(data) + 4096)
    socket.send_fds(line, [data], files)


# --- the process that forks ---------------------------------------------------------------------------------------------


def serve(line: socket.socket) -> tuple[list[str], str]:
    """Fork for every request. Returns in the children only, with the words of their command and what comes before it."""
    sys.path.remove(str(Path(__file__).parent))
    for module in (
        *("iwopd.cli", "iwopd.train.run", "iwopd.train.doctor", "iwopd.eval", "iwopd.teacher.local", "iwopd.teacher.server"),
        *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "llama", "gemma2", "gpt2")),
    ):
        __import__(module)
    import iwopd.cli

    iwopd.cli._parser()
    tasks = len(list(Path("/proc/self/task").iterdir()))
    assert tasks == 1, f"{tasks} threads after the imports: forks of this process may hang"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who watch over the commands are not waited for
    gc.freeze()  # a child's collections would copy every page
    line.send(b"ready")
    while True:
        data, files, _, _ = socket.recv_fds(line, 2**20, 3)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            line.close()
            return watch_over(json.loads(data), files)
        for file in files:
            os.close(file)


def watch_over(request: dict[str, Any], files: list[int]) -> tuple[list[str], str]:
    """Fork once more, say who the child is and how it ends; returns in the child."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdout, stderr, status = files
    child = os.fork()
    if child == 0:
        die_with_parent()
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
            os.dup2(source, target)
        for file in files:
            os.close(file)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        return request["words"], request["before"]
    os.close(stdout)
    os.close(stderr)
    os.write(status, json.dumps({"pid": child}).encode() + b"\n")
    _, code, used = os.wait4(child, 0)
    ended = {"code": os.waitstatus_to_exitcode(code), "seconds": used.ru_utime + used.ru_stime}
    os.write(status, json.dumps(ended).encode() + b"\n")
    os._exit(0)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)


if __name__ == "__main__":
    given, first = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = ["iwopd", *given]
    exec(first)
    from iwopd.cli import main

    main()
