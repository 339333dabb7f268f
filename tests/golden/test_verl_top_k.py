"""verl's real top-k loss with our plugin against `algo/`: the forward KL over the teacher's likeliest ids and the rest.

The batch goes verl's way: its logits processor makes the sum over the ids and the masses of whole logits, our loss adds the
rest and the weights, `distillation_ppo_loss` takes the mean. The local objective gets the teacher's ids and its exact rest.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import Divergence, TokenStates
from iwopd.algo.registry import WEIGHT_RULES
from iwopd.cluster.verl.carrying import EVIDENCE_WITHOUT_GAP
from iwopd.config import Method
from support import RULES, length_mask

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # verl, Ray and their dependencies warn at import

V, K = 23, 4
PROGRESS, DP = 0.25, 2
FORWARD_KL = {"objective": "divergence", "divergence": "forward-kl", "support": "top-k", "k": K}


def rules() -> list[dict[str, Any]]:
    return [
        {"weights": name, "params": params}
        for name, params in RULES
        if EVIDENCE_WITHOUT_GAP.issuperset(WEIGHT_RULES[name].needs)
    ]


@pytest.mark.parametrize(
    "weights", [*rules(), {"weights": "linear-decay", "params": {"normalize": "mean-one"}}], ids=lambda one: str(one["weights"])
)
def test_verls_top_k_loss_with_the_rest_is_ours(weights: dict[str, Any]) -> None:
    method = Method.model_validate(FORWARD_KL | weights)
    student, teacher = logits(1, 1.0), logits(2, 2.0)
    expected, expected_gradient = by_algo(method, student, teacher)
    assert expected_gradient.abs().max() > 1e-3
    for tokens in (17, 1000):  # several micro-batches, and one
        loss, gradient = by_verl(method, student, teacher, tokens)
        assert loss == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_without_the_rest_it_would_be_another_loss() -> None:
    """What verl's own `forward_kl_topk` computes: the sum over the ids alone, cut off at 0."""
    method = Method.model_validate(FORWARD_KL)
    student, teacher = logits(1, 1.0), logits(2, 2.0)
    expected, expected_gradient = by_algo(method, student, teacher)
    loss, gradient = by_verl(method, student, teacher, 1000, own=True)
    assert abs(loss - expected) > 0.05
    assert (gradient - expected_gradient).norm() > 0.05 * expected_gradient.norm()


def test_a_rest_that_is_nearly_nothing_stays_finite() -> None:
    """Where both are certain, 1 minus the mass is rounding: the gradient of the batch must not notice."""
    method = Method.model_validate(FORWARD_KL)
    student, teacher = logits(1, 1.0), logits(2, 2.0)
    for certain in (student, teacher):
        certain[:, ::2, 3] += 40.0
    expected, expected_gradient = by_algo(method, student, teacher)
    loss, gradient = by_verl(method, student, teacher, 1000)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert (gradient - expected_gradient).norm() < 1e-5 * expected_gradient.norm()


def logits(seed: int, scale: float) -> Tensor:
    """[B, T, V] in float32."""
    from verl_support import LENGTHS

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(LENGTHS), max(LENGTHS), V, generator=generator) * scale


def by_verl(method: Method, student: Tensor, teacher: Tensor, tokens: int, *, own: bool = False) -> tuple[float, Tensor]:
    """Loss, and gradient by the student's logits, of verl's code; `own`: with verl's own loss instead of ours."""
    from verl.trainer.distillation.losses import distillation_ppo_loss

    from iwopd.cluster.verl.hook import before_the_split
    from iwopd.cluster.verl.losses import batch_columns
    from iwopd.cluster.verl.params import Settings
    from verl_support import loss_settings, method_config, micro_batches, scores, verl_batch, verl_config

    top = torch.log_softmax(teacher, -1).topk(K, -1)
    data = verl_batch(scores(), threshold=5.0, reference=False)
    data["teacher_logprobs"], data["teacher_ids"] = ragged(top.values), ragged(top.indices.int())
    if own:
        settings = ["loss_mode=forward_kl_topk", "use_policy_gradient=false", "use_task_rewards=false", f"topk={K}"]
        actor, distillation = loss_settings(verl_config(*(f"distillation.distillation_loss.{item}" for item in settings)))
    else:
        actor, distillation = loss_settings(method_config(method))
        assert distillation.distillation_loss.loss_settings.use_topk
        read = data.select("prompts", "responses", *batch_columns(Settings(method).objective))  # as our trainer does
        assert "teacher_logprobs" not in read  # k of them a token, for nothing
        columns, metrics = before_the_split(read, Settings(method), PROGRESS)
        assert not any("gap" in name or "kl" in name for name in metrics)  # nobody knows it
        data.update(columns)
    student = student.clone().requires_grad_()
    total = 0.0
    for part in micro_batches(data, tokens=tokens, dp_size=DP):
        how: dict[str, Any] = {"config": actor, "distillation_config": distillation, "data": part}
        picked = [whole(student)[int(row)] for row in part["row"]]
        offsets = torch.tensor([0, *(len(row) for row in picked)]).cumsum(0)
        processed = distillation_ppo_loss(student_logits=torch.cat(picked)[None], **how)
        output = {
            name: torch.nested.nested_tensor_from_jagged(values.squeeze(0), offsets) for name, values in processed.items()
        }
        loss, _ = distillation_ppo_loss(model_output=output, **how)
        (loss / DP).backward()
        total += float(loss.detach()) / DP
    assert student.grad is not None
    return total, student.grad


def whole(values: Tensor) -> list[Tensor]:
    """Rows [prompt + response, ...] in verl's layout: entry t is about token t + 1, the last one is filler."""
    from verl_support import LENGTHS, PROMPTS

    def filler(count: int) -> Tensor:
        return torch.zeros(count, values.shape[-1], dtype=values.dtype)

    return [
        torch.cat([filler(prompt - 1), row[:length], filler(1)])
        for prompt, length, row in zip(PROMPTS, LENGTHS, values, strict=True)
    ]


def ragged(values: Tensor) -> Tensor:
    from verl_support import nested

    return nested(whole(values))


def by_algo(method: Method, student: Tensor, teacher: Tensor) -> tuple[float, Tensor]:
    """The same as the local learner computes it, in float64: an output matrix of ones on the diagonal makes states logits."""
    from verl_support import LENGTHS

    objective = method.made
    assert isinstance(objective, Divergence)
    mask = length_mask(LENGTHS)
    top = torch.log_softmax(teacher.double(), -1).topk(K, -1)
    others = torch.softmax(teacher.double(), -1).scatter(-1, top.indices, 0.0).sum(-1).log()
    nothing = torch.zeros(mask.shape)
    support = {"support_ids": top.indices, "support_logprobs": top.values, "support_rest": others}
    evidence = Evidence(nothing, nothing, mask, progress=PROGRESS, **support)
    signal = objective.signal(evidence)
    columns = {name: values[mask] for name, values in objective.columns(evidence, signal).items()}
    student = student.double().requires_grad_()
    states = TokenStates(student[mask], torch.zeros(int(mask.sum()), dtype=torch.long), torch.eye(V, dtype=torch.float64))
    loss = objective.loss(states, columns, float(signal.supervised.sum())).loss
    loss.backward()
    assert student.grad is not None
    return float(loss.detach()), student.grad.float()
