"""Math workers and real trouble: hanging checks, killed and stopped processes, little memory, threads, forks, sudden ends."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from iwopd.cli import add_command
from iwopd.errors import UserError
from iwopd.eval import workers
from iwopd.eval.math import check_math, check_math_many
from iwopd.eval.workers import MathWorkerError, WorkerPool
from waiting import PATIENCE

HANGS = r"9^{9^{9^{9}}}"
SLOW = r"\sum_{k=1}^{10^9}\frac{1}{k}"  # sums for minutes


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1)
    yield pool
    pool.close()


def right(pool: WorkerPool, number: int = 3) -> bool:
    return pool.check(rf"\frac{{{number}}}{{6}}", rf"\frac{{{2 * number}}}{{12}}", 30.0).status == "correct"


def running(pid: int) -> bool:
    """Alive, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: object, seconds: float = PATIENCE) -> bool:
    assert callable(condition)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_in_thread(pool: WorkerPool, answer: str, timeout: float) -> tuple[threading.Thread, list[workers.MathVerdict]]:
    verdicts: list[workers.MathVerdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(pool.check(answer, "5", timeout)))
    thread.start()
    return thread, verdicts


def test_a_hanging_check_is_a_timeout_and_the_next_answer_is_right(pool: WorkerPool) -> None:
    for answer in (HANGS, SLOW):
        assert right(pool)
        [pid] = pool.pids()
        verdict = pool.check(answer, "5", 0.5)
        assert verdict.status == "timeout"
        assert verdict.detail == "no verdict within 0.5 s of CPU time"
        assert not Path(f"/proc/{pid}").exists()  # gone and reaped
    assert right(pool)
    assert pool.started == 3


def test_a_worker_that_is_killed_while_idle_harms_no_answer(pool: WorkerPool) -> None:
    assert right(pool)
    [pid] = pool.pids()
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not running(pid))
    assert right(pool)
    assert pool.pids() != [pid]


def test_a_worker_that_is_killed_in_the_middle_is_asked_again_and_said_to_be_killed(pool: WorkerPool) -> None:
    assert right(pool)
    [first] = pool.pids()
    thread, verdicts = run_in_thread(pool, SLOW, 20.0)
    before = cpu_seconds(first)
    assert wait_for(lambda: cpu_seconds(first) > before + 0.1)
    os.kill(first, signal.SIGKILL)
    assert wait_for(lambda: [pid for pid in pool.pids() if pid != first])  # a second try, on a new worker
    [second] = pool.pids()
    os.kill(second, signal.SIGKILL)
    thread.join()
    assert verdicts[0].status == "timeout"
    assert "SIGKILL" in verdicts[0].detail
    assert right(pool)


def test_a_stopped_worker_runs_into_the_wall_clock(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WALL_GRACE_SECONDS", 1.0)
    assert right(pool)
    [pid] = pool.pids()
    os.kill(pid, signal.SIGSTOP)
    verdict = pool.check("x+x", "2x", 0.1)
    assert verdict == ("timeout", "no verdict within 2 s of wall time")
    assert not Path(f"/proc/{pid}").exists()
    monkeypatch.undo()
    assert right(pool)


def test_too_little_memory_is_a_timeout_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MEMORY_BYTES", 200 << 20)
    pool = WorkerPool(1)
    try:
        # A thousand million bits in one number; math-verify alone would swallow the error and say "different".
        verdict = pool.check("2^{1000000000}", "5", 60.0)
        assert verdict == ("timeout", "out of memory: the check needs more than 200 MiB")
        assert right(pool)
    finally:
        pool.close()


def test_too_deep_an_expression_is_a_timeout_with_its_own_words(pool: WorkerPool) -> None:
    verdict = pool.check("-" * 300 + "5", "6", 60.0)
    assert verdict == ("timeout", "out of stack: the expression is nested too deeply")
    assert right(pool)


def test_threads_get_their_own_answers() -> None:
    def ask(i: int) -> tuple[str, str | None]:
        outcome = check_math(rf"\boxed{{\frac{{{i}}}{{97}}}}", rf"\frac{{{2 * i if i % 3 else 2 * i + 1}}}{{194}}")
        return outcome.status, outcome.answer

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(ask, range(1, 97)))
    assert results == [("correct" if i % 3 else "wrong", rf"\frac{{{i}}}{{97}}") for i in range(1, 97)]


def test_workers_outlive_the_thread_that_started_them() -> None:
    pool = WorkerPool(1)
    try:
        thread = threading.Thread(target=right, args=(pool,))
        thread.start()
        thread.join()
        [pid] = pool.pids()
        time.sleep(0.3)
        assert running(pid)
        assert right(pool)
        assert pool.pids() == [pid]
    finally:
        pool.close()


