"""The clipped policy loss straight from hidden states: the [N, V] logits never exist, and none is computed twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from iwopd.algo._checks import Checks, check_mask
from iwopd.algo.head import HeadGradients, OutputHead, Precision, row_chunks
from iwopd.algo.loss import CLIP, DUAL_CLIP, PolicyLoss, check_loss_arguments, checked_policy_loss
from iwopd.algo.one_pass import Passed, check_results, everywhere, one_pass_loss


def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float | Tensor,
    clip: float = CLIP,
    dual_clip: float | None = DUAL_CLIP,
    correction: Tensor | None = None,
    kl_coef: float = 0.0,
    reference_logprobs: Tensor | None = None,
    entropy_coef: float = 0.0,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    precision: Precision = "float32",
) -> PolicyLoss:
    """`policy_loss` of `token_logprobs`, without the [T, V] logits and without computing them twice.

    `hidden` [..., H], `weight` [V, H], the rest [...]. The derivative of the loss by a token's log-prob needs that token alone,
    so each chunk of rows makes its logits, log-probs, that derivative (by autograd through `policy_loss`) and its gradients
    before the next chunk starts: three matrix products, one chunk of logits in memory. Padding takes no part.
    `backward` hands the gradients on; a second one through a retained graph computes them again.
    """
    check_mask(mask)
    check_loss_arguments(denominator, clip, dual_clip)
    head = OutputHead.build(hidden, weight, bias, temperature, vocab_size, precision)
    if hidden.shape[:-1] != mask.shape or targets.shape != mask.shape:
        raise ValueError(
            f"hidden {list(hidden.shape)} must be the mask's shape {list(mask.shape)} plus [H], and targets "
            f"{list(targets.shape)} must equal it"
        )
    per_token = {"old_logprobs": old_logprobs, "advantages": advantages, "correction": correction}
    per_token["reference_logprobs"] = reference_logprobs if kl_coef else None
    given = {name: values for name, values in per_token.items() if values is not None}
    rows = mask.reshape(-1).nonzero().squeeze(1)
    checks = Checks()
    for name, values in given.items():
        checks.tokens(name, values, mask)
    ids = head.token_ids(targets.reshape(-1)[rows], checks, inside=True)
    checks.settle()
    tensors = {name: values.detach().reshape(-1)[rows].to(head.dtype) for name, values in given.items()}
    scalars = {"denominator": denominator, "clip": clip, "dual_clip": dual_clip, "kl_coef": kl_coef}
    task = _Task(head, rows, ids, tensors, {**scalars, "entropy_coef": entropy_coef})
    loss, logprobs, entropy = one_pass_loss(hidden, weight, bias, task)
    results = {name: values for name, values in (("logprobs", logprobs), ("entropy", entropy)) if values is not None}
    results = {name: everywhere(values, rows, mask) for name, values in results.items()}
    check_results(results, {"the hidden state": hidden}, mask)
    with torch.no_grad():
        return PolicyLoss(loss, task.loss(logprobs, slice(None), entropy).stats)


@dataclass(frozen=True)
class _Task:
    """What is known before the log-probs are."""

    head: OutputHead
    index: Tensor
    """[N] valid rows of the hidden states."""
    targets: Tensor
    """[N]."""
    tensors: dict[str, Tensor]
    """[N] arguments of `policy_loss`, checked."""
    scalars: dict[str, Any]

    def loss(self, logprobs: Tensor, rows: slice, entropy: Tensor | None) -> PolicyLoss:
        chunk: dict[str, Any] = {name: values[rows] for name, values in self.tensors.items()}
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        return checked_policy_loss(logprobs, mask=mask, entropy=entropy, **chunk, **self.scalars)

    def run(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> Passed:
        logprobs, entropy, gradients = _one_pass(hidden, weight, bias, needs, self)
        return self.loss(logprobs, slice(None), entropy).loss, (logprobs, entropy), gradients


def _one_pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool], task: _Task
) -> tuple[Tensor, Tensor | None, HeadGradients]:
    """Log-probs and (if it is asked for) entropies of the task's rows, and the gradients of the loss."""
    head, targets = task.head, task.targets
    gradients = HeadGradients.allocate(hidden, weight, bias, needs)
    logprobs = torch.empty(len(task.index), dtype=head.dtype, device=hidden.device)
    entropy = torch.empty_like(logprobs) if task.scalars["entropy_coef"] else None
    for chunk in row_chunks(head, hidden, task.index, spare=0 if entropy is None else 1):
        rows, logits = chunk.rows, chunk.logits
        picked = logits.gather(1, targets[rows, None]).squeeze(1)
        largest = logits.amax(1)
        scaled = logits.sub_(largest[:, None]).exp_()
        total = scaled.sum(1)
        logprobs[rows] = picked - largest - total.log()
        if entropy is not None:
            scaled.div_(total[:, None])
            total.fill_(1.0)
            entropy[rows] = torch.special.entr(scaled, out=chunk.spare[0]).sum(1)
        if not gradients.any:
            continue
        by_logprob, by_entropy = _derivatives(task, logprobs[rows], rows, None if entropy is None else entropy[rows])
        # By the logits: the log-prob gives onehot - p, the entropy -p * (log p + entropy). Here p = scaled / total.
        if entropy is None or by_entropy is None:
            dlogits = scaled.mul_((-by_logprob / total)[:, None])
        else:
            bonus = chunk.spare[0].mul_(by_entropy[:, None])
            dlogits = scaled.mul_((-by_logprob - by_entropy * entropy[rows])[:, None]).add_(bonus)
        dlogits.scatter_add_(1, targets[rows, None], by_logprob[:, None])
        gradients.add(head, chunk, dlogits)
    return logprobs, entropy, gradients


def _derivatives(task: _Task, logprobs: Tensor, rows: slice, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Derivatives of the loss by log-prob and entropy for a chunk of rows, through the one formula of `policy_loss`."""
    with torch.enable_grad():
        leaves = [values.detach().requires_grad_() for values in (logprobs, entropy) if values is not None]
        loss = task.loss(leaves[0], rows, leaves[1] if len(leaves) > 1 else None).loss
        derivatives = torch.autograd.grad(loss, leaves)
    return derivatives[0], derivatives[1] if len(leaves) > 1 else None
