"""The tables that `iwopd probe` prints, with small bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from iwopd.analysis.probe.result import (
    Agreement,
    Aligned,
    Alignment,
    Curve,
    Estimate,
    Handoff,
    Horizons,
    Likelihood,
    Positions,
    Probe,
    Rules,
    TopKOverlap,
)

BAR = 24
EIGHTHS = " ▏▎▍▌▋▊▉█"
Show = Callable[[float | None], str]


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
        "agreement": _agreement,
        "horizons": _horizons,
    }
    for name, show in shows.items():
        if (part := getattr(probe, name)) is not None:
            console.print()
            console.print(show(part))
        if name == "alignment" and probe.alignment is not None and probe.alignment.verdicts:
            console.print()
            console.print(_verdicts(probe.alignment))
    console.print()
    for name, reason in probe.missing.items():
        console.print(Text(f"not measured: {name} ({reason})"))
    for note in probe.notes:
        console.print(Text(f"note: {note}"))
    console.print(Text(f"Verdict: {probe.bias}", style="bold"))
    for sentence in probe.verdict:
        console.print(Text(sentence))
    if probe.horizons is not None and (proposal := probe.horizons.proposal) is not None:
        console.print(Text(proposal.words))
        if proposal.section["type"] != "full":
            console.print(Text(proposal.toml))


def bar(value: float | None, most: float, width: int = BAR) -> str:
    """A bar in eighths of a character; empty where there is no value."""
    if value is None or most <= 0:
        return ""
    eighths = round(8 * width * min(1.0, max(0.0, value / most)))
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _handoff(part: Handoff) -> Table:
    title = "The student begins, the teacher finishes: right answers in percent"
    table = _table(title, "written by the student", "teacher", "")
    points = zip(part.fractions, part.teacher.mean, part.teacher.low, part.teacher.high, strict=True)
    for fraction, mean, low, high in points:
        table.add_row(f"{100 * fraction:g} %", _percent(Estimate(mean=mean, low=low, high=high)), bar(mean, 1.0))
    if part.student is not None:
        table.add_row("all (student alone)", _percent(part.student), bar(part.student.mean, 1.0))
    return table


def _positions(part: Positions) -> Table:
    title = "Disagreement by position: nats per token, and each part's share of the total of |gap|"
    columns = {"|gap|": (part.abs_gap, _nats), "gap": (part.gap, _nats), "KL": (part.kl, _nats), "share": (part.share, _share)}
    return _by_position(title, part.edges, columns, part.share.mean, _most(part.share.mean))


def _top_k_overlap(part: TopKOverlap) -> Table:
    title = f"Likeliest next tokens in common (top {part.k}; by chance {100 * part.chance:.2g} %)"
    columns = {f"top {part.k}": (part.shared, _share), "same first": (part.same_first, _share)}
    return _by_position(title, part.edges, columns, part.shared.mean, 1.0)


def _likelihood(part: Likelihood) -> Table:
    by = part.by_fraction
    fall = [None if value is None else -value for value in by.difference.mean]
    columns = {name: (getattr(by, name), _tenths) for name in ("student", "teacher", "difference")}
    title = "Log-likelihood of the student's prefixes, nats"
    table = _by_position(title, by.edges, columns, fall, _most(fall))
    table.add_row("whole answers", *(_tenths(one.mean) for one in (part.student, part.teacher, part.difference)), "")
    return table


def _rules(part: Rules) -> Table:
    title = "What each weight rule, and each advantage with weight 1, would do to these rollouts"
    table = _table(title, "rule", "weight, first part", "last part", "effective tokens, %", "update on first 30 %", "")
    for rule in part.rules:
        ends = (rule.weights.mean[0], rule.weights.mean[-1])
        table.add_row(
            rule.title,
            *(_number(value, ".2f") for value in ends),
            rule.effective.plus_minus(100, ".1f"),
            rule.first_30.plus_minus(100, ".1f"),
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
    most = _most([row.cosine.mean for row in rows])
    for row in rows:
        if row is part.regions[0]:
            table.add_section()
        gain = "" if row.gain is None else row.gain.plus_minus(sign="+")
        share = "" if row.share is None else _percent(row.share)
        table.add_row(row.title, row.cosine.plus_minus(), gain, share, bar(row.cosine.mean, most))
    return table


def _verdicts(part: Alignment) -> Table:
    title = f"The same on right and on wrong rollouts ({part.compared} of each)"
    table = _table(title, "update", "right", "wrong", "wrong minus right")
    for row in part.verdicts:
        table.add_row(row.title, row.right.plus_minus(), row.wrong.plus_minus(), row.difference.plus_minus(sign="+"))
    return table


def _agreement(part: Agreement) -> Table:
    title = f"Gradients of the tokens before and after drifts, {part.batches} batches of {part.batch_prompts} prompts"
    table = _table(title, "", "cosine", "counted by the rule gated, %")
    table.add_row("agreement", part.cosine.plus_minus(sign="+"), _number(part.gate, ".0f", 100.0))
    return table


def _horizons(part: Horizons) -> Table:
    methods = part.horizons[0].methods
    solved = any(one.solutions is not None for one in methods)
    words = ("kept", "noise", "solutions") if solved else ("kept", "noise")
    title = f"Answers that stop earlier, and what is left of the update, {part.batches} batches of {part.batch_prompts} prompts"
    table = _table(title, "horizon", "tokens, %", "prompts", *(f"{one.title}: {word}" for one in methods for word in words))
    for row in part.horizons:
        cells = []
        for one in row.methods:
            cells += [one.kept.plus_minus(form=".2f"), _number(one.noise_at_equal_tokens, ".2f")]
            cells += [one.solutions.plus_minus(form=".2f")] if one.solutions is not None else []
        table.add_row(row.title, row.written.plus_minus(100, ".1f"), f"x {_number(row.prompts, '.2f')}", *cells)
    table.caption = (
        "tokens: written; prompts: how many times as many they would pay for. kept: cosine of the expected update with that of "
        "full rollouts; noise: over signal, with so many prompts"
    )
    table.caption += "; solutions: cosine with the way to them" if solved else ""
    table.caption_justify = "left"
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 or not column else "right", no_wrap=not column)
    return table


def _by_position(
    title: str, edges: list[float], columns: Mapping[str, tuple[Curve, Show]], bars: Sequence[float | None], most: float
) -> Table:
    """One row per part of the answer: the columns' values, and a bar."""
    table = _table(title, "position", *columns, "")
    for place, (left, right) in enumerate(pairwise(edges)):
        cells = (show(curve.mean[place]) for curve, show in columns.values())
        table.add_row(f"{100 * left:.0f}-{100 * right:.0f} %", *cells, bar(bars[place], most))
    return table


def _most(values: Sequence[float | None]) -> float:
    return max((value for value in values if value is not None), default=0.0)


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(scale * value, form)


def _nats(value: float | None) -> str:
    return _number(value, ".3f")


def _tenths(value: float | None) -> str:
    return _number(value, ".1f")


def _share(value: float | None) -> str:
    return _number(value, ".1f", 100.0) + " %"


def _percent(estimate: Estimate) -> str:
    mean, low, high = (_number(value, ".1f", 100.0) for value in (estimate.mean, estimate.low, estimate.high))
    return mean if "-" in (mean, low, high) else f"{mean} ({low} to {high})"
