"""The code checker at work: outcomes, limits, threads, the command line, and EvalPlus's canonical solutions."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import debian
from iwopd.cli import add_command
from iwopd.data.sources import SourceError
from iwopd.errors import UserError
from iwopd.eval import evalplus
from iwopd.eval.code import CodeJob, SandboxError, check_code, check_code_many
from iwopd.eval.evalplus import check_solution, check_solutions, expected_outputs
from iwopd.eval.evalplus_problems import CodeProblem, load_problems
from iwopd.eval.sandbox import bubblewrap, interpreter, landlock, probe, wire
from iwopd.eval.sandbox.backends import Backend
from iwopd.eval.sandbox.run import Program, Report, run
from shared_data import shared

ADD = "def add(a, b):\n    return a + b\n"


@pytest.fixture(params=["bubblewrap", "landlock"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "bubblewrap" and debian.find("bwrap", "bubblewrap") is None:
        pytest.skip(f"bubblewrap was not exercised: {debian.missing('bubblewrap')}")
    problem = probe.examine(Backend(request.param))
    if problem is not None:
        pytest.skip(f"{request.param} was not exercised: {problem}")
    return str(request.param)


# --- outcomes


def test_a_right_program_passes(backend: str) -> None:
    outcome = check_code(ADD, "add", [([1, 2], 3), (("a", "b"), "ab"), ([[1], [2]], [1, 2])], backend=backend)
    assert (outcome.status, outcome.detail, outcome.passed, outcome.total) == ("pass", "", 3, 3)
    assert 0.0 <= outcome.seconds < 5.0


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        ("def add(a, b):\n    return a - b", "fail", "test 2: returned -1"),
        ("def add(a, b):\n    return a // b", "error", "ZeroDivisionError"),
        ("def add(a, b):\n    return a +", "error", "SyntaxError"),
        ("def sub(a, b):\n    return a - b", "error", "does not define 'add'"),
        ("import no_such_module", "error", "ModuleNotFoundError"),
        ("add = 3", "error", "not callable"),
        ("def add(a, b):\n    return len(bytearray(3 << 30))", "error", "MemoryError"),
        ("import threading\ndef add(a, b):\n    threading.Thread(target=print).start()", "error", "new thread"),
        ("def add(a, b):\n    while True: pass", "timeout", "CPU"),
        ("import time\ndef add(a, b):\n    time.sleep(99)", "timeout", "asleep"),
        ("import os\ndef add(a, b):\n    os.abort()", "error", "ended during test 1"),
        ("def add(a, b):\n    raise ValueError('\\x1b[2J\\ud800')", "error", r"\\x1b\[2J\\xd800"),
    ],
)
def test_wrong_programs_do_not(backend: str, source: str, status: str, words: str) -> None:
    outcome = check_code(source, "add", [([0, 0], 0), ([1, 2], 3)], timeout=1.0, backend=backend)
    assert outcome.status == status
    assert re.search(words, outcome.detail), outcome.detail
    assert outcome.detail.isprintable()
    assert outcome.passed <= 1


HONEST = {
    "temporary files": """
import os, tempfile
def f():
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as file, tempfile.TemporaryFile("w+") as other:
        os.mkdir(folder + "/sub")
        with open(folder + "/a", "w") as text:
            text.write("yes")
        os.rename(folder + "/a", folder + "/sub/b")
        other.write(open(folder + "/sub/b").read())
        other.seek(0)
        return other.read()
""",
    "files in its own folder": """
import shutil
def f():
    open("a", "w").write("yes")
    shutil.copyfile("a", "b")
    return open("b").read()
""",
    "/dev/null": """
import contextlib, os
def f():
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        print("no")
    return "yes"
""",
    "asyncio": """
import asyncio
async def one(word):
    await asyncio.sleep(0.001)
    return word
async def both():
    return "".join(await asyncio.gather(one("y"), one("es")))
def f():
    return asyncio.run(both())
""",
    "time zones": """
import datetime, zoneinfo
def f():
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    return "yes" if datetime.datetime(2024, 7, 1, tzinfo=berlin).utcoffset() == datetime.timedelta(hours=2) else "no"
""",
    "sqlite": """
