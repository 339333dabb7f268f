"""verl's metrics under our names, so that report and compare can read a verl run.

verl's `file` logger writes one line per step to `verl/metrics-NNN.jsonl` of the run directory. Our own metrics have
our names there (`iwopd/weights/mean`, see `hook.py`); the rest are verl's. A number that verl does not measure is left
out, or NaN if the progress line needs it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from iwopd.algo.noise import NoiseFloor
from iwopd.cluster.verl.errors import VerlError
from iwopd.cluster.verl.translate import answer_limit, response_tokens
from iwopd.config import Config
from iwopd.types import StepStats

OURS = "iwopd/"
"""Prefix of our trainer's metrics."""
LOSS, GRAD_NORM = "actor/distillation/loss", "actor/grad_norm"
SAME = {
    "rollout/length_mean": "response_length/mean",
    "rollout/length_max": "response_length/max",
    "correction/ratio_mean": "rollout_corr/rollout_is_mean",
    "correction/truncated": "rollout_corr/rollout_is_ratio_fraction_high",
    "policy/clip_fraction": "actor/distillation/pg_clipfrac",
    "policy/dual_clip_fraction": "actor/distillation/pg_clipfrac_lower",
    "policy/entropy": "actor/entropy",
    "memory/gpu_gb": "actor/perf/max_memory_allocated_gb",
}
"""Our names and verl's."""
STAGES = {
    "rollout": ("gen",),
    "old": ("old_log_prob", "ref"),
    "signal": ("adv",),
    "update": ("update_actor",),
    "sync": ("update_weights",),
    "save": ("save_checkpoint",),
}
"""Our stages and verl's timers. The teacher scores while answers are sampled, so its time is in `rollout`."""
SHOWN = ("kl/sampled", "gap/abs_mean", "weights/mean", "weights/min", "weights/max", "rollout/length_mean")
"""Metrics of the progress line."""


class MetricsFile:
    """The file of verl's file logger, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self._position = path, 0

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Steps written since the last call; an incomplete line is left for the next call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                record = json.loads(line)
                if any(name.startswith("actor/") for name in record["data"]):  # else an evaluation before the first step
                    yield int(record["step"]), record["data"]


def step_stats(config: Config, step: int, given: Mapping[str, Any]) -> StepStats:
    """One step as the local engine would report it."""
    numbers = {name: math.nan if value is None else value for name, value in given.items()}
    for name in (LOSS, GRAD_NORM):
        if name not in numbers:
            there = sorted(numbers)[:8]
            raise VerlError(f"verl's metrics of step {step} have no {name!r}: is the plugin loaded? They have {there}")
    loss, norm = float(numbers[LOSS]), float(numbers[GRAD_NORM])
    skipped = not math.isfinite(norm)  # verl then skips the update
    metrics: dict[str, Any] = dict.fromkeys(SHOWN, math.nan)
    metrics |= {ours: float(numbers[theirs]) for ours, theirs in SAME.items() if theirs in numbers}
    metrics |= _measured(numbers)
    if "rollout_corr/rollout_is_max" in numbers:
        extremes = (numbers["rollout_corr/rollout_is_max"], numbers.get("rollout_corr/rollout_is_min", 1.0))
        metrics["correction/ratio_deviation"] = max(abs(value - 1) for value in extremes)
    metrics |= _limited(config, step, numbers)
    rollouts = config.rollout.prompts_per_step * config.rollout.samples
    written = metrics.get("tokens_written", rollouts * metrics["rollout/length_mean"])
    metrics["tokens_written"] = round(written) if math.isfinite(written) else math.nan
    metrics["prompts"] = config.rollout.prompts_per_step
    metrics["update/count"] = config.optim.mini_batches * config.optim.ppo_epochs
    metrics["update/skipped"] = int(skipped)
    return StepStats(
        step=step,
        loss=loss if math.isfinite(loss) or skipped else 0.0,
        grad_norm=norm,
        tokens=int(numbers.get(f"{OURS}tokens", 0)),
        rollouts=rollouts,
        skipped=skipped,
        seconds=_seconds(numbers),
        metrics=metrics,
    )


def noise_warning(config: Config, stats: StepStats) -> str | None:
    """What to tell the user if the log-probs of the student itself are as far apart as those of the pair."""
    floor = NoiseFloor(stats.metrics.get("gap/noise_student", 0.0), 0.0, stats.metrics["gap/abs_mean"])
    if not floor.is_fault:
        return None
    tokens = response_tokens(config)
    return (
        f"step {stats.step}: rollout engine and trainer put the student's own log-probs {floor.total:.2g} a token apart, "
        f"{floor.share:.0%} of the gap to the teacher ({floor.gap:.3g}). A rule that sums |gap| over {tokens:,} tokens sums up "
        f"{floor.summed(tokens):.3g} nats of noise: raise engine.vllm.dtype and precision"
    )


def reward_warning(config: Config, stats: StepStats) -> str | None:
    """What to tell the user if the checker gave no verdict on some answers."""
    if not (failed := stats.metrics.get("reward/failed", 0)):
        return None
    return (
        f"step {stats.step}: the checker {config.reward.checker!r} gave no verdict on {failed:.0f} of {stats.rollouts} "
        "rollouts, which get no reward; verl's output says why. This is said once; reward/failed counts them in every step"
    )


def _measured(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Our trainer's metrics; numbered entries become lists again."""
    plain: dict[str, Any] = {}
    lists: dict[str, dict[int, float]] = {}
    for name, value in numbers.items():
        if not name.startswith(OURS) or name in (f"{OURS}tokens", f"{OURS}progress"):
            continue
        own = name.removeprefix(OURS)
        stem, _, place = own.rpartition("/")
        if place.isdigit():
            lists.setdefault(stem, {})[int(place)] = float(value)
        else:
            plain[own] = float(value)
    return plain | {stem: [places[place] for place in sorted(places)] for stem, places in lists.items()}


def _limited(config: Config, step: int, numbers: Mapping[str, Any]) -> dict[str, float]:
    """Share of answers at the limit of the step: they were cut off, or reached the horizon.

    verl's number is relative to the longest of the batch, which may be below the limit.
    """
    limit, longest = answer_limit(config, step), numbers.get("response_length/max", math.nan)
    share = 0.0 if longest < limit else float(numbers.get("response_length/clip_ratio", math.nan))
    cut_off = limit == response_tokens(config)
    return {"rollout/truncated": share if cut_off else 0.0, "rollout/stopped": 0.0 if cut_off else share}


def _seconds(numbers: Mapping[str, Any]) -> dict[str, float]:
    timers = {ours: sum(float(numbers.get(f"timing_s/{name}", 0.0)) for name in theirs) for ours, theirs in STAGES.items()}
    whole = float(numbers.get("timing_s/step", sum(timers.values())))
    return {**timers, "teacher": 0.0, "other": max(0.0, whole - sum(timers.values()))}
