"""What each weight rule would do to a probe's rollouts (Fig. 4b), and signed against unsigned sums (Fig. 4c)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from iwopd.algo import WEIGHT_RULES
from iwopd.algo.registry import FAMILIES
from iwopd.analysis.probe.result import Curve, RuleEffect, Rules
from iwopd.report.charts import ALONG, Axis, Chart, Panel, chart_panel, full_axis
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.probes import PROMPT_BAND, curve_series, dots_chart, having, middles

SPREAD_BAND = "10th to 90th percentile of the tokens"
LIMIT = "It shows what a rule would weigh, not whether that helps."
LEAD = (
    "Nothing was trained: each weight rule is applied to the probe's rollouts as they are. A rule that moves weight to "
    "early tokens spends the update where prefixes are still clean; whether it pays, alignment and training can tell."
)
EFFECTS = {
    ("first_30", "first", "Update on the first 30 %", "of all |weight × advantage|", "share"): (
        "How much of the update each rule spends early, if all tokens' gradients were equally long. They are not."
    ),
    ("effective", "effective", "Effective tokens", "of all tokens", "effective tokens"): (
        "Kish's effective number, (sum of w)² / sum of w². With few, few tokens carry a noisy update. Many are no merit: "
        "plain OPD has all."
    ),
}
"""Estimate of a rule, id, title, axis and label: caption."""


def build(data: ReportData) -> Panel | None:
    return chart_panel("rules", "What rules would do", LEAD, charts(data.compared))


def charts(views: Sequence[ProbeView], suffix: str = "") -> list[Chart]:
    found = having(views, "rules")
    drawn = []
    for view, part in found:
        drawn += _curves(part, suffix) if view.alone else _curves(part, f"-{view.style}", view.label)
    return [*drawn, *_effects(found, suffix)]


def _curves(part: Rules, suffix: str, label: str = "") -> list[Chart]:
    """Mean weights by position, one chart per family of rules; then the sums."""
    drawn = []
    for family, (title, words) in FAMILIES.items():
        members = [rule for rule in part.rules if _family(rule.rule) == family and rule.advantage == "opd"]
        series = tuple(curve_series(rule.title, n, middles(part.edges), typical(rule)) for n, rule in enumerate(members))
        chart = Chart(f"probe-weights-{family}{suffix}", title, ALONG, weight_axis(members), series, f"{words} {LIMIT}")
        band = SPREAD_BAND if _is_spread(members) else PROMPT_BAND
        if members:
            drawn.append(replace(chart, title=_titled(title, label), band=band, markers=True, by="own"))
    return [*drawn, sums(part, suffix, label)]


def _titled(title: str, label: str) -> str:
    return f"{title}, {label}" if label else title


def _family(rule: str) -> str:
    """A rule that is not installed here, or of a family that nobody knows, counts as other."""
    try:
        family = WEIGHT_RULES[rule].family
    except (LookupError, ImportError, TypeError):
        return "other"
    return family if family in FAMILIES else "other"


def typical(rule: RuleEffect) -> Curve:
    """What stands for a rule's weights: their mean, or where that says nothing their median."""
    return rule.spread if rule.rule == "ideal" and rule.spread is not None else rule.weights


def weight_axis(rules: Sequence[RuleEffect]) -> Axis:
    curves = [typical(rule) for rule in rules]
    values = [value for curve in curves for ends in (curve.mean, curve.low, curve.high) for value in ends or ()]
    title = "median weight" if _is_spread(rules) else "mean weight"
    return full_axis(title, [value for value in values if value is not None])


def _is_spread(rules: Sequence[RuleEffect]) -> bool:
    return any(typical(rule) is rule.spread for rule in rules)


def sums(part: Rules, suffix: str = "", label: str = "") -> Chart:
    """Signed against unsigned prefix sums of the gap (Fig. 4c), the signed one turned over so that the two can be compared."""
    x, found = middles(part.edges), part.cumulative
    rebound, opposite = found.rebound.mean, found.opposite.mean
    return Chart(
        f"probe-sums{suffix}",
        _titled("Signed and unsigned sums", label),
        ALONG,
        Axis("nats", zero=True),
        (
            curve_series("unsigned: sum of |gap|", 1, x, found.unsigned),
            curve_series("signed: minus the sum of gaps", 0, x, found.signed, -1.0),
        ),
        "Discrepancy of the prefix so far, a mean over rollouts. Where the signed sum stays behind, gaps of opposite signs "
        "cancel"
        + (f": {100 * opposite:.1f} % of |gap| has the cancelling sign" if opposite is not None else "")
        + (f", and within a rollout the signed sum comes back by {rebound:.2g} nats" if rebound is not None else "")
        + ". The mean hides single rollouts in which it comes back further.",
        band=PROMPT_BAND,
        by="own",
    )


def _effects(found: Sequence[tuple[ProbeView, Rules]], suffix: str = "") -> list[Chart]:
    """Two numbers per rule, as dots."""
    drawn = []
    for (name, chart_id, title, unit, label), caption in EFFECTS.items() if found else ():
        estimates = {view: {rule.title: getattr(rule, name) for rule in part.rules} for view, part in found}
        axis = Axis(unit, percent=True, zero=True)
        drawn.append(dots_chart(estimates, f"probe-{chart_id}{suffix}", title, axis, label, caption))
    return drawn
