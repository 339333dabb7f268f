"""How a probe measures."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from iwopd.algo.drift import DRIFT
from iwopd.analysis.handoff import FRACTIONS
from iwopd.analysis.probe.result import ProbeError
from iwopd.rollout.engine import LOCAL, EngineChoice

PARTS = ("handoff", "positions", "overlap", "likelihood", "rules", "alignment", "agreement", "horizons")
"""What can be left out with --skip. `positions` includes the drift."""


@dataclass(frozen=True)
class ProbeSettings:
    """Everything that decides a probe's numbers, apart from models and prompts."""

    max_tokens: int
    """Longest answer of the student, and longest continuation."""
    samples: int = 1  # rollouts per prompt
    temperature: float = 1.0
    """Of sampling and of all log-probs."""
    seed: int = 0
    fractions: tuple[float, ...] = FRACTIONS
    continuations: int = 4  # of each prefix
    bins: int = 10
    top_k: int = 5
    drift: float = DRIFT
    """Nats: a token is a drift if its gap lies below minus this."""
    gamma: float = 0.5
    """Of IW-OPD, for the verdict."""
    batches: int = 8
    batch_prompts: int = 32  # of each batch of gradients
    skip: frozenset[str] = frozenset()
    rules: tuple[str, ...] = ()
    """Further rules, as `name:param=value,...`."""
    engine: EngineChoice = LOCAL
    teacher_engine: EngineChoice = LOCAL
    """Which engines write the student's rollouts and the teacher's continuations."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "samples", "continuations", "bins", "top_k", "batches", "batch_prompts"):
            if getattr(self, name) < 1:
                option = {"batch_prompts": "batch-size"}.get(name, name.replace("_", "-"))
                raise ProbeError(f"--{option} must be at least 1, got {getattr(self, name)}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ProbeError(
                f"--temperature must be positive, got {self.temperature}: log-probs are taken at it, and greedy answers are "
                "not what on-policy distillation trains on"
            )
        if not (self.drift > 0 and math.isfinite(self.drift)):
            raise ProbeError(f"--drift must be positive (nats), got {self.drift}")
        if not (self.gamma >= 0 and math.isfinite(self.gamma)):
            raise ProbeError(f"--gamma must not be negative, got {self.gamma}")
        shown = ", ".join(f"{fraction:g}" for fraction in self.fractions) or "none"
        if not self.fractions or not all(0 <= fraction < 1 for fraction in self.fractions):
            raise ProbeError(f"--fractions must lie in [0, 1), got {shown}")
        if list(self.fractions) != sorted(set(self.fractions)):
            raise ProbeError(f"--fractions must rise, got {shown}")
        for part in sorted(self.skip):
            if part not in PARTS:
                raise ProbeError(f"--skip names {part!r}; the parts are {', '.join(PARTS)}")

    def as_dict(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        engines = {"engine": self.engine.name, "teacher_engine": self.teacher_engine.name}
        return plain | engines | {"fractions": list(self.fractions), "skip": sorted(self.skip), "rules": list(self.rules)}
