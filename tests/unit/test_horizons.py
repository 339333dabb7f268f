"""Horizons: where an answer is looked at, where it stops, and which settings are refused."""

from __future__ import annotations

import itertools
import math
import tomllib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iwopd.algo.horizons import cut_lengths, next_look, next_weights
from iwopd.algo.registry import WEIGHT_RULES
from iwopd.config import ConfigError
from iwopd.config.reading import config_toml, make_config
from iwopd.rollout.horizons import HORIZONS, Growing
from iwopd.train.state import CATCH_UP, TrainingState
from iwopd.types import StepStats


def horizon(**settings: Any) -> Any:
    return make_config({"models": {"world": "clean"}, "rollout": {"horizon": settings}}).rollout.horizon


def test_looks_are_near_at_first_and_further_apart_in_long_answers() -> None:
    looks = [next_look(0, 8)]
    while looks[-1] < 16_384:
        looks.append(next_look(looks[-1], 8))
    assert looks[:16] == [8 * place for place in range(1, 17)]  # 8 to 128
    assert looks[16:19] == [144, 160, 176]
    assert len(looks) < 70  # 2,048 blocks of 8
    assert all(look % 8 == 0 for look in looks)
    assert all(later - look <= max(8, look / 8) for look, later in itertools.pairwise(looks))


@given(st.integers(0, 5000), st.integers(1, 64))
def test_the_next_look_does_not_depend_on_where_one_stands_between_two(length: int, block: int) -> None:
    after = next_look(length, block)
    assert after > length
    assert next_look(after - 1, block) == after


