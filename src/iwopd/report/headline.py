"""What the page is about, for a reader with five seconds: where the teacher stops being useful, who learned, who wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from iwopd.analysis.compare import Difference
from iwopd.analysis.wording import points, show_p
from iwopd.eval.statistics import Interval, holm
from iwopd.report.gathering import ReportData
from iwopd.report.probes import having

LEVEL = 0.05
WORTH = 0.1
"""Share of what there is to learn (the teacher's lead, or else the best method's gain) that makes a gain learning."""
SPACE = "\u00a0"

Learned = Literal["learned", "little", "not shown", "worse"]
Point = tuple[float, float | None, float | None]
"""Mean, low and high in percent."""


@dataclass(frozen=True)
class Fall:
    """The teacher's accuracy along the student's answer, in percent."""

    shares: tuple[float, ...]
    """Of the answer that the student wrote, 0 to 1."""
    curve: tuple[Point, ...]
    student: Point | None
    """The student alone, before training."""
    teacher: Point | None
    """The teacher alone."""

    @property
    def start(self) -> float:
        return self.curve[0][0]

    @property
    def end(self) -> float:
        return self.curve[-1][0]

    @property
    def is_shown(self) -> bool:
        """The intervals of the two ends leave room between them; without intervals the means decide."""
        low, high = self.curve[0][1], self.curve[-1][2]
        return (self.start if low is None else low) > (self.end if high is None else high)

    @property
    def half(self) -> float | None:
        """The share after which half of the teacher's lead over the student is gone; None if it never is."""
        alone = self.end if self.student is None else self.student[0]
        level = (self.start + alone) / 2
        if self.start <= alone:
            return None
        for place in range(1, len(self.curve)):
            before, after = self.curve[place - 1][0], self.curve[place][0]
            if after <= level:
                left, right = self.shares[place - 1 : place + 1]
                return left + (right - left) * (before - level) / (before - after)
        return None


def find_fall(data: ReportData) -> Fall | None:
    """The curve of the hand-off file, or of the only probe; None where there is none, or several."""
    measured = having(data.compared, "handoff")
    if (demo := data.handoff) is not None:
        shares, curve = zip(*demo["points"], strict=True)
        alone = curve[0] if shares[0] == 0 else None
        return Fall(shares, curve, demo["student"], demo.get("teacher") or alone) if len(shares) > 1 else None
    if len(measured) != 1:
        return None
    part = measured[0][1]
    rows = zip(part.fractions, part.teacher.mean, part.teacher.low, part.teacher.high, strict=True)
    known = [(share, _point(mean, low, high)) for share, mean, low, high in rows if mean is not None]
    if len(known) < 2:
        return None
    one = part.student
    student = None if one is None or one.mean is None else _point(one.mean, one.low, one.high)
    shares, curve = zip(*known, strict=True)
    return Fall(shares, curve, student, curve[0] if shares[0] == 0 else None)


def _point(mean: float, low: float | None, high: float | None) -> Point:
    return 100 * mean, None if low is None else 100 * low, None if high is None else 100 * high


def headline(fall: Fall | None, tables: Sequence[Mapping[str, Any]]) -> str:
    """One sentence in the largest type; empty where nothing was found out."""
    if fall is not None and fall.is_shown:
        return f"The teacher’s accuracy falls from {_percent(fall.start)} to {_percent(fall.end)} along the student’s answer"
    if fall is not None:
        ends = f"{_percent(fall.start)}, {_percent(fall.end)} at its end"
        return f"The teacher keeps its accuracy along the student’s answer: {ends}"
    if not tables:
        return ""
    rows = tables[0]["rows"]
    learned = [row for row in rows if row["learned"] == "learned"]
    if not learned:
        return "No gain over the student before training is shown"
    best = max(learned, key=lambda row: row["final"].mean)
    if len(rows) == 1:
        return f"{best['label']} takes the student from {best['start'].mean:.1f} to {best['final'].mean:.1f}{SPACE}%"
    winners = _winners(rows, tables[0]["reference"])
    return winners[0][0] if winners else f"{best['label']} learned most"


