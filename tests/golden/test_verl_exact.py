"""verl's real loss with our plugin against `algo/`: loss and gradient to 1e-6, for every rule and advantage.

The batch goes verl's way: settings composed from our overrides and built by verl, the rollout correction by verl's helper, the
hook on the whole batch, the split into micro-batches by verl's engine, `distillation_ppo_loss` on each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import PolicyGradient
from iwopd.algo.registry import WEIGHT_RULES, WeightRule
from iwopd.algo.rewards import reward_advantages, spread_over_tokens
from iwopd.config import Method, Reward
from iwopd.train.checking import Judged
from support import RULES

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # verl, Ray and their dependencies warn at import

METHODS = [
    *({"weights": name, "params": params} for name, params in RULES),
    {"weights": "cumulative-share", "params": {"normalize": "mean-one"}},
    {"advantage": "exopd"},
    {"advantage": "exopd", "weights": "cumulative-share"},
    {"advantage": "exopd", "weights": "cumulative-share", "weighting": "advantage", "scale": 2.0},
    {"advantage": "exopd", "weights": "ideal"},
    {"advantage": "power", "power": 0.5},
    {"advantage": "clipped", "weights": "survival"},
    {"advantage": "log-mix", "future": True, "weights": "cumulative-share"},
    {"weights": "cumulative-share", "clip": 0.1, "dual_clip": 1.5, "correction_threshold": 1.2},
    {"weights": "cumulative-share", "dual_clip": float("inf")},
]
PROGRESS = 0.25
DP = 2


def names(values: dict[str, Any]) -> str:
    return " ".join(str(value) for value in values.values())


@pytest.mark.parametrize("values", METHODS, ids=names)
def test_verls_loss_is_ours(values: dict[str, Any]) -> None:
    from verl_support import loss_settings, method_config, scores

    method = Method.model_validate(values)
    given = scores()
    settings = loss_settings(method_config(method))
    expected, expected_gradient, _, _ = by_algo(method, given)
    assert expected_gradient.abs().max() > 1e-2
    for tokens in (17, 1000):  # several micro-batches, and one
        loss, gradient = by_verl(method, given, tokens, settings)
        assert loss == pytest.approx(expected, abs=1e-6, rel=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)


def test_clip_dual_clip_and_truncation_are_active() -> None:
    """Else the agreement above would say little."""
    from verl_support import scores

    given = scores()
    _, _, stats, correction = by_algo(Method(weights="cumulative-share"), given)
    assert min(int(stats.clipped_high), int(stats.clipped_low), int(stats.dual_clipped)) >= 2
    assert int((correction == 5.0).sum()) >= 2
    _, _, stats, _ = by_algo(Method(weights="cumulative-share", dual_clip=float("inf")), given)
    assert int(stats.dual_clipped) == 0


def test_an_impossible_token_is_floored() -> None:
    from verl_support import scores

    given = scores()
    given["teacher"][4, 2] = -torch.inf
    loss, gradient = by_verl(Method(weights="survival"), given, 17)
    expected, expected_gradient, _, _ = by_algo(Method(weights="survival"), given)
    assert loss == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)


def test_a_rule_gets_the_entropy_that_verls_trainer_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands beside the old log-probs."""
    from verl_support import scores

    def by_entropy(student_entropy: Tensor, mask: Tensor, *, most: float = 2.0) -> Tensor:
        return (student_entropy / most).clamp(0.0, 1.0)

    monkeypatch.setitem(WEIGHT_RULES._items, "by-entropy", WeightRule("by-entropy", by_entropy))
    given = scores()
    given["entropy"] = torch.where(given["mask"], -given["old"], 0.0)
    method = Method(weights="by-entropy")
    loss, gradient = by_verl(method, given, 17)
    expected, expected_gradient, _, _ = by_algo(method, given)
    assert loss == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)


REWARDS = torch.tensor([1.0, 0.0, torch.nan, 1.0, 0.5, 0.0], dtype=torch.float64)
"""Of the six rollouts; no verdict is not a wrong answer."""
GROUPS = torch.tensor([4, 4, 4, 7, 7, 7])


