"""How a job is asked to save and end: a file beside verl's metrics, which all machines of the job see.

Launcher and driver write the name of the signal into it; the trainer, which may run on any machine, looks at it at each point
where it can leave a step (`trainer.py`). The file exists from the start: a network file system shows a change at the next
opening, but a new file only after a while.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from iwopd.errors import UserError

METRICS_PATH = "VERL_FILE_LOGGER_PATH"
"""Variable in which verl's file logger finds its file."""
ECHO_SECONDS = 2.0
"""Further SIGTERMs within this time are the same request: `timeout` and Slurm send it to a process and to its group."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopAskedError(UserError):
    """The job was asked to end, and the newest finished step is saved."""

    exit_code = 128 + signal.SIGTERM


class StopFile:
    """`stop-001.txt` beside `metrics-001.jsonl`: empty while the job trains, the name of a signal once it must end."""

    def __init__(self, metrics: Path) -> None:
        self.path = metrics.with_name(metrics.name.replace("metrics", "stop").replace(".jsonl", ".txt"))
        self._metrics = metrics

    @classmethod
    def of_this_job(cls) -> StopFile | None:
        """None if the job was started by hand without a file for its metrics."""
        metrics = os.environ.get(METRICS_PATH)
        return cls(Path(metrics)) if metrics else None

    def clear(self) -> None:
        """Create it empty."""
        self.path.write_text("", encoding="utf-8")

    def ask(self, name: str) -> None:
        """Ask the trainer to save and end; `name` is the signal's."""
        self.path.write_text(name, encoding="utf-8")

    def asked(self) -> str:
        """The signal's name; empty if nothing was asked."""
        with suppress(OSError):
            return self.path.read_text(encoding="utf-8").strip()
        return ""

    @property
    def training_began(self) -> bool:
        """Whether there can be something to save: verl opens its metrics when all models are loaded."""
        return self._metrics.exists()


class Received:
    """Signals that arrived. The first asks for a stop, a later one for an end at once."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.again = False
        self._when = 0.0

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """For `signal.signal`."""
        now = time.monotonic()
        if self.first is None:
            self.first, self._when = signal.Signals(number), now
        elif number == signal.SIGINT or now - self._when > ECHO_SECONDS:
            self.again = True


@contextmanager
def received_signals() -> Iterator[Received]:
    """Collects SIGTERM and SIGINT."""
    received = Received()
    before = {number: signal.signal(number, received.note) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listen(stop: StopFile) -> None:
    """In the driver: SIGTERM asks the trainer to save and end; before training or the second time it ends the driver."""
    received = Received()

    def note(number: int, frame: FrameType | None) -> None:
        received.note(number)
        if received.again or not stop.training_began:
            raise SystemExit(128 + number)
        stop.ask(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, note)
