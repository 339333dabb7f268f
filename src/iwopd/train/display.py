"""What a terminal shows of a run, from before its models are loaded to its end: a table in place, or lines for logs and pipes.

Both show what is under way in long steps, from a thread of their own, and answer Ctrl-C at once. A signal's handler may
interrupt anything, so it only leaves a note: whoever prints reads it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from iwopd.config import Config
from iwopd.runs.alerts import Alert
from iwopd.stages import duration, rate
from iwopd.train.activity import Activity

PULSE = 0.5
"""Seconds between two looks at what is under way, where it is told in lines."""
QUIET_STARTING, QUIET = 3.0, 15.0
"""So many seconds without a line, before the first step and later, until one says what is under way."""
SHORT = 2.0
"""Seconds of a stage that is not worth a line."""
SHOWN = 5
"""Evaluations of a task, and alerts, that the table shows."""
STAGES = ("rollout", "teacher", "update")


class Display:
    """Follows a run. This one shows nothing: `tracking.console = "off"`, or a process that is not the first."""

    def __init__(self, config: Config) -> None:
        self.steps, self.activity = config.steps, Activity()
        self.teacher: Callable[[], str] = lambda: ""
        """The teacher's state, in words."""
        self.alerts: Sequence[Alert] = ()
        """Those that are not over."""

    def about(self, lines: Sequence[tuple[str, str]]) -> None:
        """What this run is, before anything is loaded."""

    def before(self, records: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
        """What an earlier process left of a run that goes on."""

    def step(self, record: Mapping[str, Any]) -> None: ...
    def evaluation(self, record: Mapping[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...
    def alert(self, alert: Alert) -> None:
        """Something begins to go wrong."""

    def stopping(self) -> None:
        """The run has been asked to stop after this step; called by a signal's handler."""
        self.activity.stopping = True

    def close(self) -> None: ...

    @property
    def _stopping_words(self) -> str:
        return f"finishing step {self.activity.step or 1}; again to stop now"


class Totals:
    """Tokens written over the run, and those that answers to their end would have cost beyond them."""

    def __init__(self) -> None:
        self.written = 0.0
        self.saved = 0.0
        self.whole: float | None = None
        """Tokens of an answer to its end: the mean of the last evaluation, which always writes so far."""

    def step(self, record: Mapping[str, Any]) -> None:
        written = record.get("tokens_written") or 0
        self.written += written
        if self.whole is not None and record.get("rollout/stopped"):
            self.saved += max(0.0, record["rollouts"] * self.whole - written)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self.whole = record.get("mean_tokens", self.whole)

    def words(self) -> str:
        if not self.saved:
            return f"{self.written:,.0f} written"
        share = self.saved / (self.saved + self.written)
        return f"{self.written:,.0f} written, about {self.saved:,.0f} saved by the horizon ({share:.0%})"


class Shown(Display):
    """What both displays know."""

    def __init__(self, config: Config, console: Console) -> None:
        super().__init__(config)
        self.console, self.totals = console, Totals()
        self.began: float | None = None
        """When the first step of this process began; the first report ends it."""
        self.done = 0
        """Steps of this process."""
        self.taken = 0
        """The last step of the run."""
        self.ended = 0.0

    def before(self, records: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
        for evaluation in evaluations:
            self.totals.evaluation(evaluation)
        for record in records:
            self.totals.step(record)
            self.taken = record["step"]

    def left(self, step: int) -> str:
        """Time to the last step, at the pace of this process, evaluations included; empty: not known yet, or none."""
        if self.began is None or not self.done or step >= self.steps:
            return ""
        pace = (self.ended - self.began) / self.done
        return f"about {duration(max(0.0, pace * (self.steps - step) - (time.monotonic() - self.ended)))} left"

    def _count(self, record: Mapping[str, Any]) -> None:
        self.totals.step(record)
        self.ended, self.taken = time.monotonic(), record["step"]
        if self.began is None:
            self.began = self.ended - record["time/step"]
        self.done += 1


class PlainDisplay(Shown):
    """One line per step, and one now and then in long ones."""

    def __init__(self, config: Config, console: Console) -> None:
        super().__init__(config, console)
        self._last, self._printing = time.monotonic(), threading.Lock()
        self._told = ""
        """The stage that was told last."""
        self.served = config.teacher.has_servers
        self._notes: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="iwopd-display", daemon=True)
        self._thread.start()

    def about(self, lines: Sequence[tuple[str, str]]) -> None:
        for name, text in lines:
            self._print(f"{name:<9}{text}")

    def step(self, record: Mapping[str, Any]) -> None:
        self._count(record)
        ends = [f"step {record['step']}/{self.steps}  loss {record['loss']:+.4f}"]
        if record["rollouts"]:
            ends += [f"kl {record['kl/sampled']:.3f}", f"|gap| {record['gap/abs_mean']:.3f}"]
            ends += [f"weight {record['weights/mean']:.2f}", f"grad {record['grad_norm']:.2f}"]
            ends += [f"length {record['rollout/length_mean']:.0f}", f"cut {record['rollout/truncated']:.0%}"]
        else:
            ends += [f"grad {record['grad_norm']:.2f}", _others(record)]
        ends.append(" ".join(f"{name} {record[f'time/{name}']:.2f}s" for name in STAGES))
        if record["rollouts"]:
            ends.append(rate(record["throughput/tokens_per_second"], 1))
            ends += [f"reward {record['reward/mean']:.3f}"] if "reward/mean" in record else []
            ends.append(_others(record))
        ends += [self.left(record["step"]), "UPDATE SKIPPED" if record["skipped"] else ""]
        self._print("  ".join(word for word in ends if word))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self.totals.evaluation(record)
        self._print(f"step {record['step']}/{self.steps}  {record['task']} {100 * record['mean']:.1f} %")

    def say(self, text: str) -> None:
        self._print(text)

    def alert(self, alert: Alert) -> None:
        self._print(f"ALERT  {alert.sentence}")

    def stopping(self) -> None:
        super().stopping()
        self._notes.put(self._stopping_words)

    def close(self) -> None:
        self._notes.put(None)
        self._thread.join(timeout=5)
        if self.totals.written:
            self._print(f"tokens: {self.totals.words()}")

    def _follow(self) -> None:
        while True:
            try:
                note = self._notes.get(timeout=PULSE)
            except Empty:
                self._tell()
                continue
            if note is None:
                return
            self._print(note)

    def _tell(self) -> None:
        """What is under way, if nobody has heard anything for a while."""
        name, words, step = self.activity.name, self.activity.words(), self.activity.step
        quiet, news = time.monotonic() - self._last, not self.done and name != self._told and self.activity.seconds > SHORT
        if words and quiet > (QUIET_STARTING if news else QUIET):
            self._told = name
            self._print(words if step is None else f"step {step}/{self.steps}: {words}")
            if name == "teacher" and self.served:
                self._print(f"teacher: {self.teacher()}")

    def _print(self, text: str) -> None:
        with self._printing:
            print(text, file=self.console.file, flush=True)
            self._last = time.monotonic()


class LiveDisplay(Shown):
    """A small table that stays in place; messages scroll by above it."""

    def __init__(self, config: Config, console: Console) -> None:
        super().__init__(config, console)
        self.latest: dict[str, Any] = {}
        self.scores: list[tuple[str, int, float]] = []
        self.live = Live(console=console, refresh_per_second=4, transient=False, get_renderable=self._table)
        self.live.start()

    def about(self, lines: Sequence[tuple[str, str]]) -> None:
        for name, text in lines:
            self.console.print(f"{name:<9}{text}", markup=False, highlight=False, soft_wrap=True)

    def before(self, records: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
        super().before(records, evaluations)
        self.scores = [(one["task"], one["step"], one["mean"]) for one in evaluations]

    def step(self, record: Mapping[str, Any]) -> None:
        self._count(record)
        self.latest = dict(record)
        self.live.refresh()

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self.totals.evaluation(record)
        self.scores.append((record["task"], record["step"], record["mean"]))
        self.live.refresh()

    def say(self, text: str) -> None:
        self.console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def alert(self, alert: Alert) -> None:
        """In full above the table, where it stays; the table has its first words as long as it holds."""
        self.console.print(f"ALERT  {alert.sentence}", style="bold red", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.activity.stage("")
        self.live.stop()

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        now, activity = self.latest, self.activity
        done = self.taken
        if done or activity.step is not None:
            filled = round(20 * done / self.steps)
            table.add_row("step", f"{done}/{self.steps} {'█' * filled}{'░' * (20 - filled)} {self.left(done)}".rstrip())
        if words := activity.words():
            table.add_row("now", Text(words if activity.step is None else f"step {activity.step}: {words}"))
        for task in dict.fromkeys(task for task, _, _ in self.scores):
            line = [f"step {step}: {100 * mean:.1f} %" for name, step, mean in self.scores if name == task]
            table.add_row(Text(task), "   ".join(line[-SHOWN:]))
        for name, text in _learning(now) if now else []:
            table.add_row(name, Text(text))
        if self.totals.written:
            table.add_row("tokens", self.totals.words())
        if now:
            stages = "   ".join(f"{name} {now[f'time/{name}']:.2f} s" for name in STAGES)
            speed = rate(now["throughput/tokens_per_second"], 1)
            table.add_row("time", f"{stages}   {speed}".rstrip())
        if state := self.teacher():
            table.add_row("teacher", Text(state))
        for alert in self.alerts[-SHOWN:]:
            words = f"{alert.title} since step {alert.since}: {alert.text}"
            table.add_row(Text("alert", style="bold red"), Text(words, style="red"))
        if activity.stopping and activity.name:
            table.add_row(Text("stopping", style="bold yellow"), Text(self._stopping_words, style="yellow"))
        return table


def _learning(now: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How the last step went, in rows of the table."""
    rows = []
    if now["rollouts"]:
        floor = now.get("gap/noise_floor")
        noise = "" if floor is None else f" (noise floor {floor:.2g})"
        rows.append(("gap", f"{now['gap/abs_mean']:.3f}{noise}   KL {now['kl/sampled']:.3f}   loss {now['loss']:+.4f}"))
    else:
        rows.append(("loss", f"{now['loss']:+.4f}"))
    if others := _others(now):
        rows.append(("others", others))
    if "reward/mean" in now:
        unjudged = f", {now['reward/failed']:.0f} without a verdict" if now["reward/failed"] else ""
        rows.append(("reward", f"{now['reward/mean']:.3f}{unjudged}"))
    if now["rollouts"]:
        rows.append(("weights", f"{now['weights/mean']:.2f} ({now['weights/min']:.2f} to {now['weights/max']:.2f})"))
        stopped = f", {share:.0%} stopped by the horizon" if (share := now.get("rollout/stopped") or 0) else ""
        rows.append(("answers", f"{now['rollout/length_mean']:.0f} tokens, {now['rollout/truncated']:.0%} cut off{stopped}"))
    if now["skipped"]:
        rows.append(("update", "SKIPPED: loss or gradient was not finite"))
    return rows


def _others(record: Mapping[str, Any]) -> str:
    """What others wrote in a step, in words; empty: nothing."""
    if not record.get("mix/share"):
        return ""
    return f"others {record['mix/share']:.0%} (log-prob {record['mix/logprob']:.3f})"


def open_display(config: Config, console: Console | None = None, *, is_main: bool | None = None) -> Display:
    """As `tracking.console` says. `is_main`: whether this is the first of several processes; None: as it was launched."""
    main = os.environ.get("RANK", "0") == "0" if is_main is None else is_main
    choice, console = config.tracking.console, console or Console(stderr=True)
    if choice == "off" or not main:
        return Display(config)
    if choice == "live" or (choice == "auto" and console.is_terminal):
        return LiveDisplay(config, console)
    return PlainDisplay(config, console)
