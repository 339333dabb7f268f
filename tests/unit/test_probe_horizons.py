"""Horizons in the probe: products of noisy gradients by hand, cuts by hand, updates against explicit gradients, proposals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from iwopd.algo.gradients import dot, expected_cosine, noise_over_signal, shared_signal, sketch
from iwopd.analysis.probe.alignment import AlignmentBatch, TokenGradients
from iwopd.analysis.probe.horizons import FULL, measure_horizons, probe_cuts
from iwopd.analysis.probe.intervals import Bootstrap, jackknife
from iwopd.analysis.probe.kept import Kept
from iwopd.analysis.probe.present import print_probe
from iwopd.analysis.probe.proposal import propose
from iwopd.analysis.probe.result import Estimate, HorizonEffect, Horizons, KeptUpdate, Probe, Rollouts
from iwopd.analysis.probe.rules import probe_rules
from iwopd.analysis.probe.scoring import Tokens
from iwopd.lm import ResponseModel
from iwopd.types import Prompt, Rollout
from models import make_model
from support import length_mask

VOCAB = 21


# --- gradients ------------------------------------------------------------------------------------------------------------


def test_sketches_of_small_gradients_have_the_same_products() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = ([torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (2, 2))] for _ in range(2))
    for pair in ((first, first), (first, second)):
        product = float(sketch(pair[0], 26).double() @ sketch(pair[1], 26).double())
        assert product == pytest.approx(dot(*pair), rel=1e-5)


def test_sketches_of_large_ones_nearly() -> None:
    generator = torch.Generator().manual_seed(0)
    first, noise = ([torch.randn(40_000, generator=generator), torch.randn(300, 70, generator=generator)] for _ in range(2))
    second = [0.8 * one + 0.6 * other for one, other in zip(first, noise, strict=True)]
    ours, theirs = sketch(first, 4096).double(), sketch(second, 4096).double()
    found = float(ours @ theirs / (ours.norm() * theirs.norm()))
    assert found == pytest.approx(dot(first, second) / math.sqrt(dot(first, first) * dot(second, second)), abs=0.05)


def test_products_of_different_batches_by_hand() -> None:
    x = torch.tensor([[2.0, 1.0], [2.0, -1.0]], dtype=torch.float64)  # signal (2, 0), noise of length 1
    y = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert shared_signal(x @ x.T) == 3.0  # 4 - 1: with two batches the noise is not yet orthogonal
    assert shared_signal(y @ y.T) == 2.0
    assert shared_signal(x @ y.T) == 2.0
    assert expected_cosine(x @ y.T, x @ x.T, y @ y.T) == pytest.approx(2 / math.sqrt(6))
    assert noise_over_signal(x @ x.T) == pytest.approx(math.sqrt((5 - 3) / 3))
    assert noise_over_signal(y @ y.T) == 0.0
    opposite = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    assert math.isnan(expected_cosine(opposite @ opposite.T, opposite @ opposite.T, opposite @ opposite.T))
    assert math.isnan(noise_over_signal(opposite @ opposite.T))
    assert math.isnan(shared_signal(torch.ones(1, 1)))


def test_noise_does_not_lower_the_expected_cosine() -> None:
    """Two updates with one signal, the second with noise of its own: in a batch they differ, on average they do not."""
    generator = torch.Generator().manual_seed(1)
    signal = torch.zeros(20_000, dtype=torch.float64)
    signal[0] = 20.0
    shared = torch.randn(8, 20_000, generator=generator, dtype=torch.float64) / 10
    own = torch.randn(8, 20_000, generator=generator, dtype=torch.float64) / 10
    x, y = signal + shared, signal + shared + own
    in_batch = torch.nn.functional.cosine_similarity(x, y).mean()
    assert float(in_batch) < 0.9
    assert expected_cosine(x @ y.T, x @ x.T, y @ y.T) == pytest.approx(1.0, abs=0.02)
    assert noise_over_signal(x @ x.T) == pytest.approx(math.sqrt(200) / 20, rel=0.05)


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    found = jackknife(lambda chosen: float(values[chosen].mean()), 4)
    half = 3.182446 * float(values.std()) / 2
    assert (found.mean, found.low, found.high) == pytest.approx((3.0, 3.0 - half, 3.0 + half), rel=1e-5)
    assert jackknife(lambda chosen: float(values[chosen].mean()), 2).low is None
    assert jackknife(lambda chosen: math.nan if len(chosen) < 4 else 1.0, 4).low is None


# --- cuts and updates -----------------------------------------------------------------------------------------------------


def tokens_of(gap: Tensor, mask: Tensor, correct: Tensor | None = None) -> Tokens:
    old = torch.full_like(gap, -0.5)
    zeros = torch.zeros_like(gap)
    return Tokens(mask, list(range(len(gap))), old, old + gap, gap, kl=zeros, shared=zeros, same_first=zeros, correct=correct)


def test_cuts_by_hand() -> None:
    """Two answers of 32 and 20 tokens; the first loses 1 nat at token 6 and 2 more at token 18."""
    gap = torch.zeros(2, 32, dtype=torch.float64)
    gap[0, 5], gap[0, 17] = -1.0, -2.0
    tokens = tokens_of(gap, length_mask([32, 20]), torch.tensor([1.0, 1.0]))
    cuts = {cut.key: cut.lengths(tokens).tolist() for cut in probe_cuts(26.0)}
    assert cuts == {
        "full": [32, 20],
        "fixed-7": [7, 7],
        "fixed-13": [13, 13],
        "fixed-20": [20, 20],
        "drift-0.5": [8, 20],  # exp(-1) = 0.37
        "drift-0.2": [24, 20],
        "drift-0.05": [24, 20],  # exp(-3) = 0.0498
        "drift-0.001": [32, 20],
        "drift-1e-06": [32, 20],
    }
    left = tokens.cut(torch.tensor([8, 20]))
    assert left.mask.sum(-1).tolist() == [8, 20]
    assert left.correct is not None
    assert left.correct.isnan().tolist() == [True, False]
    assert [cut.key for cut in probe_cuts(1.0)][:2] == [FULL, "fixed-1"]  # equal limits stand once


@pytest.fixture(scope="module")
def lm() -> ResponseModel:
    return ResponseModel(make_model("qwen3", hidden=16, layers=1).double().eval(), vocab_size=VOCAB)


def batch_of(seed: int, drifting: bool = True) -> AlignmentBatch:
    generator = torch.Generator().manual_seed(seed)
    rollouts, solutions = [], {}
    for number in range(3):
        prompt = Prompt(f"p{seed}-{number}", tuple(torch.randint(2, VOCAB, (3,), generator=generator).tolist()))
        rollouts.append(Rollout(prompt, torch.randint(2, VOCAB, (24,), generator=generator), torch.zeros(24), "length"))
        solutions[prompt.id] = torch.randint(1, VOCAB, (5,), generator=generator)
    gap = 0.1 * torch.randn(3, 24, generator=generator, dtype=torch.float64)
    if drifting:
        gap[:, 3] = -4.0
    return AlignmentBatch(rollouts, tokens_of(gap, length_mask([24] * 3)), solutions)


def joined(batches: list[AlignmentBatch]) -> Tokens:
    parts = [batch.tokens for batch in batches]
    return tokens_of(torch.cat([part.gap for part in parts]), torch.cat([part.mask for part in parts]))


RULES = [rule for rule in probe_rules() if rule.key in ("opd", "survival")]


def test_what_is_kept_is_that_of_explicit_gradients(lm: ResponseModel) -> None:
    batches = [batch_of(seed) for seed in range(3)]
    tokens, heard = joined(batches), []
    found = measure_horizons(lm, tokens, Bootstrap(tokens.prompts), batches, RULES, heard.append)
    assert sum(heard) == 3 * 2 * len(found.horizons)
    rows = {row.key: row for row in found.horizons}
    assert rows["full"].written.mean == rows["full"].prompts == 1.0
    assert rows["drift-0.05"].written.mean == pytest.approx(8 / 24)
    assert rows["drift-0.05"].stopped.mean == 1.0
    assert rows["drift-0.05"].prompts == pytest.approx(3.0)
    assert rows["drift-0.05"].lengths == [8.0] * 21
    vectors: dict[str, list[Tensor]] = {"full": [], "cut": []}
    for batch in batches:
        prompts = [torch.tensor(rollout.prompt.token_ids) for rollout in batch.rollouts]
        gradients = TokenGradients(lm, prompts, [rollout.response_ids for rollout in batch.rollouts])
        for name, most in (("full", 24), ("cut", 8)):
            coefficients = torch.where(torch.arange(24) < most, batch.tokens.gap, 0.0)
            vectors[name].append(torch.cat([part.flatten() for part in gradients.of(coefficients)]).double())
    full, left = torch.stack(vectors["full"]), torch.stack(vectors["cut"])
    opd = rows["drift-0.05"].of("opd")
    assert opd is not None
    assert opd.kept.mean == pytest.approx(expected_cosine(left @ full.T, left @ left.T, full @ full.T), abs=1e-4)
    assert opd.in_batch.mean == pytest.approx(float(torch.nn.functional.cosine_similarity(left, full).mean()), abs=1e-4)
    assert opd.noise == pytest.approx(noise_over_signal(left @ left.T), rel=1e-3)
    assert opd.noise is not None
    assert opd.noise_at_equal_tokens == pytest.approx(opd.noise / math.sqrt(3))
    assert opd.change is not None
    whole = rows["full"].of("opd")
    assert whole is not None
    assert whole.kept == Estimate(mean=1.0, low=1.0, high=1.0)
    assert whole.change is None
    assert opd.solutions is not None
    assert whole.solutions is not None
    assert opd.change.mean == pytest.approx(float(opd.solutions.mean or 0) - float(whole.solutions.mean or 0))


def test_batches_that_were_measured_before_are_not_measured_again(
    lm: ResponseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [batch_of(seed) for seed in range(2)]
    tokens, heard = joined(batches), []
    whole = measure_horizons(lm, tokens, Bootstrap(tokens.prompts), batches, RULES)
    measure_horizons(lm, batches[0].tokens, Bootstrap(batches[0].tokens.prompts), batches[:1], RULES, kept=Kept(tmp_path / "a"))
    passes: list[Tensor] = []
    original = TokenGradients.of

    def counted(self: TokenGradients, given: Tensor) -> list[Tensor]:
        passes.append(given)
        return original(self, given)

    monkeypatch.setattr(TokenGradients, "of", counted)
    again = measure_horizons(lm, tokens, Bootstrap(tokens.prompts), batches, RULES, heard.append, Kept(tmp_path / "a"))
    assert again == whole
    second = len(passes)
    assert sum(heard) == 2 * 2 * len(whole.horizons)
    measure_horizons(lm, tokens, Bootstrap(tokens.prompts), batches, RULES)
    assert second == (len(passes) - second) / 2


def test_without_solutions_and_with_one_batch(lm: ResponseModel) -> None:
    batch = replace(batch_of(0), solutions={})
    found = measure_horizons(lm, batch.tokens, Bootstrap(batch.tokens.prompts), [batch], RULES)
    assert (found.batches, found.batch_prompts) == (1, 3)
    for row in found.horizons:
        for one in row.methods:
            assert (one.solutions, one.change, one.kept.mean, one.noise) == (None, None, None, None)
            assert one.in_batch.mean is not None
    proposal = propose(found, "strong", 24)
    assert (proposal.method, proposal.section) == ("survival", {"type": "full"})
    assert "do not agree on a direction" in proposal.words


# --- proposals ------------------------------------------------------------------------------------------------------------


def part(**kept: tuple[float, float, float]) -> Horizons:
    """Share, and lower ends for OPD and survival, by key."""

    def effect(key: str, share: float, *low: float) -> HorizonEffect:
        kind, _, value = key.partition("-")
        section: dict[str, Any] = {"type": kind}
        section |= {"threshold": float(value), "block": 8} if kind == "drift" else {"tokens": int(value)} if value else {}
        methods = [
            KeptUpdate(
                key=name,
                title=name,
                kept=Estimate(mean=end, low=end, high=1.0),
                in_batch=Estimate(mean=end),
                noise=2.0,
                noise_at_equal_tokens=2 * math.sqrt(share),
                solutions=Estimate(mean=0.4 if name == "opd" else 0.6),
            )
            for name, end in zip(("opd", "survival"), low, strict=True)
        ]
        estimates: dict[str, Any] = {"written": Estimate(mean=share), "stopped": Estimate(mean=1.0)}
        lengths: list[float | None] = [100.0 * share] * 21
        return HorizonEffect(
            key=key, title=key, section=section, prompts=1 / share, lengths=lengths, methods=methods, **estimates
        )

    rows = [
        effect("full", 1.0, 1.0, 1.0),
        *(effect(key.replace("_", "-").replace("p", "."), *row) for key, row in kept.items()),
    ]
    levels = [place / 20 for place in range(21)]
    return Horizons(batches=8, batch_prompts=4, mean_tokens=100.0, levels=levels, horizons=rows)


def test_the_cheapest_that_keeps_enough_of_the_better_method() -> None:
    found = part(drift_0p5=(0.2, 0.3, 0.89), drift_0p2=(0.3, 0.4, 0.95), drift_0p1=(0.4, 0.95, 0.97))
    chosen = propose(found, "strong", 100)
    assert (chosen.method, chosen.section, chosen.written) == ("survival", found.horizons[2].section, 0.3)
    assert chosen.toml == '[rollout.horizon]\ntype = "drift"\nthreshold = 0.2\nblock = 8'
    assert "3.3 times as many prompts" in chosen.words
    plain = propose(found, "none", 100)
    assert (plain.method, plain.section["threshold"]) == ("opd", 0.1)


def test_among_equally_cheap_ones_the_one_that_stops_last() -> None:
    assert propose(part(drift_0p5=(0.3, 1, 1), drift_0p05=(0.301, 1, 1)), "strong", 100).section["threshold"] == 0.05


def test_a_fixed_limit_is_proposed_as_the_beginning_of_a_growing_one() -> None:
    """From 50 to 100 over training: three quarters on average, dearer than drift at 60 %."""
    found = part(fixed_50=(0.5, 0.99, 0.99))
    chosen = propose(found, "strong", 100)
    assert chosen.section == {"type": "growing", "from": 50}
    assert chosen.written == pytest.approx(0.75, abs=0.01)
    both = part(fixed_50=(0.5, 0.99, 0.99), drift_0p1=(0.6, 0.99, 0.99))
    assert propose(both, "strong", 100).section["type"] == "drift"


def test_full_rollouts_where_nothing_keeps_enough_or_saves_enough() -> None:
    lost = propose(part(drift_0p1=(0.4, 0.5, 0.8)), "strong", 100)
    assert lost.section == {"type": "full"}
    assert "no horizon surely keeps 0.9" in lost.words
    assert "drift-0.1, keeps 0.80" in lost.words
    assert "saves next to no tokens" in propose(part(drift_0p1=(0.97, 1.0, 1.0)), "strong", 100).words


def test_a_proposal_is_a_section_that_can_be_read() -> None:
    import tomllib

    from iwopd.config.horizon import HorizonSettings

    for found in (part(fixed_50=(0.5, 1, 1)), part(drift_0p2=(0.5, 1, 1))):
        section = tomllib.loads(propose(found, "strong", 100).toml)["rollout"]["horizon"]
        assert HorizonSettings.model_validate(section).type in ("growing", "drift")


def test_the_table_and_the_proposal_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    about = Rollouts(prompts=2, rollouts=2, empty=0, truncated=0, mean_tokens=100.0)
    found = part(drift_0p2=(0.3, 0.4, 0.95))
    found = found.model_copy(update={"proposal": propose(found, "strong", 100)})
    print_probe(Probe(iwopd="0", student="s", teacher="t", settings={}, rollouts=about, horizons=found), Console(width=150))
    text = " ".join(capsys.readouterr().out.split())
    assert "Answers that stop earlier" in text
    assert "drift-0.2" in text
    assert "x 3.33" in text
    assert '[rollout.horizon] type = "drift" threshold = 0.2 block = 8' in text