def fall_words(fall: Fall) -> str:
    """Where the teacher stops being useful."""
    far = f"{100 * fall.shares[-1]:.0f}{SPACE}%"
    if not fall.is_shown:
        return f"After {far} of the student's answer it is right as often as before, as far as these problems can tell."
    half = fall.half
    where = (
        "" if half is None else f"Half of its lead is gone after the first {max(1.0, 100 * half):.0f}{SPACE}% of an answer. "
    )
    alone = "" if fall.student is None else f"; the student alone reaches {_percent(fall.student[0])}"
    first = "from the start" if fall.shares[0] == 0 else f"after {100 * fall.shares[0]:.0f}{SPACE}%"
    return f"{where}It is right {_percent(fall.start)} of the time {first} and {_percent(fall.end)} after {far}{alone}."


def judge_gains(gains: Mapping[str, Difference | None], lead: float | None) -> dict[str, Learned | None]:
    """Whether each method learned something worth the name. `lead`: of the teacher over the untrained student, in points."""
    known = {label: gain for label, gain in gains.items() if gain is not None}
    corrected = dict(zip(known, holm([gain.p_value for gain in known.values()]), strict=True))
    best = max((100 * gain.interval.mean for gain in known.values()), default=0.0)
    enough = WORTH * (lead if lead is not None and lead > 0 else best)
    return {label: None if gain is None else _learned(gain.interval, corrected[label], enough) for label, gain in gains.items()}


def _learned(gain: Interval, p: float, enough: float) -> Learned:
    if gain.high < 0 and p < LEVEL:
        return "worse"
    if gain.low <= 0 or p >= LEVEL:
        return "not shown"
    return "learned" if 100 * gain.mean >= enough else "little"


def learned_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Who learned, by how much; and who did not."""
    by: dict[str, list[str]] = {}
    for row in rows:
        if row["learned"] is not None:
            gain = row["gain"].interval
            precise = "" if row["learned"] == "learned" else f", {points(gain.low)} to {points(gain.high)}"
            by.setdefault(row["learned"], []).append(f"{row['label']} ({points(gain.mean)}{precise})")
    words = {
        "learned": "{} learned: points over the student before training.",
        "little": "{} learned next to nothing.",
        "not shown": "{}: no gain shown.",
        "worse": "{} got worse.",
    }
    return " ".join(words[kind].format(_listed(by[kind])) for kind in words if kind in by)


def winner_words(rows: Sequence[Mapping[str, Any]], reference: str) -> str:
    """Who is ahead of the reference, who is behind, and how sure that is."""
    return " ".join(f"{short}{': ' if rest else ''}{rest}." for short, rest in _winners(rows, reference))


def _winners(rows: Sequence[Mapping[str, Any]], reference: str) -> list[tuple[str, str]]:
    """Sentences, each as its head and what may follow a colon."""
    by = {verdict: [row for row in rows if row["verdict"] == verdict] for verdict in ("higher", "no difference shown", "lower")}
    higher, tied, lower = by.values()
    names = [row["label"] for row in tied]
    said = []
    if higher:
        best = max(higher, key=lambda row: row["difference"].interval.mean)
        said.append((f"{best['label']} beats {reference}", f"{_certainty(best['difference'])}, hardly by chance"))
        if others := [row for row in higher if row is not best]:
            said.append((f"So {'does' if len(others) == 1 else 'do'} {_listed([_short(row) for row in others])}", ""))
    if tied and higher:
        said.append((f"{_listed(names)} cannot be told from {reference}", ""))
    elif len(tied) == 1:
        said.append((f"No winner between {reference} and {names[0]}", f"{_certainty(tied[0]['difference'])} may be chance"))
    elif tied:
        said.append((f"No winner among {_listed([reference, *names])}", f"differences of {_spread(tied)} points may be chance"))
    if lower:
        below = f"{_listed([_short(row) for row in lower])} {'ends' if len(lower) == 1 else 'end'} below"
        alone = (f"{reference} is ahead", f"{below}, hardly by chance")
        said.append((f"{below} {reference}, hardly by chance", "") if said else alone)
    return said


def _certainty(difference: Difference) -> str:
    mean, low, high = (points(value) for value in difference.interval)
    return f"{mean} points ({low} to {high}, p{SPACE}{show_p(difference.holm)})"


def _short(row: Mapping[str, Any]) -> str:
    early = f" at step {row['early']}" if row["early"] else ""
    return f"{row['label']} ({points(row['difference'].interval.mean)}{early})"


def _spread(rows: Sequence[Mapping[str, Any]]) -> str:
    means = sorted(row["difference"].interval.mean for row in rows)
    return f"{points(means[0])} to {points(means[-1])}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _percent(value: float) -> str:
    return f"{value:.0f}{SPACE}%"
