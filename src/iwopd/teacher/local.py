"""A scorer in this process: the teacher, the reference model, or the student itself for the old log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from iwopd.lm import ResponseModel, Sequences
from iwopd.types import Rollout

TOKEN_BUDGET_CPU = 640
"""Few enough that what a layer computes stays in a core's cache, enough for matrix products at full speed: a tenth faster than
2,000 tokens at a time (model 512 wide)."""
TOKEN_BUDGET_GPU = 2**16


class LocalScorer:
    """Log-probs of given rollouts under a transformers causal LM.

    Micro-batches are made of rollouts of similar length within a token budget; the result does not depend on them beyond
    rounding. Log-probs may hold -inf (an id beyond the model's vocabulary): `algo.floor_logprobs` is the caller's business,
    because the count belongs into its metrics.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        token_budget: int | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Score with `model`; `autocast` is the context of its forward pass (that of the update, for the old log-probs)."""
        self.lm = ResponseModel(model, temperature=temperature, vocab_size=vocab_size)
        default = TOKEN_BUDGET_CPU if self.lm.device.type == "cpu" else TOKEN_BUDGET_GPU
        self.token_budget = default if token_budget is None else token_budget
        self.autocast = autocast

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs [T] of each rollout's response tokens, in order."""
        lengths = [len(rollout.prompt.token_ids) + len(rollout) for rollout in rollouts]
        scores: list[Tensor] = [torch.empty(0)] * len(rollouts)
        was_training = self.lm.model.training
        self.lm.model.eval()
        try:
            for rows in self.lm.micro_batches(lengths, self.token_budget):
                chosen = [rollouts[row] for row in rows]
                sequences = Sequences.from_rollouts(chosen).to(self.lm.device)
                with self.autocast():
                    values = self.lm.logprobs(sequences).cpu()
                for row, rollout, logprobs in zip(rows, chosen, values, strict=True):
                    scores[row] = logprobs[: len(rollout)]
        finally:
            self.lm.model.train(was_training)
        return scores
