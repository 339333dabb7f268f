"""A comparison in words: the difference, its uncertainty, the verdict, and what it would take to know."""

from __future__ import annotations

import math

from iwopd.analysis.compare import AVERAGE, POWER, Comparison, Difference, Needed
from iwopd.eval.statistics import LEAST_UNITS


def sentence(difference: Difference, comparison: Comparison) -> str:
    d, alpha = difference, 1.0 - comparison.level
    what = f"{title(d, comparison)} on {d.task}: {points(d.interval.mean)} points"
    if d.too_few:
        return f"{what}: {verdict(d, comparison)}."
    over = f" over {d.seeds} training seeds and {d.problems} problems" if d.over_seeds else ""
    if d.over_units:
        over = f" over {d.over_units.units} units ({comparison.unit}, {d.seeds} pairs of runs)"
    p = f"p {show_p(d.p_value)}" + (f", Holm {show_p(d.holm)}" if len(comparison.differences) > 1 else "")
    interval = f"{percent(comparison.level)} interval{over} {points(d.interval.low)} to {points(d.interval.high)}"
    words = [f"{what} ({interval}; {p}): {verdict(d, comparison)}."]
    least = 2.0 ** (1 - d.differing)
    if d.over_units:
        return words[0]
    if d.p_seeds is None and (d.interval.low > 0 or d.interval.high < 0) != (d.p_value < alpha) and d.differing > 0:
        words.append("Interval (bootstrap over problems) and p (sign flips) are two methods; where they disagree, p decides.")
    if d.p_seeds is None and d.differing > 0 and least > alpha:
        words.append(f"Only {d.differing} problems differ: no p below {least:.2g} is possible.")
    if d.over_seeds:
        low, high = points(d.over_problems.low), points(d.over_problems.high)
        words.append(f"These models alone, seed noise left aside: {low} to {high}, p {show_p(d.p_problems)}.")
    for need in d.needed:
        observed = abs(need.difference - abs(d.interval.mean)) < 1e-9
        if d.p_value >= alpha or not observed:
            size = "a difference of this size" if observed else "1 point"
            words.append(f"To tell {size} with {percent(POWER)} power: {_ways(need, d)}.")
    if d.cancelled is not None and d.cancelled > 0.05:
        words.append(f"Matched noise cancels {percent(round(d.cancelled, 2))} of the sampling variance.")
    return " ".join(words)


def title(difference: Difference, comparison: Comparison) -> str:
    several = len({group.student for group in comparison.groups}) > 1
    student = f" ({difference.student})" if several and difference.student else ""
    return f"{difference.group} − {difference.baseline}{student}"


def verdict(difference: Difference, comparison: Comparison) -> str:
    alpha = 1.0 - comparison.level
    if difference.over_units is not None and difference.too_few:
        count = difference.over_units.units
        return f"too few to tell ({count} unit{'s' if count > 1 else ''}, a verdict takes {LEAST_UNITS})"
    if difference.differing == 0:
        return "the same on every problem"
    if difference.holm < alpha:
        return "distinguishable from noise"
    if difference.p_value < alpha:
        return f"distinguishable on its own, but not as one of {len(comparison.differences)} comparisons"
    return "not distinguishable from noise"


def _ways(need: Needed, difference: Difference) -> str:
    average = difference.task == AVERAGE
    ways = []
    for value, now, unit in (
        (need.samples, difference.samples, "samples per problem"),
        (need.problems, difference.problems, "problems"),
        (need.seeds, difference.seeds, "training seeds"),
    ):
        multiple = average and unit != "training seeds"
        if value is not None and value <= (1 if multiple else now):
            return "there is enough data"
        if value is not None:
            ways.append(
                f"about {_two_digits(value)} times the {unit}" if multiple else f"about {_count(value)} {unit} (now {now})"
            )
    if not ways:
        return "more of one thing alone is not enough"
    stuck = need.samples is None and difference.cancelled is not None
    return ("more samples of these problems alone are not enough; " if stuck else "") + ", or ".join(ways)


def points(value: float) -> str:
    """+1.9 with a real minus sign; never -0.0."""
    return f"{round(100.0 * value, 1) + 0.0:+.1f}".replace("-", "−")


def percent(share: float) -> str:
    return f"{100.0 * share:.4g} %"


def show_p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.2g}" if p < 0.995 else "= 1"


def _count(value: float) -> str:
    return f"{math.ceil(value):,}" if value < 100 else f"{round(value, 1 - math.floor(math.log10(value))):,.0f}"


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if value < 10 else _count(value)
