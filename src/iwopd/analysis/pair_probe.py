"""A short probe of a configured pair with the trainer's own parts: what methods would do in the first step, without a step.

    settings --rollouts, scores (whole distributions)--> batches --agreement--> one number, no answers needed
                                                                 --cosines----> one number a method, if solutions are known

The agreement is that of every run's metrics (`algo.agreement`), on the reverse KL of whole distributions: sampled tokens alone
are too noisy for so few prompts. Cosines are those of `iwopd probe`'s alignment, for methods of whole distributions, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from iwopd.algo.agreement import GradientParts
from iwopd.algo.gradients import cosine
from iwopd.algo.objectives import Objective, make_objective
from iwopd.analysis.prediction import method_section
from iwopd.analysis.probe.alignment import TokenGradients
from iwopd.analysis.probe.inputs import Material
from iwopd.analysis.probe.intervals import jackknife, over_batches
from iwopd.analysis.probe.result import Estimate
from iwopd.config import Config, make_config
from iwopd.data.prompts import PromptOrder
from iwopd.methods import METHODS
from iwopd.tiny import PretrainingListener
from iwopd.train.assembly import assemble
from iwopd.train.parts import Parts
from iwopd.train.scoring import ScoredStep, loss_columns, score_step, write_rollouts

BATCHES, PROMPTS = 16, 16
"""Of a short probe: so many batches of so many prompts. Four batches leave every agreement open (LOG.md)."""
Advance = Callable[[int], None]


class PairProbe(NamedTuple):
    """What was measured, before training."""

    agreement: Estimate
    """Of all batches; its mean is None where it cannot be told: the models nowhere differ, or nowhere drift."""
    cosines: Mapping[str, Estimate]
    """By method; empty without solutions."""
    gap: float
    """Mean of |a| over all tokens, in nats: how far the models differ at all."""
    prompts: int
    batches: int

    @property
    def record(self) -> dict[str, Any]:
        """As `analysis.prediction` reads it."""
        interval = [self.agreement.low, self.agreement.high]
        cosines = {"cosines": {name: one.mean for name, one in self.cosines.items()}} if self.cosines else {}
        numbers = {"agreement": self.agreement.mean, "agreement_interval": interval, **cosines}
        return {**numbers, "gap": round(self.gap, 4), "prompts": self.prompts, "batches": self.batches}


def probe_pair(
    config: Config,
    *,
    batches: int = BATCHES,
    prompts: int = PROMPTS,
    methods: Sequence[str] = (),
    material: Material | None = None,
    progress: PretrainingListener | None = None,
    advance: Advance = lambda batch: None,
) -> PairProbe:
    """Probe the untrained student of these settings on `batches` of `prompts` each.

    The prompts are the settings' own, or those of `material`, which has their solutions; then `methods`, by their names in the
    catalogue or in a probe, get cosines.
    """
    objectives = {name: make_objective(method_section(name)) for name in methods}
    settings = probe_settings(config, prompts)
    gradients: list[GradientParts] = []
    gaps: list[Tensor] = []
    cosines: dict[str, list[float]] = {name: [] for name in methods}
    with assemble(settings, lambda _: None, progress) as parts:
        if material is not None:
            parts.order = PromptOrder(material.prompts, prompts, config.seed)
        for step in range(1, batches + 1):
            scored = score_step(settings, parts, write_rollouts(settings, parts, step), step)
            columns = loss_columns(parts.objective, scored.batch, scored.evidence)
            halves = parts.learner.measure(scored.batch, columns)[1]
            gradients += halves
            gaps.append(scored.evidence.gap[scored.evidence.mask].abs())
            if objectives and material is not None:
                agreement = halves[0].agreement or 0.0 if halves else 0.0
                for name, value in _cosines(parts, scored, objectives, agreement, _target(parts, step, material)).items():
                    cosines[name].append(value)
            advance(step)
    found = {name: over_batches(values) for name, values in cosines.items() if values}
    return PairProbe(pooled_agreement(gradients), found, float(torch.cat(gaps).mean()), batches * prompts, batches)


def pooled_agreement(gradients: Sequence[GradientParts]) -> Estimate:
    """Of all batches as one, with a jackknife interval over them: noise makes the agreement of a small batch small."""

    def of(numbers: Tensor) -> float:
        found = GradientParts.merge([gradients[number] for number in numbers.tolist()]).agreement
        return math.nan if found is None else found

    return jackknife(of, len(gradients)) if gradients else Estimate(mean=None)


def probe_settings(config: Config, prompts: int) -> Config:
    """The same pair and prompts; whole answers, all of the student's own; the reverse KL; nothing judged or kept."""
    tree = config.model_dump(exclude_none=True)
    rollout = {name: value for name, value in tree["rollout"].items() if name not in ("horizon", "mix")}
    tree |= {"rollout": {**rollout, "prompts_per_step": prompts}, "method": METHODS["kl"], "reward": {}}
    tree |= {"eval": {"prompts": 0}, "optim": {**tree["optim"], "ppo_epochs": 1, "mini_batches": 1}}
    return make_config(tree)


def _target(parts: Parts, step: int, material: Material) -> list[Tensor]:
    """The gradient of the log-likelihood of correct solutions to a step's prompts."""
    asked = parts.order.batch(step)
    solutions = [torch.tensor(material.solutions[prompt.id]) for prompt in asked]
    every_token = pad_sequence([torch.ones(len(ids)) for ids in solutions], batch_first=True)
    return TokenGradients(parts.learner.lm, [torch.tensor(one.token_ids) for one in asked], solutions).of(every_token)


def _cosines(
    parts: Parts, scored: ScoredStep, objectives: Mapping[str, Objective], agreement: float, target: list[Tensor]
) -> dict[str, float]:
    """Of each method's update, minus the gradient of its loss, with the target. The gate stands where the batch puts it."""
    loss, evidence = parts.learner.loss, replace(scored.evidence, agreement=agreement)
    own = loss.objective
    found = {}
    for name, objective in objectives.items():
        loss.objective = objective
        found[name] = -cosine(parts.learner.gradient(scored.batch, loss_columns(objective, scored.batch, evidence)), target)
    loss.objective = own
    return found
