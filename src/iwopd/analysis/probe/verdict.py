"""The numbers in words: how strong the bias is, where the discrepancy is spent, what gamma would change.

The thresholds are conventions, not findings; `docs/probe.md` lists them.
"""

from __future__ import annotations

from iwopd.algo.drift_weights import LEAST
from iwopd.analysis.probe.result import Aligned, Bias, Estimate, Handoff, Positions, Probe
from iwopd.analysis.probe.rules import iw_key

STRONG_FALL = 0.20
"""Accuracy that the teacher loses after a student's prefix."""
SOME_FALL = 0.05
"""Below this a fall counts as none."""
TEACHER_LEAD = 0.02
"""A teacher that is not this much better than the student has nothing to lose."""
AGREEMENT = 0.02
"""Nats per token: below this the two models hardly disagree anywhere."""
STRONG_SHARE = 0.45
"""Of the discrepancy on the first 30 % of the tokens, where there is no checker."""
SOME_SHARE = 0.35
PLAIN = "Your pair shows none: use plain OPD."


def judge(probe: Probe, gamma: float) -> tuple[Bias, list[str]]:
    """How strong the bias is, and a few sentences."""
    if probe.handoff is not None:
        bias, sentences = _from_handoff(probe.handoff)
    elif probe.positions is not None:
        bias, sentences = _from_discrepancy(probe.positions)
    else:
        nothing = "Nothing was measured that could show a bias; see what is missing and why."
        return "unmeasurable", [nothing, *_agreement(probe)]
    sentences += _where(probe) + _drift(probe) + _agreement(probe) + _by_verdict(probe)
    if bias == "none":
        return bias, [*sentences, PLAIN]
    return bias, sentences + _gamma(probe, gamma)


def _from_handoff(handoff: Handoff) -> tuple[Bias, list[str]]:
    first, last = handoff.fractions[0], handoff.fractions[-1]
    start, end, fall = handoff.teacher.mean[0], handoff.teacher.mean[-1], handoff.fall
    if start is None or end is None or fall.mean is None or fall.low is None or fall.high is None:
        return "unclear", ["The hand-off curve has no interval: give more prompts with answers."]
    student = None if handoff.student is None else handoff.student.mean
    if student is not None and start - student < TEACHER_LEAD:
        text = f"The teacher is right {_percent(start)} of the time, the student {_percent(student)}: a teacher that is no "
        text += "better has no lead that the student's prefixes could cost. Check the pair, the prompts and --max-tokens."
        return "unclear", [text]
    alone = "by itself" if first == 0 else f"after the first {_percent(first)} of the student's answer"
    curve = f"The teacher is right {_percent(start)} of the time {alone} and {_percent(end)} after the first {_percent(last)} "
    curve += f"of the student's answer: {100 * fall.mean:.0f} points less ({_range(fall)})"
    curve += f"; the student alone reaches {_percent(student)}." if student is not None else "."
    if fall.low > 0 and fall.mean >= STRONG_FALL:
        return "strong", [f"The position bias is strong. {curve}"]
    if fall.low > 0 and fall.mean >= SOME_FALL:
        return "moderate", [f"There is a position bias. {curve}"]
    if fall.high < SOME_FALL:
        return "none", [f"The student's prefixes hardly cost the teacher anything. {curve}"]
    return "unclear", [f"These prompts cannot tell. {curve} More prompts or --continuations would."]


def _from_discrepancy(positions: Positions) -> tuple[Bias, list[str]]:
    """Without a checker the gap says where the models disagree, not what that costs."""
    size, first = positions.mean_abs_gap, positions.first_30
    if size.high is not None and size.high < AGREEMENT:
        return "none", [f"The two models hardly disagree: {size.mean:.3f} nats per token."]
    blind = "Whether that costs answers only a checker can tell (--task, or answers in the data)."
    if first.mean is None or first.low is None:
        return "unclear", [f"There is no interval: give more prompts. {blind}"]
    spent = f"The first 30 % of the tokens hold {_percent(first.mean)} of the discrepancy ({_range(first)})."
    if first.low > STRONG_SHARE:
        return "strong", [f"The disagreement comes early: a sign of a strong position bias. {spent} {blind}"]
    if first.low > SOME_SHARE:
        return "moderate", [f"The disagreement comes rather early: a sign of a position bias. {spent} {blind}"]
    return "unclear", [f"The disagreement does not come early. {spent} {blind}"]


def _where(probe: Probe) -> list[str]:
    if probe.positions is None or probe.positions.half.mean is None:
        return []
    half, first = probe.positions.half, probe.positions.first_30
    text = f"Half of the discrepancy is spent by {_percent(half.mean)} of an answer ({_range(half)})"
    return [f"{text}, {_percent(first.mean)} of it on the first 30 % of the tokens."]


