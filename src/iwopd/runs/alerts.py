"""What goes wrong in a run, told from the metrics of its steps: the console, trackers and the report all ask here.

    watch = AlertWatch()                  while it runs: a few additions a step
    for alert in watch.step(record):      those that begin with this step
        print(alert.sentence)
    watch.flags()                         0 or 1 for each kind, for trackers
    find_alerts(run.metrics)              afterwards: all of them, with first and last step

A check takes means over `WINDOW` steps, as single steps are noisy. An alert ends when its check has found nothing for as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import Any

from iwopd.algo.noise import NoiseFloor
from iwopd.runs.logs import number

WINDOW = 5
"""Steps that are looked at together, and steps without a finding after which an alert has ended."""
GROWTH = 1.5
"""Length inflation: answers are so many times as long as in the first steps."""
ERRORS = 3.0
"""Length inflation: and by so many standard errors of the two means, as small batches vary."""
CUT_SHARE = 0.1
"""Truncation: share of answers at the length limit."""
CUT_LEAST = 3
"""Truncation: fewer answers than that are chance."""
ENTROPY_FALL = 0.2
"""Entropy collapse: share of the first steps' entropy that is left ..."""
GAP_LEFT = 0.5
"""... while so much of the gap is still there. A student that learns grows certain, too, but its gap falls as well."""

Record = Mapping[str, Any]
"""One line of metrics.jsonl."""


@dataclass(frozen=True)
class Alert:
    """Something that a person should look at."""

    kind: str
    """A key of `CHECKS`: `length`, `truncation`, `entropy`, `noise`, `skipped`."""
    title: str
    since: int
    """The step at which it was first seen."""
    last: int
    """The last step at which it was seen."""
    active: bool
    """Not over yet at the last step that is known."""
    text: str
    """What was seen at its worst, with numbers: a sentence."""
    remedy: str
    """What to do: a sentence."""

    @property
    def sentence(self) -> str:
        """For a console: everything on one line."""
        return f"{self.title} since step {self.since}: {self.text} {self.remedy}"


@dataclass(frozen=True)
class Past:
    """What a check sees."""

    first: Sequence[Record]
    """The first steps in which the student wrote answers."""
    last: Sequence[Record]
    """The latest ones."""

    @property
    def step(self) -> int:
        return int(self.last[-1]["step"])

    def both(self, name: str) -> tuple[list[float], list[float]] | None:
        """A metric then and now; None where there are too few steps with it, or the same step would be in both."""
        before, now = _values(self.first, name), _values(self.last, name)
        apart = bool(self.first) and self.last[0]["step"] > self.first[-1]["step"]
        return (before, now) if apart and len(before) == len(now) == WINDOW else None


@dataclass(frozen=True)
class Finding:
    """What a check saw."""

    severity: float
    """Compared within one kind only: an alert tells of its worst step."""
    text: str


Check = Callable[[Past], Finding | None]


def _lengthening(past: Past) -> Finding | None:
    """Where a horizon stops answers, lengths are what it makes them."""
    if (lengths := past.both("rollout/length_mean")) is None or any(_values([*past.first, *past.last], "rollout/stopped")):
        return None
    before, now = lengths
    if fmean(before) <= 0:
        return None
    growth, error = fmean(now) / fmean(before), ((variance(now) + variance(before)) / WINDOW) ** 0.5
    if growth < GROWTH or fmean(now) - fmean(before) < ERRORS * error:
        return None
    return Finding(growth, f"answers have grown from {fmean(before):.0f} to {fmean(now):.0f} tokens ({growth:.1f} times).")


def _truncation(past: Past) -> Finding | None:
    answers = sum(_values(past.last, "rollouts"))
    cut = sum(_product(record, "rollouts", "rollout/truncated") for record in past.last)
    if cut < CUT_LEAST - 0.5 or cut < CUT_SHARE * answers:
        return None
    limit = max(_values(past.last, "rollout/length_max"), default=None)
    where = "" if limit is None else f" of {limit:,.0f} tokens"
    return Finding(cut / answers, f"{cut / answers:.0%} of the answers reached the limit{where}, so their ends are missing.")


def _collapse(past: Past) -> Finding | None:
    entropies, gaps = past.both("rollout/entropy_sampled"), past.both("gap/abs_mean")
    if entropies is None or gaps is None:
        return None
    (before, now), (gap_before, gap_now) = map(fmean, entropies), map(fmean, gaps)
    if before <= 0 or now > ENTROPY_FALL * before:
        return None
    teacher = _values(past.last, "teacher/entropy")
    if teacher and now > GAP_LEFT * fmean(teacher):  # the teacher is as certain
        return None
    falls = f"the student's entropy fell from {before:.2g} to {max(now, 0.0):.2g} nats a token"
    if gap_now > GAP_LEFT * gap_before:
        return Finding(1 - now / before, f"{falls}, but its gap to the teacher only from {gap_before:.2g} to {gap_now:.2g}.")
    if _lengthening(past) or _truncation(past):  # loops please the teacher, too: the gap closes
        return Finding(1 - now / before, f"{falls}, while answers grew or were cut off: it may write in loops.")
    return None


