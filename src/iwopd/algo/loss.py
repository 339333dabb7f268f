"""The clipped policy loss, on log-probs or straight from hidden states. A sum over tokens, divided once.

Both functions divide by a `denominator` that the caller gives: the number of supervised tokens of the *whole* optimizer
step, over all micro-batches and ranks. So losses and gradients of any split add up to those of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from iwopd.algo._checks import NonFiniteError, check_mask, check_tokens, keep
from iwopd.algo.head import HeadGradients, OutputHead, row_chunks

LOG_RATIO_LIMIT = 20.0
"""`|lp - lp_0|` is clamped here before it is exponentiated: exp(89) is inf in float32 and 0 * inf is NaN in a gradient.
A ratio of e^20 lies beyond the clip and the dual clip by eight orders of magnitude, so under both no gradient changes. Without
a dual clip a negative advantage has no gradient beyond it, and `ratio_max` and `approx_kl` are those of the clamped ratio."""


@dataclass(frozen=True)
class PolicyStats:
    """Detached counts and sums over the tokens of a loss; `merge` adds those of several micro-batches."""

    tokens: Tensor
    """Valid tokens, []."""
    clipped_high: Tensor
    """Tokens whose ratio was cut at `1 + clip` (positive advantage), []."""
    clipped_low: Tensor
    """Tokens whose ratio was cut at `1 - clip` (negative advantage), []."""
    dual_clipped: Tensor
    """Tokens whose loss was capped by the dual clip, []."""
    kl_sum: Tensor
    """Sum of the low-variance estimate `(eta - 1) - log eta` of KL(old || current), []."""
    ratio_min: Tensor
    """Smallest `eta`, [] (+inf without tokens)."""
    ratio_max: Tensor
    """Largest `eta`, [] (-inf without tokens)."""

    @property
    def clip_fraction(self) -> Tensor:
        return (self.clipped_high + self.clipped_low) / self.tokens.clamp(min=1)

    @property
    def dual_clip_fraction(self) -> Tensor:
        return self.dual_clipped / self.tokens.clamp(min=1)

    @property
    def approx_kl(self) -> Tensor:
        return self.kl_sum / self.tokens.clamp(min=1)

    @classmethod
    def merge(cls, parts: list[PolicyStats]) -> PolicyStats:
        """The statistics of several disjoint sets of tokens taken together."""
        if not parts:
            raise ValueError("nothing to merge: the list of statistics is empty")

        def stack(name: str) -> Tensor:
            return torch.stack([getattr(part, name) for part in parts])

        sums = {name: stack(name).sum(0) for name in ("tokens", "clipped_high", "clipped_low", "dual_clipped", "kl_sum")}
        return cls(**sums, ratio_min=stack("ratio_min").amin(0), ratio_max=stack("ratio_max").amax(0))

    def as_dict(self) -> dict[str, float]:
        """Plain numbers for a log line; ratios are 1 where there were no tokens."""
        names = ("clip_fraction", "dual_clip_fraction", "approx_kl", "ratio_min", "ratio_max")
        numbers = {name: float(getattr(self, name)) for name in names}
        return numbers if self.tokens > 0 else {**numbers, "ratio_min": 1.0, "ratio_max": 1.0}


@dataclass(frozen=True)
class PolicyLoss:
    """What a policy loss returns."""

    loss: Tensor
    """Sum over valid tokens divided by the denominator, []; carries the gradient."""
    stats: PolicyStats


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float | Tensor,
    clip: float = 0.2,
    dual_clip: float | None = 3.0,
    correction: Tensor | None = None,
    kl_coef: float = 0.0,
    reference_logprobs: Tensor | None = None,
    entropy_coef: float = 0.0,
    entropy: Tensor | None = None,
) -> PolicyLoss:
    """Clipped PPO surrogate, Eq. 67 of the paper (Appendix "Algorithm"), with dual clip and rollout correction.

    Per token, with `eta = exp(lp - lp_0)` and `A` the (already weighted) advantage:
    `max(-A * eta, -A * clip(eta, 1 - clip, 1 + clip))`, for `A < 0` at most `-A * dual_clip`, times `correction`.
    Summed over the mask and divided by `denominator` (valid tokens of the whole step; supervised ones under
    prefix-/suffix-only, see `supervised_mask`).

    Two coefficients, 0 by default: `kl_coef` adds the low-variance KL to the reference, `entropy_coef` subtracts the
    mean `entropy` (from `token_entropy`). Only `logprobs` and `entropy` carry gradients. Any shape; masks may have holes.
    """
    check_mask(mask)
    check_loss_arguments(denominator, clip, dual_clip)
    check_tokens("logprobs", logprobs, mask)
    check_tokens("old_logprobs", old_logprobs, mask)
    check_tokens("advantages", advantages, mask)
    # Select before any arithmetic: NaN outside the mask must reach neither the value nor the gradient.
    log_ratio = (keep(logprobs, mask) - keep(old_logprobs, mask).detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    advantage = keep(advantages, mask).detach()

    plain = -advantage * ratio
    cut = -advantage * ratio.clamp(1.0 - clip, 1.0 + clip)
    per_token = torch.maximum(plain, cut)
    capped = torch.zeros_like(mask)
    if dual_clip is not None:
        cap = -advantage * dual_clip
        capped = (advantage < 0) & (per_token > cap)
        per_token = torch.where(advantage < 0, torch.minimum(per_token, cap), per_token)
    if correction is not None:
        check_tokens("correction", correction, mask)
        per_token = per_token * keep(correction, mask).detach()
    if kl_coef:
        if reference_logprobs is None:
            raise ValueError("kl_coef is not 0: reference_logprobs are needed")
        per_token = per_token + kl_coef * low_variance_kl(logprobs, reference_logprobs, mask)
    if entropy_coef:
        if entropy is None:
            raise ValueError("entropy_coef is not 0: the entropy of each token is needed (algo.token_entropy)")
        check_tokens("entropy", entropy, mask)
        per_token = per_token - entropy_coef * keep(entropy, mask)

    with torch.no_grad():
        high = mask & (advantage > 0) & (ratio > 1.0 + clip)
        low = mask & (advantage < 0) & (ratio < 1.0 - clip)
        infinity = torch.full((), torch.inf, dtype=ratio.dtype, device=ratio.device)
        lowest, highest = torch.where(mask, ratio, infinity), torch.where(mask, ratio, -infinity)
        stats = PolicyStats(
            tokens=mask.sum(),
            clipped_high=high.sum(),
            clipped_low=low.sum(),
            dual_clipped=capped.sum(),
            kl_sum=(torch.expm1(log_ratio) - log_ratio).sum(),  # 0 outside the mask, where the ratio is 1
            ratio_min=lowest.amin() if mask.numel() else infinity,
            ratio_max=highest.amax() if mask.numel() else -infinity,
        )
    return PolicyLoss(per_token.sum() / denominator, stats)


def low_variance_kl(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(student || reference) per token: `exp(d) - 1 - d`, `d = lp_R - lp`.

    `d` is cut at 20 from above, where the exponential would overflow; downwards it is exact.
    """
    check_mask(mask)
    check_tokens("logprobs", logprobs, mask)
    check_tokens("reference_logprobs", reference_logprobs, mask)
    difference = keep(reference_logprobs, mask).detach() - keep(logprobs, mask)
    difference = difference.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(difference) - difference


