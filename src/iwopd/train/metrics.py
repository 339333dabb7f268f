"""Numbers of a step. `docs/run-directory.md` says what each name means."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from iwopd import algo
from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import Objective, TrainingSignal
from iwopd.train.activity import Activity
from iwopd.train.learner import Update

if TYPE_CHECKING:
    from iwopd.train.pipeline import Written
    from iwopd.train.scoring import ScoredStep

POSITION_BINS = 10


class Clock:
    """Wall time by stage of a step; `activity` hears which one is under way."""

    def __init__(self, activity: Activity, step: int) -> None:
        self.laps: dict[str, float] = {}
        self._activity, self._stage, self._last = activity, "", time.perf_counter()
        activity.step = step

    def begin(self, name: str, total: int = 0) -> None:
        """The stage before ends now, and `name` begins, over `total` answers."""
        self.end()
        self._stage = name
        self._activity.stage(name)
        self._activity.expect(total)

    def end(self) -> None:
        now = time.perf_counter()
        if self._stage:
            self.laps[self._stage] = now - self._last
        self._stage, self._last = "", now
        self._activity.stage("")


def step_metrics(
    scored: ScoredStep, signal: TrainingSignal, written: Written, update: Update, objective: Objective
) -> dict[str, Any]:
    """What happened in a step, by name."""
    rollouts = written.rollouts
    lengths = [len(rollout) for rollout in rollouts]
    return {
        "tokens_written": sum(lengths),
        "prompts": len({rollout.prompt.id for rollout in rollouts}),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": max(lengths),
        "rollout/truncated": sum(rollout.stop_reason == "length" for rollout in rollouts) / len(rollouts),
        "rollout/stopped": sum(rollout.stop_reason == "horizon" for rollout in rollouts) / len(rollouts),
        **({} if written.overrun is None else {"rollout/overrun": written.overrun}),
        **({} if scored.thinking is None else {"rollout/thinking": scored.thinking}),
        "rollout/entropy_sampled": -mean(scored.evidence.old_logprobs[signal.mask]),
        "teacher/floored": scored.floored,
        **_update_metrics(update),
        **{f"{objective.metrics}/{name}": value for name, value in update.stats.as_dict().items()},
        **signal_metrics(signal.of_spans or signal),
        **span_metrics(scored),
        **evidence_metrics(scored.evidence, signal.mask, objective),
        **(scored.rewards.metrics(signal if objective.takes_reward else None) if scored.rewards else {}),
    }


def metrics_without_rollouts(update: Update) -> dict[str, Any]:
    """The same of a step in which the student wrote nothing: there is no mean of nothing."""
    of_rollouts = [f"rollout/{name}" for name in ("length_mean", "truncated", "stopped", "entropy_sampled")]
    means = [*of_rollouts, "kl/sampled", "gap/abs_mean", "weights/mean", "weights/min", "weights/max"]
    return {"tokens_written": 0, "prompts": 0, **dict.fromkeys(means, math.nan), **_update_metrics(update)}


def _update_metrics(update: Update) -> dict[str, float]:
    counts = {"update/padding_waste": update.padding_waste, "update/count": update.updates, "update/skipped": update.skipped}
    return {**counts, "gradient/agreement": math.nan if update.agreement is None else update.agreement}


def signal_metrics(signal: TrainingSignal) -> dict[str, Any]:
    """Gap and weights of a batch: means and extremes, and how they go along the response."""
    mask = signal.mask
    gap, weights = signal.gap[mask], signal.weights[mask]
    profile = algo.position.position_profile(signal.gap, mask, bins=POSITION_BINS, kl=-signal.gap, weights=signal.weights)
    curves = {"abs_gap": profile.abs_gap, "kl": profile.kl, "weights": profile.weights}
    return {
        "kl/sampled": -mean(gap),
        "gap/abs_mean": mean(gap.abs()),
        "weights/mean": mean(weights),
        "weights/min": float(weights.min()) if len(weights) else 0.0,
        "weights/max": float(weights.max()) if len(weights) else 0.0,
        **{f"position/{name}": curve.mean.tolist() for name, curve in curves.items() if curve is not None},
    }


def span_metrics(scored: ScoredStep) -> dict[str, float]:
    """How the tokens of a step lie over those of a teacher with another tokenizer; nothing where there is none."""
    evidence, of_batch = scored.evidence, scored.batch.spans
    if evidence.spans is None or of_batch is None:
        return {}
    spans = algo.spans.Spans.of(evidence.spans, evidence.mask)
    tokens = spans.sum(spans.tokens.double())[spans.mask]  # of each span
    return {
        "spans/count": int(spans.mask.sum()),
        "spans/tokens": mean(tokens),
        "spans/alone": float((tokens == 1).sum() / tokens.sum().clamp(min=1)),
        "spans/unscored": int((of_batch == algo.spans.UNSCORED).sum()),
    }


def evidence_metrics(evidence: Evidence, mask: Tensor, objective: Objective) -> dict[str, float]:
    """Means of the evidence that the objective asked for anyway."""
    names = {
        "student_entropy": "student/entropy",
        "teacher_entropy": "teacher/entropy",
        "kl": "kl/top_k" if objective.kl_k else "kl/full",
        "top_overlap": "teacher/top_overlap",
    }
    found = {shown: getattr(evidence, name) for name, shown in names.items()}
    return {shown: mean(values[mask]) for shown, values in found.items() if values is not None}


def mean(values: Tensor) -> float:
    """In float64; 0 of nothing."""
    return float(values.double().mean()) if values.numel() else 0.0
