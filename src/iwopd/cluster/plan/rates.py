"""What is reached of a GPU's peaks. These are the plan's assumptions: none was measured here, for there was no GPU.

Each comes from published measurements, named by number in docs/plan.md ("Rates"), with a low and a high value beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from iwopd.train.memory import ModelShape


@dataclass(frozen=True)
class Rates:
    """Efficiencies (shares of a data sheet's peak) and fixed costs."""

    train: float
    """FLOPs of update and old log-probs, recomputed ones included; dense models, sharded by FSDP."""
    train_experts: float
    """The same for mixtures of experts as transformers computes them, without expert parallelism."""
    score: float
    """FLOPs of reading a sequence in vLLM (the teacher's log-probs, prompts); dense models."""
    score_experts: float
    decode_bandwidth: float
    """Memory bandwidth while decoding."""
    decode_flops: float
    layer_seconds: float
    """Of one decoding step, for each layer: launches and small kernels."""
    launch_seconds: float
    """The same without CUDA graphs: our own sampler, or one pass of the update through a layer."""
    row_seconds: float
    """Of one decoding step, for each row: scheduling, sampling, sending the token."""
    exchange_seconds: float
    """One sum over the GPUs of a tensor-parallel group; two in each layer."""
    link: float
    """Of interconnect and network."""
    sync: float
    """New weights to the rollout engine, bytes/s."""
    step_seconds: float
    """What a step costs besides: data to and fro, waking the engine."""

    def training(self, model: ModelShape) -> float:
        return self.train_experts if model.count.experts else self.train

    def scoring(self, model: ModelShape) -> float:
        return self.score_experts if model.count.experts else self.score


_ASSUMED = {  # slow, typical, fast
    "train": (0.15, 0.30, 0.45),
    "train_experts": (0.04, 0.08, 0.20),
    "score": (0.18, 0.30, 0.45),
    "score_experts": (0.10, 0.20, 0.30),
    "decode_bandwidth": (0.55, 0.75, 0.85),
    "decode_flops": (0.40, 0.60, 0.75),
    "layer_seconds": (75e-6, 35e-6, 20e-6),
    "launch_seconds": (700e-6, 500e-6, 250e-6),
    "row_seconds": (80e-6, 45e-6, 15e-6),
    "exchange_seconds": (30e-6, 15e-6, 8e-6),
    "link": (0.4, 0.7, 0.85),
    "sync": (2e9, 5e9, 20e9),
    "step_seconds": (10.0, 3.0, 1.0),
}
SLOW, TYPICAL, FAST = (Rates(**{name: values[column] for name, values in _ASSUMED.items()}) for column in range(3))


def own_sampler(rates: Rates) -> Rates:
    """Rollouts by this package's sampler: no CUDA graphs, so each layer's launches cost; but its sampling is one operation."""
    return replace(rates, layer_seconds=rates.launch_seconds, row_seconds=2e-6)