def test_the_next_weight_is_that_of_one_more_token() -> None:
    gap = torch.tensor([[-0.5, 0.25, -1.0], [-2.0, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert next_weights(gap, mask).tolist() == pytest.approx([math.exp(-1.5), math.exp(-2.0)])
    assert next_weights(gap, mask, "survival", {"tau": 2.0}).tolist() == pytest.approx([math.exp(-0.75), math.exp(-1.0)])


def test_an_answer_is_cut_at_the_end_of_the_block_in_which_it_drifts() -> None:
    gap = torch.zeros(4, 20)
    gap[0, 5] = -4.0  # within the second block of 4
    gap[1, 7] = -4.0  # its last token
    gap[2, 18] = -4.0  # in the last block
    gap[3, 2] = -2.0  # not enough
    mask = torch.ones_like(gap, dtype=torch.bool)
    assert cut_lengths(gap, mask, threshold=0.05, block=4).tolist() == [8, 8, 20, 20]
    assert cut_lengths(gap, mask, threshold=0.2, block=4).tolist() == [8, 8, 20, 4]
    mask[0, 7:] = False  # ended before the block did
    assert cut_lengths(gap, mask, threshold=0.05, block=4).tolist() == [7, 8, 20, 20]


@given(st.integers(0, 10_000), st.sampled_from([1, 3, 8]), st.floats(0.01, 0.9))
def test_a_cut_depends_on_its_own_answer_alone(seed: int, block: int, threshold: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    gap = torch.randn(4, 40, generator=generator)
    mask = torch.arange(40) < torch.randint(1, 41, (4, 1), generator=generator)
    together = cut_lengths(gap, mask, threshold=threshold, block=block)
    for row in range(4):
        length = int(mask[row].sum())
        alone = cut_lengths(gap[row : row + 1, :length], mask[row : row + 1, :length], threshold=threshold, block=block)
        assert alone.item() == together[row]


def test_full_is_the_default_and_written_settings_are_read_again() -> None:
    assert horizon().type == "full"
    for settings in (
        {"type": "fixed", "tokens": 12},
        {"type": "growing", "from": 4, "to": 20, "schedule": "cosine", "until": 0.5},
        {"type": "drift", "threshold": 0.1, "block": 4, "params": {"tau": 2.0}},
        {"type": "budget", "tokens": 5000},
    ):
        config = make_config({"models": {"world": "clean"}, "rollout": {"horizon": settings}})
        again = make_config(tomllib.loads(config_toml(config)))
        assert again == config
        assert {name: again.rollout.horizon.model_dump()[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"type": "drift", "threshold": 0}, "threshold must lie in (0, 1), got 0"),
        ({"type": "drift", "threshold": 1.0}, "threshold must lie in (0, 1), got 1"),
        ({"type": "drift", "threshold": float("nan")}, "threshold: must be a finite number"),
        ({"type": "drift", "threshold": "low"}, "threshold: must be a number"),
        ({"type": "drift", "block": 0}, "block: must be at least 1"),
        ({"type": "drift", "tokens": 3}, "horizon 'drift' has no setting 'tokens'"),
        ({"type": "drift", "treshold": 0.1}, "did you mean 'threshold'?"),
        ({"type": "drift", "weights": "cumulative-share"}, "depends on tokens that come after it"),
        ({"type": "drift", "weights": "sod"}, "depends on tokens that come after it"),
        ({"type": "drift", "weights": "prune"}, "looks at more than one answer's gaps (top_overlap)"),
        ({"type": "drift", "weights": "ideal"}, "the rest of the batch"),
        ({"type": "drift", "params": {"tau": -1}}, "tau must be positive"),
        ({"type": "growing", "from": 9, "to": 3}, "from is 9 and to is 3"),
        ({"type": "growing"}, "from: is needed and not there"),
        ({"type": "fixed", "tokens": 0}, "tokens: must be at least 1"),
        ({"type": "fixt", "tokens": 3}, "unknown horizon 'fixt'; did you mean 'fixed'?"),
        ({"type": 3}, "type must be one of full"),
    ],
)
def test_wrong_settings_are_refused_with_words(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.horizon") as error:
        horizon(**settings)
    assert words in str(error.value)


def test_only_rules_that_look_back_can_stop_answers() -> None:
    able = []
    for name in WEIGHT_RULES:
        try:
            horizon(type="drift", weights=name)
        except ConfigError:
            continue
        able.append(name)
    assert able == ["uniform", "survival", "until-drift", "gated"]  # uniform never falls


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"type": "fixed", "tokens": 65}, "tokens is 65, longer than an answer can be (64"),
        ({"type": "growing", "from": 65}, "from is 65"),
        ({"type": "growing", "from": 5, "to": 65}, "to is 65"),
        ({"type": "drift", "block": 65}, "block is 65"),
        ({"type": "budget", "tokens": 127}, "one prompt may take 128"),
    ],
)
def test_a_horizon_must_fit_the_answers(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.horizon") as error:
        horizon(**settings).made.check(64, 2)
    assert words in str(error.value)
    horizon(type="budget", tokens=128).made.check(64, 2)


def test_limits_over_training() -> None:
    assert [horizon().made.limit(64, p) for p in (0.0, 1.0)] == [64, 64]
    assert horizon(type="fixed", tokens=10).made.limit(64, 0.5) == 10
    grows = Growing.model_validate({"from": 10, "to": 50, "until": 0.5})
    assert [grows.limit(64, p) for p in (0.0, 0.25, 0.5, 1.0)] == [10, 30, 50, 50]
    smooth = Growing.model_validate({"from": 10, "schedule": "cosine"})
    assert [smooth.limit(64, p) for p in (0.0, 0.5, 1.0)] == [10, 37, 64]


def test_every_horizon_says_what_it_is() -> None:
    assert list(HORIZONS)[:5] == ["full", "fixed", "growing", "drift", "budget"]
    for kind in HORIZONS.values():
        assert kind.formula
        assert kind.source


def _stats(step: int, tokens: int, prompts: int) -> StepStats:
    metrics = {"update/skipped": 0, "tokens_written": tokens, "prompts": prompts}
    return StepStats(step, 0.0, 0.0, tokens, prompts, metrics=metrics)


def test_a_budget_is_spent_on_prompts_and_balanced_over_a_few_steps() -> None:
    state = TrainingState()
    assert state.prompts(None) is None
    assert state.prompts(1000) is None  # nothing is known yet: the usual number
    state.finished(_stats(1, 400, 10))  # 40 tokens a prompt
    assert state.prompts(1000) == round((1000 + 600 / CATCH_UP) / 40)
    state.finished(_stats(2, 1150, 29))
    written = 1550
    for step in range(3, 60):
        count = state.prompts(1000)
        assert count is not None
        state.finished(_stats(step, 40 * count, count))
        written += 40 * count
    assert abs(written - 59_000) < 100
    assert state.tokens_written == written