def test_a_worker_is_replaced_before_its_caches_grow(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHECKS_PER_WORKER", 2)
    assert all(right(pool, number) for number in range(1, 6))
    assert pool.started == 3


def test_a_forked_child_makes_its_own_workers_and_leaves_ours_alone() -> None:
    assert check_math(r"\boxed{x+x}", "2x").status == "correct"
    ours = set(workers.shared_pool().pids())
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = check_math(r"\boxed{y+y}", "2y").status
        theirs = workers.shared_pool().pids()
        os.write(writer, json.dumps([status, theirs]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        status, theirs = json.load(pipe)
    os.waitpid(child, 0)
    assert status == "correct"
    assert theirs
    assert not ours & set(theirs)
    assert all(running(pid) for pid in ours)
    assert check_math(r"\boxed{z+z}", "2z").status == "correct"
    assert wait_for(lambda: not any(running(pid) for pid in theirs))  # their pipe closed with the child


def test_closing_a_pool_ends_its_busy_worker(pool: WorkerPool) -> None:
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            pool.check(SLOW, "5", 60.0)
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert wait_for(pool.pids)
    [pid] = pool.pids()
    pool.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not running(pid)
    assert "closed" in str(failures[0])


def test_a_worker_that_cannot_start_is_an_error_with_a_remedy(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MathWorkerError, match="ended with exit code 1 while starting"):
        pool.check("x", "y", 1.0)
    with pytest.raises(MathWorkerError):
        check_math_many([(r"\boxed{x+x}", "2x")] * 3, workers=2)
    monkeypatch.undo()
    assert right(pool)


# --- whole programs


def script(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    """A program without a main guard, in a directory with files that would shadow what a worker imports."""
    for name in ("sympy", "math", "json"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('shadowed')\n")
    program = tmp_path / "program" / "script.py"
    program.parent.mkdir()
    program.write_text(
        "from iwopd.eval.math import check_math, check_math_many\nfrom iwopd.eval.workers import shared_pool\n" + body
    )
    return subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, cwd=tmp_path)


def test_a_script_without_a_main_guard_runs_once_and_leaves_nothing_running(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "print('start')\n"
        "print(check_math(r'\\boxed{x+x}', '2x').status)\n"
        "print([o.status for o in check_math_many([(r'\\boxed{x+x}', '2x'), (r'\\boxed{y+x}', '2x')], workers=2)])\n"
        "print(*shared_pool().pids())\n",
    )
    lines = program.communicate(timeout=PATIENCE)[0].splitlines()
    assert program.returncode == 0
    assert lines[:3] == ["start", "correct", "['correct', 'wrong']"]
    pids = [int(pid) for pid in lines[3].split()]
    assert pids
    assert not any(running(pid) for pid in pids)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_workers_end_when_their_parent_is_killed(tmp_path: Path, busy: bool) -> None:
    program = script(
        tmp_path,
        "import threading, time\n"
        "check_math(r'\\boxed{x+x}', '2x')\n"
        f"hang = lambda: check_math(r'\\boxed{{{HANGS}}}', '5', timeout=600)\n"
        f"if {busy}: threading.Thread(target=hang).start()\n"
        "time.sleep(1)\n"
        "print(*shared_pool().pids(), flush=True)\n"
        "time.sleep(600)\n",
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert pids
    assert all(running(pid) for pid in pids)
    program.kill()
    program.communicate()
    assert wait_for(lambda: not any(running(pid) for pid in pids))


FOUND_ESCAPE = "the answer has the control character U+001B at position 0"


@pytest.mark.parametrize(
    ("arguments", "code", "status", "answer", "reason"),
    [
        ([r"\boxed{\frac12}", "0.5"], 0, "correct", r"\frac12", "math-verify finds them equal"),
        ([r"\boxed{-0.5}", "--", r"-\frac12"], 0, "correct", "-0.5", "math-verify finds them equal"),
        (["5", "5"], 1, "unparsed", "(none)", r"no \boxed{} in the text"),
        (["-", "7"], 1, "wrong", "6", "different integers"),
        (["@text", "7"], 1, "unparsed", r"\x1b[2J\udcff", FOUND_ESCAPE),
    ],
)
def test_the_command_says_what_it_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    status: str,
    answer: str,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"\\boxed{\x1b[2J\xff}")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(rb"\boxed{6}")))
    assert command(arguments) == code
    assert capsys.readouterr().out.splitlines() == [f"status  {status}", f"answer  {answer}", f"reason  {reason}"]


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_bytes(b"\\boxed{\x1b[2J\xff}")
    assert command([f"@{tmp_path / 'text'}", "7", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"status": "unparsed", "answer": "\x1b[2J\udcff", "detail": FOUND_ESCAPE}


def test_the_command_refuses_what_it_cannot_read() -> None:
    with pytest.raises(UserError, match="cannot read 'missing': No such file"):
        command(["@missing", "7"])
    with pytest.raises(UserError, match="--timeout must be a positive number of seconds"):
        command([r"\boxed{5}", "5", "--timeout", "0"])


def command(arguments: list[str]) -> int:
    """Run the command by its own two functions, without the other commands around it."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "check-math")
    options, rest = parser.parse_known_args(["check-math", *arguments])
    assert not rest
    code = options.run(options, rest)
    assert isinstance(code, int)
    return code