import sqlite3
def f():
    base = sqlite3.connect("base")
    base.execute("create table t (word)")
    base.execute("insert into t values ('yes')")
    base.commit()
    return base.execute("select word from t").fetchone()[0]
""",
    "the standard library": """
def f():
    import importlib
    importlib.invalidate_caches()
    import colorsys, concurrent.futures, csv, ctypes, decimal, email.message, lzma, ssl, unittest.mock, xml.dom.minidom
    return "yes"
""",
}


@pytest.mark.parametrize("what", HONEST)
def test_honest_programs_get_what_they_need(backend: str, what: str) -> None:
    if what == "time zones" and interpreter.time_zones() is None:
        pytest.skip("this machine has no time zones: neither the system's nor the package tzdata")
    outcome = check_code(HONEST[what], "f", [([], "yes")], backend=backend)
    assert (outcome.status, outcome.detail) == ("pass", "")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f():\n    open('a', 'wb').write(b'x' * (9 << 20))", "File too large"),
        ("def f():\n    for n in range(20): open(str(n), 'wb').write(b'x' * (8 << 20))\n    while True: pass", "MiB|No space"),
        ("import os\ndef f():\n    for n in range(9**9): os.mkdir(str(n))", "names"),
        ("import os\ndef f():\n    while True: os.mkdir('n' * 200, 0o300), os.chdir('n' * 200)", "names|looked into"),
    ],
)
def test_its_folder_is_small(backend: str, source: str, why: str) -> None:
    outcome = check_code(source, "f", [([], 1)], timeout=20.0, backend=backend)
    assert outcome.status == "error"
    assert re.search(why, outcome.detail), outcome.detail


def test_its_folder_is_new_every_time_and_gone_afterwards(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = "import os\ndef f():\n    seen = os.listdir()\n    os.makedirs('a/b', 0o300)\n    open('c', 'w')\n    return seen"
    for _ in range(2):
        assert check_code(source, "f", [([], [])], backend=backend).status == "pass"
    assert list(tmp_path.iterdir()) == []


def test_sleep_is_limited_in_all(backend: str) -> None:
    """Each nap is shorter than what one call may sleep, and their sum is not."""
    source = "import time\ndef f():\n    time.sleep(0.2)\n    return 1"
    calls: list[Report] = []
    job = Program(source, "f", [wire.encode_plain([])] * 20, [9.0] * 20, 9.0, sleep=0.5)

    def heard(report: Report) -> bool:
        calls.append(report)
        return True

    end = run(job, Backend(backend), heard)
    assert end.status == "timeout"
    assert re.search(r"asleep for 0\.[5-9] s in all", end.detail), end.detail
    assert 1 <= len(calls) <= 3
    assert end.slept > 0.5


def test_base_and_plus_tests_share_their_sleep(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evalplus, "SLEEP_SECONDS", 0.7)
    expected = expected_outputs(SQUARE, cache=tmp_path, backend=backend)
    sleepy = "import time\ndef square(x):\n    time.sleep(0.2)\n    return x * x"
    verdict = check_solution(SQUARE, sleepy, expected=expected, backend=backend)
    assert (verdict.base.status, verdict.plus.status) == ("pass", "timeout")


@pytest.mark.parametrize(
    ("result", "expected", "status"),
    [
        ("fractions.Fraction(1, 2)", 0.5, "pass"),
        ("[fractions.Fraction(1, 3)]", [1 / 3], "fail"),
        ("decimal.Decimal('0.5')", 0.5, "pass"),
        ("collections.namedtuple('P', 'x y')(1, 2.5)", (1, 2.5), "pass"),
        ("collections.namedtuple('P', 'x y')(0.1 + 0.2, 0.1)", (0.3, 0.1), "fail"),
        ("(0.1 + 0.2, 0.1)", (0.3, 0.1), "pass"),
        ("enum.IntEnum('E', 'A B').B", 2, "pass"),
        ("bytearray(b'x')", b"x", "pass"),
        ("{1: 2}.keys()", {1}, "pass"),
        ("{1: 2}.values()", [2], "fail"),
        ("type('L', (list,), {})([1])", [1], "pass"),
        ("type('D', (dict,), {})(a=1)", {"a": 1}, "pass"),
        ("type('L', (list,), {})(range(500_000))", list(range(500_000)), "pass"),
        ("set(range(50_000))", set(range(50_000)), "pass"),
        ("set(range(50_000))", set(range(50_001)), "fail"),
    ],
)
def test_results_are_judged_as_evalplus_judges_them(result: str, expected: Any, status: str) -> None:
    """By `==` whatever the type; with a tolerance only where the types agree."""
    source = f"import collections, decimal, enum, fractions\ndef f():\n    return {result}"
    assert check_code(source, "f", [([], expected)]).status == status


def test_every_call_gets_its_own_arguments(backend: str) -> None:
    source = "def f(x):\n    x.append(1)\n    return len(x)"
    shared: list[int] = []
    assert check_code(source, "f", [([shared], 1), ([shared], 1)], backend=backend).status == "pass"
    assert shared == []


def test_types_arrive_as_they_were(backend: str) -> None:
    source = "def f(*xs):\n    return [type(x).__name__ for x in xs] + [list(xs)]"
    given = [None, True, 7, 1.5, 2j, "ü\ud800", b"x", [1], (2,), {3}, frozenset({4}), {"k": (5,)}, 10**5000]
    assert check_code(source, "f", [(given, [*(type(x).__name__ for x in given), given])], backend=backend).status == "pass"


def test_large_results_are_compared_too(backend: str) -> None:
    source = "def f(n):\n    return [float(x) for x in range(n)]"
    assert check_code(source, "f", [([500_000], list(range(500_000)))], backend=backend).status == "pass"
    assert check_code(source, "f", [([500_000], list(range(1, 500_001)))], backend=backend).status == "fail"
    assert check_code("def f(n):\n    return 'ü' * n", "f", [([5 << 20], "ü" * (5 << 20))], backend=backend).status == "pass"


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ([], "tests is empty"),
        ([([1],)], "test 1 must be"),
        ([([1], 1), (3, 1)], "test 2 must be"),
        ([([object()], 1)], r"test 1: value\[0\] is a builtins.object"),
        ([([1], object())], "test 1: value is a builtins.object"),
    ],
)
def test_bad_tests_are_named(tests: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_code(ADD, "add", tests)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_timeouts_are_named(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be"):
        check_code(ADD, "add", [([1, 2], 3)], timeout=timeout)


def test_a_busy_machine_fails_nobody(backend: str) -> None:
    """Half a second of work within a limit of one second of CPU time, while many others want the processors."""
    work = "import time\ndef f():\n    while time.process_time() < {}: pass\n    return 1"
    jobs = [CodeJob(work.format(0.5), "f", [([], 1)], timeout=1.0) for _ in range(8 * len(os.sched_getaffinity(0)))]
    start = time.monotonic()
    outcomes = check_code_many(jobs, workers=len(jobs), backend=backend)
    assert time.monotonic() - start > 1.5, "the machine was not busy"
    assert [outcome.status for outcome in outcomes] == ["pass"] * len(jobs)


def test_any_thread_may_ask(backend: str) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(check_code(ADD, "add", [([1, 2], 3)], backend=backend).status))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["pass"] * 8


def test_batches_keep_their_order(backend: str) -> None:
    jobs = [CodeJob(ADD, "add", [([number, 1], number + 1 if number % 2 else 0)]) for number in range(6)]
    steps: list[tuple[int, int]] = []
    outcomes = check_code_many(jobs, workers=3, progress=lambda done, of: steps.append((done, of)), backend=backend)
    assert [outcome.status for outcome in outcomes] == ["fail", "pass"] * 3
    assert steps == [(number, 6) for number in range(1, 7)]


def test_nothing_is_left_open(backend: str) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    check_code(ADD, "add", [([1, 2], 3)], backend=backend)
    before = count()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: check_code(ADD, "add", [([1, 2], 4)], backend=backend), range(12)))
    assert count() == before


def test_a_right_program_that_talks_on_the_channel_does_not_pass(backend: str) -> None:
    source = (
        "import os\n"
        "def f(x):\n"
        "    for number in range(3, 64):\n"
        "        try: os.write(number, x)\n"
        "        except OSError: pass\n"
        "    return 1"
    )
    assert check_code(source, "f", [([b""], 1)], backend=backend).status == "pass"
    for noise in (b"x", b"\x01\x00\x00\x00N", bytes(8)):
        assert check_code(source, "f", [([noise], 1)], backend=backend).status == "error"
    late = source.replace("    return 1", "    return 1\nend = os._exit\nos._exit = lambda code: (f(b'N'), end(code))")
    assert check_code(late, "f", [([b""], 1)], backend=backend).status == "error"


# --- which sandbox


def test_without_a_sandbox_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_found", {})
    monkeypatch.setattr(bubblewrap, "missing", lambda: "bwrap is not installed")
    monkeypatch.setattr(landlock, "version", lambda: 0)
    with pytest.raises(SandboxError, match=r"Install bubblewrap .* --unsafe-no-sandbox .*bwrap is not installed"):
        check_code(ADD, "add", [([1, 2], 3)])
    assert check_code(ADD, "add", [([1, 2], 3)], unsafe=True).status == "pass"


def test_without_bubblewrap_landlock_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if probe.examine(Backend("landlock")) is not None:
        pytest.skip(f"landlock was not exercised: {probe.examine(Backend('landlock'))}")
    monkeypatch.setattr(probe, "_found", {})
    monkeypatch.setattr(bubblewrap, "missing", lambda: "bwrap is not installed")
    assert probe.choose().name == "landlock"


def test_the_self_test_notices_a_sandbox_that_is_none() -> None:
    problem = probe.self_test(Backend("none"))
    assert problem is not None
    for harm in ("read a file", "called the network", "made a process", "executed a program", "signalled the parent"):
        assert harm in problem


@pytest.mark.parametrize("wall", ["readable", "seccomp"])
def test_the_self_test_notices_a_missing_wall(monkeypatch: pytest.MonkeyPatch, wall: str) -> None:
    if probe.examine(Backend("landlock")) is not None:
        pytest.skip(f"landlock was not exercised: {probe.examine(Backend('landlock'))}")
    walls = Backend.walls
    monkeypatch.setattr(Backend, "walls", lambda *given: walls(*given) | {wall: [] if wall == "readable" else False})
    assert "broke out" in str(probe.self_test(Backend("landlock")))


def test_a_sandbox_that_does_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    if probe.examine(Backend("bubblewrap")) is not None:
        pytest.skip("needs bubblewrap")
    wanted = bubblewrap.command
    monkeypatch.setattr(bubblewrap, "command", lambda channel, info: [*wanted(channel, info)[:1], "--no-such-option"])
    with pytest.raises(SandboxError, match="no-such-option"):
        check_code(ADD, "add", [([1, 2], 3)], backend="bubblewrap")


# --- the command


def _command(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    start = "import argparse, sys; from iwopd.cli import add_command; from iwopd.errors import UserError\n"
    start += "p = argparse.ArgumentParser(); add_command(p.add_subparsers(), 'check-code')\n"
    start += "o = p.parse_args(['check-code', *sys.argv[1:]])\n"
    start += "try:\n    sys.exit(o.run(o, []))\nexcept UserError as e:\n    print(e, file=sys.stderr); sys.exit(2)"
    return subprocess.run([sys.executable, "-c", start, *words], input=stdin, capture_output=True, text=True, check=False)


def test_the_command(tmp_path: Path) -> None:
    program, tests = tmp_path / "add.py", tmp_path / "tests.json"
    program.write_text(ADD)
    tests.write_text("[[[1, 2], 3], [[0.1, 0.2], 0.3]]")
    done = _command(str(program), "add", str(tests))
    assert (done.returncode, done.stdout.split(",")[0]) == (0, "pass: 2 of 2 tests"), done.stderr
    done = _command("-", "add", str(tests), "--json", stdin=ADD.replace("+", "-"))
    assert done.returncode == 1
    assert json.loads(done.stdout)["status"] == "fail"
    done = _command("--self-test")
    assert done.returncode == 0
    assert ", and is used" in done.stdout


@pytest.mark.parametrize(
    ("words", "tests", "why"),
    [
        (["missing.py", "add", "tests.json"], "[]", "missing.py"),
        (["add.py", "add", "none.json"], "[]", "none.json"),
        (["add.py", "add", "tests.json"], "[", "tests.json: not JSON.*line 1"),
        (["add.py", "add", "tests.json"], "{}", "expected a list"),
        (["add.py", "add", "tests.json"], "[]", "tests is empty"),
        (["add.py", "add", "tests.json"], "[[[1, 2], 3], [1]]", "tests.json: test 2 must be"),
        (["add.py"], "[]", "needs FILE"),
    ],
)
def test_the_command_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], tests: str, why: str
) -> None:
    (tmp_path / "add.py").write_text(ADD)
    (tmp_path / "tests.json").write_text(tests)
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "check-code")
    options = parser.parse_args(["check-code", *words])
    with pytest.raises(UserError, match=why):
        options.run(options, [])


# --- EvalPlus

SQUARE = CodeProblem(
    "HumanEval/999", "def square(x):\n", "square", "    return x * x\n", [[2], [3]], [[4], [-5], [0.1]], 0.0
)  # fmt: skip


def test_base_and_plus_are_told_apart(backend: str, tmp_path: Path) -> None:
    expected = expected_outputs(SQUARE, cache=tmp_path, backend=backend)
    assert [part.outputs for part in expected] == [[4, 9], [16, 25, pytest.approx(0.01)]]
    only_base = "def square(x):\n    return abs(x) * x"
    verdict = check_solution(SQUARE, only_base, expected=expected, backend=backend)
    assert (verdict.base.status, verdict.plus.status, verdict.passed) == ("pass", "fail", False)
    assert verdict.plus.passed == 1
    assert check_solution(SQUARE, SQUARE.reference, expected=expected, backend=backend).passed


def test_expected_outputs_are_cached_as_plain_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = expected_outputs(SQUARE, cache=tmp_path)
    (place,) = tmp_path.iterdir()
    assert json.loads(place.read_text())
    monkeypatch.setattr(evalplus, "run", lambda *_: pytest.fail("it ran again"))
    assert expected_outputs(SQUARE, cache=tmp_path) == first
    monkeypatch.undo()
    place.write_text("rubbish")
    assert [part.outputs for part in expected_outputs(SQUARE, cache=tmp_path)] == [part.outputs for part in first]


def test_a_canonical_solution_that_fails_is_named(tmp_path: Path) -> None:
    broken = CodeProblem("HumanEval/998", "", "f", "def f(x):\n    return 1 / x\n", [[1], [0]], [], 0.0)
    with pytest.raises(SourceError, match=r"HumanEval/998.*ZeroDivisionError"):
        expected_outputs(broken, cache=tmp_path)


def _problems(name: str) -> list[CodeProblem]:
    return load_problems(shared(name))


# Half of all CPU time is theirs (Mbpp/255 returns 130 million values, Mbpp/599 adds numbers one by one). The bench has them.
_HEAVY = {
    "Mbpp/255",
    "Mbpp/599",
    "Mbpp/630",
    "Mbpp/392",
    "Mbpp/271",
    "Mbpp/603",
    "HumanEval/130",
    "HumanEval/139",
    "HumanEval/15",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HumanEvalPlus.jsonl", "HumanEvalPlus-Mini.jsonl", "MbppPlus.jsonl"])
def test_canonical_solutions_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of each set here; `bench/code_check.py` runs all of it."""
    monkeypatch.setattr(evalplus, "_cache_folder", lambda: tmp_path)
    chosen = [problem for problem in _problems(name)[::3] if problem.id not in _HEAVY]
    verdicts = check_solutions([(problem, problem.reference) for problem in chosen])
    assert [verdict for verdict in verdicts if not verdict.passed] == []


@pytest.mark.slow
def test_nothing_passes_by_returning_a_constant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evalplus, "_cache_folder", lambda: tmp_path)
    chosen = [problem for problem in _problems("MbppPlus.jsonl")[::9] if problem.id not in _HEAVY]
    programs = [f"def {problem.entry_point}(*args, **named):\n    return None" for problem in chosen]
    passed = [verdict.id for verdict in check_solutions(list(zip(chosen, programs, strict=True))) if verdict.passed]
    assert passed == []


@pytest.mark.slow
def test_the_known_fault_of_evalplus(tmp_path: Path) -> None:
    (problem,) = [problem for problem in _problems("HumanEvalPlus.jsonl") if problem.id == "HumanEval/32"]
    expected = expected_outputs(problem, cache=tmp_path)
    assert check_solution(problem, problem.reference, expected=expected).passed
    assert not check_solution(problem, problem.reference, expected=expected, as_published=True).passed
