"""Start a program in a sandbox, send its inputs, read its reports, and end it.

All reading is bounded, all waiting has a deadline, and deadlines are in CPU time, so a busy machine causes no
timeouts. Time in which the program neither ran nor waited for a processor (it slept or hung) has deadlines of its own: at a
stretch, and in all. So a run takes no longer than its CPU limit and `Program.sleep`, and what the machine makes it wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from iwopd.errors import UserError
from iwopd.eval.sandbox import bubblewrap, interpreter, private_folder, wire
from iwopd.eval.sandbox.backends import Backend
from iwopd.eval.sandbox.unbuilt import Related

_TICK = 0.05
_START_SECONDS = 120.0  # a bare Python starts in 0.03 s
_IDLE_SECONDS = 5.0  # one call may sleep this long, or as long as its CPU limit
SLEEP_SECONDS = 10.0
"""All calls together may sleep this long."""
_RUN_BYTES = 64 << 20  # all results together; each is bounded by wire.RESULT


class SandboxError(UserError):
    """The sandbox itself did not work; nothing is known about the program."""


@dataclass(frozen=True)
class Program:
    """A program and its inputs. `arguments`: for each call the encoded list of its positional arguments."""

    source: str
    entry_point: str
    arguments: Sequence[bytes]
    cpu_each: Sequence[float]
    """CPU seconds for each call (loading the program may take as long as the longest)."""
    cpu_total: float
    """CPU seconds for everything."""
    sleep: float = SLEEP_SECONDS
    """Seconds for everything in which it neither runs nor waits for a processor."""


@dataclass(frozen=True)
class Report:
    """The outcome of one call: the value it returned (sets and dicts as `Bag`, a value of a related type as `Related`), a
    `Digest` if it is too large to send, or the error it raised.
    """

    index: int
    value: Any
    error: str | None
    seconds: float
    """CPU time since the previous report."""


@dataclass(frozen=True)
class Digest:
    """What `wire.digest` makes of a value."""

    sha256: bytes


@dataclass(frozen=True)
class End:
    """How a run ended. `complete`: every call was reported; `stopped`: the receiver stopped it."""

    status: Literal["complete", "stopped", "timeout", "broken", "crashed", "forged"]
    detail: str
    seconds: float
    """CPU time."""
    slept: float
    """Seconds in which it neither ran nor waited for a processor."""


class _Over(Exception):  # noqa: N818 - not an error
    """Carries the end of a run out of the loop."""

    def __init__(self, status: Literal["stopped", "timeout", "broken", "crashed", "forged"], detail: str) -> None:
        self.status, self.detail = status, detail


def run(job: Program, backend: Backend, receive: Callable[[Report], bool]) -> End:
    """Run `job`; `receive` gets every report in order and returns whether to continue. Nothing is left running."""
    inside = {"source": job.source, "entry_point": job.entry_point, "arguments": list(job.arguments)}
    with contextlib.ExitStack() as files:
        mounted = backend.name == "bubblewrap"
        folder = bubblewrap.FOLDER if mounted else files.enter_context(private_folder.private_folder())
        message = wire.encode_plain(inside | {"walls": backend.walls(math.ceil(job.cpu_total) + 5, folder)})
        process, channel, info, stderr = _start(backend, message, folder, files)
        child = _Child(process, folder, mounted)
        try:
            child.watch(_inner_pid(info) if mounted else process.pid)
            session = _Session(job, child, channel, receive)
            session.ready()
            session.calls()
            return End("complete", "", child.cpu - session.start, session.slept)
        except _Over as over:
            return End(over.status, over.detail, child.cpu - session.start, session.slept)
        except _NotReadyError as failure:
            child.end()
            raise SandboxError(f"the {backend.name} sandbox did not start: {_last_words(stderr) or failure}") from None
        finally:
            child.end()


def _start(
    backend: Backend, message: bytes, folder: str, files: contextlib.ExitStack
) -> tuple[subprocess.Popen[bytes], int, int, int]:
    job = os.memfd_create("job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    files.callback(os.close, job)
    view = memoryview(message)
    while view:
        view = view[os.write(job, view) :]
    os.lseek(job, 0, os.SEEK_SET)
    fcntl.fcntl(job, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    pipes = [os.pipe() for _ in range(3)]
    for reading, _ in pipes:
        files.callback(os.close, reading)
    (channel, to_channel), (info, to_info), (stderr, to_stderr) = pipes
    try:
        process = subprocess.Popen(  # no preexec_fn: any thread may do this
            backend.command(to_channel, to_info),
            stdin=job,
            stdout=subprocess.DEVNULL,
            stderr=to_stderr,
            pass_fds=(to_channel, to_info) if backend.name == "bubblewrap" else (to_channel,),
            env=interpreter.environment(folder),
            cwd="/" if backend.name == "bubblewrap" else folder,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"cannot start the {backend.name} sandbox: {error}") from error
    finally:
        for _, writing in pipes:
            os.close(writing)
    return process, channel, info, stderr


class _NotReadyError(Exception):
    """The child failed before it ran the program."""


def _inner_pid(info: int) -> int:
    """The process that bubblewrap started, by its id in our namespace."""
    told = b""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        if not _readable(info, deadline - time.monotonic()):
            raise _NotReadyError("bubblewrap says nothing")
        piece = os.read(info, 4096)
        told += piece
        with contextlib.suppress(ValueError):
            return int(json.loads(told)["child-pid"])
        if not piece:
            raise _NotReadyError("bubblewrap ended")


class _Child:
    """The process in the sandbox: its clocks, its folder, and how it is ended."""

    def __init__(self, process: subprocess.Popen[bytes], folder: str, mounted: bool) -> None:
        self.process = process
        self.folder, self.mounted = folder, mounted
        self.queues = False  # whether the kernel says how long it waited for a processor
        self.handle: int | None = None
        self.pid = 0
        self.cpu = 0.0
        self.waited = 0.0

    def watch(self, pid: int) -> None:
        self.pid = pid
        with contextlib.suppress(OSError):  # it may be gone already
            self.handle = os.pidfd_open(pid)
        with contextlib.suppress(OSError):  # when memory runs out, the kernel should kill this one
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000")

    def look(self) -> None:
        """Read its clocks: CPU seconds, and seconds that it waited for a processor."""
        with contextlib.suppress(OSError):
            self.cpu = time.clock_gettime((~self.pid << 3) | 2)  # as clock_getcpuclockid(3) computes it
        with contextlib.suppress(OSError, IndexError, ValueError):
            self.waited = int(Path(f"/proc/{self.pid}/schedstat").read_bytes().split()[1]) / 1e9
            self.queues = True

    def runnable(self) -> bool:
        """Whether it runs or waits for a processor. Its clock of waiting shows that only when it has got one."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
        except (OSError, IndexError):
            return False

    def overfull(self) -> str | None:
        """Whether it has written too much."""
        if self.mounted:
            return private_folder.overfull_mount(f"/proc/{self.pid}/root{self.folder}")
        return private_folder.overfull(self.folder)

    def end(self) -> None:
        """Kill it and wait until it is dead. It cannot fork and is process 1 of its namespace, so nothing else is left."""
        if self.handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            _readable(self.handle, 10.0)
            os.close(self.handle)
            self.handle = None
        else:
            self.process.kill()
        try:
            self.process.wait(10.0)  # bubblewrap ends when its child has
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Session:
    """The protocol over the channel."""

    def __init__(self, job: Program, child: _Child, channel: int, receive: Callable[[Report], bool]) -> None:
        self.job, self.child, self.channel, self.receive = job, child, channel, receive
        self.buffer = bytearray()
        self.total = 0
        self.start = self.mark = 0.0  # CPU clock at the beginning, and at the last report
        self.waited = 0.0  # for a processor, at the beginning
        self.watched = 0.0  # seconds in which we waited for it
        self.idle = 0.0

    @property
    def slept(self) -> float:
        """Seconds in which we waited for it while it neither ran nor waited for a processor itself."""
        return max(0.0, self.watched - (self.child.cpu - self.start) - (self.child.waited - self.waited))

    def ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while (message := self._message()) is None:
            if not _readable(self.channel, _TICK):
                if time.monotonic() > deadline:
                    raise _NotReadyError("nothing heard from it")
            elif not self._fill():
                raise _NotReadyError("it ended early")
        if message != ("ready",):
            raise _NotReadyError("it began with something else")
        self.child.look()
        self.start = self.mark = self.child.cpu
        self.waited = self.child.waited

    def calls(self) -> None:
        loading = max(self.job.cpu_each)
        for index, cpu in enumerate(self.job.cpu_each):
            message = self._wait(cpu + loading, f"test {index + 1}")
            loading = 0.0
            if not self.receive(self._report(message, index)):
                raise _Over("stopped", "")
        if self._wait(1.0, "the end") != ("end",):
            raise _Over("forged", "a report too many on the channel")
        open_ = True
        while open_ and self._wait_data(1.0, "the end"):
            open_ = self._fill()
            if self.buffer:
                raise _Over("forged", "bytes after the end on the channel")

    def _report(self, message: Any, index: int) -> Report:
        self.child.look()
        seconds, self.mark = self.child.cpu - self.mark, self.child.cpu
        if type(message) is tuple and len(message) == 2 and message[0] == "broken" and type(message[1]) is str and index == 0:
            raise _Over("broken", message[1][:300])
        if type(message) is not tuple or len(message) != 3 or type(message[1]) is not int or message[1] != index:
            raise _Over("forged", f"not a report on test {index + 1}")
        if message[0] == "returned":
            return Report(index, message[2], None, seconds)
        if message[0] == "related":
            return Report(index, Related(message[2]), None, seconds)
        if message[0] == "digest" and type(message[2]) is bytes:
            return Report(index, Digest(message[2]), None, seconds)
        if message[0] == "raised" and type(message[2]) is str:
            return Report(index, None, message[2][:300], seconds)
        raise _Over("forged", f"not a report on test {index + 1}")

    def _wait(self, cpu: float, what: str) -> Any:
        while (message := self._message()) is None:
            if self._wait_data(cpu, what) and not self._fill():
                raise _Over("crashed", f"ended during {what}{self._cause()}")
        return message

    def _wait_data(self, cpu: float, what: str) -> bool:
        """True when there is something to read; raises when a deadline has passed."""
        before, cpu_before, waited_before = time.monotonic(), self.child.cpu, self.child.waited
        readable = _readable(self.channel, _TICK)
        self.child.look()
        now, total = time.monotonic(), self.job.cpu_total
        ran, queued = self.child.cpu - cpu_before, self.child.waited - waited_before
        self.idle = 0.0 if readable else max(0.0, self.idle + now - before - ran - queued)
        self.watched += now - before
        used, whole = self.child.cpu - self.mark, self.child.cpu - self.start
        if used > cpu or whole > total:
            raise _Over("timeout", f"{what}: {used:.1f} s of CPU, {whole:.1f} s in all")
        if self.idle > min(total, max(cpu, _IDLE_SECONDS)) and not self.child.runnable():
            raise _Over("timeout", f"{what}: asleep for {self.idle:.1f} s")
        most = self.job.sleep if self.child.queues else self.job.sleep + 3.0 * total
        if self.slept > most and not self.child.runnable():
            raise _Over("timeout", f"{what}: asleep for {self.slept:.1f} s in all")
        if problem := self.child.overfull():
            raise _Over("crashed", f"{what}: {problem}")
        return readable

    def _fill(self) -> bool:
        piece = os.read(self.channel, 1 << 16)
        self.buffer += piece
        self.total += len(piece)
        if self.total > _RUN_BYTES:
            raise _Over("forged", f"more than {_RUN_BYTES >> 20} MiB of results")
        return bool(piece)

    def _message(self) -> Any:
        """The next complete message, or None."""
        if len(self.buffer) < 4:
            return None
        length = int.from_bytes(self.buffer[:4], "little")
        if length > wire.RESULT.size:
            raise _Over("forged", f"message of {length} bytes announced")
        if len(self.buffer) < 4 + length:
            return None
        data = bytes(self.buffer[4 : 4 + length])
        del self.buffer[: 4 + length]
        try:
            message = wire.decode(data)
        except wire.WireError as error:
            raise _Over("forged", f"message on the channel: {error}") from None
        if message is None:
            raise _Over("forged", "an empty message on the channel")
        return message

    def _cause(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.child.process.wait(2.0)
            number = -code if code < 0 else code - 128 if code > 128 else 0
            if number in (signal.SIGXCPU, signal.SIGKILL):
                return " (killed: over its CPU or memory limit)"
            return f" (signal {number})" if number else f" (exit code {code})"
        return ""


def _readable(file: int, seconds: float) -> bool:
    """Whether there is something to read within this time. Not with select(2), which is limited to 1024 descriptors."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000.0))


def _last_words(stderr: int) -> str:
    if not _readable(stderr, 0.0):
        return ""
    text = os.read(stderr, 4096).decode("utf-8", "replace").strip()
    return text.splitlines()[-1][:300] if text else ""
