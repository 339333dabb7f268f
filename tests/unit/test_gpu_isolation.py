"""Processes of their own: how they end, and that none stays."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from iwopd.train.doctor.findings import failure, passed, warning
from iwopd.train.doctor.gpu import isolation
from iwopd.train.doctor.gpu.isolation import Ended, run_alone, run_together
from iwopd.train.doctor.gpu.wire import read_findings, write_findings
from waiting import PATIENCE, wait_until


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("code", "how", "words"),
    [
        ("print('fine')", "ended with exit code 0", "fine"),
        ("raise SystemExit(3)", "ended with exit code 3", ""),
        (
            "import os; print('so far', flush=True); os.kill(os.getpid(), 4)",
            "was killed by SIGILL",
            "so far",
        ),
        ("raise MemoryError('CUDA out of memory')", "ended with exit code 1", "MemoryError: CUDA out of memory"),
    ],
)
def test_how_a_process_ends_is_said_in_words(code: str, how: str, words: str, tmp_path: Path) -> None:
    ended = run_alone(python(code), {}, seconds=PATIENCE, folder=tmp_path)
    assert ended.how == how
    assert words in ended.words


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(inner.pid, flush=True)\n"
        "time.sleep(600)"
    )
    for seconds in (2, 20, 200):  # a busy machine needs longer before it hangs
        ended = run_alone(python(code), {}, seconds=seconds, folder=tmp_path)
        assert ended.code is None
        assert ended.how == "gave no answer in time"
        if ended.output:
            break
    inner = int(ended.output)
    wait_until(lambda: not is_running(inner), "the end of what it started")


def test_if_one_of_several_fails_the_others_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "GRACE", 0.5)
    commands = [python("raise SystemExit(5)"), python("import time; time.sleep(600)")]
    first, second = run_together(commands, [{}, {}], seconds=PATIENCE, folder=tmp_path)
    assert (first.code, second.code) == (5, None)


def test_each_has_its_own_variables_and_nobody_a_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("IWOPD_TEST", "shared")
    names = ("WORLD_SIZE", "IWOPD_TEST", "CUDA_VISIBLE_DEVICES")
    show = python(f"import os; print(*(os.environ.get(name) for name in {names}))")
    ended = run_together([show, show], [{"CUDA_VISIBLE_DEVICES": place} for place in "01"], seconds=PATIENCE, folder=tmp_path)
    assert [one.output.strip() for one in ended] == ["None shared 0", "None shared 1"]
    assert os.environ["WORLD_SIZE"] == "8"


def test_only_the_last_words_are_shown() -> None:
    assert Ended(1, "\n".join(map(str, range(100)))).words == "\n".join(map(str, range(88, 100)))


def test_findings_travel_whole_and_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    found = [passed("a", "fine", {"x": 1.5}), warning("b", "hm", "look", "more\nlines"), failure("c", "no", "do")]
    file = tmp_path / "found.jsonl"
    assert list(read_findings(file)) == []
    write_findings(file, found)
    with file.open("a") as out:
        out.write('{"level": "pa')
    assert list(read_findings(file)) == found
