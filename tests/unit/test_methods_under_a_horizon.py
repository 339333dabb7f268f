"""What a cut changes: every rule and advantage on full and on cut rollouts, and docs/horizons.md's table of it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd.algo import WEIGHT_RULES, token_weights
from iwopd.algo.advantages import ADVANTAGES
from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import make_objective
from iwopd.algo.weights import supervised_mask
from support import length_mask

DOC = Path(__file__).parents[2] / "docs" / "horizons.md"
LENGTHS = (40, 33, 40, 17, 26, 40)
KEPT = torch.tensor([16, 33, 24, 8, 26, 8])
WRITTEN = torch.arange(40) < KEPT[:, None]
FULL = length_mask(LENGTHS)
STOPPED = torch.tensor(LENGTHS) > KEPT
PARAMS: dict[str, dict[str, Any]] = {"sod": {"tokens": 12}, "gated": {"agreement": 0.2}}
"""Where the defaults would see nothing of answers that are so short; and a number of the steps before."""


def evidence(seed: int = 0) -> dict[str, Tensor]:
    """Of full rollouts, two of a prompt; some right, some wrong."""
    generator = torch.Generator().manual_seed(seed)
    names = ("student_entropy", "teacher_entropy", "kl", "top_overlap")
    found = {name: torch.rand(FULL.shape, generator=generator, dtype=torch.float64) for name in names}
    found["old_logprobs"] = -torch.rand(FULL.shape, generator=generator, dtype=torch.float64)
    found["teacher_logprobs"] = found["old_logprobs"] + torch.randn(FULL.shape, generator=generator, dtype=torch.float64)
    found["reference_logprobs"] = found["old_logprobs"] - 0.3
    found["prompt"] = torch.tensor([0.0, 0, 1, 1, 1, 1], dtype=torch.float64)[:, None].expand(FULL.shape)
    found["correct"] = torch.tensor([1.0, 0, 1, 1, 1, 0], dtype=torch.float64)[:, None].expand(FULL.shape)
    return found


def cut(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of cut ones: a stopped answer is not judged."""
    return values | {"correct": torch.where(STOPPED[:, None], math.nan, values["correct"])}


def weights(rule: str, values: dict[str, Tensor], mask: Tensor) -> Tensor:
    needs = {name: values[name] for name in WEIGHT_RULES[rule].needs if name in values}
    gap = values["teacher_logprobs"] - values["old_logprobs"]
    return token_weights(rule, gap, mask, progress=0.3, **needs, **PARAMS.get(rule, {}))


def unchanged(rule: str) -> bool:
    full, left = (weights(rule, values, mask) for values, mask in ((evidence(), FULL), (cut(evidence()), FULL & WRITTEN)))
    return torch.allclose(full[WRITTEN & FULL], left[WRITTEN & FULL], rtol=0, atol=1e-9)


def documented() -> dict[str, bool]:
    """By rule, the last column of the table."""
    rows = re.findall(r"^\| (`[^|]*) \|.*\| (yes|no) \|$", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: says == "yes" for names, says in rows for name in re.findall(r"`([\w-]+)`", names)}


def test_the_table_has_every_rule_once() -> None:
    assert sorted(documented()) == sorted(name for name in WEIGHT_RULES if WEIGHT_RULES[name].family)


@pytest.mark.parametrize("rule", sorted(documented()))
def test_what_a_cut_changes_is_what_the_table_says(rule: str) -> None:
    assert unchanged(rule) == documented()[rule]


def test_a_share_is_that_of_the_written_part() -> None:
    """1 + gamma at the beginning, 1 at the horizon."""
    gap = torch.tensor([[-1.0, -3.0, -2.0, -2.0, -9.0]], dtype=torch.float64)
    full = token_weights("cumulative-share", gap, length_mask([5]), gamma=0.5)
    left = token_weights("cumulative-share", gap, length_mask([3]).new_tensor([[1, 1, 1, 0, 0]]), gamma=0.5)
    assert full[0].tolist() == pytest.approx([1.5, 1.5 - 0.5 / 8, 1.25, 1.5 - 3 / 8, 1.0])
    assert left[0].tolist() == pytest.approx([1.5, 1.5 - 0.5 / 4, 1.0, 0.0, 0.0])


def test_ideal_weights_are_normalised_by_those_that_reach_a_place() -> None:
    """The second answer drifts at its first token and is stopped: at the third place the first one is alone, with weight 1."""
    gap = torch.tensor([[0.0, 0.0, 0.0], [-2.0, 0.0, 0.0]], dtype=torch.float64)
    small = math.exp(-2.0)
    full = token_weights("ideal", gap, length_mask([3, 3]), alpha=1.0)
    left = token_weights("ideal", gap, length_mask([3, 2]), alpha=1.0)
    assert full[0].tolist() == pytest.approx([1.0, 2 / (1 + small), 2 / (1 + small)])
    assert left[0].tolist() == pytest.approx([1.0, 2 / (1 + small), 1.0])
    assert left[0, 2] < full[0, 2]


def test_segments_that_are_whole_keep_their_weights() -> None:
    full, left = (weights("sod", evidence(), mask) for mask in (FULL, FULL & WRITTEN))
    assert torch.equal(full[0, :12], left[0, :12])
    assert not torch.allclose(full[0, 12:16], left[0, 12:16])


def test_a_stopped_answer_is_not_compared_with_others() -> None:
    left = weights("scope", cut(evidence()), FULL & WRITTEN)
    assert bool((left[STOPPED][(WRITTEN & FULL)[STOPPED]] == 1).all())
    whole = weights("scope", evidence(), FULL)
    assert not bool((whole[STOPPED][FULL[STOPPED]] == 1).all())


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_look_at_their_own_token(name: str) -> None:
    def advantages(values: dict[str, Tensor], mask: Tensor, **settings: Any) -> Tensor:
        objective = make_objective({"advantage": name, **settings})
        names = {"teacher_logprobs", "old_logprobs", *(set(objective.needs) & values.keys())}
        return objective.signal(Evidence(mask=mask, progress=0.3, **{one: values[one] for one in names})).advantages

    written = WRITTEN & FULL
    full, left = advantages(evidence(), FULL), advantages(cut(evidence()), written)
    torch.testing.assert_close(full[written], left[written], rtol=0, atol=1e-12)
    if name == "log-mix":
        whole, short = advantages(evidence(), FULL, future=True), advantages(evidence(), written, future=True)
        assert not torch.allclose(whole[written], short[written])


def test_the_denominator_counts_written_tokens() -> None:
    assert int(supervised_mask("survival", FULL & WRITTEN).sum()) == int((FULL & WRITTEN).sum())
    first = supervised_mask("prefix-only", FULL & WRITTEN, ratio=0.5)
    assert first.sum(-1).tolist() == [math.ceil(int(length) / 2) for length in (FULL & WRITTEN).sum(-1)]
