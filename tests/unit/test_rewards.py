"""Task rewards as advantages, and which settings of a reward are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import make_objective
from iwopd.algo.rewards import DEVIATION_EPS, Normalize, differing_groups, group_advantages, reward_advantages
from iwopd.config import ConfigError, config_toml, load_config, make_config
from support import length_mask, poison

NONE = math.nan
NORMALIZE: tuple[Normalize, ...] = ("deviation", "mean", "none")


def tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_worked_out_by_hand() -> None:
    rewards, groups = tensor([1, 0, 0, 1, 0.5]), torch.tensor([7, 7, 7, 2, 2])
    std = math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2) + DEVIATION_EPS  # unbiased
    other = math.sqrt((0.0625 + 0.0625) / 1) + DEVIATION_EPS
    wanted = [2 / 3 / std, -1 / 3 / std, -1 / 3 / std, 0.25 / other, -0.25 / other]
    assert group_advantages(rewards, groups).tolist() == pytest.approx(wanted, abs=1e-12)
    centred = group_advantages(rewards, groups, normalize="mean")
    assert centred.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.25, -0.25], abs=1e-12)
    assert group_advantages(rewards, groups, normalize="none").tolist() == rewards.tolist()


@pytest.mark.parametrize("normalize", ["deviation", "mean"])
@pytest.mark.parametrize(
    "rewards", [[0.1, 0.1, 0.1], [1, NONE, NONE], [NONE, NONE, NONE], [0.7, NONE, 0.7]], ids=["equal", "one", "no", "equal two"]
)
def test_groups_with_nothing_to_compare_give_exactly_nothing(rewards: list[float], normalize: Normalize) -> None:
    groups = torch.zeros(3, dtype=torch.long)
    assert group_advantages(tensor(rewards), groups, normalize=normalize).tolist() == [0, 0, 0]
    assert differing_groups(tensor(rewards), groups).tolist() == [False]


@st.composite
def judged_groups(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    size = draw(st.integers(1, 12))
    eighths = st.integers(0, 4).map(lambda n: n / 8)
    rewards = draw(st.lists(st.one_of(eighths, st.just(NONE)), min_size=size, max_size=size))
    groups = draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size))
    return tensor(rewards), torch.tensor(groups)


@given(judged_groups(), st.permutations(range(-3, 4)))
def test_advantages_do_not_depend_on_order_or_the_numbers_of_groups(case: tuple[Tensor, Tensor], renamed: list[int]) -> None:
    rewards, groups = case
    other = torch.tensor([renamed[number + 3] for number in groups.tolist()])
    turned = list(reversed(range(len(rewards))))
    for normalize in NORMALIZE:
        plain = group_advantages(rewards, groups, normalize=normalize)
        again = group_advantages(rewards[turned], other[turned], normalize=normalize)
        torch.testing.assert_close(again, plain[turned], rtol=1e-12, atol=1e-12)


@given(judged_groups(), st.integers(0, 4))
def test_a_shift_of_a_group_changes_nothing(case: tuple[Tensor, Tensor], eighths: int) -> None:
    rewards, groups = case
    shifted = torch.where(groups == groups[0], rewards + eighths / 8, rewards)
    for normalize in ("deviation", "mean"):
        plain, moved = (group_advantages(values, groups, normalize=normalize) for values in (rewards, shifted))
        torch.testing.assert_close(moved, plain, rtol=1e-9, atol=1e-9)


@given(judged_groups())
def test_without_a_verdict_there_is_no_advantage_and_no_say_in_the_mean(case: tuple[Tensor, Tensor]) -> None:
    rewards, groups = case
    judged = ~rewards.isnan()
    for normalize in NORMALIZE:
        whole = group_advantages(rewards, groups, normalize=normalize)
        assert whole[~judged].tolist() == [0] * int((~judged).sum())
        alone = group_advantages(rewards[judged], groups[judged], normalize=normalize)
        torch.testing.assert_close(whole[judged], alone, rtol=0, atol=1e-15)
        if normalize != "none":
            for number in groups.unique():
                assert abs(float(whole[groups == number].sum())) < 1e-9


def test_tokens_share_the_rollouts_advantage_and_padding_has_none() -> None:
    mask = length_mask([3, 1])
    spread = reward_advantages(tensor([1, 0]), torch.tensor([0, 0]), mask, coefficient=3, normalize="mean")
    assert spread.tolist() == [[1.5, 1.5, 1.5], [-1.5, 0, 0]]


@pytest.mark.parametrize(
    ("rewards", "groups", "words"),
    [
        ([0.5, 1.5], [0, 0], r"row 1 is 1\.5"),
        ([math.inf, 0], [0, 0], "row 0 is inf"),
        ([0.5], [0, 0], r"both be \[B\]"),
        ([0.5], [0.0], "integers"),
    ],
)
def test_rewards_that_are_none_are_refused(rewards: list[float], groups: list[Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        group_advantages(tensor(rewards), torch.tensor(groups))
    with pytest.raises(ValueError, match="normalize must be"):
        group_advantages(tensor([0]), torch.tensor([0]), normalize="std")  # type: ignore[arg-type]


def evidence(**more: Any) -> Evidence:
    mask = length_mask([4, 2])
    values = torch.linspace(-2, -1, 8).reshape(2, 4)
    return Evidence(poison(values * 1.5, mask), poison(values, mask), mask, **more)


def test_the_objective_adds_the_reward_to_the_weighted_advantage_of_supervised_tokens() -> None:
    objective = make_objective({"weights": "prefix-only", "params": {"ratio": 0.5}})
    plain = evidence()
    signal = objective.signal(plain)
    without = objective.columns(plain, signal)["advantages"]
    reward = torch.tensor([[0.5], [-0.25]]).expand(2, 4)
    added = objective.columns(evidence(reward_advantages=reward), signal)["advantages"]
    assert torch.equal(added, torch.where(signal.supervised, without + reward, 0.0))
    assert signal.supervised.sum() == 3
    zero = objective.columns(evidence(reward_advantages=torch.zeros(2, 4)), signal)["advantages"]
    assert torch.equal(zero, without)


def test_the_advantage_none_leaves_the_reward_alone() -> None:
    objective = make_objective({"advantage": "none", "weights": "cumulative-share"})
    reward = torch.tensor([[0.5], [-0.25]]).expand(2, 4)
    given = evidence(reward_advantages=reward)
    columns = objective.columns(given, objective.signal(given))
    assert torch.equal(columns["advantages"], torch.where(given.mask, reward, 0.0))


# --- settings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reward": {"coefficient": 0.5}}, r"reward\.coefficient is 0\.5, but nobody judges: set reward\.checker"),
        ({"reward": {"checker": "exact", "coefficient": -1}}, r"reward\.coefficient.*-1"),
        ({"reward": {"checker": "exact", "coefficient": math.inf}}, r"reward\.coefficient.*finite"),
        ({"reward": {"checker": "exact", "coefficient": math.nan}}, r"reward\.coefficient.*"),
        ({"reward": {"checker": "exact", "normalize": "std"}}, r"reward\.normalize.*'deviation', 'mean' or 'none'"),
        ({"reward": {"checker": "exact"}}, r"reward\.normalize = 'deviation'.*rollout\.samples is 1.*'none'"),
        ({"reward": {"checker": "exact", "normalize": "mean"}}, r"reward\.normalize = 'mean'.*rollout\.samples is 1"),
        (
            {"reward": {"checker": "exact"}, "rollout": {"samples": 2}, "method": {"objective": "divergence"}},
            r"method\.objective = 'divergence' has no advantage.*'policy-gradient'",
        ),
        ({"method": {"advantage": "none"}}, r"method\.advantage = 'none' trains on the reward alone.*reward\.checker"),
        (
            {"method": {"advantage": "none"}, "reward": {"checker": "exact", "coefficient": 0}},
            r"method\.advantage = 'none' trains on the reward alone.*coefficient 0",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config({"models": {"world": "clean"}, **settings})


def test_a_saved_recipe_reads_back(tmp_path: Path) -> None:
    for one in (
        make_config({"models": {"world": "clean"}}),
        make_config(
            {"models": {"world": "clean"}, "reward": {"checker": "exact", "coefficient": 0.25}, "rollout": {"samples": 2}}
        ),
    ):
        path = tmp_path / "config.toml"
        path.write_text(config_toml(one))
        assert load_config(path, saved=True) == one


def test_a_divergence_may_log_rewards() -> None:
    made = make_config(
        {"models": {"world": "clean"}, "method": {"objective": "divergence"}, "reward": {"checker": "exact", "coefficient": 0}}
    )
    assert not made.reward.added