def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float | Tensor,
    clip: float = 0.2,
    dual_clip: float | None = 3.0,
    correction: Tensor | None = None,
    kl_coef: float = 0.0,
    reference_logprobs: Tensor | None = None,
    entropy_coef: float = 0.0,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> PolicyLoss:
    """`policy_loss` of `token_logprobs`, without the [T, V] logits and without computing them twice.

    `hidden` [..., H], `weight` [V, H], the rest [...]. Old log-probs, advantages and mask are known beforehand, so the
    derivative of the loss by a token's log-prob needs that token alone: each chunk of rows makes its logits, its
    log-probs, that derivative (by autograd through `policy_loss` itself) and its gradients before the next chunk
    starts. Three matrix products, none repeated, and one chunk of logits in memory. Padding takes no part.

    The gradients are kept until `backward`, which hands them on; a second backward through a retained graph works them
    out anew.
    """
    check_mask(mask)
    check_loss_arguments(denominator, clip, dual_clip)
    head = OutputHead.build(hidden, weight, bias, temperature, vocab_size)
    if hidden.shape[:-1] != mask.shape or targets.shape != mask.shape:
        raise ValueError(
            f"hidden {list(hidden.shape)} must be the mask's shape {list(mask.shape)} plus [H], and targets "
            f"{list(targets.shape)} must equal it"
        )
    per_token = {"old_logprobs": old_logprobs, "advantages": advantages}
    if correction is not None:
        per_token["correction"] = correction
    if kl_coef and reference_logprobs is not None:
        per_token["reference_logprobs"] = reference_logprobs
    for name, values in per_token.items():
        check_tokens(name, values, mask)
    valid = {name: values[mask].detach().to(head.dtype) for name, values in per_token.items()}
    terms = _Terms(
        tensors=valid,
        scalars={
            "denominator": denominator,
            "clip": clip,
            "dual_clip": dual_clip,
            "kl_coef": kl_coef,
            "entropy_coef": entropy_coef,
        },
    )
    ids = head.check_targets(targets[mask], inside=True)
    flat, valid_rows = hidden.reshape(-1, hidden.shape[-1]), mask.reshape(-1).nonzero().squeeze(1)
    grad = torch.is_grad_enabled()
    try:
        loss, logprobs, entropy = _FusedPolicyLoss.apply(flat, weight, bias, head, valid_rows, ids, terms, grad)  # type: ignore[no-untyped-call]
    except NonFiniteError:
        _refuse_hidden(hidden, mask)
        raise
    with torch.no_grad():
        stats = terms(logprobs, slice(None), entropy).stats
    return PolicyLoss(loss, stats)


