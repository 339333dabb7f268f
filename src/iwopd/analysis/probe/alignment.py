"""Gradient alignment: does an update point to where correct solutions become likelier?

The update of a rule on a batch is `sum_t w[t] A[t] grad lp[t]` over the rollouts' tokens (the loss's gradient at ratio 1; its
denominator does not turn it). The reference is `sum_t grad lp[t]` over the tokens of correct solutions to the same prompts. The
cosine of the two says how much of a step is progress; it needs no training and no sampling beyond the rollouts.

Memory: parameters, reference gradient, one update, and the activations of one micro-batch. So rules are the outer loop and
micro-batches the inner one. If the batch is one micro-batch, its forward pass is kept for all rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from iwopd.algo.evidence import Evidence
from iwopd.algo.gradients import cosine
from iwopd.analysis.probe.intervals import over_batches
from iwopd.analysis.probe.positions import named_regions
from iwopd.analysis.probe.result import Aligned, Alignment, Drift
from iwopd.analysis.probe.rules import Rule
from iwopd.lm import ResponseModel, Sequences
from iwopd.types import Rollout

TOKEN_BUDGET = 4096
"""Tokens of one micro-batch."""
Advance = Callable[[int], None]
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
    evidence: Evidence  # [B, T]
    solutions: list[tuple[Tensor, Tensor]]
    """Prompt ids and solution ids, end-of-sequence included."""


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


def batch_cosines(
    lm: ResponseModel,
    batch: AlignmentBatch,
    rules: Sequence[Rule],
    threshold: float,
    budget: int = TOKEN_BUDGET,
    advance: Advance = lambda directions: None,
) -> dict[str, float]:
    """Cosine of every rule's update, and of OPD's on each region, with the gradient towards the solutions."""
    prompts, solutions = ([pair[place] for pair in batch.solutions] for place in range(2))
    every_token = pad_sequence([torch.ones(len(ids)) for ids in solutions], batch_first=True)
    target = TokenGradients(lm, prompts, solutions, budget).of(every_token)
    prompts = [torch.tensor(rollout.prompt.token_ids) for rollout in batch.rollouts]
    updates = TokenGradients(lm, prompts, [rollout.response_ids for rollout in batch.rollouts], budget)
    found = {}
    for key, coefficients in _directions(batch, rules, threshold).items():
        found[key] = cosine(updates.of(coefficients), target)
        advance(1)
    return found


def measure_alignment(
    lm: ResponseModel,
    batches: Sequence[AlignmentBatch],
    rules: Sequence[Rule],
    drift: Drift,
    advance: Advance = lambda directions: None,
) -> Alignment:
    """Cosines over batches, with t intervals and paired differences to plain OPD (the rule `opd`)."""
    lm.model.eval()
    rows = [batch_cosines(lm, batch, rules, drift.threshold, advance=advance) for batch in batches]

    def aligned(key: str, title: str) -> Aligned:
        gain = None if key == "opd" else over_batches([row[key] - row["opd"] for row in rows])
        share = getattr(drift, key) if key in REGIONS else None
        return Aligned(key=key, title=title, cosine=over_batches([row[key] for row in rows]), gain=gain, share=share)

    return Alignment(
        batches=len(batches),
        batch_prompts=len(batches[0].solutions),
        rules=[aligned(rule.key, rule.title) for rule in rules],
        regions=[aligned(key, title) for key, title in REGIONS.items()],
    )


def _directions(batch: AlignmentBatch, rules: Sequence[Rule], threshold: float) -> dict[str, Tensor]:
    """Coefficients [B, T] of each update."""
    found = {rule.key: rule.signal(batch.evidence).advantages for rule in rules}
    gap = batch.evidence.gap
    regions = named_regions(gap, batch.evidence.mask, threshold)
    return found | {key: torch.where(region, gap, 0.0) for key, region in regions.items()}
