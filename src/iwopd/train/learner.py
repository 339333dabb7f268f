"""The update: mini-batches, micro-batches by token budget, one global denominator, and no step on a broken gradient.

It executes an objective and does not know which.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from iwopd.algo.agreement import GradientParts
from iwopd.algo.objectives import LossStats, Objective, TokenLoss
from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.config import Optim
from iwopd.devices import upload
from iwopd.lm import ResponseModel, Sequences
from iwopd.modes import switch_off_dropout
from iwopd.train.average import Average
from iwopd.train.checkpoint_optimizer import OptimizerState
from iwopd.train.micro_batch import Columns, Distributions, MicroBatchLoss, no_tokens
from iwopd.train.ranks import Ranks
from iwopd.train.sharding import ShardedWeights
from iwopd.train.weights import Weights
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
    agreement: float | None = None
    """Of the gradients of tokens before and after drifts (`algo.agreement`); None where it cannot be told."""


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The forward pass of the coming update, which gives the old log-probs and waits for its backward pass."""

    scores: list[TokenScores]
    """[T] of each rollout: its old log-probs, and what else was wanted."""
    hidden: Tensor
    """[N, H] with its graph."""


class _OptimizerStep(NamedTuple):
    loss: float
    grad_norm: float
    padding_waste: float
    stats: LossStats
    taken: bool
    parts: list[GradientParts]
    """At most one: of all micro-batches and ranks."""


