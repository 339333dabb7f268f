"""When another engine writes the rollouts: does it have the student's weights, and how far are its log-probs from ours?"""

from __future__ import annotations

import torch

from iwopd import algo
from iwopd.algo.correction import CORRECTION_THRESHOLD
from iwopd.config import Config
from iwopd.errors import UserError
from iwopd.train.parts import Parts
from iwopd.types import TokenBatch

LIMITS = {"float32": 0.01, "bfloat16": 0.2, "float16": 0.1}
"""Mean |difference| of log-probs that rounding does not explain, by the coarser precision of the two."""
TOKENS = 256
"""Tokens of each rollout, at most, that are compared before the first step."""


class MismatchError(UserError, RuntimeError):
    """An engine that is not the student."""

    exit_code = 1


def check_engine(config: Config, parts: Parts, step: int) -> None:
    """Before the first step: the engine's log-probs of a few rollouts against the trainer's, for the engine of every rank."""
    if parts.engine.exact:
        return

    prompts = parts.order.batch(step)[:4]
    limits = [min(TOKENS, parts.max_response)] * len(prompts)

    def compare() -> None:
        rollouts = parts.sampler.sample(prompts, seed=config.seed, step=step, max_tokens=limits)
        ours = torch.cat(parts.student_scorer.score(rollouts))
        theirs = torch.cat([rollout.rollout_logprobs for rollout in rollouts])
        everywhere = torch.ones_like(ours[None], dtype=torch.bool)
        _judge(config, parts, algo.rollout_mismatch(ours[None], theirs[None], everywhere), step)

    parts.before_writing()
    parts.ranks.together(compare)


def mismatch_metrics(config: Config, parts: Parts, batch: TokenBatch, step: int) -> dict[str, float]:
    """Statistics of the rollout correction of a step; none if the trainer itself wrote. Too large a mismatch ends the run."""
    if batch.rollout_logprobs is None:
        return {}
    threshold = config.method.model_dump().get("correction_threshold", CORRECTION_THRESHOLD)
    everywhere = torch.ones_like(batch.old_logprobs, dtype=torch.bool)
    mismatch = algo.rollout_mismatch(batch.old_logprobs, batch.rollout_logprobs, everywhere, threshold)
    _judge(config, parts, mismatch, step)
    return {
        "correction/ratio_mean": mismatch.mean_ratio,
        "correction/ratio_deviation": mismatch.largest_deviation,
        "correction/truncated": mismatch.truncated,
        "correction/logprob_difference": mismatch.mean_difference,
    }


def mismatch_limit(config: Config, engine_dtype: str) -> float:
    """Mean |difference| of an engine's log-probs and the trainer's that ends a run."""
    precisions = (config.models.dtype, config.compute_dtype, engine_dtype)
    return config.rollout.mismatch_limit or max(LIMITS[name] for name in precisions)


def _judge(config: Config, parts: Parts, mismatch: algo.Mismatch, step: int) -> None:
    limit = mismatch_limit(config, parts.engine.dtype)
    if not mismatch.mean_difference <= limit:
        raise MismatchError(
            f"step {step}: the log-probs of rollout.engine = {config.rollout.engine!r} differ from the trainer's by "
            f"{mismatch.mean_difference:.3g} on average (limit {limit:g}; largest ratio 1 ± {mismatch.largest_deviation:.3g}): "
            f"the engine has other weights, another temperature or a coarser precision than {parts.engine.dtype}. Check its "
            "model and its dtype (section engine; a server has its own, which engine.server.dtype must say); raise "
            "rollout.mismatch_limit only if you know why"
        )
