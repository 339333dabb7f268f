"""Following a run: the page is written again when logs grow, and for the last time when the run is finished."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from browser.report_runs import evaluation, make_run, metrics
from iwopd.report.page import write_report
from iwopd.report.watch import all_finished, stamps, watch
from waiting import PATIENCE, wait_until


def append(path: Path, record: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_watch_follows_a_run_to_its_end(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "report.html"
    said: list[str] = []
    thread = threading.Thread(target=watch, args=([run], out), kwargs={"every": 0.2, "say": said.append}, daemon=True)
    thread.start()
    wait_until(lambda: said == ["waiting for a run"])
    make_run(run, steps=19, planned=20)
    wait_until(lambda: out.exists() and "19 of 20" in out.read_text(encoding="utf-8"))
    assert 'http-equiv="refresh"' in out.read_text(encoding="utf-8")
    noise, before = random.Random(0), out.stat().st_mtime_ns
    append(run / "metrics.jsonl", metrics(20, noise))
    wait_until(lambda: out.stat().st_mtime_ns > before)
    time.sleep(0.7)
    assert thread.is_alive()  # the last evaluation is still to come
    append(run / "evals.jsonl", evaluation(20, noise, "tiny", 40, 0.9))
    thread.join(PATIENCE)
    assert not thread.is_alive()
    text = out.read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' not in text
    assert "unfinished" not in text
    assert said[-1] == f"the run is finished; report: {out}"


def test_ctrl_c_leaves_a_page_that_stays_as_it_is(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", steps=10, planned=20), tmp_path / "report.html"
    program = (
        "import signal, sys; from pathlib import Path; from iwopd.report.watch import watch\n"
        # A shell that starts the tests in the background has its children ignore Ctrl-C.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"try: watch([Path({str(run)!r})], Path({str(out)!r}), every=0.2)\n"
        "except KeyboardInterrupt: sys.exit(130)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "OMP_NUM_THREADS": "1"})
    wait_until(out.exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert 'http-equiv="refresh"' not in out.read_text(encoding="utf-8")
    assert not list(tmp_path.glob(".tmp*"))


def test_ctrl_c_right_after_the_first_page_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_run(tmp_path / "run", steps=10, planned=20), tmp_path / "report.html"
    refreshed: list[float | None] = []

    def write_and_interrupt(*places: Any, refresh: float | None, **options: Any) -> None:
        write_report(*places, refresh=refresh, **options)
        refreshed.append(refresh)
        if len(refreshed) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("iwopd.report.watch.write_report", write_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        watch([run], out, every=0.2)
    assert refreshed == [0.2, None]
    assert 'http-equiv="refresh"' not in out.read_text(encoding="utf-8")


def test_stamps_change_with_the_logs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = stamps([tmp_path])
    assert len(before) == 5
    append(run / "evals.jsonl", {"step": 30})
    assert stamps([tmp_path]) != before
    assert stamps([tmp_path / "nowhere"]) == {}


def test_finished(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "run", steps=20)
    assert all_finished([tmp_path / "a"])
    make_run(tmp_path / "a" / "other", steps=10, planned=20)
    assert not all_finished([tmp_path / "a"])