def _drift(probe: Probe) -> list[str]:
    drift = probe.drift
    if drift is None or not drift.rollouts.mean:
        return []
    text = (
        f"{_percent(drift.rollouts.mean)} of the rollouts drift (a token {drift.threshold:g} nats less likely for the "
        f"teacher), first at {_percent(drift.position.mean)} of the answer; the tokens after it hold "
        f"{_percent(drift.after.mean)} of the discrepancy"
    )
    regions = {region.key: region.cosine for region in probe.alignment.regions} if probe.alignment is not None else {}
    if regions and regions["until"].mean is not None and regions["after"].mean is not None:
        text += f"; their update has a cosine of {_signed(regions['after'])} with the way to correct solutions, that of the "
        text += f"tokens up to the drift {_signed(regions['until'])}"
    return [f"{text}."]


def _agreement(probe: Probe) -> list[str]:
    """Do the tokens after a drift still teach? The threshold is that of the rule `gated`."""
    if probe.agreement is None or (found := probe.agreement.cosine).mean is None:
        return []
    figures = f"agreement {_number(found.mean)}"
    if found.low is None or found.high is None:
        return [f"Whether the tokens after a drift pull the same way as those before it cannot be told ({figures}; one batch)."]
    figures += f", {_number(found.low)} to {_number(found.high)}"
    if found.low > LEAST:
        kept = "they teach, and uniform weights keep them"
        if (share := probe.agreement.gate) is not None and share < 1:
            kept = f"they teach in part, and gated weights let them count {_percent(share)}"
        return [f"The tokens after a drift pull the same way as those before it ({figures}): {kept}."]
    if found.high < LEAST:
        return [f"The tokens after a drift pull elsewhere or back ({figures}): survival weights leave them out."]
    text = f"Whether the tokens after a drift pull the same way as those before it cannot be told ({figures}; they begin to"
    return [f"{text} count at {_number(LEAST)}). More prompts would."]


def _by_verdict(probe: Probe) -> list[str]:
    found = {one.key: one for one in probe.alignment.verdicts} if probe.alignment is not None else {}
    if "opd" not in found:
        return []
    opd = found["opd"]
    text = f"On wrong rollouts OPD's update has a cosine of {_signed(opd.wrong)} with the way to correct solutions, on as many "
    return [f"{text}right ones {_signed(opd.right)} (difference {_signed(opd.difference)})."]


def _gamma(probe: Probe, gamma: float) -> list[str]:
    """What IW-OPD would change, and whether it is the gap that helps or the position alone."""
    sentences = []
    effects = {rule.key: rule.first_30.mean for rule in probe.rules.rules} if probe.rules is not None else {}
    key = iw_key(gamma)
    if key in effects:
        change = f"from {_percent(effects['opd'])} to {_percent(effects[key])}"
        share = "the share of the update on the first 30 % of the tokens"
        sentences.append(f"IW-OPD with gamma {gamma:g} would move {share} {change}.")
    found = {rule.key: rule for rule in probe.alignment.rules} if probe.alignment is not None else {}
    if key in found and (gain := found[key].gain) is not None:
        sentences.append(_gain(found, key, gain, gamma))
    return sentences


def _gain(found: dict[str, Aligned], key: str, gain: Estimate, gamma: float) -> str:
    if gain.low is None or gain.high is None:
        what = "IW-OPD's cosine with the way to correct solutions"
        return f"{what} differs from OPD's by {_signed(gain)} (one batch: no interval)."
    plain = found["opd"].cosine
    change = "raises" if gain.low > 0 else "lowers" if gain.high < 0 else "does not clearly change"
    text = f"IW-OPD with gamma {gamma:g} {change} the update's cosine with the way to correct solutions (OPD {_signed(plain)}, "
    text += f"change {_signed(gain)})."
    gammas = [rule for rule in found.values() if rule.key.startswith("iw-opd-") and rule.gain is not None]
    best = max(gammas, key=lambda rule: _mean(rule.gain))
    if best.key != key and best.gain is not None and (best.gain.low or 0.0) > 0:
        text += f" Of the gammas tried, {best.key.removeprefix('iw-opd-')} gains most ({_signed(best.gain)})."
    linear, share = found.get("linear-decay-4"), found.get(iw_key(4.0))
    if linear is not None and share is not None and gain.low > 0 and _mean(linear.gain) >= _mean(share.gain):
        text += " Linear decay, which does not look at the gap, gains as much: here the position matters, not the adaptivity."
    return text


def _mean(estimate: Estimate | None) -> float:
    return 0.0 if estimate is None or estimate.mean is None else estimate.mean


def _number(value: float) -> str:
    return f"{value:+.2f}".replace("-", "\u2212")


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:.0f} %"


def _range(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "no interval"
    return f"{100 * estimate.low:.0f} to {100 * estimate.high:.0f}"


def _signed(estimate: Estimate) -> str:
    return estimate.plus_minus(sign="+", nothing="?")