def _refuse_hidden(hidden: Tensor, mask: Tensor) -> None:
    """Name the token whose hidden state is not finite, in the caller's coordinates (chunks have their own)."""
    worst = hidden.detach().to(torch.float32).abs().amax(-1) if hidden.shape[-1] else torch.zeros(mask.shape)
    check_tokens("the hidden state", worst, mask)


@dataclass(frozen=True)
class _Terms:
    """The arguments of `policy_loss` that are known before the log-probs are."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Any]

    def __call__(self, logprobs: Tensor, rows: slice, entropy: Tensor | None) -> PolicyLoss:
        chunk: dict[str, Any] = {name: values[rows] for name, values in self.tensors.items()}
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        return policy_loss(logprobs, mask=mask, entropy=entropy, **chunk, **self.scalars)


class _FusedPolicyLoss(torch.autograd.Function):
    """Loss and gradients in one pass over chunks of rows: see `fused_policy_loss`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: OutputHead,
        index: Tensor,
        targets: Tensor,
        terms: _Terms,
        grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.work = (head, index, targets, terms)
        needs = [grad and need for need in ctx.needs_input_grad[:3]]
        logprobs, entropy, ctx.gradients = _one_pass(hidden, weight, bias, needs, *ctx.work)
        ctx.mark_non_differentiable(logprobs)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return terms(logprobs, slice(None), entropy).loss, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        # Let go of the buffers, so that the engine takes them over instead of copying them. A second backward through
        # a retained graph has to work them out again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = _one_pass(hidden, weight, bias, list(ctx.needs_input_grad[:3]), *ctx.work)[2]
        return (*gradients.scaled(grad_loss), None, None, None, None, None)


def _one_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: list[bool],
    head: OutputHead,
    index: Tensor,
    targets: Tensor,
    terms: _Terms,
) -> tuple[Tensor, Tensor | None, HeadGradients]:
    """Log-probs and (if it is asked for) entropies of the rows `index`, and the gradients of the loss."""
    gradients = HeadGradients.allocate(hidden, weight, bias, needs)
    logprobs = torch.empty(len(index), dtype=head.dtype, device=hidden.device)
    entropy = torch.empty_like(logprobs) if terms.scalars["entropy_coef"] else None
    for chunk in row_chunks(head, hidden, index, spare=0 if entropy is None else 1):
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
        by_logprob, by_entropy = _derivatives(terms, logprobs[rows], rows, None if entropy is None else entropy[rows])
        # By the logits: the log-prob gives onehot - p, the entropy -p * (log p + entropy). Here p = scaled / total.
        if entropy is None or by_entropy is None:
            dlogits = scaled.mul_((-by_logprob / total)[:, None])
        else:
            bonus = chunk.spare[0].mul_(by_entropy[:, None])
            dlogits = scaled.mul_((-by_logprob - by_entropy * entropy[rows])[:, None]).add_(bonus)
        dlogits.scatter_add_(1, targets[rows, None], by_logprob[:, None])
        gradients.add(head, chunk, dlogits)
    return logprobs, entropy, gradients


def _derivatives(terms: _Terms, logprobs: Tensor, rows: slice, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Derivatives of the loss by log-prob and entropy for a chunk of rows, through the one formula of `policy_loss`."""
    with torch.enable_grad():
        leaves = [values.detach().requires_grad_() for values in (logprobs, entropy) if values is not None]
        loss = terms(leaves[0], rows, leaves[1] if len(leaves) > 1 else None).loss
        derivatives = torch.autograd.grad(loss, leaves)
    return derivatives[0], derivatives[1] if len(leaves) > 1 else None


def check_loss_arguments(denominator: float | Tensor, clip: float, dual_clip: float | None) -> None:
    """Refuse a denominator, clip or dual clip that makes no sense."""
    if not float(denominator) > 0:
        raise ValueError(
            f"denominator must be positive, got {float(denominator)}: it is the number of supervised tokens of the "
            "whole optimizer step; skip a step that has none"
        )
    if not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1 (or None), got {dual_clip}")
