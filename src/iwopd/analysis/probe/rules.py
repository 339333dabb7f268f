"""What each weight rule would do to these very rollouts, without training on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from iwopd.algo.budget import effective_share, region_share
from iwopd.algo.drift import prefix_sums, rebound
from iwopd.algo.objectives import Objective, TrainingSignal, make_objective
from iwopd.algo.position import bin_values, fraction_bins
from iwopd.analysis.probe.intervals import Bootstrap
from iwopd.analysis.probe.positions import beginning
from iwopd.analysis.probe.result import Cumulative, Curve, ProbeError, RuleEffect, Rules
from iwopd.analysis.probe.scoring import Tokens
from iwopd.config import parse_value
from iwopd.methods import probed_methods


@dataclass(frozen=True)
class Rule:
    """A weight rule with parameters under plain OPD, or an advantage under uniform weights: a `[method]` section."""

    key: str
    title: str
    section: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def objective(self) -> Objective:
        return make_objective(self.section)

    @property
    def weights(self) -> str:
        return self.objective.weights

    @property
    def params(self) -> Mapping[str, Any]:
        return self.objective.params

    @property
    def advantage(self) -> str:
        return str(self.section.get("advantage", "opd"))

    def signal(self, tokens: Tokens) -> TrainingSignal:
        """What training with this rule would start from (a curriculum stands at its beginning)."""
        return self.objective.signal(tokens.evidence(self.objective))


def probe_rules(gamma: float = 0.5, more: Sequence[str] = ()) -> list[Rule]:
    """Those of the catalogue, then those that were asked for."""
    rules = [Rule(key, title, section) for key, (title, section) in probed_methods(gamma).items()]
    return rules + [named_rule(text) for text in dict.fromkeys(more) if text not in {rule.key for rule in rules}]


def named_rule(text: str) -> Rule:
    """A rule as the command line writes it: `survival` or `survival:tau=2,floor=0.1`."""
    name, _, given = text.partition(":")
    params = {}
    for word in filter(None, (word.strip() for word in given.split(","))):
        key, equals, value = word.partition("=")
        if not equals:
            raise ProbeError(f"--rule {text!r}: write parameters as name=value, separated by commas")
        params[key.strip()] = parse_value(value.strip())
    section = {"weights": name, "params": params}
    try:
        make_objective(section)
    except (TypeError, ValueError, LookupError) as error:
        raise ProbeError(f"--rule {text!r}: {error}") from None
    return Rule(text, text, section)


def iw_key(gamma: float) -> str:
    return f"iw-opd-{gamma:g}"


def measure_rules(tokens: Tokens, bootstrap: Bootstrap, bins: int, rules: Sequence[Rule]) -> Rules:
    """Weight curves, effective tokens and the first tokens' share of the update of every rule (Fig. 4b)."""
    return Rules(
        edges=[place / bins for place in range(bins + 1)],
        rules=[_effect(rule, tokens, bootstrap, bins) for rule in rules],
        cumulative=_cumulative(tokens, bootstrap, bins),
    )


def _effect(rule: Rule, tokens: Tokens, bootstrap: Bootstrap, bins: int) -> RuleEffect:
    signal = rule.signal(tokens)
    weights, update = signal.weights.double(), signal.advantages.double().abs()
    first = torch.where(beginning(tokens.mask), update, 0.0)
    index = fraction_bins(tokens.mask, bins)
    return RuleEffect(
        key=rule.key,
        title=rule.title,
        rule=rule.weights,
        params=dict(rule.params),
        advantage=rule.advantage,
        weights=bootstrap.mean_curve(bin_values(weights, index, bins)),
        spread=_spread(weights, index, bins),
        effective=bootstrap.estimate(effective_share, weights.sum(-1), weights.square().sum(-1), tokens.mask.sum(-1)),
        first_30=bootstrap.estimate(region_share, first.sum(-1), update.sum(-1)),
    )


def _spread(weights: Tensor, index: Tensor, bins: int) -> Curve:
    """Median, 10th and 90th percentile of the weights in each bin; NaN where it has no token."""
    levels = torch.tensor([0.5, 0.1, 0.9], dtype=weights.dtype)
    members = (weights[index == place] for place in range(bins))
    rows = [torch.quantile(w, levels) if len(w) else torch.full((3,), math.nan) for w in members]
    median, low, high = torch.stack(rows).T.tolist() if rows else ([], [], [])
    return Curve(mean=median, low=low, high=high)


def _cumulative(tokens: Tokens, bootstrap: Bootstrap, bins: int) -> Cumulative:
    """Signed and unsigned prefix sums: the first take back what the second keep (Fig. 4b-c)."""
    index = fraction_bins(tokens.mask, bins)
    size = torch.where(tokens.mask, tokens.gap.abs(), 0.0).double()
    return Cumulative(
        signed=bootstrap.mean_curve(bin_values(prefix_sums(tokens.gap, tokens.mask), index, bins)),
        unsigned=bootstrap.mean_curve(bin_values(prefix_sums(tokens.gap.abs(), tokens.mask), index, bins)),
        rebound=bootstrap.mean(rebound(tokens.gap, tokens.mask)),
        opposite=bootstrap.estimate(region_share, torch.where(tokens.gap > 0, size, 0.0).sum(-1), size.sum(-1)),
    )
