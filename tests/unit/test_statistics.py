"""Against brute force, scipy and hand computations; and simulated: does a 95 % interval cover 95 %?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from iwopd.eval import per_problem, statistics
from iwopd.eval.per_problem import best_at, majority_at, mean_at, pass_at
from iwopd.eval.statistics import (
    Term,
    crossed,
    holm,
    interval_over_problems,
    needed,
    sampling_noise,
    sign_flip_p,
    t_quantile,
    t_two_sided,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The simulations are thousands of tiny tensors: threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_by_hand() -> None:
    scores = torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert mean_at(scores).tolist() == [0.5, 0.0, 1.0]
    assert pass_at(scores, 2).tolist() == pytest.approx([5 / 6, 0, 1])  # 1 - C(2, 2) / C(4, 2)
    assert best_at(scores, 2).tolist() == pytest.approx([5 / 6, 0, 1])
    assert best_at(scores, 4).tolist() == pytest.approx([1, 0, 1])
    assert pass_at(scores, 1).tolist() == pytest.approx(mean_at(scores).tolist())


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=7), st.data())
def test_best_of_k_is_the_mean_over_all_subsets(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    subsets = [max(subset) for subset in combinations(values, k)]
    assert float(best_at(row(values), k)) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)
    binary = [float(value == 1) for value in values]
    assert float(pass_at(row(binary), k)) == pytest.approx(float(best_at(row(binary), k)), abs=1e-12)


@pytest.mark.parametrize(("right", "k"), [(0, 7), (1, 1), (1, 9999), (3, 100), (50, 5000), (9000, 2), (10_000, 10_000)])
def test_pass_at_k_holds_for_ten_thousand_samples(right: int, k: int) -> None:
    scores = row([1.0] * right + [0.0] * (10_000 - right))
    exact = float(1 - Fraction(math.comb(10_000 - right, k), math.comb(10_000, k)))
    assert float(pass_at(scores, k)) == pytest.approx(exact, rel=1e-10)
    assert float(best_at(scores, k)) == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize("k", [0, 5])
def test_more_samples_than_there_are_is_refused(k: int) -> None:
    for metric in (pass_at, best_at, lambda scores, k: majority_at(scores, [["a"] * 4], k)):
        with pytest.raises(ValueError, match=f"k = {k} is not possible with 4 samples per problem"):
            metric(torch.ones(1, 4), k)


def test_pass_at_refuses_scores_in_between() -> None:
    with pytest.raises(ValueError, match="best@k takes scores in between"):
        pass_at(row([0.5, 1.0]), 1)


def vote(scores: list[float], answers: list[str | None]) -> float:
    counts = {name: answers.count(name) for name in answers if name is not None}
    winners = [name for name in counts if counts[name] == max(counts.values())]
    return sum(scores[answers.index(name)] for name in winners) / len(winners) if winners else 0.0


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), st.data())
def test_majority_is_the_mean_vote_of_all_subsets(answers: list[str | None], data: st.DataObject) -> None:
    scores = [float(answer == "a") for answer in answers]
    k = data.draw(st.integers(1, len(answers)))
    places = list(combinations(range(len(answers)), k))
    votes = [vote([scores[i] for i in subset], [answers[i] for i in subset]) for subset in places]
    assert float(majority_at(row(scores), [answers], k)) == pytest.approx(sum(votes) / len(votes), abs=1e-12)


def test_majority_breaks_ties_fairly_and_counts_no_empty_votes() -> None:
    assert float(majority_at(row([1, 1, 0, 0]), [["7", "7", "8", "8"]])) == 0.5
    assert float(majority_at(row([1, 0, 0, 0]), [["7", None, None, None]])) == 1.0
    assert float(majority_at(row([0, 0, 0]), [[None, None, None]])) == 0.0
    with pytest.raises(ValueError, match=r"answers of the scores' shape \[1, 2\]"):
        majority_at(row([1, 0]), [["7"]])


def test_resampled_votes_agree_with_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [["a"] * 9 + ["b"] * 8 + ["c"] * 5 + [None] * 2]
    scores = row([1.0] * 9 + [0.0] * 15)
    exact = float(majority_at(scores, answers, 7))
    monkeypatch.setattr(per_problem, "EXACT_VOTES", 0)
    sampled = float(majority_at(scores, answers, 7))
    assert sampled != exact
    assert sampled == pytest.approx(exact, abs=0.03)
    assert sampled == float(majority_at(scores, answers, 7))


# --- Student's t -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("df", [1, 1.5, 2, 7.3, 29, 200, 1e5])
def test_students_t_is_scipys(df: float) -> None:
    for t in (0.0, 1e-5, 0.3, 1.0, 2.0, 5.0, 12.7, 40.0):
        assert t_two_sided(-t, df) == pytest.approx(2 * scipy.stats.t.sf(t, df), rel=1e-8, abs=1e-200)
    for level in (0.0, 0.5, 0.6, 0.8, 0.95, 0.999):
        assert t_quantile(level, df) == pytest.approx(scipy.stats.t.ppf(0.5 + level / 2, df), rel=1e-8, abs=1e-8)


# --- intervals -------------------------------------------------------------------------------------------------------


def test_the_interval_over_problems_by_another_way() -> None:
    """A plain percentile bootstrap at the tails that Student's t would have: those of scipy."""
    values = (torch.rand(40, 3, generator=torch.Generator().manual_seed(1)) < 0.4).double().mean(1)
    picks = torch.randint(40, (4000, 40), generator=torch.Generator().manual_seed(0))
    means = sorted(float(values[pick].mean()) for pick in picks)
    tail = scipy.stats.norm.cdf(-math.sqrt(40 / 39) * scipy.stats.t.ppf(0.975, 39))
    found = interval_over_problems([values])
    assert found.mean == pytest.approx(float(values.mean()))
    assert means[int(4000 * tail) - 2] - 1e-9 <= found.low <= means[int(4000 * tail) + 2] + 1e-9
    assert means[int(4000 * (1 - tail)) - 2] - 1e-9 <= found.high <= means[int(4000 * (1 - tail)) + 2] + 1e-9
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        interval_over_problems([values], level=95)


