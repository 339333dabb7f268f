"""Agreement of gradients before and after drifts (`algo.agreement`), before any training.

The loss is the full-vocabulary reverse KL: its gradient has no noise of the draw, so a batch is enough to see the sign. A group
of rollouts takes two matrices [K, K], however many tokens it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from iwopd import algo
from iwopd.algo.agreement import GradientParts, split
from iwopd.algo.drift_weights import gate
from iwopd.analysis.probe.intervals import over_batches
from iwopd.analysis.probe.result import Agreement


class GroupedParts:
    """Gradients of groups of rollouts, summed as their micro-batches come."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        """Which rollouts each group has, by number; a rollout in none of them is left out."""
        self._group = {row: number for number, rows in enumerate(groups) for row in rows}
        self._sums: list[GradientParts | None] = [None] * len(groups)

    def add(self, rows: Sequence[int], hidden: Tensor, slopes: Tensor, own: Sequence[Tensor], other: Sequence[Tensor]) -> None:
        """Of these rollouts: states and the loss's gradient by them [N, H], log-probs of student and teacher [T] of each."""
        lengths = torch.tensor([len(one) for one in own])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        gap = algo.opd_advantages(pad_sequence(list(other), batch_first=True), pad_sequence(list(own), batch_first=True), mask)
        parts = [part[mask].to(hidden.device) for part in split(gap, mask, torch.ones_like(gap), mask)]
        numbers = torch.tensor([self._group.get(row, -1) for row in rows])
        for number in numbers[numbers >= 0].unique().tolist():
            here = (numbers == number).repeat_interleave(lengths).to(hidden.device)
            found = GradientParts.of(hidden[here], slopes[here], *(part[here] for part in parts))
            known = self._sums[number]
            self._sums[number] = found if known is None else GradientParts.merge([known, found])

    @property
    def agreements(self) -> tuple[float, ...]:
        """Of each group; NaN where one of its parts is empty."""
        found = [None if part is None else part.agreement for part in self._sums]
        return tuple(math.nan if value is None else value for value in found)


def measure_agreement(agreements: Sequence[float], batch_prompts: int) -> Agreement | None:
    """Over batches, and what the rule `gated` would make of it; None if no batch has tokens before and after a drift."""
    known = [value for value in agreements if not math.isnan(value)]
    if not known:
        return None
    found, mean = over_batches(known), sum(known) / len(known)
    ends = {name: None if end is None else min(1.0, max(-1.0, end)) for name, end in (("low", found.low), ("high", found.high))}
    cosine = found.model_copy(update=ends)  # a t interval of two batches may be wider than a cosine can be
    return Agreement(batches=len(known), batch_prompts=batch_prompts, cosine=cosine, gate=gate(mean))
