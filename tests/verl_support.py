"""Batches and settings as verl itself makes them, for tests of the plugin. Import it inside tests: verl takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass

from iwopd.cluster.verl import params
from iwopd.config import Method, Reward
from support import length_mask

PROMPTS = (3, 1, 4, 2, 2, 5)
LENGTHS = (1, 2, 7, 5, 12, 3)
FILLER = 9.0
"""Log-prob of prompt tokens: whoever takes one for a response's token gets a wrong sum."""


def verl_config(*overrides: str) -> Any:
    """The tree of verl's settings."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=["distillation.enabled=true", *overrides])


def loss_settings(config: Any) -> tuple[Any, Any]:
    """Settings of actor and distillation, built from a tree the way verl's worker builds them."""
    config.distillation.enabled = False  # no teacher to be placed
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 1
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor), omega_conf_to_dataclass(config.distillation)


def method_config(method: Method, steps: int = 5, reward: Reward | None = None) -> Any:
    """The tree of verl's settings for a method."""
    return verl_config(*params.overrides(method, steps, reward=reward))


def scores(seed: int = 0) -> dict[str, Tensor]:
    """Log-probs [B, T] in float32 whose ratios are clipped on both sides, dual-clipped and truncated."""
    generator = torch.Generator().manual_seed(seed)
    mask = length_mask(LENGTHS)

    def noise(scale: float) -> Tensor:
        return torch.randn(mask.shape, generator=generator) * scale

    old = -noise(1.0).abs() - 0.5
    current = old + noise(0.5)
    current[:, ::3] += 1.5  # ratios above 3
    rollout = old + noise(0.1)
    rollout[:, 1::4] -= 2.0  # factors above 5
    values = {
        "old": old,
        "teacher": old + noise(1.5),
        "reference": old + noise(0.3),
        "current": current,
        "rollout": rollout,
    }
    return {"mask": mask, **{name: torch.where(mask, value, 0.0) for name, value in values.items()}}


def nested(rows: Sequence[Tensor]) -> Tensor:
    """A ragged tensor of these rows."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def rows_of(values: Tensor, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """The rows of a padded tensor without their padding."""
    return [row[:length] for row, length in zip(values, lengths, strict=True)]


def whole(values: Tensor) -> list[Tensor]:
    """Rows of prompt and response in verl's layout: entry t is about token t + 1, the last one is filler."""
    fill = [torch.full((prompt - 1,), FILLER) for prompt in PROMPTS]
    last = torch.full((1,), FILLER)
    return [torch.cat([before, row, last]) for before, row in zip(fill, rows_of(values), strict=True)]


def verl_batch(given: dict[str, Tensor], *, threshold: float, reference: bool) -> TensorDict:
    """A step's batch as it lies in verl's TransferQueue before the update."""
    mask = given["mask"].long()
    batch = {"old_log_probs": given["old"], "rollout_log_probs": given["rollout"], "response_mask": mask}
    proto, _ = compute_rollout_correction_and_add_to_batch(
        DataProto.from_single_dict(batch), {"rollout_is": "token", "rollout_is_threshold": threshold}
    )
    ids = [torch.arange(prompt + length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    columns = {
        "row": torch.arange(len(LENGTHS)),
        "input_ids": nested(ids),
        "prompts": nested([row[:prompt] for row, prompt in zip(ids, PROMPTS, strict=True)]),
        "responses": nested([row[prompt:] for row, prompt in zip(ids, PROMPTS, strict=True)]),
        "response_mask": nested(rows_of(mask)),
        "loss_mask": nested(rows_of(mask)),
        "old_log_probs": nested(rows_of(given["old"])),
        "teacher_logprobs": nested([row[:, None] for row in whole(given["teacher"])]),
        "rollout_is_weights": nested(rows_of(proto.batch["rollout_is_weights"])),
        "advantages": nested(rows_of(torch.zeros_like(given["old"]))),
    }
    if reference:
        columns["ref_log_prob"] = nested(rows_of(given["reference"]))
    if "entropy" in given:
        columns["entropy"] = nested(rows_of(given["entropy"]))
    return TensorDict(columns, batch_size=len(LENGTHS))


def micro_batches(data: TensorDict, *, tokens: int, dp_size: int) -> list[TensorDict]:
    """What verl's engine makes of a batch: its own split into micro-batches, and the numbers of the whole."""
    from verl.workers.engine.utils import prepare_micro_batches

    count = int(data["loss_mask"].values().sum())
    tu.assign_non_tensor(
        data,
        batch_num_tokens=count,
        dp_size=dp_size,
        global_batch_size=len(LENGTHS),
        use_dynamic_bsz=True,
        max_token_len_per_gpu=tokens,
    )
    parts, _ = prepare_micro_batches(data)
    return list(parts)


def model_output(part: TensorDict, current: Tensor) -> dict[str, Tensor]:
    """The model's output for a micro-batch: log-probs of prompt and response, with a gradient into `current` [B, T]."""
    rows = whole(current)
    picked = [rows[int(row)] for row in part["row"]]
    offsets = torch.tensor([0, *(len(row) for row in picked)]).cumsum(0)
    return {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(picked), offsets)}
