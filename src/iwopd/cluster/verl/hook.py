"""What must be known before a batch is split: new columns of the whole batch, and its metrics. `trainer.py` calls it.

Advantages get a column of their own for the rules that need the rest of the batch, the progress or another denominator; the
worker's loss then reads the column. The denominator is verl's: it divides by the sum of `loss_mask`.
"""

from __future__ import annotations

from typing import Any

from iwopd.algo.correction import rollout_mismatch
from iwopd.algo.evidence import Evidence
from iwopd.algo.logprobs import floor_logprobs
from iwopd.algo.objectives import TrainingSignal
from iwopd.cluster.verl.losses import ADVANTAGES, batch_evidence, padded
from iwopd.cluster.verl.params import Settings
from iwopd.train.metrics import mean, signal_metrics


def before_the_split(data: Any, settings: Settings, progress: float) -> tuple[dict[str, Any], dict[str, float]]:
    """New columns of a whole batch, ragged like its `response_mask`, and metrics by name."""
    from verl.workers.utils.padding import response_to_nested

    objective = settings.objective
    evidence = batch_evidence(data, objective, progress)
    signal = objective.signal(evidence)
    columns = {}
    if objective.needs_whole_batch:
        mask = data["response_mask"]
        columns[ADVANTAGES] = response_to_nested(signal.advantages, mask)
        if objective.rule.supervised is not None:
            columns["loss_mask"] = response_to_nested(signal.supervised.to(mask.dtype), mask)
    return columns, _metrics(evidence, signal, progress) | _noise(data, evidence)


def _metrics(evidence: Evidence, signal: TrainingSignal, progress: float) -> dict[str, float]:
    """The local engine's numbers about scores and signal; lists become one entry per bin, because verl logs numbers only."""
    numbers: dict[str, float] = {
        "progress": progress,
        "tokens": float(signal.supervised.sum()),
        "advantages/mean": mean(signal.advantages[signal.supervised]),
        "teacher/floored": float(floor_logprobs(evidence.teacher_logprobs, evidence.mask).floored),
        "rollout/entropy_sampled": -mean(evidence.old_logprobs[evidence.mask]),
    }
    for name, value in signal_metrics(signal).items():
        numbers |= {f"{name}/{place}": item for place, item in enumerate(value)} if isinstance(value, list) else {name: value}
    return {f"iwopd/{name}": value for name, value in numbers.items()}


def _noise(data: Any, evidence: Evidence) -> dict[str, float]:
    """The student's log-probs by the engine that wrote against the trainer's: the noise floor as far as verl shows it.

    The teacher is behind such an engine, too, so it stands for both sides; the teacher's own is not measured.
    """
    if "rollout_log_probs" not in data:
        return {}
    rollout = floor_logprobs(padded(data["rollout_log_probs"]).float(), evidence.mask, name="rollout_logprobs").logprobs
    floor = rollout_mismatch(evidence.old_logprobs, rollout, evidence.mask).mean_difference
    names = ("correction/logprob_difference", "gap/noise_floor", "gap/noise_student")
    return {f"iwopd/{name}": floor for name in names}
