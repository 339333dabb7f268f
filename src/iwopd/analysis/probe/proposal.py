"""Which horizon to take: the cheapest that keeps the update of the method that suits the pair."""

from __future__ import annotations

from collections.abc import Sequence

from iwopd.analysis.probe.horizons import METHODS
from iwopd.analysis.probe.result import KEPT, Bias, HorizonEffect, Horizons, KeptUpdate, Proposal
from iwopd.rollout.horizons import Growing

WORTH = 0.95
"""A horizon that writes more than this share of the tokens is not worth a setting."""
TRAINING = [place / 20 for place in range(21)]
"""Shares of training over which a growing horizon is averaged."""


def propose(part: Horizons, bias: Bias, max_tokens: int) -> Proposal:
    """The setting, or full rollouts and why.

    A fixed limit is proposed as the beginning of a growing one: the probe sees the student before it has learned, and what a
    limit leaves out would never be taught.
    """
    full = part.horizons[0]
    chosen = _method(full, bias)
    measured = [(one, found) for one in part.horizons[1:] if (found := one.of(chosen.key)) is not None]
    good = [(one, found) for one, found in measured if found.kept.low is not None and found.kept.low >= KEPT]
    costs = {one.key: share for one, _ in good if (share := _share(one, part, max_tokens)) is not None and share <= WORTH}
    if not costs:
        words = _why_full(chosen, measured)
        return Proposal(method=chosen.key, section={"type": "full"}, written=1.0, words=words)
    least = min(round(share, 2) for share in costs.values())
    # Among those that cost the same, the one that stops last: it keeps most.
    best, found = [(one, found) for one, found in good if one.key in costs and round(costs[one.key], 2) == least][-1]
    section = best.section
    if section["type"] == "fixed":
        section = {"type": "growing", "from": section["tokens"]}
    words = _words(best, found, chosen, costs[best.key])
    return Proposal(method=chosen.key, section=section, written=costs[best.key], words=words)


def _method(full: HorizonEffect, bias: Bias) -> KeptUpdate:
    """Plain OPD where there is no bias; else the method whose full update points nearer to correct solutions.

    Where there are no solutions: survival if the bias was seen.
    """
    plain, other = (full.of(key) for key in METHODS)
    if plain is None or other is None:
        return full.methods[0]
    if bias == "none":
        return plain
    if plain.solutions is not None and other.solutions is not None:
        return max(plain, other, key=lambda one: -2.0 if one.solutions is None else one.solutions.mean or -2.0)
    return other if bias in ("strong", "moderate") else plain


def _share(one: HorizonEffect, part: Horizons, max_tokens: int) -> float | None:
    """Of all tokens, over training."""
    if one.section["type"] != "fixed":
        return one.written.mean
    grows = Growing(from_=one.section["tokens"])
    lengths = [length for length in part.horizons[0].lengths if length is not None]
    limits = [grows.limit(max_tokens, progress) for progress in TRAINING]
    return sum(min(length, limit) for length in lengths for limit in limits) / (len(limits) * sum(lengths))


def _why_full(chosen: KeptUpdate, measured: Sequence[tuple[HorizonEffect, KeptUpdate]]) -> str:
    if all(found.kept.low is None for _, found in measured):
        why = "the batches do not agree on a direction well enough to tell what a horizon keeps"
        return f"Keep full rollouts: {why}. More prompts or --batches would."
    best, found = max(measured, key=lambda pair: -2.0 if pair[1].kept.low is None else pair[1].kept.low)
    if found.kept.low is not None and found.kept.low >= KEPT:
        return f"Keep full rollouts: what keeps the direction of the update ({chosen.title}) saves next to no tokens."
    text = f"Keep full rollouts: no horizon surely keeps {KEPT:g} of the direction of the update ({chosen.title})"
    return f"{text}; the best, {best.title}, keeps {found.kept.plus_minus(form='.2f')}."


def _words(best: HorizonEffect, found: KeptUpdate, chosen: KeptUpdate, share: float) -> str:
    grows = best.section["type"] == "fixed"
    what = f"a limit that grows from {best.section['tokens']} tokens" if grows else best.title
    over = " over training, if answers keep their lengths" if grows else " with the student as it is now"
    text = f"Horizon for {chosen.title}: {what}. It writes {100 * share:.0f} % of the tokens{over}, and keeps "
    text += f"{found.kept.plus_minus(form='.2f')} of the update's direction (lower end asked: {KEPT:g})."
    if not grows and best.prompts is not None and chosen.noise is not None and found.noise_at_equal_tokens is not None:
        text += (
            f" The saved tokens pay for {best.prompts:.1f} times as many prompts (type = 'budget'): noise over signal of an "
        )
        text += f"update {chosen.noise:.2f} in full, {found.noise_at_equal_tokens:.2f} then."
    return text
