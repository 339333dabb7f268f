"""What is reached of a GPU's peaks. These are the plan's assumptions: none was measured here, for there was no GPU.

Each comes from published measurements, named by number as in docs/plan.md ("Rates"), with a low and a high value beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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


TYPICAL = Rates(
    train=0.30,
    train_experts=0.08,
    score=0.30,
    score_experts=0.20,
    decode_bandwidth=0.75,
    decode_flops=0.60,
    layer_seconds=35e-6,
    row_seconds=45e-6,
    exchange_seconds=15e-6,
    link=0.7,
    sync=5e9,
    step_seconds=3.0,
)
FAST = Rates(
    train=0.45,
    train_experts=0.20,
    score=0.45,
    score_experts=0.30,
    decode_bandwidth=0.85,
    decode_flops=0.75,
    layer_seconds=20e-6,
    row_seconds=15e-6,
    exchange_seconds=8e-6,
    link=0.85,
    sync=20e9,
    step_seconds=1.0,
)
SLOW = Rates(
    train=0.15,
    train_experts=0.04,
    score=0.18,
    score_experts=0.10,
    decode_bandwidth=0.55,
    decode_flops=0.40,
    layer_seconds=75e-6,
    row_seconds=80e-6,
    exchange_seconds=30e-6,
    link=0.4,
    sync=2e9,
    step_seconds=10.0,
)


def own_sampler(rates: Rates) -> Rates:
    """Rollouts by this package's sampler: no CUDA graphs, so each layer's launches cost; but its sampling is one operation.

    transformers on a GPU takes 0.6 ms a layer, whatever the model's size (docs/plan.md); our lean path launches less.
    """
    layer = {TYPICAL: 500e-6, FAST: 250e-6, SLOW: 700e-6}[rates]
    return replace(rates, layer_seconds=layer, row_seconds=2e-6)
