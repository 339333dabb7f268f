"""What an objective is: a named object that says which evidence it needs and turns it into a loss.

The trainer executes three calls and knows nothing else of the method:

    signal = objective.signal(evidence)                 # once per step, on whole rollouts [B, T]
    columns = objective.columns(evidence, signal)       # what the loss needs of each token
    out = objective.loss(student, columns, denominator)  # once per micro-batch, on N tokens

An objective is a frozen dataclass; its fields are the settings of the recipe's `[method]` section. To add one, write a module
that registers a subclass (or name it in an entry point of the group `iwopd.objectives`), and its test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, get_type_hints

import torch
from torch import Tensor

from iwopd.algo._checks import on_cpu
from iwopd.algo.asking import Asked, Support, asked_for, further_evidence
from iwopd.algo.evidence import FURTHER, TEACHER_DISTRIBUTION, WEIGHTS, Evidence, Formula
from iwopd.algo.head import Precision
from iwopd.algo.spans import Spans
from iwopd.algo.views import NO_ID, TokenScores
from iwopd.algo.weights import WEIGHT_RULES, WeightRule, rule_weights, supervised_mask


@dataclass(frozen=True)
class TrainingSignal:
    """Per-token tensors [B, T] of a batch of whole rollouts, all detached, 0 (or false) outside the mask."""

    mask: Tensor
    """Boolean: the valid tokens it was made from."""
    gap: Tensor
    """`a[t] = lp_T[t] - lp_0[t]`."""
    weights: Tensor
    """`w[t]` of the weight rule."""
    advantages: Tensor
    """The direction of the update at ratio 1: the derivative of the objective by each log-prob, up to the denominator."""
    supervised: Tensor
    """Boolean: the tokens that the loss sums over and its denominator counts."""
    of_spans: TrainingSignal | None = None
    """The same by span [B, S], if the teacher has another tokenizer: every token of a span has the span's numbers, so
    statistics are taken here, where each counts once."""


@dataclass(frozen=True)
class TokenStates:
    """One model's side of N tokens: the hidden states that predict them, and the output matrix."""

    hidden: Tensor
    """[N, H]; the student's with their graph."""
    targets: Tensor
    """[N] the tokens that were written."""
    weight: Tensor
    """[V, H]."""
    bias: Tensor | None = None
    temperature: float = 1.0
    vocab_size: int | None = None
    precision: Precision = "float32"
    """Of the products with the output matrix."""

    def take(self, rows: Tensor) -> TokenStates:
        """Of some of the tokens: `rows` [N] is boolean."""
        return self if bool(rows.all()) else replace(self, hidden=self.hidden[rows], targets=self.targets[rows])

    def to(self, device: torch.device) -> TokenStates:
        bias = None if self.bias is None else self.bias.to(device)
        hidden, targets, weight = self.hidden.to(device), self.targets.to(device), self.weight.to(device)
        return replace(self, hidden=hidden, targets=targets, weight=weight, bias=bias)


class LossStats(Protocol):
    """Statistics of a loss over some tokens, which can be added up over micro-batches and ranks."""

    @classmethod
    def merge(cls, parts: list[Any]) -> Self: ...
    def cpu(self) -> Self: ...
    def as_dict(self) -> dict[str, float]: ...


class ObjectiveLoss(Protocol):
    """What an objective returns for a micro-batch."""

    @property
    def loss(self) -> Tensor:
        """Sum over supervised tokens divided by the denominator, []; carries the gradient."""

    @property
    def stats(self) -> LossStats: ...


class TokenLoss(Protocol):
    """What the learner executes: the part of an objective that runs on micro-batches (see `Objective`)."""

    def loss(
        self, student: TokenStates, columns: Mapping[str, Tensor], denominator: float, teacher: TokenStates | None = None
    ) -> ObjectiveLoss: ...
    def logprobs_loss(self, logprobs: Tensor, columns: Mapping[str, Tensor], denominator: float) -> ObjectiveLoss: ...
    def no_stats(self) -> LossStats: ...


@dataclass(frozen=True)
class TokenMeans:
    """The simplest statistics: sums over N tokens by name, reported as means."""

    tokens: Tensor
    """[]."""
    sums: Mapping[str, Tensor]
    """[] each."""

    @classmethod
    def merge(cls, parts: list[TokenMeans]) -> TokenMeans:
        """Those of several disjoint sets of tokens taken together."""
        sums = {name: torch.stack([part.sums[name] for part in parts]).sum() for name in parts[0].sums}
        return cls(torch.stack([part.tokens for part in parts]).sum(), sums)

    def cpu(self) -> TokenMeans:
        """The same, on the CPU."""
        numbers = on_cpu({"": self.tokens, **self.sums})
        return TokenMeans(numbers.pop(""), numbers)

    def as_dict(self) -> dict[str, float]:
        """Means by name; 0 where there were no tokens."""
        return {name: float(value / self.tokens.clamp(min=1)) for name, value in self.sums.items()}


