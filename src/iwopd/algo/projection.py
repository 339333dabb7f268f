"""The theory on a space small enough to enumerate: the constrained projection and its prefix form.

The paper asks for the distribution nearest to the teacher within a KL budget around the student (Eq. 7):

    min_q KL(q || pi_T)   subject to   KL(q || pi_theta) <= rho

and finds (Proposition 1, Eq. 8) `q_alpha = pi_theta * (pi_T / pi_theta)^alpha / Z_alpha`, with `alpha` fixed by the
budget. Here the space is a list of Y outcomes (for instance all sequences of a short length), given by log-probs [Y]
under both models; the prefix form takes per-token log-probs [Y, T]. The tests check the practical weights against these
functions. Use float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from iwopd.algo._checks import check_batch, keep
from iwopd.algo.evidence import prefix_sum


def log_partition(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """`log Z_alpha = log sum_y pi_theta(y)^(1-alpha) pi_T(y)^alpha`, [] (Eq. 25)."""
    return torch.logsumexp((1.0 - alpha) * student + alpha * teacher, dim=-1)


def projected_policy(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """`log q_alpha` over the outcomes, [Y] (Eq. 8): the student at `alpha = 0`, the teacher at 1."""
    return (1.0 - alpha) * student + alpha * teacher - log_partition(student, teacher, alpha)


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of two distributions given by their logs, []."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def budget(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """`rho(alpha) = alpha * d/d alpha log Z_alpha - log Z_alpha = KL(q_alpha || pi_theta)`, [] (Eq. 31).

    The derivative of `log Z` is the mean of `log pi_T/pi_theta` under `q_alpha` (Eq. 29).
    """
    mean_log_ratio = (projected_policy(student, teacher, alpha).exp() * (teacher - student)).sum(-1)
    return alpha * mean_log_ratio - log_partition(student, teacher, alpha)


def alpha_from_budget(student: Tensor, teacher: Tensor, rho: float, *, iterations: int = 200) -> float:
    """The `alpha` in [0, 1] whose budget is `rho`, by bisection (`rho` rises with `alpha`: Eq. 32).

    At or above KL(pi_T || pi_theta) the teacher itself is within reach and `alpha` is 1.
    """
    if not rho >= 0:
        raise ValueError(f"rho must not be negative, got {rho}")
    if rho == 0:
        return 0.0
    if rho >= float(divergence(teacher, student)):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(iterations):
        middle = (low + high) / 2.0
        if float(budget(student, teacher, middle)) < rho:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def prefix_log_normalizer(student: Tensor, teacher: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """`log Z_{alpha,t}`, [T]: the mean of `r_t^alpha` over student prefixes that reach `t` (Eq. 45).

    `student` and `teacher` [Y, T] hold the per-token log-probs of *all* sequences of the space, so sums over sequences
    weighted by their student probability are exact expectations. NaN at a position that no sequence reaches.
    """
    log_ratio, log_reach = _prefix_ratio(student, teacher, mask, alpha)
    return torch.logsumexp(log_ratio + log_reach, dim=0) - torch.logsumexp(log_reach, dim=0)


def prefix_weights(student: Tensor, teacher: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """`r_t^alpha / Z_{alpha,t}` [Y, T], 0 outside the mask (Eq. 46): what the weight rule `ideal` estimates from a batch."""
    log_ratio, _ = _prefix_ratio(student, teacher, mask, alpha)
    return keep((log_ratio - prefix_log_normalizer(student, teacher, mask, alpha)).exp(), mask)


def _prefix_ratio(student: Tensor, teacher: Tensor, mask: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """`alpha * log r_t` [Y, T], and the log-probability of each sequence where it reaches `t`, -inf elsewhere."""
    check_batch(mask, student=student, teacher=teacher)
    log_ratio = alpha * prefix_sum(keep(teacher - student, mask))
    sequence = keep(student, mask).sum(-1, keepdim=True)
    return log_ratio, torch.where(mask, sequence, -torch.inf)
