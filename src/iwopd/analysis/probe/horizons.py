"""Horizons: how many tokens would not be written, and what is left of the update.

The probe's rollouts are written to the end. Each horizon cuts them as training would have stopped them (`algo.horizons`), a
method's signal is made anew from what is left, and its update `sum_t w[t] A[t] grad lp[t]` is compared with that of the full
rollouts. The loss's denominator does not turn an update, so it plays no part here; an optimizer that scales steps does not see
it either.

Late tokens bring noise as well as signal, and noise is no loss. So what counts is the cosine of the *expected* updates, from
products of different batches (`algo.gradients.expected_cosine`). Gradients are kept as sketches, so that memory does not grow
with the number of horizons. Equal cuts are measured once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from iwopd.algo.gradients import cosine, expected_cosine, noise_over_signal, sketch
from iwopd.algo.horizons import cut_lengths
from iwopd.analysis.probe.alignment import Advance, AlignmentBatch, TokenGradients
from iwopd.analysis.probe.intervals import Bootstrap, jackknife, over_batches
from iwopd.analysis.probe.kept import Kept
from iwopd.analysis.probe.result import Estimate, HorizonEffect, Horizons, KeptUpdate
from iwopd.analysis.probe.rules import Rule
from iwopd.analysis.probe.scoring import Tokens
from iwopd.lm import ResponseModel

METHODS = ("opd", "survival")
"""Rules under which updates are compared."""
SHARES = (0.25, 0.5, 0.75)
"""Fixed horizons, as shares of the mean length."""
THRESHOLDS = (0.5, 0.2, 0.05, 1e-3, 1e-6)
"""Of drift horizons: 0.7, 1.6, 3, 7 and 14 nats; long answers lose many without drifting."""
BLOCK = 8
LEVELS = [place / 20 for place in range(21)]
"""Of the quantiles of lengths: enough to price a step (`iwopd plan`)."""
FULL = "full"


@dataclass(frozen=True)
class Cut:
    """A horizon of the table: how it cuts whole rollouts."""

    key: str
    title: str
    section: dict[str, Any]
    lengths: Callable[[Tokens], Tensor]
    """[B] tokens that are left of each rollout."""


@dataclass(frozen=True, eq=False)
class Updates:
    """The updates of one horizon and one method, a batch each."""

    sketches: Tensor
    """[n, size]"""
    solutions: list[float]
    """Cosines with the way to correct solutions; empty where there are none."""


def probe_cuts(mean_tokens: float) -> list[Cut]:
    """Full rollouts, fixed lengths, and drift at several thresholds."""
    cuts = [Cut(FULL, "full", {"type": "full"}, lambda tokens: tokens.mask.sum(-1))]
    for limit in dict.fromkeys(math.ceil(share * mean_tokens) for share in SHARES):
        cuts.append(Cut(f"fixed-{limit}", f"fixed {limit}", {"type": "fixed", "tokens": limit}, _at(limit)))
    for threshold in THRESHOLDS:
        section = {"type": "drift", "threshold": threshold, "block": BLOCK}
        cuts.append(Cut(f"drift-{threshold:g}", f"drift {threshold:g}", section, _drifted(threshold)))
    return cuts


def _at(limit: int) -> Callable[[Tokens], Tensor]:
    return lambda tokens: tokens.mask.sum(-1).clamp(max=limit)


def _drifted(threshold: float) -> Callable[[Tokens], Tensor]:
    return lambda tokens: cut_lengths(tokens.gap, tokens.mask, threshold=threshold, block=BLOCK)


def measure_horizons(
    lm: ResponseModel,
    tokens: Tokens,
    bootstrap: Bootstrap,
    batches: Sequence[AlignmentBatch],
    rules: Sequence[Rule],
    advance: Advance = lambda directions: None,
    kept: Kept | None = None,
) -> Horizons:
    """Tokens from all rollouts, with intervals over prompts; updates of `rules` from batches, with intervals over them.

    Those of a batch are kept as soon as they are known.
    """
    lm.model.eval()
    mean = float(tokens.mask.sum(-1).double().mean())
    cuts = probe_cuts(mean)
    by_batch = [
        _kept_or(kept or Kept(), number, len(cuts) * len(rules), advance, partial(_of_batch, lm, batch, cuts, rules, advance))
        for number, batch in enumerate(batches)
    ]
    updates = {key: _joined([found[key] for found in by_batch]) for key in by_batch[0]}
    return Horizons(
        batches=len(batches),
        batch_prompts=len({rollout.prompt.id for rollout in batches[0].rollouts}),
        mean_tokens=mean,
        levels=LEVELS,
        horizons=[_effect(cut, tokens, bootstrap, rules, updates) for cut in cuts],
    )


def _of_batch(
    lm: ResponseModel, batch: AlignmentBatch, cuts: Sequence[Cut], rules: Sequence[Rule], advance: Advance
) -> dict[tuple[str, str], Updates]:
    """By horizon and rule: the updates on one batch."""
    asked = {rollout.prompt.id: torch.tensor(rollout.prompt.token_ids) for rollout in batch.rollouts}
    target = None
    if batch.solutions:
        solutions = [batch.solutions[id_] for id_ in asked]
        every_token = pad_sequence([torch.ones(len(ids)) for ids in solutions], batch_first=True)
        target = TokenGradients(lm, list(asked.values()), solutions).of(every_token)
    prompts = [asked[rollout.prompt.id] for rollout in batch.rollouts]
    gradients = TokenGradients(lm, prompts, [rollout.response_ids for rollout in batch.rollouts])
    found: dict[tuple[str, str], Updates] = {}
    left = {cut.key: batch.tokens.cut(cut.lengths(batch.tokens)) for cut in cuts}
    for rule in rules:
        known: list[tuple[Tensor, Updates]] = []
        for cut in cuts:
            direction = rule.signal(left[cut.key]).advantages
            same = next((updates for other, updates in known if torch.equal(direction, other)), None)
            if same is None:
                update = gradients.of(direction)
                same = Updates(sketch(update)[None], [] if target is None else [cosine(update, target)])
                known.append((direction, same))
            found[cut.key, rule.key] = same
            advance(1)
    return found


def _kept_or(
    kept: Kept, number: int, count: int, advance: Advance, measure: Callable[[], dict[tuple[str, str], Updates]]
) -> dict[tuple[str, str], Updates]:
    """The updates on a batch as they were kept, or measured and kept."""
    name = f"horizons-{number}"
    if (before := kept.tensors(name)) is not None and (solutions := kept.read(name)) is not None:
        advance(count)
        return {_pair(key): Updates(sketches, solutions[key]) for key, sketches in before.items()}
    found = measure()
    kept.keep_tensors(name, {"|".join(key): updates.sketches for key, updates in found.items()})
    kept.write(name, {"|".join(key): updates.solutions for key, updates in found.items()})
    return found


def _pair(key: str) -> tuple[str, str]:
    cut, rule = key.split("|")
    return cut, rule


def _joined(parts: Sequence[Updates]) -> Updates:
    return Updates(torch.cat([part.sketches for part in parts]), [value for part in parts for value in part.solutions])


def _effect(
    cut: Cut, tokens: Tokens, bootstrap: Bootstrap, rules: Sequence[Rule], updates: dict[tuple[str, str], Updates]
) -> HorizonEffect:
    whole, left = tokens.mask.sum(-1), cut.lengths(tokens)
    written = bootstrap.estimate(torch.div, left, whole)
    share = int(left.sum()) / int(whole.sum())
    return HorizonEffect(
        key=cut.key,
        title=cut.title,
        section=cut.section,
        written=written,
        stopped=bootstrap.mean((left < whole).double()),
        prompts=1 / share,
        lengths=torch.quantile(left.double(), torch.tensor(LEVELS, dtype=torch.float64)).tolist(),
        methods=[_kept(rule, updates[cut.key, rule.key], updates[FULL, rule.key], share) for rule in rules],
    )


def _kept(rule: Rule, ours: Updates, full: Updates, share: float) -> KeptUpdate:
    """From products of sketches in float64: ours with the full ones, and each kind among themselves."""
    mine, theirs = ours.sketches.double(), full.sketches.double()
    across, own, whole = mine @ theirs.T, mine @ mine.T, theirs @ theirs.T

    def of_batches(chosen: Tensor) -> float:
        return expected_cosine(*(products[chosen][:, chosen] for products in (across, own, whole)))

    sizes = (own.diagonal() * whole.diagonal()).sqrt()
    in_batch = torch.where(sizes > 0, across.diagonal() / sizes, math.nan).tolist()
    noise = noise_over_signal(own)
    pairs = zip(ours.solutions, full.solutions, strict=True)
    return KeptUpdate(
        key=rule.key,
        title=rule.title,
        kept=_as_cosine(jackknife(of_batches, len(own))),
        in_batch=over_batches(in_batch),
        noise=noise,
        noise_at_equal_tokens=noise * math.sqrt(share),
        solutions=over_batches(ours.solutions) if ours.solutions else None,
        change=over_batches([mine - other for mine, other in pairs]) if ours.solutions and ours is not full else None,
    )


def _as_cosine(estimate: Estimate) -> Estimate:
    """With an interval inside [-1, 1]."""
    low, high = (None if end is None else max(-1.0, min(1.0, end)) for end in (estimate.low, estimate.high))
    return Estimate(mean=estimate.mean, low=low, high=high)
