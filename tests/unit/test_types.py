from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from iwopd.types import EvalResult, Prompt, Rollout, ScoredRollout, StepStats, TokenBatch
from support import length_mask


def scored(name: str, prompt: int, response: int, reference: bool = False) -> ScoredRollout:
    """A scored rollout whose log-probs tell which row and token they are."""
    steps = torch.arange(response, dtype=torch.float32)
    rollout = Rollout(Prompt(name, tuple(range(1, prompt + 1))), torch.arange(response) + 10, -steps - 0.25, "length")
    return ScoredRollout(rollout, -steps - 0.5, -steps - 0.75, -steps - 1.0 if reference else None)


def test_objects_are_frozen() -> None:
    prompt = Prompt("a", (1,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        prompt.id = "b"  # type: ignore[misc]


def test_collate_puts_rollouts_one_after_the_other() -> None:
    batch = TokenBatch.collate([scored("a", 2, 3), scored("b", 4, 1), scored("c", 1, 0)], correct_rollouts=True)
    assert batch.prompt_ids.tolist() == [1, 2, 1, 2, 3, 4, 1]
    assert batch.prompt_lengths.tolist() == [2, 4, 1]
    assert batch.response_ids.tolist() == [10, 11, 12, 10]
    assert batch.lengths.tolist() == [3, 1, 0]
    assert batch.teacher_logprobs.tolist() == [-0.75, -1.75, -2.75, -0.75]
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs.tolist() == [-0.25, -1.25, -2.25, -0.25]
    assert batch.reference_logprobs is None
    assert len(batch) == 3


def test_formulas_get_padded_rows_and_hand_back_tokens() -> None:
    batch = TokenBatch.collate([scored("a", 2, 3, True), scored("b", 4, 0, True), scored("c", 1, 2, True)])
    assert torch.equal(batch.mask, length_mask([3, 0, 2]))
    padded = batch.pad(batch.teacher_logprobs)
    assert padded.tolist() == [[-0.75, -1.75, -2.75], [0.0, 0.0, 0.0], [-0.75, -1.75, 0.0]]
    assert torch.equal(padded[batch.mask], batch.teacher_logprobs)
    assert batch.places([2, 0]).tolist() == [3, 4, 0, 1, 2]
    assert batch.reference_logprobs is not None
    assert batch.reference_logprobs.tolist() == [-1.0, -2.0, -3.0, -1.0, -2.0]


def test_reference_logprobs_for_all_or_none() -> None:
    with pytest.raises(ValueError, match="reference_logprobs are missing from row 1, but other rows have them"):
        TokenBatch.collate([scored("a", 1, 1, True), scored("b", 1, 1)])
    with pytest.raises(ValueError, match="no rollouts"):
        TokenBatch.collate([])


def rollout(**change: Any) -> Rollout:
    fields: dict[str, Any] = {
        "prompt": Prompt("p7", (1, 2)),
        "response_ids": torch.tensor([3, 4]),
        "rollout_logprobs": torch.tensor([-1.0, -2.0]),
        "stop_reason": "eos",
    }
    return Rollout(**{**fields, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"response_ids": torch.tensor([3, -4])}, ValueError, r"Rollout\('p7'\).response_ids is -4 at token 1"),
        ({"response_ids": torch.tensor([3.0, 4.0])}, TypeError, r"response_ids must be int64, got torch.float32"),
        ({"response_ids": torch.tensor([[3, 4]])}, ValueError, r"response_ids must have one dimension, got \[1, 2\]"),
        ({"rollout_logprobs": torch.tensor([-1.0])}, ValueError, r"rollout_logprobs has shape \[1\], expected \[2\]"),
        ({"rollout_logprobs": torch.tensor([-1.0, float("nan")])}, ValueError, "rollout_logprobs is nan at token 1"),
        ({"rollout_logprobs": torch.tensor([-1.0, -2.0]).half()}, TypeError, "must be float32 or float64"),
        ({"stop_reason": "stop"}, ValueError, r"stop_reason must be one of \('eos', 'length', 'horizon'\), got 'stop'"),
        (
            {"response_ids": torch.tensor([], dtype=torch.long), "rollout_logprobs": torch.tensor([])},
            ValueError,
            "stop_reason is 'eos' but there is no token",
        ),
    ],
)
def test_rollout_checks_name_the_field(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rollout(**change)
    assert len(rollout()) == 2


def test_prompt_checks() -> None:
    with pytest.raises(ValueError, match=r"Prompt.token_ids of 'x' is empty"):
        Prompt("x", ())
    with pytest.raises(ValueError, match="must be integers >= 0"):
        Prompt("x", (1, -1))


def test_scored_rollout_checks_name_field_and_token() -> None:
    bad = torch.tensor([-1.0, -float("inf")])
    with pytest.raises(ValueError, match=r"ScoredRollout\('p7'\).teacher_logprobs is -inf at token 1"):
        ScoredRollout(rollout(), torch.tensor([-1.0, -1.0]), bad)
    with pytest.raises(ValueError, match=r"reference_logprobs has shape \[1\], expected \[2\]"):
        ScoredRollout(rollout(), torch.zeros(2), torch.zeros(2), torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_logprobs": torch.tensor([0.0, 0.0, float("nan")])}, r"teacher_logprobs is nan at token 2"),
        ({"response_ids": torch.tensor([1, -3, 4])}, "response_ids is -3 at token 1"),
        ({"old_logprobs": torch.zeros(2)}, r"old_logprobs has shape \[2\], expected \[3\]"),
        ({"lengths": torch.tensor([2, 2])}, "lengths add up to 4, but there are 3 response_ids"),
        ({"prompt_lengths": torch.tensor([1])}, "prompt_lengths add up to 1, but there are 2 prompt_ids"),
        ({"prompt_lengths": torch.tensor([2])}, "1 prompts and 2 responses"),
    ],
)
def test_token_batch_checks_name_field_and_place(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "prompt_ids": torch.ones(2, dtype=torch.long),
        "prompt_lengths": torch.tensor([1, 1]),
        "response_ids": torch.ones(3, dtype=torch.long),
        "lengths": torch.tensor([2, 1]),
        "old_logprobs": torch.zeros(3),
        "teacher_logprobs": torch.zeros(3),
    }
    assert len(TokenBatch(**fields)) == 2
    with pytest.raises(ValueError, match=message):
        TokenBatch(**{**fields, **change})


def test_step_stats() -> None:
    StepStats(step=1, loss=float("nan"), grad_norm=float("inf"), tokens=3, rollouts=1, skipped=True)
    with pytest.raises(ValueError, match=r"StepStats.loss of step 2 is nan, yet it was not skipped"):
        StepStats(step=2, loss=float("nan"), grad_norm=1.0, tokens=3, rollouts=1)
    with pytest.raises(ValueError, match=r"StepStats.tokens of step 2 is -1"):
        StepStats(step=2, loss=0.0, grad_norm=1.0, tokens=-1, rollouts=1)


def test_eval_result() -> None:
    result = EvalResult("tiny", ("a", "b"), torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64))
    assert result.mean == 0.75
    with pytest.raises(ValueError, match=r"scores of 'tiny' is 2.0 in row 1 \('b'\), sample 0"):
        EvalResult("tiny", ("a", "b"), torch.tensor([[1.0], [2.0]]))
    with pytest.raises(ValueError, match=r"must be floats \[2, K\], got torch.float32 \[1, 1\]"):
        EvalResult("tiny", ("a", "b"), torch.tensor([[1.0]]))
    with pytest.raises(ValueError, match="not unique"):
        EvalResult("tiny", ("a", "a"), torch.tensor([[1.0], [1.0]]))
