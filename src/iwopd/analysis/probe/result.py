"""What a probe found, as typed objects and as `probe.json`. `docs/probe.md` explains the fields.

A number that does not exist (a mean over nothing, an interval of one prompt) is None here and null in the file, never NaN.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from iwopd.errors import UserError
from iwopd.filesystem import write_atomic

FORMAT = 1
PROBE_FILE = "probe.json"
MEASURED = ("handoff", "positions", "drift", "overlap", "likelihood", "rules", "alignment", "agreement", "horizons")
"""Parts of a probe, each of which may be missing."""
KEPT = 0.9
"""Least cosine of a proposed horizon's expected update with that of full rollouts, at the lower end of its interval. To first
order, a step of equal length along an update gains its cosine of what the full one gains on the same loss: at most a tenth is
given up."""
Bias = Literal["strong", "moderate", "none", "unclear", "unmeasurable"]


class ProbeError(UserError, ValueError):
    """Options or files that a probe cannot use, with the remedy."""


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_number)]


class Part(BaseModel):
    """A piece of the result. Unknown fields are ignored, so that later versions may add some."""

    model_config = ConfigDict(frozen=True)


class Estimate(Part):
    """A number with its 95 % interval."""

    mean: Number
    low: Number = None
    high: Number = None

    def plus_minus(self, scale: float = 1.0, form: str = ".3f", sign: str = "", nothing: str = "-") -> str:
        if self.mean is None:
            return nothing
        half = "" if self.low is None or self.high is None else f" ± {format(scale * (self.high - self.low) / 2, form)}"
        return format(scale * self.mean, sign + form) + half


class Curve(Part):
    """The same along an axis; lists of equal length."""

    mean: list[Number]
    low: list[Number]
    high: list[Number]


class Handoff(Part):
    """Accuracies in [0, 1] when the teacher finishes what the student began (Fig. 1b)."""

    fractions: list[float]
    teacher: Curve
    student: Estimate | None
    """The student's own answers; None if every one of them was cut off."""
    fall: Estimate
    """Accuracy at the first fraction minus accuracy at the last, paired by prompt."""
    problems: int
    continuations: int


class Positions(Part):
    """Discrepancy along the response, in K equal bins of relative position; nats per token."""

    edges: list[float]
    """[K + 1]"""
    tokens: list[int]
    abs_gap: Curve
    gap: Curve
    kl: Curve
    """Full-vocabulary KL(student || teacher)."""
    share: Curve
    """Each bin's part of the total of |gap|."""
    kl_share: Curve
    mean_abs_gap: Estimate
    mean_kl: Estimate
    half: Estimate
    """Relative position at which half of the total of |gap| is spent."""
    first_30: Estimate
    """Part of the total of |gap| on the first 30 % of the tokens."""


class Drift(Part):
    """The first token of each rollout with gap < -threshold: the share of rollouts that have one, and where."""

    threshold: float
    rollouts: Estimate
    position: Estimate
    """Relative, where there is one."""
    before: Estimate
    at: Estimate
    until: Estimate
    after: Estimate
    """Shares of the total of |gap|: before the first drift, on it, both, and after it."""


class TopKOverlap(Part):
    """Likeliest next tokens that the models have in common, by relative position."""

    k: int
    chance: float
    """k / vocabulary: what two unrelated models would share."""
    edges: list[float]
    shared: Curve
    same_first: Curve
    mean_shared: Estimate
    mean_same_first: Estimate


class PrefixLikelihood(Part):
    """Mean log-likelihood of the student's prefixes under both models, in nats (Fig. 3c)."""

    edges: list[float]
    """[K + 1]: fractions of the response, or tokens."""
    rollouts: list[int]
    """Rollouts that reach the bin."""
    student: Curve
    teacher: Curve
    difference: Curve
    """Teacher minus student."""


class Likelihood(Part):
    """By position, and of whole responses."""

    by_fraction: PrefixLikelihood
    by_token: PrefixLikelihood
    student: Estimate
    teacher: Estimate
    difference: Estimate


class RuleEffect(Part):
    """What a weight rule, or an advantage, would do to these rollouts."""

    key: str
    title: str
    rule: str
    params: dict[str, Any]
    advantage: str = "opd"
    """Another than plain OPD's stands under uniform weights."""
    weights: Curve
    spread: Curve | None = None
    """Median (`mean`), 10th (`low`) and 90th percentile (`high`) of the tokens' weights by relative position: no interval, but
    how unlike the tokens are. Ideal weights have mean 1 by construction; this is where their alphas differ."""
    effective: Estimate
    """Effective number of tokens, as a share of all."""
    first_30: Estimate
    """Share of the update, by |w A|, on the first 30 % of the tokens."""


class Cumulative(Part):
    """Signed against unsigned prefix sums of the gap, by relative position, in nats (Fig. 4b-c)."""

    signed: Curve
    unsigned: Curve
    rebound: Estimate
    """Largest rise of the signed sum above its lowest value so far, mean over rollouts. The unsigned sum has none."""
    opposite: Estimate
    """Share of the total of |gap| on tokens that the teacher likes better than the student does."""


class Rules(Part):
    edges: list[float]
    rules: list[RuleEffect]
    cumulative: Cumulative


