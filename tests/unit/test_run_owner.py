"""One process at a time writes into a run directory. Real processes, which are killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from iwopd.runs import owner
from iwopd.runs.logs import RunError
from iwopd.runs.owner import FILE, Owner, owned, owner_of

HOLD = """
import os, sys, time
from pathlib import Path
from iwopd.runs.owner import owned
with owned(Path(sys.argv[1]), print):
    if len(sys.argv) > 2 and os.fork() == 0:
        time.sleep(3600)
        os._exit(0)
    print("held", flush=True)
    time.sleep(3600)
"""


@contextmanager
def holder(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *options], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def take(folder: Path) -> list[str]:
    """Own the folder for a moment; returns what was said."""
    said: list[str] = []
    with owned(folder, said.append):
        assert (found := owner_of(folder)) is not None
        assert found.pid == os.getpid()
    return said


def test_a_folder_in_use_is_refused_with_host_and_process_and_free_after_a_kill(tmp_path: Path) -> None:
    with holder(tmp_path / "run", "fork") as process:
        named = rf"is in use by process {process.pid} on {socket.gethostname()} \(since 20"
        with pytest.raises(RunError, match=named):
            take(tmp_path / "run")
        with pytest.raises(RunError, match=named):
            owner.refuse_owned(tmp_path / "run")
        process.kill()  # its forked child lives on, as a worker process may
        process.wait()
        assert (tmp_path / "run" / FILE).exists()
        assert take(tmp_path / "run") == []
    assert not (tmp_path / "run" / FILE).exists()  # a clean end leaves nothing


def test_a_stopped_process_is_not_dead(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(RunError, match="in use"):
            take(tmp_path)


def test_the_lock_of_one_that_ended_in_between_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    """Three in a row: the file is another one each time, and never left behind."""
    for _ in range(3):
        take(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_inherits_the_lock_keeps_it(tmp_path: Path) -> None:
    with owned(tmp_path, print) as ownership:
        job = subprocess.Popen(["sleep", "60"], pass_fds=[ownership.descriptor])
        os.close(os.dup(ownership.descriptor))
        ownership.leave()  # as if this process had been killed
    try:
        with pytest.raises(RunError, match="in use"):
            take(tmp_path)
    finally:
        job.kill()
        job.wait()
    assert take(tmp_path) == []


# --- other machines, and file systems without locks -----------------------------------------------------------------


def written(folder: Path, **change: Any) -> Owner:
    """The file of somebody else."""
    other = replace(Owner.myself(), token="other", **change)
    (folder / FILE).write_text(json.dumps(asdict(other)))
    return other


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "WATCH", 0.5)
    monkeypatch.setattr(owner, "PATIENCE", 0.05)


@pytest.mark.usefixtures("hurried")
def test_a_dead_owner_on_another_machine_is_watched_and_replaced(tmp_path: Path) -> None:
    written(tmp_path, host="gpu7", machine="another", pid=77)
    said = take(tmp_path)
    assert "process 77 on gpu7" in said[0]
    assert "gave no sign of life" in said[1]


@pytest.mark.usefixtures("hurried")
def test_a_living_owner_on_another_machine_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = written(tmp_path, host="gpu7", machine="another", pid=77)
    pause = time.sleep

    def beats(seconds: float) -> None:
        written(tmp_path, **{name: value for name, value in asdict(other).items() if name not in ("token", "beat")}, beat=1)
        pause(seconds)

    monkeypatch.setattr(time, "sleep", beats)
    with pytest.raises(RunError, match="in use by process 77 on gpu7"):
        take(tmp_path)


@pytest.mark.usefixtures("hurried")
def test_without_locks_the_process_itself_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_lock", lambda descriptor: None)

    def no_locks(*_: Any) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    written(tmp_path)  # of this process, which lives
    with pytest.raises(RunError, match=f"in use by process {os.getpid()} on"):
        take(tmp_path)
    written(tmp_path, started="0")  # of one that had the same id
    assert take(tmp_path) == []
    child = subprocess.Popen(["true"])
    written(tmp_path, pid=child.pid, started="1")
    child.wait()
    assert take(tmp_path) == []


@pytest.mark.usefixtures("hurried")
def test_one_that_was_taken_for_dead_writes_no_more(tmp_path: Path) -> None:
    with owned(tmp_path, print) as ownership:
        ownership.check()
        written(tmp_path, host="gpu7", pid=77)
        with pytest.raises(RunError, match=r"process 77 on gpu7 .*has taken"):
            ownership.check()
    assert (tmp_path / FILE).exists()  # the other's


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": "x"}', b"\xff" * 9000, b'{"pid": 1e400}'])
def test_a_file_that_names_nobody_blocks_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert take(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to .*file"):
        take(tmp_path / "file" / "run")
