"""A scorer in this process: the teacher, the reference model, or the student itself for the old log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from iwopd.algo.head import Precision
from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.lm import Context, HeadCheck, ResponseModel, Sequences
from iwopd.modes import eval_mode
from iwopd.teacher.following import LocalFollower
from iwopd.teacher.scorer import HasModel, OutputMatrix, Scorer, ScoringPath
from iwopd.types import Rollout

TOKEN_BUDGET_CPU = 640
"""What a layer computes stays in a core's cache: a tenth faster than 2,000 tokens at a time (model 512 wide)."""
TOKEN_BUDGET_GPU = 2**16


class LocalScorer(Scorer):
    """Log-probs of given rollouts under a transformers causal LM, in micro-batches of similar lengths.

    They may hold -inf (an id beyond the model's vocabulary). The caller floors it, because the count belongs in its metrics.
    """

    here = True

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        token_budget: int | None = None,
        autocast: Context = nullcontext,
        head_precision: Precision = "float32",
    ) -> None:
        """`autocast` is the context of the forward pass; `head_precision` is that of the output head's products."""
        self.lm = ResponseModel(
            model, temperature=temperature, vocab_size=vocab_size, autocast=autocast, head_precision=head_precision
        )
        default = TOKEN_BUDGET_CPU if self.lm.device.type == "cpu" else TOKEN_BUDGET_GPU
        self.token_budget = default if token_budget is None else token_budget
        self.half = self.lm.half
        self.progress: Callable[[int], None] | None = None
        """Who wants to know how many more rollouts are scored, while others are."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        return [one.logprobs for one in self.look(rollouts)]

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        """Hidden states only if its logits come from the output matrix."""
        return frozenset({"entropy", "top-k", "chosen", *(["states"] if self.lm.fused else [])})

    @torch.no_grad()
    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        lengths = [len(rollout.prompt.token_ids) + len(rollout) for rollout in rollouts]
        scores: dict[int, TokenScores] = {}
        with eval_mode(self.lm.model):
            for rows in self.lm.micro_batches(lengths, self.token_budget):
                sequences = Sequences.from_rollouts([rollouts[row] for row in rows]).to(self.lm.device)
                ids = None if chosen is None else torch.cat([chosen[row] for row in rows]).to(self.lm.device)
                found = self.lm.scores(sequences, wanted, ids).cpu()
                scores.update(zip(rows, found.split(sequences.answers.tolist()), strict=True))
                if self.progress is not None:
                    self.progress(len(rows))
        return [scores[row] for row in range(len(rollouts))]

    def arrive(self) -> None:
        """Called before its model is used by somebody else: one that has left the device comes back (`offload`)."""

    def follow(self, wanted: Wanted = NOTHING) -> LocalFollower:
        return LocalFollower(self.lm, self.token_budget, wanted)

    def output_matrix(self) -> OutputMatrix:
        weight, bias = self.lm.head
        return OutputMatrix(weight.detach(), bias, self.lm.temperature, self.lm.vocab_size, self.lm.head_precision)

    def check_head(self, sequences: Sequences, *, trained: bool = False) -> HeadCheck:
        """Compare the fused head with the model's own logits; `trained`: also on the path that carries gradients."""
        with eval_mode(self.lm.model):
            return self.lm.check_head(sequences, trained=trained)

    def local(self, name: str) -> dict[str, HasModel]:
        return {name: self}

    @property
    def whole_distribution(self) -> HasModel | None:
        """Itself, if its logits come from the output matrix."""
        return self if self.lm.fused else None

    def paths(self, name: str) -> Iterator[ScoringPath]:
        yield ScoringPath(f"{name} (local)", name, self, self.half)
