"""Processes of their own for what may crash, hang or run out of memory: how they end becomes something to read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

CHILD = (sys.executable, "-m", "iwopd.train.doctor.gpu.child")
"""Begins the command of a check in a process of its own."""
GRACE = 10.0
"""Seconds that processes of a group have after one of them has failed: their own words may say more."""
POLL = 0.05
WORDS = 12
"""Last lines of a process that a finding shows."""
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
"""Variables that would make a process wait for others."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None
    """Exit code, negative for a signal; None: it was still running when time was up."""
    output: str
    """All that it printed."""

    @property
    def words(self) -> str:
        """Its last lines."""
        return "\n".join(self.output.strip().splitlines()[-WORDS:])

    @property
    def how(self) -> str:
        if self.code is None:
            return "gave no answer in time"
        if self.code < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


def run_together(
    commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]], *, seconds: float, folder: Path
) -> list[Ended]:
    """Run commands side by side, each with its own variables, for at most so many seconds. None of them is left running.

    `folder` gets their output. If one fails, the others have `GRACE` seconds more.
    """
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    logs = [folder / f"output-{place}.txt" for place in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(_end, processes)
        for command, own, log in zip(commands, variables, logs, strict=True):
            file = stack.enter_context(log.open("wb"))
            processes.append(
                subprocess.Popen(
                    command, env={**plain, **own}, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
            )
        codes = _wait(processes, time.monotonic() + seconds)
    return [Ended(code, log.read_text(errors="replace")) for code, log in zip(codes, logs, strict=True)]


def run_alone(command: Sequence[str], variables: Mapping[str, str], *, seconds: float, folder: Path) -> Ended:
    return run_together([command], [variables], seconds=seconds, folder=folder)[0]


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Exit codes when all have ended, or time is up."""
    failed = False
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return codes
        if not failed and any(code for code in codes):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            return codes
        time.sleep(POLL)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Each with the processes that it started."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