def test_if_nothing_differs_the_rule_of_three_speaks() -> None:
    found = interval_over_problems([torch.zeros(30)])
    assert found == pytest.approx((0.0, 0.0, 1 - 0.025 ** (1 / 30)))
    one = interval_over_problems([torch.tensor([0.4])], bounds=(-1.0, 1.0))
    assert one.low < -0.9
    assert one.high > 0.9


def test_strata_weigh_the_same_whatever_their_size() -> None:
    easy, hard = torch.ones(100) - 0.1 * (torch.arange(100) % 2), 0.2 * (torch.arange(10) % 2)
    found = interval_over_problems([easy, hard])
    assert found.mean == pytest.approx((0.95 + 0.1) / 2)
    assert found.low < found.mean < found.high


def skewed(count: int, generator: torch.Generator) -> Tensor:
    """Paired differences with mean 0, most of them small: what two models on hard problems look like."""
    signs = 2.0 * torch.randint(2, (count,), generator=generator) - 1.0
    return (signs * torch.rand(count, generator=generator) ** 3).double()


def test_under_the_null_p_is_uniform_and_the_interval_covers() -> None:
    generator, trials, covered = torch.Generator().manual_seed(5), 400, 0
    p_values = []
    for _ in range(trials):
        differences = skewed(24, generator)
        p_values.append(sign_flip_p([differences], flips=399))
        low, high = interval_over_problems([differences], bounds=(-1.0, 1.0), resamples=500)[1:]
        covered += low <= 0 <= high
    assert 0.93 <= covered / trials <= 0.975
    assert 0.03 <= sum(p <= 0.05 for p in p_values) / trials <= 0.07
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 0.05


@pytest.mark.parametrize(("seeds", "noise", "least"), [(3, 0.0, 0.93), (3, 0.03, 0.93), (3, 0.1, 0.92), (2, 0.1, 0.89)])
def test_the_interval_over_seeds_and_problems_covers_seed_noise(seeds: int, noise: float, least: float) -> None:
    generator, trials = torch.Generator().manual_seed(seeds), 300
    both = alone = 0
    for trial in range(trials):
        shift = noise * torch.randn(seeds, 1, generator=generator)
        values = 0.1 * torch.randn(1, 30, generator=generator) + shift + 0.08 * torch.randn(seeds, 30, generator=generator)
        found = crossed([values])
        assert found is not None
        interval = found.interval()
        both += interval.low <= 0 <= interval.high
        if trial % 20 == 0:
            assert (found.p_value >= 0.05) == (interval.low <= 0 <= interval.high)
        if noise >= 0.1:
            wrong = interval_over_problems([values.mean(0)], bounds=(-9.0, 9.0), resamples=200)
            alone += wrong.low <= 0 <= wrong.high
    assert both / trials >= least
    assert alone / trials < 0.65  # the reason why it exists: problems alone miss the truth in every second experiment


def test_crossed_variances_by_hand() -> None:
    found = crossed([torch.tensor([[0.1, 0.3, 0.2], [0.5, 0.5, 0.2]])])
    assert found is not None
    # problem means 0.3 0.4 0.2: variance 0.01 / 3; seed means 0.2 0.4: 0.02 / 2; residuals +-0.1, 0, -+0.1: 0.04 / 2 / 6
    assert found.mean == pytest.approx(0.3)
    assert found.problems == pytest.approx(0.01 / 3)
    assert found.rest == pytest.approx(0.04 / 2 / 6)
    assert found.seeds == pytest.approx(0.01 - 0.04 / 2 / 6)
    assert found.problems_df == pytest.approx(2)
    assert found.seeds_df == 1
    wide = found.interval(0.95)
    assert wide.high - wide.mean == pytest.approx(math.sqrt(4.302653**2 * found.problems + 12.7062**2 * found.seeds), rel=1e-5)


def test_crossed_needs_two_seeds_and_two_problems() -> None:
    assert crossed([torch.rand(1, 30)]) is None
    assert crossed([torch.rand(3, 1)]) is None
    assert crossed([torch.full((3, 30), 0.25)]) is None


