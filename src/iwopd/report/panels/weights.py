"""What each weight rule would do to a probe's rollouts (Fig. 4b), and signed against unsigned sums (Fig. 4c)."""

from __future__ import annotations

from collections.abc import Sequence

from iwopd.analysis.probe.result import Curve, RuleEffect, Rules
from iwopd.report.charts import Axis, Chart
from iwopd.report.gathering import ProbeView, ReportData
from iwopd.report.panel import Panel
from iwopd.report.probes import ALONG, PROMPT_BAND, curve_series, dots_chart, middles

FAMILIES: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    (
        "sums",
        "Weights from sums of gaps",
        ("uniform", "cumulative-share", "signed", "survival"),
        "IW-OPD gives a token more weight the less of the answer's discrepancy lies before it; plain OPD gives 1 everywhere.",
    ),
    (
        "ideal",
        "Ideal weights",
        ("ideal",),
        "The prefix's importance ratio to the power of alpha over its mean. That mean is 1 everywhere: the median is drawn.",
    ),
    (
        "position",
        "Weights by position alone",
        ("fixed-prefix", "linear-decay", "curriculum", "prefix-only", "suffix-only"),
        "Rules that look at no gap, only at where a token is.",
    ),
)
"""Name, title, rules and words of a chart; rules that are in none have one of their own."""
OTHER = ("other", "Other rules", "Rules from plug-ins, with their defaults.")
SPREAD_BAND = "10th to 90th percentile of the tokens"
LIMIT = "It shows what a rule would weigh, not whether that helps."


def build(data: ReportData) -> Panel | None:
    views = [view for view in data.compared if view.probe.rules is not None]
    if not views:
        return None
    drawn = [chart for view in views for chart in (curves(view) if view.alone else curves(view, f"-{view.style}", view.label))]
    return Panel(
        "rules",
        "What rules would do",
        "Nothing was trained: each weight rule is applied to the probe's rollouts as they are. A rule that moves weight to "
        "early tokens spends the update where prefixes are still clean; whether it pays, alignment and training can tell.",
        (*drawn, *effects(views)),
    )


def charts(views: Sequence[ProbeView], suffix: str = "") -> list[Chart]:
    """Everything for one probe."""
    found = [view for view in views if view.probe.rules is not None]
    return [*(chart for view in found for chart in curves(view, suffix)), *effects(found, suffix)]


def curves(view: ProbeView, suffix: str = "", label: str = "") -> list[Chart]:
    """Mean weights by position, a chart a family of rules; then the sums."""
    part = _part(view)
    known = {rule for _, _, rules, _ in FAMILIES for rule in rules}
    families = [
        (name, title, [rule for rule in part.rules if rule.rule in rules], words) for name, title, rules, words in FAMILIES
    ]
    families.append((OTHER[0], OTHER[1], [rule for rule in part.rules if rule.rule not in known], OTHER[2]))
    behind = f", {label}" if label else ""
    drawn = [
        Chart(
            f"probe-weights-{name}{suffix}",
            f"{title}{behind}",
            ALONG,
            weight_axis(members),
            tuple(curve_series(rule.title, place, middles(part.edges), typical(rule)) for place, rule in enumerate(members)),
            f"{words} {LIMIT}",
            band=SPREAD_BAND if _is_spread(members) else PROMPT_BAND,
            markers=True,
            by="own",
        )
        for name, title, members, words in families
        if members
    ]
    return [*drawn, sums(view, suffix, label)]


def typical(rule: RuleEffect) -> Curve:
    """What stands for a rule's weights: their mean, or where that says nothing their median."""
    return rule.spread if rule.rule == "ideal" and rule.spread is not None else rule.weights


def weight_axis(rules: Sequence[RuleEffect]) -> Axis:
    return Axis("median weight" if _is_spread(rules) else "mean weight", zero=True)


def _is_spread(rules: Sequence[RuleEffect]) -> bool:
    return any(typical(rule) is rule.spread for rule in rules)


def sums(view: ProbeView, suffix: str = "", label: str = "") -> Chart:
    """Signed against unsigned prefix sums of the gap (Fig. 4c), the signed one turned over so that the two can be compared."""
    part = _part(view)
    x = middles(part.edges)
    rebound, opposite = part.cumulative.rebound.mean, part.cumulative.opposite.mean
    return Chart(
        f"probe-sums{suffix}",
        f"Signed and unsigned sums{', ' + label if label else ''}",
        ALONG,
        Axis("nats", zero=True),
        (
            curve_series("unsigned: sum of |gap|", 1, x, part.cumulative.unsigned),
            curve_series("signed: minus the sum of gaps", 0, x, part.cumulative.signed, -1.0),
        ),
        "Discrepancy of the prefix so far, a mean over rollouts. Where the signed sum stays behind, gaps of opposite signs "
        "cancel"
        + (f": {100 * opposite:.1f} % of |gap| has the cancelling sign" if opposite is not None else "")
        + (f", and within a rollout the signed sum comes back by {rebound:.2g} nats" if rebound is not None else "")
        + ". The mean hides single rollouts in which it comes back further.",
        band=PROMPT_BAND,
        by="own",
    )


def effects(views: Sequence[ProbeView], suffix: str = "") -> list[Chart]:
    """Two numbers per rule, as dots."""
    if not views:
        return []
    titles = list(dict.fromkeys(rule.title for view in views for rule in _part(view).rules))
    return [
        dots_chart(
            views,
            f"probe-first{suffix}",
            "Update on the first 30 %",
            Axis("of all |weight \u00d7 advantage|", percent=True, zero=True),
            titles,
            "share",
            lambda view: {rule.title: rule.first_30 for rule in _part(view).rules},
            "How much of the update each rule spends early, if all tokens' gradients were equally long. They are not.",
        ),
        dots_chart(
            views,
            f"probe-effective{suffix}",
            "Effective tokens",
            Axis("of all tokens", percent=True, zero=True),
            titles,
            "effective tokens",
            lambda view: {rule.title: rule.effective for rule in _part(view).rules},
            "Kish's effective number, (sum of w)\u00b2 / sum of w\u00b2. With few, few tokens carry a noisy "
            "update. Many are no merit: plain OPD has all.",
        ),
    ]


def _part(view: ProbeView) -> Rules:
    assert view.probe.rules is not None  # those that have one were chosen
    return view.probe.rules
