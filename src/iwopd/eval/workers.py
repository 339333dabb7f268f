"""Worker processes that compare answers, started when needed and killed when a comparison takes too long.

Why not `ProcessPoolExecutor`: one stuck or killed worker breaks the whole pool. Why not threads: sympy inside one long
multiplication cannot be interrupted. Here a worker that dies affects only the answer it was working on.

What ends a worker:

- the kernel, when a check has used its CPU time (a timer that the worker sets; it ends the process even inside C code). CPU
  time, because with wall time answers would fail when the machine is busy;
- the pool, with SIGKILL, when there is no reply after a generous multiple of that in wall time;
- the end of this process, for any reason: the pipe closes, which an idle worker reads and a busy one gets as a signal.
  (PR_SET_PDEATHSIG does not work here: it fires when the starting *thread* ends.)

POSIX systems only: Windows has neither these limits nor these signals.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from iwopd.errors import UserError

MEMORY_BYTES = 1 << 30
"""Address space of a worker; with math-verify loaded it uses about a tenth."""

WALL_FACTOR = 10.0
WALL_GRACE_SECONDS = 10.0
"""A check may take `WALL_FACTOR` times its CPU limit in wall time, plus this."""

START_SECONDS = 120.0
"""Wall time for a worker to start; it takes half a second on an idle machine."""

CHECKS_PER_WORKER = 500
"""Then the worker is replaced: sympy's caches grow."""

_PROGRAM = Path(__file__).with_name("math_worker.py")
_LONGEST_REPLY = 1 << 20
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class MathWorkerError(UserError):
    """Workers cannot be started."""


class MathVerdict(NamedTuple):
    """A worker's verdict: `status` is correct, wrong, unparsed or timeout, `detail` the reason."""

    status: str
    detail: str


class WorkerPool:
    """Up to `size` workers, started when needed. Call `check` from any thread."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one worker, got {size}")
        self.size = size
        self.started = 0  # in total, for tests
        self._closed = False
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        """Start without workers; at most `size` threads hold a slot and so a worker."""
        self._free: list[_Worker] = []
        self._taken: set[_Worker] = set()
        self._lock, self._slots = threading.Lock(), threading.Semaphore(self.size)

    def check(self, answer: str, gold: str, timeout: float) -> MathVerdict:
        """Compare. Waiting for a free worker does not count towards the timeout."""
        verdict, innocent = self._try(answer, gold, timeout)
        if innocent:  # something else killed the worker, or its memory was full before: retry on a new one
            verdict, _ = self._try(answer, gold, timeout, fresh=True)
        return verdict

    def _try(self, answer: str, gold: str, timeout: float, *, fresh: bool = False) -> tuple[MathVerdict, bool]:
        """A verdict, and whether something other than this pair may have caused it."""
        worker = self._take(fresh=fresh)
        keep = False
        try:
            reply = worker.check(answer, gold, timeout, time.monotonic() + WALL_FACTOR * timeout + WALL_GRACE_SECONDS)
            keep = reply["exhausted"] is None and worker.checks < CHECKS_PER_WORKER
            return MathVerdict(reply["status"], reply["detail"]), reply["exhausted"] == "memory" and worker.checks > 1
        except _LateError:
            return MathVerdict(
                "timeout", f"no verdict within {WALL_FACTOR * timeout + WALL_GRACE_SECONDS:g} s of wall time"
            ), False
        except _DiedError as died:
            if died.signal in (signal.SIGPROF, signal.SIGXCPU):
                return MathVerdict("timeout", f"no verdict within {timeout:g} s of CPU time"), False
            return MathVerdict("timeout", f"no verdict: the worker process {died}, twice"), True
        finally:  # also after KeyboardInterrupt: a worker with a pending request must not be reused
            self._give_back(worker, keep=keep)

    def close(self) -> None:
        """End all workers, also busy ones; running and later checks raise `RuntimeError`."""
        with self._lock:
            self._closed = True
            free, taken = self._free, list(self._taken)
            self._free = []
        for worker in free:
            worker.end()
        for worker in taken:
            worker.kill()  # the thread that uses it sees the end of the pipe and does the rest

    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        with self._lock:
            return [worker.pid for worker in (*self._free, *self._taken)]

    def _take(self, *, fresh: bool) -> _Worker:
        self._slots.acquire()
        worker = None
        try:
            with self._lock:
                if self._free:
                    worker = self._free.pop()
                    self._taken.add(worker)
            if worker is not None and not fresh:
                return worker
            if worker is not None:
                self._end(worker)
            self._check_open()
            worker = _Worker()
            worker.wait_until_ready()
            with self._lock:
                self.started += 1
                self._taken.add(worker)
            self._check_open()  # it may have been closed in the meantime
            return worker
        except BaseException:
            if worker is not None:
                self._end(worker)
            self._slots.release()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the pool of math workers is closed")

    def _give_back(self, worker: _Worker, *, keep: bool) -> None:
        with self._lock:
            keep = keep and not self._closed
            if keep:
                self._taken.discard(worker)
                self._free.append(worker)
        if not keep:
            self._end(worker)
        self._slots.release()

    def _end(self, worker: _Worker) -> None:
        worker.end()
        with self._lock:
            self._taken.discard(worker)

    def _abandon(self) -> None:
        """In a forked child: the workers belong to the parent. Close our copies of their pipes."""
        for worker in (*self._free, *self._taken):
            worker.forget()
        self._reset()


def shared_pool() -> WorkerPool:
    """The pool of this process, one worker per usable core."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = WorkerPool(usable_cores())
        return _shared


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_parallel(
    work: Callable[[_Item], _Result], items: Sequence[_Item], workers: int | None = None
) -> Iterator[tuple[int, _Result]]:
    """(place, `work(item)`) of every item as it is finished, in threads that each wait for a process (None: one per core)."""
    with ThreadPoolExecutor(workers or usable_cores()) as pool:
        places = {pool.submit(work, item): place for place, item in enumerate(items)}
        try:
            for future in as_completed(places):
                yield places[future], future.result()
        finally:  # also when the caller stops early
            pool.shutdown(cancel_futures=True)


