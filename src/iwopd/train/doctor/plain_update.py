"""The update of a step, computed once more in the plainest way: one answer at a time, no packing, no fused head, one sum.

With the policy that wrote the answers every ratio is 1, so the loss of the policy gradient is `-sum(A c) / N` and its gradient
that of `-sum(A c lp) / N`, with N response tokens that are counted here, on the rollouts. Prompts, padding and the tokens that
other micro-batches hold have no place in N. Objectives with further terms are compared in one piece instead of many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from iwopd.algo.objectives import Objective
from iwopd.algo.objectives.policy_gradient import PolicyGradient
from iwopd.config import Config
from iwopd.devices import upload
from iwopd.lm import Sequences
from iwopd.modes import eval_mode
from iwopd.own_head import at_temperature
from iwopd.train.doctor.findings import Finding, failure, passed
from iwopd.train.learner import ForwardPass, Learner, Update
from iwopd.train.parts import Parts
from iwopd.train.scoring import ScoredStep, loss_columns
from iwopd.train.weights import trained
from iwopd.types import TokenBatch

TOLERANCE = 2e-3
"""Relative, of loss and gradient norm in float32."""
TOLERANCE_HALF = 5e-2
REMEDY = "this is a fault of iwopd or of a plug-in objective: report it with this line, and do not train"


class PlainLoss(NamedTuple):
    loss: float
    scale: float
    """Mean size of a token's term: the loss may be small because terms cancel."""
    grad_norm: float
    how: str


def check_update(config: Config, parts: Parts, scored: ScoredStep) -> Iterator[Finding]:
    """What the learner makes of a step's batch, cut into many micro-batches, against the plain computation."""
    objective, batch = parts.objective, scored.batch
    signal = objective.signal(scored.evidence)
    columns = loss_columns(objective, batch, scored.evidence, signal)
    counted = int(scored.evidence.mask.sum()) if objective.rule.supervised is None else int(signal.supervised.sum())
    if not counted:
        yield passed("self update", "none of the answers' tokens teaches under this method, so there is nothing to compare")
        return
    plain = plain_loss(parts, batch, columns, counted, gradient=True)
    longest = int((batch.prompt_lengths + batch.lengths).max())
    half = parts.student_scorer.half
    ways: dict[str, tuple[int, ForwardPass | None]] = {f"micro-batches of {longest} tokens": (longest, None)}
    if scored.forward is not None:
        ways["the forward pass that gave the old log-probs"] = (config.optim.token_budget, scored.forward)
    for way, (budget, forward) in ways.items():
        with _standing_still(parts.learner, budget) as learner:
            update = learner.update(batch, columns, seed=config.seed, step=1, forward=forward)
        fault = _fault(update, plain, counted, TOLERANCE_HALF if half else TOLERANCE)
        words = f"in {way} over {counted} tokens: loss {update.loss:.6g}, gradient norm {update.grad_norm:.6g}"
        if fault is None:
            yield passed("self update", f"{words}, as {plain.how} says")
        else:
            yield failure(
                "self update", f"{words}; {plain.how} says {plain.loss:.6g} and {plain.grad_norm:.6g}: {fault}", REMEDY
            )


def plain_loss(parts: Parts, batch: TokenBatch, columns: dict[str, Tensor], denominator: int, *, gradient: bool) -> PlainLoss:
    """Loss and gradient norm of a whole batch under the student as it is."""
    model, parameters = parts.student, trained(parts.student)
    totals: list[Tensor | None] = [None] * len(parameters)

    def backward(loss: Tensor) -> None:
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        for number, one in enumerate(found):
            if one is not None:
                before = totals[number]
                totals[number] = one.float() if before is None else before + one.float()

    def norm() -> float:
        return math.sqrt(sum(float(one.double().pow(2).sum()) for one in totals if one is not None))

    if not _is_plain(parts.objective):
        lm = parts.learner.lm
        sequences = Sequences.from_batch(batch, range(len(batch))).to(lm.device)
        with eval_mode(model), torch.enable_grad():
            there = {name: upload(values, lm.device) for name, values in columns.items()}
            value, _ = parts.learner.loss(sequences, there, denominator)
            if gradient:
                backward(value)
        return PlainLoss(float(value.detach()), abs(float(value.detach())), norm(), "the same in one piece")
    terms = columns["advantages"].double()
    if "correction" in columns:
        terms = terms * columns["correction"].double()
    terms = torch.where(columns["supervised"], terms, 0.0)
    if gradient:
        start = 0
        with eval_mode(model), torch.enable_grad():
            for row in range(len(batch)):
                logprobs = _logprobs(parts, batch, row)
                mine = terms[start : start + len(logprobs)].to(logprobs.device)
                start += len(logprobs)
                backward(-(mine * logprobs.double()).sum() / denominator)
    loss, scale = -float(terms.sum()) / denominator, float(terms.abs().sum()) / denominator
    return PlainLoss(loss, scale, norm(), "a plain sum over single answers")


def _is_plain(objective: Objective) -> bool:
    """Whether its loss at ratio 1 is the mean of `-A`: no entropy bonus, no auxiliary KL, no distributions."""
    return isinstance(objective, PolicyGradient) and not objective.entropy_coef and not objective.kl_coef


def _logprobs(parts: Parts, batch: TokenBatch, row: int) -> Tensor:
    """[T] of one answer, from the model's own whole logits."""
    lm = parts.learner.lm
    prompt = batch.prompt_ids.split(batch.prompt_lengths.tolist())[row]
    answer = batch.response_ids.split(batch.lengths.tolist())[row].to(lm.device)
    ids = torch.cat([prompt.to(lm.device), answer])
    with lm.autocast():
        logits = parts.student(input_ids=ids[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :, : lm.vocab_size]
    return at_temperature(logits.float(), lm.temperature).log_softmax(-1).gather(-1, answer[:, None].to(logits.device))[:, 0]


@contextmanager
def _standing_still(learner: Learner, budget: int) -> Iterator[Learner]:
    """The learner with one update in micro-batches of `budget` tokens and no step: weights and optimizer end as they were."""
    optim, groups = learner.optim, learner.optimizer.param_groups
    before = [(group["lr"], group["weight_decay"]) for group in groups]
    state = dict(learner.optimizer.state)
    learner.optimizer.state.clear()
    try:
        learner.optim = optim.model_copy(update={"token_budget": budget, "mini_batches": 1, "ppo_epochs": 1})
        for group in groups:
            group["lr"] = group["weight_decay"] = 0.0
        yield learner
    finally:
        learner.optim = optim
        for group, (lr, decay) in zip(groups, before, strict=True):
            group["lr"], group["weight_decay"] = lr, decay
        learner.optimizer.state.clear()
        learner.optimizer.state.update(state)


def _fault(update: Update, plain: PlainLoss, counted: int, tolerance: float) -> str | None:
    if update.skipped:
        return "the update was left out, because its loss or gradient was not finite"
    if update.tokens != counted:
        return f"the trainer counts {update.tokens} tokens"
    factor = update.grad_norm / plain.grad_norm if plain.grad_norm else math.inf if update.grad_norm else 1.0
    if abs(factor - 1) > tolerance:
        divided = f", as if it were divided by {counted / factor:,.1f} tokens" if 0 < factor < math.inf else ""
        return f"the gradient is {factor:.4g} times as large{divided}"
    if abs(update.loss - plain.loss) > tolerance * max(plain.scale, 1e-6):
        return "the loss is another one"
    return None
