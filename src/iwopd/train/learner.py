"""The update: mini-batches, micro-batches by token budget, one global denominator, and no step on a broken gradient.

It executes an objective and does not know which.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from iwopd import algo
from iwopd.algo.objectives import LossStats, Objective, ObjectiveLoss, TokenStates
from iwopd.config import Optim
from iwopd.lm import ResponseModel, Sequences
from iwopd.modes import eval_mode
from iwopd.teacher.scorer import HasModel
from iwopd.train.ranks import Ranks
from iwopd.types import Rollout, TokenBatch


@dataclass(frozen=True)
class Update:
    """What the update of one step did: means over its optimizer steps."""

    loss: float
    grad_norm: float
    tokens: int
    """Supervised tokens of the batch."""
    skipped: int
    """Optimizer steps left out because loss or gradient was not finite."""
    updates: int
    """Optimizer steps taken."""
    padding_waste: float
    stats: LossStats


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The forward pass of the coming update, which gives the old log-probs and waits for its backward pass."""

    logprobs: list[Tensor]
    """[T] of each rollout."""
    hidden: Tensor
    """[N, H] with its graph."""


class _OptimizerStep(NamedTuple):
    loss: float
    grad_norm: float
    padding_waste: float
    stats: LossStats
    taken: bool


class Learner:
    """Owns the optimizer of a student."""

    def __init__(
        self,
        lm: ResponseModel,
        optim: Optim,
        objective: Objective,
        accelerator: Accelerator,
        ranks: Ranks,
        teacher: HasModel | None = None,
    ) -> None:
        """`teacher` is there for objectives that need its whole distributions."""
        self.lm, self.optim, self.objective, self.accelerator, self.ranks = lm, optim, objective, accelerator, ranks
        self.teacher = teacher
        self.parameters = [parameter for parameter in lm.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        )
        _switch_off_dropout(lm.model)
        if optim.gradient_checkpointing:
            lm.model.gradient_checkpointing_enable()

    def forward(self, rollouts: Sequence[Rollout]) -> ForwardPass | None:
        """The forward pass of the coming update, if it can run before the signal; then nobody else need score the rollouts.

        None if the step has several updates (it would not be the old policy's) or micro-batches (it would cost more memory).
        """
        lengths = [len(rollout.prompt.token_ids) + len(rollout) for rollout in rollouts]
        groups = self.lm.micro_batches(lengths, self.optim.token_budget)
        one_update = self.optim.ppo_epochs == self.optim.mini_batches == self.ranks.count == 1
        if not (one_update and len(groups) == 1 and self.lm.fused):
            return None
        self.lm.model.train()
        sequences = Sequences.from_rollouts([rollouts[row] for row in groups[0]]).to(self.lm.device)
        with self.accelerator.autocast():
            hidden = self.lm.token_hidden(sequences)
            with torch.no_grad():
                values = self.lm.head_logprobs(hidden, sequences.response_ids).cpu()
        if not values.isfinite().all():
            return None  # the scorer will find it too, and its errors name the rollout
        parts = dict(zip(groups[0], sequences.split(values), strict=True))
        return ForwardPass([parts[row] for row in range(len(rollouts))], hidden)

    def update(
        self, batch: TokenBatch, columns: dict[str, Tensor], *, seed: int, step: int, forward: ForwardPass | None = None
    ) -> Update:
        """Train on the whole step's batch; `columns` [N] are the objective's, `forward` is the pass over the same rollouts."""
        if forward is not None and len(forward.hidden) != len(batch.response_ids):
            raise ValueError(f"the forward pass has {len(forward.hidden)} tokens, the batch {len(batch.response_ids)}")
        self.lm.model.train()
        steps: list[_OptimizerStep] = []
        for epoch in range(self.optim.ppo_epochs):
            for rows in self._mini_batches(len(batch), seed, step, epoch):
                denominator = int(columns["supervised"][batch.places(rows)].sum())
                if denominator:
                    steps.append(self._optimize(batch, columns, rows, denominator, forward))
        taken = sum(one.taken for one in steps)
        return Update(
            loss=_mean([one.loss for one in steps]),
            grad_norm=_mean([one.grad_norm for one in steps]),
            tokens=int(columns["supervised"].sum()),
            skipped=len(steps) - taken,
            updates=taken,
            padding_waste=_mean([one.padding_waste for one in steps]),
            stats=self._merged([one.stats for one in steps]),
        )

    def _mini_batches(self, count: int, seed: int, step: int, epoch: int) -> list[list[int]]:
        """Rows of each optimizer step; shuffled only if there are several, the same on every rank."""
        rows = list(range(count))
        if self.optim.mini_batches > 1:
            random.Random(f"mini:{seed}:{step}:{epoch}").shuffle(rows)
        size = math.ceil(count / self.optim.mini_batches)
        return [rows[start : start + size] for start in range(0, count, size)]

    def _optimize(
        self, batch: TokenBatch, columns: dict[str, Tensor], rows: Sequence[int], denominator: int, forward: ForwardPass | None
    ) -> _OptimizerStep:
        """One optimizer step on these rows of the batch, or none if loss or gradient is not finite."""
        loss, stats, waste = self._accumulate(batch, columns, rows, denominator, forward)
        self.ranks.sum_gradients(self.parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.optim.grad_clip))
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return _OptimizerStep(loss, norm, waste, stats, finite)

    def _accumulate(
        self, batch: TokenBatch, columns: dict[str, Tensor], rows: Sequence[int], denominator: int, forward: ForwardPass | None
    ) -> tuple[float, LossStats, float]:
        """Backward over this rank's rows; returns loss and statistics of all ranks, and the share of padding here."""
        mine = rows[self.ranks.rank :: self.ranks.count]
        totals = (batch.prompt_lengths + batch.lengths)[mine].tolist() if mine else []
        groups = self.lm.micro_batches(totals, self.optim.token_budget)
        loss, parts = 0.0, []
        for group in groups:
            chosen = [mine[place] for place in group]
            here = batch.places(chosen)
            part = {name: values[here].to(self.lm.device) for name, values in columns.items()}
            try:
                out = self._loss(Sequences.from_batch(batch, chosen), part, denominator, forward)
            except algo.NonFiniteError:  # log-probs that are not numbers: the whole update is void, on every rank
                loss = math.nan
                break
            out.loss.backward()
            loss += float(out.loss.detach())
            parts.append(out.stats)
        everyone = self.ranks.gather((loss, [part.cpu() for part in parts]))
        stats = self._merged([part for _, stats in everyone for part in stats])
        return sum(value for value, _ in everyone), stats, self.lm.padding_waste(totals, groups)

    def _loss(
        self, sequences: Sequences, columns: dict[str, Tensor], denominator: int, forward: ForwardPass | None
    ) -> ObjectiveLoss:
        sequences = sequences.to(self.lm.device)
        if not self.lm.fused:
            with self.accelerator.autocast():
                logprobs = self.lm.logprobs(sequences)
            return self.objective.logprobs_loss(logprobs, columns, denominator)
        with self.accelerator.autocast():
            hidden = self.lm.token_hidden(sequences) if forward is None else forward.hidden
        student = self.lm.token_states(hidden, sequences.response_ids)
        return self.objective.loss(student, columns, denominator, self._teacher_states(sequences))

    @torch.no_grad()
    def _teacher_states(self, sequences: Sequences) -> TokenStates | None:
        """The teacher's hidden states and output matrix, on the student's device; None where the objective does not ask."""
        if self.teacher is None:
            return None
        lm = self.teacher.lm
        with eval_mode(lm.model), self.teacher.autocast():
            hidden = lm.token_hidden(sequences.to(lm.device))
        return lm.token_states(hidden, sequences.response_ids).to(self.lm.device)

    def _merged(self, parts: list[LossStats]) -> LossStats:
        return type(parts[0]).merge(parts) if parts else self.objective.no_stats()


def _switch_off_dropout(model: nn.Module) -> None:
    """The update must see the policy that wrote the rollouts: with dropout the first ratio would not be 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