class _LateError(Exception):
    pass


class _DiedError(Exception):
    def __init__(self, code: int) -> None:
        self.signal = -code if code < 0 else None
        name = signal.Signals(-code).name if code < 0 and -code in set(signal.Signals) else str(-code)
        super().__init__(f"was ended by {name}" if code < 0 else f"ended with exit code {code}")


class _Worker:
    """One process and its pipes. Used by one thread at a time, except for `kill`."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        if not sys.executable or importlib.util.find_spec("math_verify") is None:
            raise MathWorkerError("math answers are checked with math-verify, which is not installed: pip install math-verify")
        self.checks = 0
        # -P: do not search the program's own directory, which has a `math.py`. -W: some test runners make warnings errors.
        command = [sys.executable, "-P", "-W", "ignore", str(_PROGRAM)]
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}  # deterministic verdicts
        with _fork_lock:  # a fork in another thread must see all of this worker or nothing
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=environment,
                process_group=0,  # Ctrl-C goes to this process only
            )
            _workers.add(self)
        self._sink, self._source = cast(Any, self._process.stdin), cast(Any, self._process.stdout)
        os.set_blocking(self._sink.fileno(), False)
        os.set_blocking(self._source.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        try:
            self._send({"path": [entry for entry in sys.path if entry], "memory": MEMORY_BYTES}, deadline)
            hello = self._receive(deadline)
        except _LateError:
            raise MathWorkerError(f"a math worker did not start within {START_SECONDS:g} s") from None
        except _DiedError as died:
            raise MathWorkerError(
                f"a math worker {died} while starting; try: {sys.executable} -c 'import math_verify'"
            ) from None
        if "failed" in hello:
            raise MathWorkerError(f"a math worker cannot import math-verify ({hello['failed']}): pip install math-verify")

    def check(self, answer: str, gold: str, timeout: float, deadline: float) -> dict[str, Any]:
        self.checks += 1
        number = next(self._numbers)
        self._send({"id": number, "answer": answer, "gold": gold, "timeout": timeout}, deadline)
        reply = self._receive(deadline)
        if reply.get("id") != number:  # should never happen, and must not count as an answer
            raise _DiedError(self.end())
        return reply

    def kill(self) -> int:
        """Kill and reap; returns the exit code. Harmless when repeated."""
        self._process.kill()
        return self._process.wait()

    def end(self) -> int:
        """Kill, reap and close; returns the exit code. Harmless when repeated."""
        code = self.kill()
        self._sink.close()
        self._source.close()
        _workers.discard(self)
        return code

    def forget(self) -> None:
        self._process.returncode = 0  # not our child: nothing to wait for
        self._sink.close()
        self._source.close()

    def _send(self, message: dict[str, Any], deadline: float) -> None:
        body = json.dumps(message).encode()
        data = memoryview(struct.pack(">I", len(body)) + body)
        while data:
            self._wait(self._sink, select.POLLOUT, deadline)
            try:
                data = data[self._sink.write(data) or 0 :]
            except BrokenPipeError:
                raise _DiedError(self._exit_code()) from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        size = struct.unpack(">I", self._read_exactly(4, deadline))[0]
        if size > _LONGEST_REPLY:
            raise _DiedError(self.end())
        reply = json.loads(self._read_exactly(size, deadline))
        assert isinstance(reply, dict)
        return reply

    def _read_exactly(self, count: int, deadline: float) -> bytes:
        data = b""
        while len(data) < count:
            self._wait(self._source, select.POLLIN, deadline)
            part = self._source.read(count - len(data))  # None: nothing to read yet
            if part == b"":
                raise _DiedError(self._exit_code())
            data += part or b""
        return data

    def _wait(self, pipe: Any, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000.0):
            raise _LateError

    def _exit_code(self) -> int:
        """After the pipe has closed: the process is about to end; wait for its exit code, which says why."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        return self.end()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_workers: set[_Worker] = set()
_shared: WorkerPool | None = None
_shared_lock = threading.Lock()
_fork_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _shared_lock, _fork_lock
    _shared_lock, _fork_lock = threading.Lock(), threading.Lock()
    for pool in _pools:
        pool._abandon()
    for worker in _workers:  # workers that were just starting
        worker.forget()
    _workers.clear()


def _end_all() -> None:
    for pool in list(_pools):
        pool.close()


os.register_at_fork(
    before=lambda: _fork_lock.acquire(), after_in_parent=lambda: _fork_lock.release(), after_in_child=_after_fork_in_child
)
atexit.register(_end_all)
