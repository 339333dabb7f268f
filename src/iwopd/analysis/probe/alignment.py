"""Gradient alignment: does an update point to where correct solutions become likelier?

The update of a rule on a batch is `sum_t w[t] A[t] grad lp[t]` over the rollouts' tokens (the loss's gradient at ratio 1; its
denominator does not turn it). The reference is `sum_t grad lp[t]` over the tokens of correct solutions to the same prompts. The
cosine of the two says how much of a step is progress; it needs no training and no sampling beyond the rollouts.

A few updates are also looked at on right and on wrong rollouts, as many of each, because cosines grow with their number.

Memory: parameters, reference gradient, one update, and the activations of one micro-batch. So rules are the outer loop and
micro-batches the inner one. If the batch is one micro-batch, its forward pass is kept for all rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from iwopd.algo.gradients import cosine
from iwopd.analysis.probe.intervals import over_batches
from iwopd.analysis.probe.positions import named_regions
from iwopd.analysis.probe.result import Aligned, Alignment, ByVerdict, Drift, Estimate
from iwopd.analysis.probe.rules import Rule
from iwopd.analysis.probe.scoring import Tokens
from iwopd.lm import ResponseModel, Sequences
from iwopd.types import Rollout

TOKEN_BUDGET = 4096
"""Tokens of one micro-batch."""
Advance = Callable[[int], None]
SIDES = ("right", "wrong")
REGIONS = {
    "before": "OPD before the first drift",
    "at": "OPD on the first drift",
    "until": "OPD up to and with the first drift",
    "after": "OPD after the first drift",
}


@dataclass(frozen=True, eq=False)
class AlignmentBatch:
    """Rollouts with their scores, and one correct solution for each of their prompts."""

    rollouts: list[Rollout]
    tokens: Tokens
    """[B, T] of these rollouts."""
    solutions: dict[str, Tensor]
    """Solution ids by prompt id, end-of-sequence included."""

    def verdict(self, right: bool) -> list[int]:
        """The first right (or wrong) rollouts, as many as there are of both."""
        if self.tokens.correct is None:
            return []
        sides = [(self.tokens.correct > 0.5).nonzero(), (self.tokens.correct <= 0.5).nonzero()]
        rows = sides[0] if right else sides[1]
        return rows.flatten().tolist()[: min(len(side) for side in sides)]


class TokenGradients:
    """Gradients of weighted sums of token log-probs, by all trainable parameters, one at a time."""

    def __init__(
        self, lm: ResponseModel, prompts: Sequence[Tensor], responses: Sequence[Tensor], budget: int = TOKEN_BUDGET
    ) -> None:
        self.lm = lm
        self.parameters = [parameter for parameter in lm.model.parameters() if parameter.requires_grad]
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        self.batches = [
            (rows, Sequences.build([prompts[row] for row in rows], [responses[row] for row in rows]).to(lm.device))
            for rows in lm.micro_batches(lengths, budget)
        ]
        self._kept: Tensor | None = None

    def of(self, coefficients: Tensor) -> list[Tensor]:
        """The gradient of `sum_t coefficients[t] * lp[t]`; coefficients are [B, T], 0 outside the mask."""
        for parameter in self.parameters:
            parameter.grad = None
        for rows, sequences in self.batches:
            lengths = zip(rows, sequences.answers.tolist(), strict=True)
            wanted = torch.cat([coefficients[row, :length] for row, length in lengths]).to(self.lm.device)
            if bool((wanted != 0).any()):
                logprobs = self._logprobs(sequences)
                (logprobs * wanted.to(logprobs.dtype)).sum().backward(retain_graph=self._kept is not None)
        gradient = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradient

    def _logprobs(self, sequences: Sequences) -> Tensor:
        logprobs = self.lm.logprobs(sequences) if self._kept is None else self._kept
        if len(self.batches) == 1 and self.lm.fused:
            self._kept = logprobs
        return logprobs


def cosines(
    lm: ResponseModel,
    batch: AlignmentBatch,
    directions: Mapping[str, Tensor],
    rows: Sequence[int],
    budget: int = TOKEN_BUDGET,
    advance: Advance = lambda directions: None,
    known: MutableMapping[str, float] | None = None,
    name: str = "",
) -> dict[str, float]:
    """Cosine of updates on some of the batch's rollouts with the gradient towards the solutions of their prompts.

    `directions` are coefficients [B, T] by name. NaN of no rollouts. What is in `known`, under this name and the direction's,
    is taken from there; what is not is put there.
    """
    if not rows:
        advance(len(directions))
        return dict.fromkeys(directions, math.nan)
    kept: MutableMapping[str, float] = {} if known is None else known
    found = {key: kept[f"{name}/{key}"] for key in directions if f"{name}/{key}" in kept}
    advance(len(found))
    if len(found) == len(directions):
        return found
    rollouts = [batch.rollouts[row] for row in rows]
    asked = {rollout.prompt.id: torch.tensor(rollout.prompt.token_ids) for rollout in rollouts}
    solutions = [batch.solutions[id_] for id_ in asked]
    every_token = pad_sequence([torch.ones(len(ids)) for ids in solutions], batch_first=True)
    target = TokenGradients(lm, list(asked.values()), solutions, budget).of(every_token)
    prompts = [asked[rollout.prompt.id] for rollout in rollouts]
    updates = TokenGradients(lm, prompts, [rollout.response_ids for rollout in rollouts], budget)
    for key, coefficients in directions.items():
        if key not in found:
            found[key] = kept[f"{name}/{key}"] = cosine(updates.of(coefficients[list(rows)]), target)
            advance(1)
    return found


def measure_alignment(
    lm: ResponseModel,
    batches: Sequence[AlignmentBatch],
    rules: Sequence[Rule],
    drift: Drift,
    split: Sequence[str] = (),
    advance: Advance = lambda directions: None,
    known: MutableMapping[str, float] | None = None,
) -> Alignment:
    """Cosines over batches, with t intervals and paired differences to plain OPD (the rule `opd`).

    `split` names the rules that are also looked at on right and on wrong rollouts. `known`: cosines that were measured before,
    to which new ones are added.
    """
    lm.model.eval()
    rows: list[dict[str, float]] = []
    for number, batch in enumerate(batches):
        directions = _directions(batch, rules, drift.threshold)
        told: Any = {"advance": advance, "known": known}
        found = cosines(lm, batch, directions, range(len(batch.rollouts)), name=f"{number}", **told)
        few = {key: directions[key] for key in split}
        for side in SIDES if few else ():
            on_side = cosines(lm, batch, few, batch.verdict(side == "right"), name=f"{number}/{side}", **told)
            found |= {_on_side(key, side): value for key, value in on_side.items()}
        rows.append(found)

    def estimate(key: str) -> Estimate:
        return over_batches([row[key] for row in rows])

    def against(key: str, other: str) -> Estimate:
        return over_batches([row[key] - row[other] for row in rows])

    def aligned(key: str, title: str) -> Aligned:
        gain = None if key == "opd" else against(key, "opd")
        share = getattr(drift, key) if key in REGIONS else None
        return Aligned(key=key, title=title, cosine=estimate(key), gain=gain, share=share)

    def by_verdict(rule: Rule) -> ByVerdict:
        right, wrong = (_on_side(rule.key, side) for side in SIDES)
        sides = {"right": estimate(right), "wrong": estimate(wrong), "difference": against(wrong, right)}
        return ByVerdict(key=rule.key, title=rule.title, **sides)

    compared = sum(len(batch.verdict(right=True)) for batch in batches)
    return Alignment(
        batches=len(batches),
        batch_prompts=len(batches[0].solutions),
        rules=[aligned(rule.key, rule.title) for rule in rules],
        regions=[aligned(key, title) for key, title in REGIONS.items()],
        verdicts=[by_verdict(rule) for rule in rules if rule.key in split] if compared else [],
        compared=compared,
    )


def gradient_passes(batches: Sequence[AlignmentBatch], directions: int, split: int) -> int:
    """Passes with gradients that it takes: one of each direction, and one towards the solutions, for all and for each side."""
    sides = sum(len(SIDES) * (split + 1) for batch in batches if split and batch.verdict(right=True))
    return len(batches) * (directions + 1) + sides


def _on_side(key: str, side: str) -> str:
    return f"{key}, {side}"


def _directions(batch: AlignmentBatch, rules: Sequence[Rule], threshold: float) -> dict[str, Tensor]:
    """Coefficients [B, T] of each update."""
    found = {rule.key: rule.signal(batch.tokens).advantages for rule in rules}
    gap, mask = batch.tokens.gap, batch.tokens.mask
    regions = named_regions(gap, mask, threshold)
    return found | {key: torch.where(region, gap, 0.0) for key, region in regions.items()}
