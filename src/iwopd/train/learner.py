"""The update: mini-batches, micro-batches by token budget, one global denominator, and no step on a broken gradient."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from iwopd import algo
from iwopd.algo.signal import TrainingSignal
from iwopd.config import Method, Optim
from iwopd.lm import ResponseModel, Sequences
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
    stats: algo.PolicyStats


@dataclass(frozen=True)
class _Forward:
    """A forward pass that waits for its backward pass."""

    sequences: Sequences
    hidden: Tensor
    """[N, H] with its graph."""

    def fits(self, sequences: Sequences) -> bool:
        """Whether it is that of these sequences."""
        same = (sequences.input_ids, self.sequences.input_ids), (sequences.response_ids, self.sequences.response_ids)
        return all(torch.equal(one, other) for one, other in same)


class Learner:
    """Owns the optimizer of a student."""

    def __init__(self, lm: ResponseModel, optim: Optim, method: Method, accelerator: Accelerator, ranks: Ranks) -> None:
        self.lm, self.optim, self.method = lm, optim, method
        self.accelerator, self.ranks = accelerator, ranks
        self.parameters = [parameter for parameter in lm.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        )
        self._forward: _Forward | None = None
        _switch_off_dropout(lm.model)
        if optim.gradient_checkpointing:
            lm.model.gradient_checkpointing_enable()

    def old_logprobs(self, rollouts: Sequence[Rollout]) -> list[Tensor] | None:
        """Log-probs [T] of each rollout from the forward pass of the coming update, which then need not run it again.

        None if that pass must wait for the signal: it is the old policy's only if the step has one update, and to keep it costs
        no more memory than the update needs anyway only if it is one micro-batch. A scorer has to do it then.
        """
        self._forward = None
        lengths = [len(rollout.prompt.token_ids) + len(rollout) for rollout in rollouts]
        groups = self.lm.micro_batches(lengths, self.optim.token_budget)
        one_update = self.optim.ppo_epochs == self.optim.mini_batches == self.ranks.count == 1
        if not (one_update and len(groups) == 1 and self.lm.fused):
            return None
        self.lm.model.train()
        sequences = Sequences.from_rollouts([rollouts[row] for row in groups[0]]).to(self.lm.device)
        hidden = self._hidden(sequences)
        with torch.no_grad(), self.accelerator.autocast():
            values = self.lm.head_logprobs(hidden, sequences.response_ids[sequences.mask]).cpu()
        if not values.isfinite().all():
            return None  # the scorer's business, whose errors have names
        self._forward = _Forward(sequences, hidden)
        parts = dict(zip(groups[0], values.split([len(rollouts[row]) for row in groups[0]]), strict=True))
        return [parts[row] for row in range(len(rollouts))]

    def update(self, batch: TokenBatch, signal: TrainingSignal, *, seed: int, step: int) -> Update:
        """Train on a batch whose advantages and weights are known. The batch is the whole step's, on every rank."""
        self.lm.model.train()
        losses, norms, skipped, parts = [], [], 0, []
        waste = []
        for epoch in range(self.optim.ppo_epochs):
            for rows in self._mini_batches(len(batch), seed, step, epoch):
                denominator = int(signal.supervised[rows].sum())
                if denominator == 0:
                    continue
                loss, stats, padding = self._accumulate(batch, signal, rows, denominator)
                self.ranks.sum_gradients(self.parameters)
                norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.optim.grad_clip))
                losses.append(loss)
                norms.append(norm)
                parts.append(stats)
                waste.append(padding)
                if math.isfinite(loss) and math.isfinite(norm):
                    self.optimizer.step()
                else:
                    skipped += 1
                self.optimizer.zero_grad(set_to_none=True)
        return Update(
            loss=_mean(losses),
            grad_norm=_mean(norms),
            tokens=int(signal.supervised.sum()),
            skipped=skipped,
            updates=len(losses) - skipped,
            padding_waste=_mean(waste),
            stats=algo.PolicyStats.merge(parts) if parts else _no_stats(),
        )

    def _mini_batches(self, count: int, seed: int, step: int, epoch: int) -> list[list[int]]:
        """Rows of each optimizer step; shuffled only if there are several, the same on every rank."""
        rows = list(range(count))
        if self.optim.mini_batches > 1:
            random.Random(f"mini:{seed}:{step}:{epoch}").shuffle(rows)
        size = math.ceil(count / self.optim.mini_batches)
        return [rows[start : start + size] for start in range(0, count, size)]

    def _accumulate(
        self, batch: TokenBatch, signal: TrainingSignal, rows: Sequence[int], denominator: int
    ) -> tuple[float, algo.PolicyStats, float]:
        """Backward over this rank's rows; returns loss and statistics of all ranks."""
        mine = rows[self.ranks.rank :: self.ranks.count]
        totals = (batch.prompt_mask.sum(-1) + batch.lengths)[mine].tolist() if mine else []
        groups = self.lm.micro_batches(totals, self.optim.token_budget)
        loss, parts = 0.0, []
        for group in groups:
            try:
                out = self._loss(batch, signal, [mine[place] for place in group], denominator)
            except algo.NonFiniteError:  # log-probs that are no numbers: the whole update is void, on every rank
                loss = math.nan
                break
            out.loss.backward()
            loss += float(out.loss.detach())
            parts.append(out.stats)
        everyone = self.ranks.gather((loss, [_on_cpu(part) for part in parts]))
        merged = [part for _, stats in everyone for part in stats]
        stats = algo.PolicyStats.merge(merged) if merged else _no_stats()
        return sum(value for value, _ in everyone), stats, self.lm.padding_waste(totals, groups)

    def _loss(self, batch: TokenBatch, signal: TrainingSignal, rows: Sequence[int], denominator: int) -> algo.PolicyLoss:
        part = batch.select(rows)
        device, width = self.lm.device, part.mask.shape[1]
        sequences = Sequences.from_batch(part).to(device)

        def flat(values: Tensor) -> Tensor:
            """[N] of the response tokens, row after row."""
            return values[part.mask].to(device)

        correction = None
        if part.rollout_logprobs is not None:
            threshold = self.method.correction_threshold
            correction = flat(algo.rollout_correction(part.old_logprobs, part.rollout_logprobs, part.mask, threshold))
        reference = part.reference_logprobs
        terms: dict[str, Any] = {
            "denominator": denominator,
            "clip": self.method.clip,
            "dual_clip": None if math.isinf(self.method.dual_clip) else self.method.dual_clip,
            "correction": correction,
            "kl_coef": self.method.kl_coef,
            "reference_logprobs": None if reference is None else flat(reference),
        }
        advantages, supervised = flat(signal.advantages[rows, :width]), flat(signal.supervised[rows, :width])
        old = flat(part.old_logprobs)
        if not self.lm.fused:
            with self.accelerator.autocast():
                logprobs = self.lm.logprobs(sequences)[sequences.mask]
            return algo.policy_loss(logprobs, old, advantages, supervised, **terms)
        weight, bias = self.lm.head
        return algo.fused_policy_loss(
            self._hidden(sequences),
            weight,
            sequences.response_ids[sequences.mask],
            old,
            advantages,
            supervised,
            bias=bias,
            temperature=self.lm.temperature,
            vocab_size=self.lm.vocab_size,
            entropy_coef=self.method.entropy_coef,
            **terms,
        )

    def _hidden(self, sequences: Sequences) -> Tensor:
        """Hidden states [N, H] of the response tokens: those of the pass that is waiting, or of a new one."""
        ready, self._forward = self._forward, None
        if ready is not None and ready.fits(sequences):
            return ready.hidden
        with self.accelerator.autocast():
            return self.lm.token_hidden(sequences)


def _switch_off_dropout(model: nn.Module) -> None:
    """The update must see the policy that wrote the rollouts: with dropout the first ratio would not be 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _on_cpu(stats: algo.PolicyStats) -> algo.PolicyStats:
    return algo.PolicyStats(**{name: getattr(stats, name).cpu() for name in stats.__dataclass_fields__})


def _no_stats() -> algo.PolicyStats:
    zero, infinity = torch.zeros(()), torch.full((), torch.inf)
    return algo.PolicyStats(zero, zero, zero, zero, zero, infinity, -infinity)