def _noise(past: Past) -> Finding | None:
    floors, gaps = _values(past.last, "gap/noise_floor"), _values(past.last, "gap/abs_mean")
    if not floors or not gaps:
        return None
    floor = NoiseFloor(fmean(floors), 0.0, fmean(gaps))
    if floor.gap <= 0 or not floor.is_fault:  # no gap at all: the student is its own teacher and has not moved
        return None
    return Finding(
        floor.share,
        f"{floor.share:.0%} of the gap ({floor.gap:.2g} nats a token) is the pipeline's own noise ({floor.total:.2g}).",
    )


def _skipped(past: Past) -> Finding | None:
    """One skipped update is enough, and tells nothing of later steps."""
    skipped = [number(record.get("update/skipped")) or float(bool(record.get("skipped"))) for record in past.last]
    if not skipped[-1]:
        return None
    count, steps = sum(skipped), "one step" if len(skipped) == 1 else f"{len(skipped)} steps"
    words = f"{count:.0f} {'update' if count == 1 else 'updates'} in {steps} left out"
    return Finding(count, f"{words}: loss or gradient was not finite.")


CHECKS: dict[str, tuple[str, Check, str]] = {
    "length": (
        "Length inflation",
        _lengthening,
        "Read some answers for repetition; lower optim.lr, or stop answers that drift ([rollout.horizon] type = 'drift').",
    ),
    "truncation": (
        "Truncation",
        _truncation,
        "Raise rollout.max_tokens, or leave such answers out with rollout.truncated = 'mask' or 'drop'.",
    ),
    "entropy": (
        "Entropy collapse",
        _collapse,
        "Lower optim.lr, or go back to an earlier checkpoint; check that rollout.temperature is 1.",
    ),
    "noise": (
        "Noise floor",
        _noise,
        "Stop here if accuracy has settled; else score in a higher precision (`iwopd doctor` names the side to blame).",
    ),
    "skipped": (
        "Skipped updates",
        _skipped,
        "Lower optim.lr; the batches lie in the run directory (skipped-step-*.safetensors).",
    ),
}
"""Kind: title, check, what to do."""


class AlertWatch:
    """Follows a run, step after step. A resumed run is caught up with by giving it the old records first."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._first: list[Record] = []
        self._last: deque[Record] = deque(maxlen=WINDOW)
        self._open: dict[str, tuple[Alert, float]] = {}
        """By kind: the alert, and the severity that its text tells of."""
        self._quiet: dict[str, int] = {}
        self._over: list[Alert] = []
        for record in records:
            self.step(record)

    def step(self, record: Record) -> list[Alert]:
        """The alerts that begin with this step."""
        if len(self._first) < WINDOW and number(record.get("rollout/length_mean")) is not None:
            self._first.append(record)
        self._last.append(record)
        past = Past(self._first, self._last)
        return [begun for kind, (_, check, _) in CHECKS.items() if (begun := self._look(kind, check(past), past.step))]

    @property
    def active(self) -> tuple[Alert, ...]:
        """Those that are not over, the oldest first."""
        return tuple(sorted((alert for alert, _ in self._open.values()), key=lambda alert: alert.since))

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """All of them so far, the oldest first."""
        return tuple(sorted([*self._over, *self.active], key=lambda alert: alert.since))

    def flags(self) -> dict[str, float]:
        """1 for every kind that is active, 0 for the others."""
        return {f"alert/{kind}": float(kind in self._open) for kind in CHECKS}

    def _look(self, kind: str, finding: Finding | None, step: int) -> Alert | None:
        if finding is not None:
            self._quiet[kind] = 0
            if (found := self._open.get(kind)) is None:
                title, _, remedy = CHECKS[kind]
                begun = Alert(kind, title, step, step, True, finding.text, remedy)
                self._open[kind] = (begun, finding.severity)
                return begun
            alert, worst = found
            text = finding.text if finding.severity > worst else alert.text
            self._open[kind] = (replace(alert, last=step, text=text), max(worst, finding.severity))
        elif kind in self._open:
            self._quiet[kind] += 1
            if self._quiet[kind] >= WINDOW:
                self._over.append(replace(self._open.pop(kind)[0], active=False))
        return None


def find_alerts(records: Iterable[Record]) -> tuple[Alert, ...]:
    """All alerts of a run, the oldest first."""
    return AlertWatch(records).alerts


def _values(records: Iterable[Record], name: str) -> list[float]:
    return [value for record in records if (value := number(record.get(name))) is not None]


def _product(record: Record, *names: str) -> float:
    """0 where one of them is missing."""
    product = 1.0
    for name in names:
        product *= number(record.get(name)) or 0.0
    return product
