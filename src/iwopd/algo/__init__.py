"""The method: pure functions on tensors. No I/O, no models, no config.

Conventions: `[B, T]` tensors are right-padded with a boolean mask; inputs outside the mask may hold anything, outputs
there are 0; advantages and weights are detached. `docs/method.md` has the formulas side by side.
"""

from iwopd.algo import drift_weights, position, projection, related_weights, shaped_advantages, spans
from iwopd.algo._checks import LOGPROB_FLOOR, NonFiniteError
from iwopd.algo.advantages import exopd_advantages, opd_advantages
from iwopd.algo.correction import Mismatch, rollout_correction, rollout_mismatch
from iwopd.algo.divergences import DIVERGENCES, DivergenceKind, support_divergence
from iwopd.algo.fused_divergence import DivergenceLoss, fused_divergence_loss, fused_top_k_loss
from iwopd.algo.fused_loss import fused_policy_loss
from iwopd.algo.logprobs import floor_logprobs, token_divergence, token_entropy, token_kl, token_logprobs
from iwopd.algo.loss import PolicyLoss, PolicyStats, low_variance_kl, policy_loss
from iwopd.algo.noise import NoiseFloor, mean_difference
from iwopd.algo.views import TokenScores, Wanted, joined_scores, scores_of_logits, token_scores
from iwopd.algo.weights import WEIGHT_RULES, WeightRule, supervised_mask, token_weights

__all__ = [
    "DIVERGENCES",
    "LOGPROB_FLOOR",
    "WEIGHT_RULES",
    "DivergenceKind",
    "DivergenceLoss",
    "Mismatch",
    "NoiseFloor",
    "NonFiniteError",
    "PolicyLoss",
    "PolicyStats",
    "TokenScores",
    "Wanted",
    "WeightRule",
    "drift_weights",
    "exopd_advantages",
    "floor_logprobs",
    "fused_divergence_loss",
    "fused_policy_loss",
    "fused_top_k_loss",
    "joined_scores",
    "low_variance_kl",
    "mean_difference",
    "opd_advantages",
    "policy_loss",
    "position",
    "projection",
    "related_weights",
    "rollout_correction",
    "rollout_mismatch",
    "scores_of_logits",
    "shaped_advantages",
    "spans",
    "supervised_mask",
    "support_divergence",
    "token_divergence",
    "token_entropy",
    "token_kl",
    "token_logprobs",
    "token_scores",
    "token_weights",
]