# --- tests -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(st.sampled_from([-0.5, -0.25, 0.0, 0.125, 1.0]), min_size=2, max_size=9))
def test_sign_flips_are_scipys_permutation_test(values: list[float]) -> None:
    zeros = [0.0] * len(values)
    options = {"permutation_type": "samples", "vectorized": False, "alternative": "greater", "n_resamples": 10_000}
    theirs = scipy.stats.permutation_test((values, zeros), lambda x, y: abs((x - y).sum()), **options)
    assert sign_flip_p([torch.tensor(values)]) == pytest.approx(theirs.pvalue, abs=1e-12)


def test_with_one_sample_it_is_mcnemars_exact_test() -> None:
    differences = torch.tensor([1.0] * 9 + [-1.0] * 2 + [0.0] * 150)
    assert sign_flip_p([differences]) == pytest.approx(scipy.stats.binomtest(2, 11).pvalue)
    assert sign_flip_p([torch.zeros(30)]) == 1.0


def test_monte_carlo_agrees_with_enumeration_and_never_says_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = torch.randn(14, generator=torch.Generator().manual_seed(2)) + 0.4
    exact = sign_flip_p([differences])
    monkeypatch.setattr(statistics, "EXACT_FLIPS", 0)
    assert sign_flip_p([differences]) == pytest.approx(exact, abs=0.01)
    assert sign_flip_p([torch.ones(40)]) == 1 / 10_000


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_never_helps_and_keeps_the_order(p_values: list[float]) -> None:
    corrected = holm(p_values)
    assert all(p <= c <= min(1.0, len(p_values) * p) or c == max(corrected) for p, c in zip(p_values, corrected, strict=True))
    assert all(p <= c <= 1 for p, c in zip(p_values, corrected, strict=True))
    ranked = sorted(zip(p_values, corrected, strict=True))
    assert [c for _, c in ranked] == sorted(corrected)


# --- power -----------------------------------------------------------------------------------------------------------


def models(problems: int, samples: int, gain: float, spread: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scores [N, K] of two models: chances uniform in 0.3 to 0.7, the second better by `gain`, unevenly over problems."""
    chance = 0.3 + 0.4 * torch.rand(problems, 1, generator=generator)
    better = chance + gain + spread * (2 * torch.rand(problems, 1, generator=generator) - 1)
    return (
        (torch.rand(problems, samples, generator=generator) < chance).double(),
        (torch.rand(problems, samples, generator=generator) < better).double(),
    )


def power_of(problems: int, samples: int, gain: float, spread: float) -> float:
    generator = torch.Generator().manual_seed(3)
    found = 0
    for _ in range(300):
        first, second = models(problems, samples, gain, spread, generator)
        found += sign_flip_p([second.mean(1) - first.mean(1)], flips=299) < 0.05
    return found / 300


def test_as_many_samples_or_problems_as_it_says_give_that_power() -> None:
    gain, spread, count, samples = 0.06, 0.08, 20_000, 16  # planned from a large pilot, so that the plan itself is not noise
    first, second = models(count, samples, gain, spread, torch.Generator().manual_seed(0))
    noise = sampling_noise(first, second)
    assert noise is not None
    assert noise.cancelled == pytest.approx(0, abs=0.05)
    total = float((second.mean(1) - first.mean(1)).var())
    problems = 30
    sampling = Term((total - noise.variance) / problems, noise.variance / problems, lambda _: problems - 1)
    more_samples = needed(gain, [sampling], now=samples)
    assert more_samples is not None
    assert 0.72 <= power_of(problems, round(more_samples), gain, spread) <= 0.88
    more_problems = needed(gain, [Term(0.0, total / problems, lambda x: x - 1)], now=problems)
    assert more_problems is not None
    assert 0.72 <= power_of(round(more_problems), samples, gain, spread) <= 0.88
    assert power_of(problems, samples, gain, spread) < 0.65


def test_no_number_of_samples_may_be_enough() -> None:
    assert needed(0.01, [Term(1.0, 1.0, lambda _: 29)], now=32) is None
    assert needed(10.0, [Term(1.0, 1.0, lambda _: 29)], now=32) == pytest.approx(
        32 / (100 / (2.0452 + 0.8542) ** 2 - 1), rel=1e-3
    )


def test_matched_noise_cancels() -> None:
    noise = torch.rand(50, 16, generator=torch.Generator().manual_seed(0))
    first, second = (noise < 0.4).double(), (noise < 0.5).double()
    found = sampling_noise(first, second)
    assert found is not None
    assert found.cancelled > 0.6
    same = sampling_noise(first, first)
    assert same is not None
    assert same == (0.0, 1.0)
    assert sampling_noise(first, second[:, :1]) is None
    uneven = sampling_noise(first, second[:, :8])
    assert uneven is not None
    assert uneven.cancelled == 0
    assert uneven.variance == pytest.approx(float(first.var(1).mean()) / 16 + float(second[:, :8].var(1).mean()) / 8)