@dataclass(frozen=True)
class LossAndMeans:
    """An `ObjectiveLoss` with the simplest statistics."""

    loss: Tensor
    stats: TokenMeans


class Setting(NamedTuple):
    """One setting of the `[method]` section."""

    default: Any
    type: Any
    description: str


def setting(default: Any, description: str) -> Any:
    """A field of an objective that the recipe can set."""
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """The base of all objectives: every one takes token weights from a rule."""

    name: ClassVar[str]
    title: ClassVar[str]
    formula: ClassVar[str]
    source: ClassVar[str]
    metrics: ClassVar[str] = "objective"
    """Names of its statistics in `metrics.jsonl` begin with this."""
    takes_reward: ClassVar[bool] = False
    """It has an advantage to which `Evidence.reward_advantages` are added."""
    takes_spans: ClassVar[bool] = False
    """Its loss needs nothing of the teacher but the signal, so the teacher may have another tokenizer (`algo.spans`)."""

    weights: str = setting("uniform", "weight rule: see `iwopd methods`")
    params: Mapping[str, Any] = field(
        default_factory=dict, metadata={"description": "parameters of the weight rule, e.g. {gamma = 0.5}"}
    )

    # --- evidence ---

    @property
    def rule(self) -> WeightRule:
        return WEIGHT_RULES[self.weights]

    @property
    def formulas(self) -> list[tuple[Formula, Mapping[str, Any]]]:
        """What it is made of, with their parameters: they ask for evidence."""
        return [(self.rule, self.params)]

    @property
    def needs(self) -> frozenset[str]:
        """The evidence that it asks for, that of its formulas included."""
        asked = {name for formula, _ in self.formulas for name in formula.needs} - {WEIGHTS}
        return frozenset(asked | {"mask", "gap", "old_logprobs", "teacher_logprobs"})

    @property
    def who(self) -> str:
        """What messages call it, with the formulas that it is made of."""
        return f"objective {self.name!r}, weights {self.weights!r}"

    @property
    def compared_ids(self) -> Support | None:
        """Over which ids its loss compares distributions; None: over all, or not at all."""
        return None

    @property
    def overlap_k(self) -> int:
        """How many of the likeliest ids `top_overlap` looks at: the parameter `k` of the formula that asks for it."""
        return self._k_of("top_overlap")

    @property
    def kl_k(self) -> int:
        """Over how many of the student's likeliest ids `kl` is taken; 0: over all, or nobody asks for it."""
        return self._k_of("kl")

    def _k_of(self, name: str) -> int:
        found = {
            f"{formula.kind} {formula.name!r}": int({**formula.params, **params}.get("k") or 0)
            for formula, params in self.formulas
            if name in formula.needs
        }
        if len(set(found.values())) > 1:
            said = " and ".join(f"{who} with k = {k}" for who, k in found.items())
            raise ValueError(f"{name} is computed once, but asked for by {said}: give both the same k")
        return next(iter(found.values()), 0)

    @property
    def needs_whole_kl(self) -> bool:
        """Whether `kl` is asked for over all ids, and so made of both models' hidden states."""
        return "kl" in self.needs and not self.kl_k

    @property
    def asks(self) -> Asked:
        """What student and teacher must say of every token, so that the evidence can be made."""
        sizes = {"overlap_k": self.overlap_k, "kl_k": self.kl_k}
        return asked_for(self.needs, **sizes, support=self.compared_ids, states=self.needs_teacher_distribution)

    def further_evidence(self, student: TokenScores, teacher: TokenScores) -> dict[str, Tensor]:
        """Evidence of one rollout [T, ...] by name, of what both said of its tokens."""
        sizes = {"overlap_k": self.overlap_k, "kl_k": self.kl_k}
        return further_evidence(self.needs, student, teacher, **sizes, support=self.compared_ids)

    @property
    def needs_reference(self) -> bool:
        return "reference_logprobs" in self.needs

    @property
    def needs_teacher_distribution(self) -> bool:
        """Whether the loss needs the teacher's hidden states, and so a teacher in this process."""
        return TEACHER_DISTRIBUTION in self.needs

    @property
    def needs_output_matrix(self) -> str | None:
        """Why log-probs of the written tokens are not enough for the loss; None if they are."""
        return None

    @property
    def needs_reward(self) -> str | None:
        """Why there is nothing to learn without a reward; None if there is."""
        return None

    @property
    def needs_whole_batch(self) -> str | None:
        """Why the signal must be computed before a batch is split; None if each rollout's own tensors are enough."""
        if self.rule.batch_dependent:
            return "its weights depend on the other rollouts of the batch"
        if self.params.get("normalize") is not None:
            return f"normalize = {self.params['normalize']!r} needs the mean over the batch"
        if "progress" in self.needs:
            return "it follows the training progress"
        if "agreement" in self.needs:
            return "it follows the gradients of the steps before"
        if self.rule.supervised is not None:
            return "tokens that it does not supervise leave the loss's denominator"
        return None

    # --- from evidence to the loss ---

    @torch.no_grad()
    def signal(self, evidence: Evidence) -> TrainingSignal:
        """Weights and update direction of whole rollouts, before any split into micro-batches.

        Under a teacher with another tokenizer the actions are spans, and every token of a span gets what the span gets.
        """
        if evidence.spans is not None:
            spans = Spans.of(evidence.spans, evidence.mask)
            found = self.signal(spans.compress(evidence))
            gap, weights, advantages, supervised = map(
                spans.expand, (found.gap, found.weights, found.advantages, found.supervised)
            )
            return TrainingSignal(spans.tokens, gap, weights, advantages, supervised, of_spans=found)
        weights = rule_weights(self.rule, evidence, self.params)
        supervised = supervised_mask(self.weights, evidence.mask, weights=weights, **self.params)
        direction = torch.where(supervised, self.direction(evidence, weights), 0.0)
        return TrainingSignal(evidence.mask, evidence.gap, weights, direction, supervised)

    @abstractmethod
    def direction(self, evidence: Evidence, weights: Tensor) -> Tensor:
        """[B, T] how much the update raises each written token's log-prob, weights applied."""

    @abstractmethod
    def columns(self, evidence: Evidence, signal: TrainingSignal) -> dict[str, Tensor]:
        """What the loss needs of each token, by name: detached tensors [B, T]. The trainer hands them over as [N]."""

    @abstractmethod
    def loss(
        self, student: TokenStates, columns: Mapping[str, Tensor], denominator: float, teacher: TokenStates | None = None
    ) -> ObjectiveLoss:
        """The loss of N tokens: a sum over the supervised ones divided by `denominator`, that of the whole step.

        `teacher` has the teacher's states of the same tokens, if `needs_teacher_distribution`.
        """

    def logprobs_loss(self, logprobs: Tensor, columns: Mapping[str, Tensor], denominator: float) -> ObjectiveLoss:
        """The same from log-probs [N], for models whose head is more than a matrix."""
        raise TypeError(f"objective {self.name!r} needs the output matrix, not log-probs alone: {self.needs_output_matrix}")

    @abstractmethod
    def no_stats(self) -> LossStats:
        """The statistics of a step without a supervised token."""

    # --- settings ---

    of_the_method: ClassVar[tuple[str, ...]] = ()
    """Settings of its own that make another method of it; others are details of the loss (clips, coefficients)."""
    conditions: ClassVar[Mapping[str, tuple[str, tuple[str, ...]]]] = {}
    """Settings that only some choices have: the setting that makes the choice, and the values with which they come."""

    @classmethod
    def settings(cls, values: Mapping[str, Any]) -> dict[str, Setting]:
        """Settings by name. `values` are those given: one may bring others (an advantage has its own)."""
        found = cls.every_setting()

        def applies(name: str) -> bool:
            choice, with_these = cls.conditions.get(name, ("", ()))
            return not choice or values.get(choice, found[choice].default) in with_these

        return {name: one for name, one in found.items() if applies(name)}

    @classmethod
    def every_setting(cls) -> dict[str, Setting]:
        """Also those that only some choices have."""
        types = get_type_hints(cls)
        found = {}
        for one in fields(cls):
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            found[one.name] = Setting(default, types[one.name], one.metadata.get("description", ""))
        return found

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)

    def check(self) -> None:
        """Refuse wrong values now, on two tokens, and not after the first rollouts."""
        if "top_overlap" in self.needs and self.overlap_k < 1:
            raise ValueError(
                f"{self.who}: top_overlap needs a parameter k, how many likely ids are compared; it must be at least 1"
            )
        if self.kl_k < 0:
            raise ValueError(f"{self.who}: k must not be negative, got {self.kl_k} (0: the KL over all ids)")
        nothing = torch.zeros(1, 2)
        ids = torch.full((1, 2, 1), NO_ID)
        more = dict.fromkeys([*FURTHER, "support_rest"], nothing)
        evidence = Evidence(
            nothing, nothing, nothing == 0, nothing, 0.0, 0.0, support_ids=ids, support_logprobs=torch.zeros(1, 2, 1), **more
        )
        self.columns(evidence, self.signal(evidence))