@pytest.mark.parametrize(
    "values",
    [{}, {"weights": "prefix-only", "params": {"ratio": 0.5}}, {"weights": "scope"}, {"advantage": "none"}],
    ids=names,
)
@pytest.mark.parametrize("normalize", ["deviation", "mean"])
def test_a_task_reward_is_added_to_the_advantages_before_the_clip(values: dict[str, Any], normalize: Any) -> None:
    """By our own formula, over the rollouts of a prompt, before the batch is split: as the local engine does it."""
    from verl_support import scores

    given = scores()
    method, reward = Method.model_validate(values), Reward(checker="exact", coefficient=0.7, normalize=normalize)
    loss, gradient = by_verl(method, given, 17, reward=reward)
    added = reward_advantages(REWARDS, GROUPS, given["mask"], coefficient=0.7, normalize=normalize)
    assert added[:2].any()
    assert not added[2].any()  # no verdict
    expected, expected_gradient, _, _ = by_algo(method, given, added)
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)
    wrong = reward_advantages(REWARDS.nan_to_num(0), GROUPS, given["mask"], coefficient=0.7, normalize=normalize)
    assert abs(loss - by_algo(method, given, wrong)[0]) > 1e-4


def test_the_loss_without_the_column_refuses_a_reward() -> None:
    from iwopd.cluster.verl.errors import VerlError
    from iwopd.cluster.verl.losses import make_loss
    from verl_support import loss_settings, method_config, scores, verl_batch

    actor, distillation = loss_settings(method_config(Method(), reward=Reward(checker="exact")))
    with pytest.raises(VerlError, match="no column of them: start the job with `iwopd train --engine verl`"):
        make_loss("iwopd_uniform")(actor, distillation, {}, verl_batch(scores(), threshold=5.0, reference=False))


def test_verls_own_sum_with_a_task_reward_is_another_loss() -> None:
    """`use_task_rewards=true` clips each of the two by itself: why the reward is not left to it."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from verl_support import loss_settings, method_config, scores

    given = scores()
    _, distillation = loss_settings(method_config(Method()))
    config = distillation.distillation_loss
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(given["mask"].sum()), global_batch_size=6)

    def clipped(advantages: Tensor, current: Tensor) -> Tensor:
        known = {"old_log_prob": given["old"], "log_prob": current, "response_mask": given["mask"]}
        return get_policy_loss_fn("vanilla")(advantages=advantages, **known, loss_agg_mode="token-mean", config=config)[0]

    distilled, reward = given["teacher"] - given["old"], torch.ones_like(given["old"])
    for current, equal in ((given["old"], True), (given["current"], False)):  # the same only where all ratios are 1
        apart = clipped(distilled + reward, current) - (clipped(distilled, current) + clipped(reward, current))
        assert (abs(float(apart)) < 1e-5) == equal


def test_a_padded_batch_gives_the_same() -> None:
    """The older trainer of verl pads prompts on the left and responses on the right."""
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.utils import tensordict_utils as tu

    from verl_support import LENGTHS, PROMPTS, loss_settings, method_config, model_output, nested, scores, verl_batch, whole

    method = Method(weights="cumulative-share")
    given = scores()
    data = verl_batch(given, threshold=5.0, reference=False)
    for name in ("response_mask", "old_log_probs", "rollout_is_weights", "advantages", "responses"):
        data[name] = data[name].to_padded_tensor(0)
    width = max(PROMPTS)
    columns = torch.arange(width + max(LENGTHS))[None] - width
    before, after = torch.tensor(PROMPTS)[:, None], torch.tensor(LENGTHS)[:, None]
    data["attention_mask"] = ((columns >= -before) & (columns < after)).long()
    data["prompts"] = torch.zeros(len(PROMPTS), width, dtype=torch.long)
    data["teacher_logprobs"] = nested([row[:, None] for row in whole(given["teacher"])])
    tu.assign_non_tensor(data, batch_num_tokens=sum(LENGTHS), dp_size=1, global_batch_size=len(LENGTHS))
    actor, distillation = loss_settings(method_config(method))
    current = given["current"].clone().requires_grad_()
    output = model_output(data, current)
    loss, _ = distillation_ppo_loss(config=actor, distillation_config=distillation, model_output=output, data=data)
    loss.backward()
    expected, expected_gradient, _, _ = by_algo(method, given)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(current.grad, expected_gradient, rtol=1e-6, atol=1e-6)


def test_the_gap_is_made_of_old_logprobs_not_of_current_ones() -> None:
    from iwopd.cluster.verl.losses import make_loss
    from verl_support import loss_settings, method_config, model_output, scores, verl_batch

    given = scores()
    actor, distillation = loss_settings(method_config(Method(weights="cumulative-share")))
    losses = []
    for shift in (0.0, 3.0):
        data = verl_batch(given, threshold=5.0, reference=False)
        output = model_output(data, given["current"] - shift)
        losses.append(make_loss("iw_opd")(actor, distillation, output, data)[0])
    assert torch.equal(*losses)


def test_upstream_still_does_not_pad_the_rollout_correction() -> None:
    """With verl's own loss the ragged factors end in an error; when this test fails, `pad_rollout_weights` can go."""
    from verl.trainer.distillation.losses import distillation_ppo_loss

    from verl_support import loss_settings, micro_batches, model_output, scores, verl_batch, verl_config

    given = scores()
    overrides = ["loss_mode=k1", "use_policy_gradient=true", "use_task_rewards=false"]
    actor, distillation = loss_settings(verl_config(*(f"distillation.distillation_loss.{item}" for item in overrides)))
    (data,) = micro_batches(verl_batch(given, threshold=5.0, reference=False), tokens=1000, dp_size=1)
    output = model_output(data, given["current"])
    with pytest.raises((RuntimeError, ValueError, TypeError), match=r"(?i)nested|ragged|jagged"):
        distillation_ppo_loss(config=actor, distillation_config=distillation, model_output=output, data=data)