class Aligned(Part):
    """Cosine of an update with the gradient of the log-likelihood of correct solutions."""

    key: str
    title: str
    cosine: Estimate
    gain: Estimate | None = None
    """Difference to plain OPD, paired by batch."""
    share: Estimate | None = None
    """Of regions: their part of the total of |gap|."""


class ByVerdict(Part):
    """The same on right and on wrong rollouts, as many of each, with the solutions of their own prompts."""

    key: str
    title: str
    right: Estimate
    wrong: Estimate
    difference: Estimate
    """Wrong minus right, paired by batch."""


class Alignment(Part):
    batches: int
    batch_prompts: int
    rules: list[Aligned]
    regions: list[Aligned]
    """Plain OPD on some tokens only: before, at, until (both) and after the first drift."""
    verdicts: list[ByVerdict] = Field(default_factory=list)
    """Of a few rules; empty where rollouts were not judged, or no batch has right and wrong ones."""
    compared: int = 0
    """Right rollouts of all batches that were compared with as many wrong ones."""


class Agreement(Part):
    """Whether the tokens after a drift pull where those before it do (`algo.agreement`), by the full-vocabulary reverse KL."""

    batches: int
    """Those that have tokens of both kinds."""
    batch_prompts: int
    cosine: Estimate
    gate: Number
    """How much the rule `gated` would let the tokens after a drift count, in [0, 1]."""


class KeptUpdate(Part):
    """What is left of a method's update where a horizon has cut the rollouts."""

    key: str
    title: str
    kept: Estimate
    """Cosine of the expected update with that of full rollouts, from products of different batches: noise is not in it."""
    in_batch: Estimate
    """Cosine with the update on the same rollouts in full, batch by batch: what the noise of late tokens was counts as lost."""
    noise: Number
    """Noise over signal of a batch's update."""
    noise_at_equal_tokens: Number
    """The same, if the saved tokens were spent on more prompts."""
    solutions: Estimate | None = None
    """Cosine with the way to correct solutions, where there are some."""
    change: Estimate | None = None
    """Its difference to full rollouts, paired by batch."""


class HorizonEffect(Part):
    """What a horizon would leave of these rollouts, which were written to the end."""

    key: str
    title: str
    section: dict[str, Any]
    """As `[rollout.horizon]` has it."""
    written: Estimate
    """Share of all tokens."""
    stopped: Estimate
    """Share of the rollouts that it ends."""
    prompts: Number
    """How many times as many prompts the same tokens pay for."""
    lengths: list[Number]
    """Quantiles of the written lengths, at the levels of `Horizons.levels`."""
    methods: list[KeptUpdate]

    def of(self, method: str) -> KeptUpdate | None:
        return next((one for one in self.methods if one.key == method), None)


class Proposal(Part):
    """The cheapest horizon that keeps a method's update, or full rollouts."""

    method: str
    section: dict[str, Any]
    """`[rollout.horizon]`, ready to use."""
    written: Number
    """Share of the tokens; of a growing horizon, over training."""
    words: str

    @property
    def toml(self) -> str:
        """The section, as a recipe has it."""
        values = {name: f'"{value}"' if isinstance(value, str) else value for name, value in self.section.items()}
        return "\n".join(["[rollout.horizon]", *(f"{name} = {value}" for name, value in values.items())])


class Horizons(Part):
    batches: int
    batch_prompts: int
    mean_tokens: float
    """Of a whole answer."""
    levels: list[float]
    horizons: list[HorizonEffect]
    """Full rollouts first."""
    proposal: Proposal | None = None


class Rollouts(Part):
    """What everything was measured on."""

    prompts: int
    rollouts: int
    empty: int
    """Nothing but the end-of-sequence token: only the hand-off curve counts these."""
    truncated: int
    mean_tokens: Number


class Probe(Part):
    format: int = FORMAT
    iwopd: str
    student: str
    teacher: str
    task: str | None = None
    settings: dict[str, Any]
    rollouts: Rollouts
    missing: dict[str, str] = Field(default_factory=dict)
    """Part: why it was not measured."""
    notes: list[str] = Field(default_factory=list)
    handoff: Handoff | None = None
    positions: Positions | None = None
    drift: Drift | None = None
    overlap: TopKOverlap | None = None
    likelihood: Likelihood | None = None
    rules: Rules | None = None
    alignment: Alignment | None = None
    agreement: Agreement | None = None
    horizons: Horizons | None = None
    bias: Bias = "unmeasurable"
    verdict: list[str] = Field(default_factory=list)
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall time by stage."""


def write_probe(probe: Probe, path: Path) -> None:
    """Write `probe.json`, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, probe.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise ProbeError(f"cannot write {path}: {error.strerror}") from None


def read_probe(path: Path) -> Probe:
    """Read `probe.json` (or the one in the folder `path`)."""
    path = path / PROBE_FILE if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProbeError(f"cannot read the probe {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        raise ProbeError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict) or "format" not in values:
        raise ProbeError(f"{path} is not a probe: it has no field 'format'")
    if values["format"] != FORMAT:
        raise ProbeError(f"{path} has format {values['format']!r}, this version reads {FORMAT}: run `iwopd probe` again")
    try:
        return Probe.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ProbeError(f"{path}: {'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}") from None
