"""The sampled-token objective: a clipped policy gradient whose advantage is the teacher's opinion of each written token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, get_type_hints

import torch
from torch import Tensor

from iwopd.algo.advantages import ADVANTAGES
from iwopd.algo.correction import CORRECTION_THRESHOLD, rollout_correction
from iwopd.algo.evidence import Evidence, Formula
from iwopd.algo.fused_loss import fused_policy_loss
from iwopd.algo.loss import CLIP, DUAL_CLIP, PolicyLoss, PolicyStats, check_loss_arguments, policy_loss
from iwopd.algo.objectives.base import Objective, Setting, TokenStates, TrainingSignal, setting


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Objective):
    """Mean over tokens of the clipped surrogate of `w[t] A[t]` (Eq. 67); OPD, IW-OPD, ExOPD and all their variants."""

    name: ClassVar[str] = "policy-gradient"
    title: ClassVar[str] = "Policy gradient on the sampled token"
    formula: ClassVar[str] = "mean of -min(eta * w A, clip(eta, 1 - clip, 1 + clip) * w A),  eta = exp(lp - lp_0)"
    source: ClassVar[str] = "Eq. 67 (Appendix, Algorithm), with dual clip"
    metrics: ClassVar[str] = "policy"
    takes_reward: ClassVar[bool] = True
    takes_spans: ClassVar[bool] = True

    advantage: str = setting("opd", "what A is: see `iwopd methods`")
    advantage_params: Mapping[str, Any] = field(default_factory=dict)
    clip: float = setting(CLIP, "PPO clip, both sides")
    dual_clip: float = setting(DUAL_CLIP, "cap of the ratio for negative advantages; inf: off")
    correction_threshold: float = setting(
        CORRECTION_THRESHOLD, "truncation of the rollout correction (engines whose log-probs are not the trainer's)"
    )
    entropy_coef: float = setting(0.0, "entropy bonus")
    kl_coef: float = setting(0.0, "auxiliary KL to the reference, low-variance form")

    def __post_init__(self) -> None:
        check_loss_arguments(1.0, self.clip, self.dual_clip)
        for name in ("entropy_coef", "kl_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not self.correction_threshold > 0:
            raise ValueError(f"correction_threshold must be positive, got {self.correction_threshold}")

    @property
    def who(self) -> str:
        return f"objective {self.name!r}, advantage {self.advantage!r}, weights {self.weights!r}"

    @property
    def formulas(self) -> list[tuple[Formula, Mapping[str, Any]]]:
        return [*super().formulas, (ADVANTAGES[self.advantage], self.advantage_params)]

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | ({"reference_logprobs"} if self.kl_coef else set())

    @property
    def needs_output_matrix(self) -> str | None:
        return "the entropy bonus (method.entropy_coef)" if self.entropy_coef else None

    @property
    def needs_reward(self) -> str | None:
        return f"method.advantage = {self.advantage!r}" if self.advantage == "none" else None

    def direction(self, evidence: Evidence, weights: Tensor) -> Tensor:
        return ADVANTAGES[self.advantage].weighted(evidence, weights, dict(self.advantage_params))

    def columns(self, evidence: Evidence, signal: TrainingSignal) -> dict[str, Tensor]:
        advantages = signal.advantages
        if evidence.reward_advantages is not None:
            advantages = advantages + torch.where(signal.supervised, evidence.reward_advantages, 0.0)
        found = {"old_logprobs": evidence.old_logprobs, "advantages": advantages, "supervised": signal.supervised}
        if evidence.rollout_logprobs is not None:
            found["correction"] = rollout_correction(
                evidence.old_logprobs, evidence.rollout_logprobs, evidence.mask, self.correction_threshold
            )
        if self.kl_coef and evidence.reference_logprobs is not None:
            found["reference_logprobs"] = evidence.reference_logprobs
        return found

    def loss(
        self, student: TokenStates, columns: Mapping[str, Tensor], denominator: float, teacher: TokenStates | None = None
    ) -> PolicyLoss:
        return fused_policy_loss(
            student.hidden,
            student.weight,
            student.targets,
            columns["old_logprobs"],
            columns["advantages"],
            columns["supervised"],
            bias=student.bias,
            temperature=student.temperature,
            vocab_size=student.vocab_size,
            precision=student.precision,
            entropy_coef=self.entropy_coef,
            **self._terms(columns, denominator),
        )

    def logprobs_loss(self, logprobs: Tensor, columns: Mapping[str, Tensor], denominator: float) -> PolicyLoss:
        known = (columns["old_logprobs"], columns["advantages"], columns["supervised"])
        return policy_loss(logprobs, *known, **self._terms(columns, denominator))

    def _terms(self, columns: Mapping[str, Tensor], denominator: float) -> dict[str, Any]:
        return {
            "denominator": denominator,
            "clip": self.clip,
            "dual_clip": None if math.isinf(self.dual_clip) else self.dual_clip,
            "correction": columns.get("correction"),
            "kl_coef": self.kl_coef,
            "reference_logprobs": columns.get("reference_logprobs"),
        }

    def no_stats(self) -> PolicyStats:
        return PolicyStats.empty()

    @classmethod
    def settings(cls, values: Mapping[str, Any]) -> dict[str, Setting]:
        found = super().settings(values)
        del found["advantage_params"]
        chosen = ADVANTAGES[values.get("advantage", found["advantage"].default)]
        types, about = get_type_hints(chosen.function), f"of the advantage {chosen.name!r}"
        return found | {name: Setting(default, types.get(name, Any), about) for name, default in chosen.params.items()}

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> Self:
        """The objective with these settings; those of the advantage stand among them."""
        own = super().settings(values)
        given = {name: value for name, value in values.items() if name in own}
        rest = {name: values.get(name, one.default) for name, one in cls.settings(values).items() if name not in own}
        return cls(**given, advantage_params=rest)
