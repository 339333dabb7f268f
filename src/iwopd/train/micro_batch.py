"""The loss of one micro-batch as a module: the model's body, its head and the objective in one forward pass.

One module, because sharded weights (`sharding`) are whole only while the module that they belong to runs, and the objective
still works on the output matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iwopd import algo
from iwopd.algo.agreement import GradientParts
from iwopd.algo.objectives import LossStats, Mixture, ObjectiveLoss, TokenLoss, TokenStates
from iwopd.lm import ResponseModel, Sequences
from iwopd.modes import eval_mode
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.scorer import HasModel, OutputMatrix

Columns = Mapping[str, Tensor]
STATES = "teacher_states"
"""Name of the column [N, H] with the teacher's hidden states, where they were kept since it scored."""
BEFORE, AFTER = "before_drift", "after_drift"
"""Names of the columns that split the gradient in two (`algo.agreement.split`)."""


@dataclass(frozen=True, eq=False)
class Distributions:
    """The teacher's whole distributions: its output matrix, and who computes hidden states that were not kept."""

    matrix: OutputMatrix
    model: HasModel | None = None

    @classmethod
    def of(cls, scorer: LocalScorer) -> Distributions:
        return cls(scorer.output_matrix(), scorer)

    @property
    def state_bytes(self) -> int:
        """Of one token's hidden state as it is kept."""
        return self.matrix.weight.shape[1] * self.matrix.weight.element_size()

    @torch.no_grad()
    def states(self, sequences: Sequences, kept: Tensor | None) -> TokenStates:
        """Of the response tokens, on the device of `sequences`."""
        device = sequences.response_ids.device
        if kept is None:
            if self.model is None:
                raise ValueError("the teacher's hidden states were not kept, and its model is not here to compute them again")
            lm = self.model.lm
            with eval_mode(lm.model):
                kept = lm.token_hidden(sequences.to(lm.device))
        matrix = self.matrix
        return TokenStates(
            kept, sequences.response_ids, matrix.weight, matrix.bias, matrix.temperature, matrix.vocab_size, matrix.precision
        ).to(device)


class MicroBatchLoss(nn.Module):
    """Executes an objective and does not know which."""

    def __init__(self, lm: ResponseModel, objective: TokenLoss, teacher: Distributions | None = None) -> None:
        """`teacher` is there for objectives that need its whole distributions."""
        super().__init__()
        self.model = lm.model  # a part of this module; the teacher is none
        self.lm, self.objective, self.teacher = lm, objective, teacher
        self.gradient_parts: GradientParts | None = None
        """Of the micro-batches whose backward passes have run; the learner takes them from here."""

    def forward(
        self, sequences: Sequences, columns: Columns, denominator: int, hidden: Tensor | None = None
    ) -> tuple[Tensor, LossStats | None]:
        """Loss [] and statistics of N tokens; `hidden` [N, H] are their states, if they are known already.

        Log-probs that are not numbers give no statistics and the loss of no tokens, 0: its backward pass works, and with
        sharded weights the other processes wait for it.
        """
        kept, split = columns.get(STATES), (columns.get(BEFORE), columns.get(AFTER))
        columns = {name: values for name, values in columns.items() if name not in (STATES, BEFORE, AFTER)}
        compute = (
            self._from_states(sequences, denominator, hidden, self._teacher_states(sequences, columns, kept), split)
            if self.lm.fused
            else self._from_logprobs(sequences, denominator)
        )
        try:
            out = compute(columns)
        except algo.NonFiniteError:
            return compute(no_tokens(columns)).loss, None
        return out.loss, out.stats

    def _teacher_states(self, sequences: Sequences, columns: Columns, kept: Tensor | None) -> TokenStates | None:
        """Of all tokens, or of those whose objective needs them."""
        if self.teacher is None:
            return None
        taught = self.objective.taught(columns) if isinstance(self.objective, Mixture) else None
        if taught is None or taught.all():
            return self.teacher.states(sequences, kept)
        if not taught.any():
            return None
        device = sequences.response_ids.device
        return self.teacher.states(sequences.only(taught).to(device), None if kept is None else kept[taught])

    def _from_states(
        self,
        sequences: Sequences,
        denominator: int,
        hidden: Tensor | None,
        teacher: TokenStates | None,
        split: tuple[Tensor | None, Tensor | None],
    ) -> Callable[[Columns], ObjectiveLoss]:
        if hidden is None:
            hidden = self.lm.token_hidden(sequences)
        if hidden.requires_grad:
            hidden.register_hook(self._watch(hidden.detach(), *split))
        student = self.lm.token_states(hidden, sequences.response_ids)
        return lambda columns: self.objective.loss(student, columns, denominator, teacher)

    def _watch(self, hidden: Tensor, before: Tensor | None, after: Tensor | None) -> Callable[[Tensor], None]:
        """Called in the backward pass with the gradient by the hidden states [N, H]; does not change it."""

        def see(gradient: Tensor) -> None:
            if before is not None and after is not None:
                found = GradientParts.of(hidden, gradient, before, after)
                if self.gradient_parts is None:
                    self.gradient_parts = found
                else:
                    self.gradient_parts.sums.add_(found.sums)

        return see

    def _from_logprobs(self, sequences: Sequences, denominator: int) -> Callable[[Columns], ObjectiveLoss]:
        logprobs = self.lm.logprobs(sequences)
        return lambda columns: self.objective.logprobs_loss(logprobs, columns, denominator)


def no_tokens(columns: Columns) -> Columns:
    """The same columns with no supervised token."""
    return {**columns, "supervised": torch.zeros_like(columns["supervised"])}
