"""verl 0.9.0 and 0.9.1: policy-gradient distillation with `rollout_is=token` fails on ragged batches.

    pip install verl TransferQueue && python rollout_is_weights.py

Needs verl and torch, no GPU, no models. Exit code 1 and the error where the fault is there; 0 where it is mended.
"""

from __future__ import annotations

import sys

import torch
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass

PROMPT, ANSWERS = 2, (3, 5)  # two rollouts of different lengths

SETTINGS = [
    "distillation.distillation_loss.loss_mode=k1",
    "distillation.distillation_loss.use_policy_gradient=true",
    "distillation.distillation_loss.use_task_rewards=false",
    "algorithm.rollout_correction.rollout_is=token",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
]


def ragged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(padded: bool) -> TensorDict:
    """One micro-batch as the v1 trainer hands it to the loss; padded: with the one column padded that verl forgets."""
    answers = [torch.full((length,), -1.0) for length in ANSWERS]
    ids = [torch.arange(PROMPT + length) for length in ANSWERS]
    weights = ragged([torch.ones(length) for length in ANSWERS])
    data = TensorDict(
        {
            "input_ids": ragged(ids),
            "prompts": ragged([row[:PROMPT] for row in ids]),
            "responses": ragged([row[PROMPT:] for row in ids]),
            "response_mask": ragged([torch.ones(length, dtype=torch.long) for length in ANSWERS]),
            "old_log_probs": ragged(answers),
            "advantages": ragged([torch.zeros(length) for length in ANSWERS]),
            "teacher_logprobs": ragged([torch.full((PROMPT + length, 1), -0.5) for length in ANSWERS]),
            "rollout_is_weights": weights.to_padded_tensor(0.0) if padded else weights,
        },
        batch_size=len(ANSWERS),
    )
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(ANSWERS), global_batch_size=len(ANSWERS))
    return data


def loss(padded: bool) -> float:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=SETTINGS)
    current = [torch.full((PROMPT + length,), -1.1, requires_grad=True) for length in ANSWERS]
    value, _ = distillation_ppo_loss(
        config=omega_conf_to_dataclass(config.actor_rollout_ref.actor),
        distillation_config=omega_conf_to_dataclass(config.distillation),
        model_output={"log_probs": ragged(current)},
        data=batch(padded),
    )
    return float(value.detach())


def main() -> int:
    print(f"with padded rollout_is_weights: loss {loss(padded=True):.4f}")
    try:
        print(f"with ragged rollout_is_weights: loss {loss(padded=False):.4f}: the fault is mended")
    except (RuntimeError, TypeError, ValueError) as error:
        print(f"with ragged rollout_is_weights: {type(error).__name__}: {str(error).splitlines()[0]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