class Learner:
    """Owns the optimizer of a student."""

    def __init__(
        self,
        lm: ResponseModel,
        optim: Optim,
        objective: Objective,
        ranks: Ranks,
        teacher: Distributions | None = None,
        loss: TokenLoss | None = None,
        average: Average | None = None,
    ) -> None:
        """`teacher` is there for objectives that need its whole distributions; `loss` is executed, if not the objective's;
        `average` follows the weights.
        """
        switch_off_dropout(lm.model)
        self.weights = ShardedWeights(lm, ranks) if optim.shard and ranks.count > 1 else Weights(lm, ranks)
        self.lm = self.weights.lm
        if optim.gradient_checkpointing:
            self.lm.model.gradient_checkpointing_enable()
        self.optim, self.objective, self.ranks, self.average = optim, objective, ranks, average
        self.loss = MicroBatchLoss(self.lm, loss or objective, teacher)
        self.weights.adopt(self.loss)
        self.progress: Callable[[int], None] | None = None
        """Who wants to know how many more rollouts the update has worked through."""
        self.optimizer = torch.optim.AdamW(
            self.weights.parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        )

    def forward(self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING) -> ForwardPass | None:
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
        hidden = self.lm.token_hidden(sequences)
        with torch.no_grad():
            found = self.lm.head_scores(hidden.detach(), sequences.response_ids, wanted).cpu()
        if not found.logprobs.isfinite().all():
            return None  # the scorer will find it too, and its errors name the rollout
        parts = dict(zip(groups[0], found.split(sequences.answers.tolist()), strict=True))
        return ForwardPass([parts[row] for row in range(len(rollouts))], hidden)

    def update(
        self, batch: TokenBatch, columns: dict[str, Tensor], *, seed: int, step: int, forward: ForwardPass | None = None
    ) -> Update:
        """Train on the whole step's batch; `columns` [N] are the objective's, `forward` is the pass over the same rollouts."""
        if forward is not None and len(forward.hidden) != len(batch.response_ids):
            raise ValueError(f"the forward pass has {len(forward.hidden)} tokens, the batch {len(batch.response_ids)}")
        self.lm.model.train()
        steps: list[_OptimizerStep] = []
        with self.weights.updating():
            for epoch in range(self.optim.ppo_epochs):
                for rows in self._mini_batches(len(batch), seed, step, epoch):
                    denominator = int(columns["supervised"][batch.places(rows)].sum())
                    if denominator:
                        steps.append(self._optimize(batch, columns, rows, denominator, forward))
        taken, parts = sum(one.taken for one in steps), [part for one in steps for part in one.parts]
        return Update(
            loss=_mean([one.loss for one in steps]),
            grad_norm=_mean([one.grad_norm for one in steps]),
            tokens=int(columns["supervised"].sum()),
            skipped=len(steps) - taken,
            updates=taken,
            padding_waste=_mean([one.padding_waste for one in steps]),
            stats=self._merged([one.stats for one in steps]),
            agreement=GradientParts.merge(parts).agreement if parts else None,
        )

    def gradient(self, batch: TokenBatch, columns: dict[str, Tensor]) -> list[Tensor]:
        """The gradient of the whole batch by every trained parameter; nothing is updated. For measurements."""
        return self.measure(batch, columns)[0]

    def measure(self, batch: TokenBatch, columns: dict[str, Tensor]) -> tuple[list[Tensor], list[GradientParts]]:
        """The same, and its parts before and after drifts (at most one entry: of all micro-batches)."""
        self.lm.model.train()
        with self.weights.updating():
            parts = self._accumulate(batch, columns, range(len(batch)), int(columns["supervised"].sum()), None)[-1]
            self.weights.sum_gradients()
            found = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in self.weights.parameters]
        self.optimizer.zero_grad(set_to_none=True)
        return found, parts

    def optimizer_state(self) -> OptimizerState:
        """What a checkpoint holds of the optimizer. All ranks take part; the main one gets it."""
        return OptimizerState.of(self.optimizer, self.weights.masters, keep=self.ranks.is_main)

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
        loss, stats, waste, parts = self._accumulate(batch, columns, rows, denominator, forward)
        self.weights.sum_gradients()
        total = self.weights.gradient_norm()
        torch.nn.utils.clip_grads_with_norm_(self.weights.parameters, self.optim.grad_clip, total)
        norm = float(total)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.optimizer.step()
            self.weights.stepped()
            if self.average is not None:
                self.average.follow(self.weights.current())
        self.optimizer.zero_grad(set_to_none=True)
        return _OptimizerStep(loss, norm, waste, stats, finite, parts)

    def _accumulate(
        self, batch: TokenBatch, columns: dict[str, Tensor], rows: Sequence[int], denominator: int, forward: ForwardPass | None
    ) -> tuple[float, LossStats, float, list[GradientParts]]:
        """Backward over this rank's rows: loss and statistics of all ranks, the share of padding here, the gradient's parts."""
        mine = rows[self.ranks.rank :: self.ranks.count]
        totals = (batch.prompt_lengths + batch.lengths)[mine].tolist() if mine else []
        groups = self.lm.micro_batches(totals, self.optim.token_budget)
        rounds = max(self.ranks.gather(len(groups))) if self.weights.in_step else len(groups)
        hidden = None if forward is None else forward.hidden
        losses, parts = [], []
        for group in [*groups, *[[]] * (rounds - len(groups))]:
            sequences, part = _micro_batch(batch, columns, [mine[place] for place in group])
            part = {name: upload(values, self.lm.device) for name, values in part.items()}
            value, stats = self.loss(sequences.to(self.lm.device), part, denominator, hidden)
            value.backward()
            # Without statistics there are log-probs that are not numbers: the whole update is void, on every rank.
            losses.append(value.detach() if stats is not None else torch.full_like(value.detach(), math.nan))
            parts += [stats] if group and stats is not None else []
            if self.progress is not None:
                self.progress(len(group))
        loss = sum(torch.stack(losses).tolist()) if losses else 0.0  # read once: the host waits for every number
        everyone = self.ranks.gather((loss, [part.cpu() for part in parts], self._gradient_parts()))
        stats = self._merged([part for _, stats, _ in everyone for part in stats])
        split = [part for _, _, parts in everyone for part in parts]
        split = [GradientParts.merge(split)] if len(split) > 1 else split
        return sum(value for value, _, _ in everyone), stats, self.lm.padding_waste(totals, groups), split

    def _gradient_parts(self) -> list[GradientParts]:
        """Of the micro-batches since the last call, at most one; for other ranks they leave the device."""
        found, self.loss.gradient_parts = self.loss.gradient_parts, None
        if found is None:
            return []
        return [found] if self.ranks.count == 1 else [found.cpu()]

    def _merged(self, parts: list[LossStats]) -> LossStats:
        return type(parts[0]).merge(parts) if parts else self.loss.objective.no_stats()


def _micro_batch(batch: TokenBatch, columns: Columns, rows: Sequence[int]) -> tuple[Sequences, Columns]:
    """These rows of the batch; no rows: two tokens that teach nothing, for ranks that have no more."""
    if not rows:
        one = Sequences.build([batch.prompt_ids[:1]], [batch.response_ids[:1]])
        return one, no_tokens({name: values[:1] for name, values in columns.items()})
    here = batch.places(rows)
    return Sequences.from_batch(batch, rows), {name: values[here] for name, values in columns.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