def by_verl(
    method: Method, given: dict[str, Tensor], tokens: int, settings: Any = None, reward: Reward | None = None
) -> tuple[float, Tensor]:
    """Loss, and gradient by the current log-probs, of verl's code: the sum over micro-batches, the mean over ranks."""
    from verl.trainer.distillation.losses import distillation_ppo_loss

    from iwopd.cluster.verl.hook import Verdicts, before_the_split
    from verl_support import loss_settings, method_config, micro_batches, model_output, verl_batch

    actor, distillation = settings or loss_settings(method_config(method, reward=reward))
    objective = method.made
    assert isinstance(objective, PolicyGradient)
    data = verl_batch(given, threshold=objective.correction_threshold, reference=objective.needs_reference)
    verdicts = None if reward is None else Verdicts([Judged(float(value)) for value in REWARDS], GROUPS)
    columns, _ = before_the_split(data, distillation.distillation_loss.settings, PROGRESS, verdicts)
    assert bool(columns) == (objective.needs_whole_batch is not None or reward is not None)
    data.update(columns)
    current = given["current"].clone().requires_grad_()
    total = 0.0
    parts = micro_batches(data, tokens=tokens, dp_size=DP)
    assert (len(parts) > 1) == (tokens < 100)
    for part in parts:
        output = model_output(part, current)
        loss, _ = distillation_ppo_loss(config=actor, distillation_config=distillation, model_output=output, data=part)
        (loss / DP).backward()
        total += float(loss.detach()) / DP
    assert current.grad is not None
    return total, current.grad


def by_algo(
    method: Method, given: dict[str, Tensor], reward: Tensor | None = None
) -> tuple[float, Tensor, algo.PolicyStats, Tensor]:
    """The same as the local learner computes it, on the whole batch; with the loss's statistics and the correction."""
    mask = given["mask"]
    objective = method.made
    assert isinstance(objective, PolicyGradient)
    reference = given["reference"] if objective.needs_reference else None
    more = {"student_entropy": given.get("entropy"), "reward_advantages": reward}
    if reward is not None:
        more |= {"correct": spread_over_tokens(REWARDS, mask).float(), "prompt": spread_over_tokens(GROUPS.float(), mask)}
    evidence = Evidence(given["teacher"], given["old"], mask, reference, PROGRESS, **more)
    signal = objective.signal(evidence)
    correction = algo.rollout_correction(given["old"], given["rollout"], mask, objective.correction_threshold)
    current = given["current"].clone().requires_grad_()
    out = algo.policy_loss(
        current,
        given["old"],
        objective.columns(evidence, signal)["advantages"],
        signal.supervised,
        denominator=int(signal.supervised.sum()),
        clip=objective.clip,
        dual_clip=None if objective.dual_clip == float("inf") else objective.dual_clip,
        correction=correction,
    )
    out.loss.backward()
    assert current.grad is not None
    return float(out.loss.detach()), current.grad, out.stats, correction
