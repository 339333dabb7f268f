"""The tables that `iwopd probe` prints, with small bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from iwopd.analysis.probe.result import Aligned, Alignment, Estimate, Handoff, Likelihood, Positions, Probe, Rules, TopKOverlap

BAR = 24
EIGHTHS = " ▏▎▍▌▋▊▉█"


def print_probe(probe: Probe, console: Console) -> None:
    """Everything that was measured, and what was not."""
    about = probe.rollouts
    where = f" on {probe.task}" if probe.task else ""
    title = f"{probe.student} from {probe.teacher}{where}: {about.rollouts} rollouts of {about.prompts} prompts"
    console.print(Text(f"{title}, {_number(about.mean_tokens, '.0f')} tokens each", style="bold"))
    console.print("95 % intervals over prompts; those of cosines over batches", highlight=False)
    shows: dict[str, Callable[[Any], Table]] = {
        "handoff": _handoff,
        "positions": _positions,
        "overlap": _top_k_overlap,
        "likelihood": _likelihood,
        "rules": _rules,
        "alignment": _alignment,
    }
    for name, show in shows.items():
        if (part := getattr(probe, name)) is not None:
            console.print()
            console.print(show(part))
    console.print()
    for name, reason in probe.missing.items():
        console.print(Text(f"not measured: {name} ({reason})"))
    for note in probe.notes:
        console.print(Text(f"note: {note}"))
    console.print(Text(f"Verdict: {probe.bias}", style="bold"))
    for sentence in probe.verdict:
        console.print(Text(sentence))


def bar(value: float | None, most: float, width: int = BAR) -> str:
    """A bar in eighths of a character; empty where there is no value."""
    if value is None or most <= 0:
        return ""
    eighths = round(8 * width * min(1.0, max(0.0, value / most)))
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _handoff(part: Handoff) -> Table:
    table = _table(
        "The student begins, the teacher finishes: right answers in percent", "written by the student", "teacher", ""
    )
    for place, fraction in enumerate(part.fractions):
        mean = part.teacher.mean[place]
        estimate = Estimate(mean=mean, low=part.teacher.low[place], high=part.teacher.high[place])
        table.add_row(f"{100 * fraction:g} %", _percent(estimate), bar(mean, 1.0))
    if part.student is not None:
        table.add_row("all (student alone)", _percent(part.student), bar(part.student.mean, 1.0))
    return table


def _positions(part: Positions) -> Table:
    title = "Disagreement by position: nats per token, and each part's share of the total of |gap|"
    table = _table(title, "position", "|gap|", "gap", "KL", "share", "")
    most = max((value for value in part.share.mean if value is not None), default=0.0)
    for place in range(len(part.edges) - 1):
        share = part.share.mean[place]
        table.add_row(
            _between(part.edges, place),
            *(_number(curve.mean[place], ".3f") for curve in (part.abs_gap, part.gap, part.kl)),
            _number(None if share is None else 100 * share, ".1f") + " %",
            bar(share, most),
        )
    return table


def _top_k_overlap(part: TopKOverlap) -> Table:
    title = f"Likeliest next tokens in common (top {part.k}; by chance {100 * part.chance:.2g} %)"
    table = _table(title, "position", f"top {part.k}", "same first", "")
    for place in range(len(part.edges) - 1):
        shared, first = part.shared.mean[place], part.same_first.mean[place]
        row = [_number(None if value is None else 100 * value, ".1f") + " %" for value in (shared, first)]
        table.add_row(_between(part.edges, place), *row, bar(shared, 1.0))
    return table


def _likelihood(part: Likelihood) -> Table:
    table = _table("Log-likelihood of the student's prefixes, nats", "position", "student", "teacher", "difference", "")
    by = part.by_fraction
    most = max((-value for value in by.difference.mean if value is not None), default=0.0)
    for place in range(len(by.edges) - 1):
        values = [curve.mean[place] for curve in (by.student, by.teacher, by.difference)]
        length = None if values[2] is None else -values[2]
        table.add_row(_between(by.edges, place), *(_number(value, ".1f") for value in values), bar(length, most))
    whole = (part.student.mean, part.teacher.mean, part.difference.mean)
    table.add_row("whole answers", *(_number(value, ".1f") for value in whole), "")
    return table


def _rules(part: Rules) -> Table:
    title = "What each weight rule would do to these rollouts"
    table = _table(title, "rule", "weight, first part", "last part", "effective tokens, %", "update on first 30 %", "")
    for rule in part.rules:
        ends = (rule.weights.mean[0], rule.weights.mean[-1])
        table.add_row(
            rule.title,
            *(_number(value, ".2f") for value in ends),
            _plus_minus(rule.effective, 100, ".1f"),
            _plus_minus(rule.first_30, 100, ".1f"),
            bar(rule.first_30.mean, 1.0, BAR // 2),
        )
    sums = part.cumulative
    rebound, opposite = _number(sums.rebound.mean, ".2f"), _percent(sums.opposite)
    table.caption = f"signed sums rebound by {rebound} nats in a rollout; {opposite} % of |gap| have the opposite sign"
    table.caption_justify = "left"
    return table


def _alignment(part: Alignment) -> Table:
    title = f"Cosine of the update with the way to correct solutions, {part.batches} batches of {part.batch_prompts} prompts"
    table = _table(title, "update", "cosine", "against OPD", "share of |gap|", "")
    rows: list[Aligned] = [*part.rules, *part.regions]
    most = max((row.cosine.mean for row in rows if row.cosine.mean is not None), default=0.0)
    for row in rows:
        if row is part.regions[0]:
            table.add_section()
        gain = "" if row.gain is None else _plus_minus(row.gain, sign="+")
        share = "" if row.share is None else _percent(row.share)
        table.add_row(row.title, _plus_minus(row.cosine), gain, share, bar(row.cosine.mean, most))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 or not column else "right", no_wrap=not column)
    return table


def _between(edges: list[float], place: int) -> str:
    return f"{100 * edges[place]:.0f}-{100 * edges[place + 1]:.0f} %"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(estimate: Estimate) -> str:
    if estimate.mean is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{100 * estimate.mean:.1f}"
    return f"{100 * estimate.mean:.1f} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def _plus_minus(estimate: Estimate, scale: float = 1.0, form: str = ".3f", sign: str = "") -> str:
    if estimate.mean is None:
        return "-"
    mean = format(scale * estimate.mean, sign + form)
    if estimate.low is None or estimate.high is None:
        return mean
    return f"{mean} ± {format(scale * (estimate.high - estimate.low) / 2, form)}"
