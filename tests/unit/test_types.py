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


def test_collate_pads_prompts_left_and_responses_right() -> None:
    batch = TokenBatch.collate([scored("a", 2, 3), scored("b", 4, 1), scored("c", 1, 0)], pad_id=99, correct_rollouts=True)
    assert batch.prompt_ids.tolist() == [[99, 99, 1, 2], [1, 2, 3, 4], [99, 99, 99, 1]]
    assert batch.prompt_mask.tolist() == [[False, False, True, True], [True] * 4, [False, False, False, True]]
    assert batch.response_ids.tolist() == [[10, 11, 12], [10, 99, 99], [99, 99, 99]]
    assert torch.equal(batch.mask, length_mask([3, 1, 0]))
    assert batch.lengths.tolist() == [3, 1, 0]
    assert batch.teacher_logprobs.tolist() == [[-0.75, -1.75, -2.75], [-0.75, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs[0].tolist() == [-0.25, -1.25, -2.25]
    assert batch.reference_logprobs is None
    assert len(batch) == 3


def test_select_drops_padding_that_nobody_needs() -> None:
    batch = TokenBatch.collate([scored("a", 2, 3, True), scored("b", 4, 1, True), scored("c", 1, 2, True)], pad_id=99)
    part = batch.select([2, 0])
    assert part.prompt_ids.tolist() == [[99, 1], [1, 2]]
    assert part.response_ids.tolist() == [[10, 11, 99], [10, 11, 12]]
    one = batch.select([1])
    assert one.response_ids.tolist() == [[10]]
    assert one.reference_logprobs is not None
    assert one.reference_logprobs.tolist() == [[-1.0]]
    assert one.rollout_logprobs is None
    assert len(batch.select([])) == 0
    with pytest.raises(TypeError, match="row numbers, not a boolean mask"):
        batch.select(torch.tensor([True, False, True]))


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
        ({"response_ids": torch.tensor([[3, 4]])}, ValueError, r"response_ids must have shape \[T\], got \[1, 2\]"),
        ({"rollout_logprobs": torch.tensor([-1.0])}, ValueError, r"rollout_logprobs has shape \[1\], expected \[2\]"),
        ({"rollout_logprobs": torch.tensor([-1.0, float("nan")])}, ValueError, "rollout_logprobs is nan at token 1"),
        ({"rollout_logprobs": torch.tensor([-1.0, -2.0]).half()}, TypeError, "must be float32 or float64"),
        ({"stop_reason": "stop"}, ValueError, r"stop_reason must be one of \('eos', 'length'\), got 'stop'"),
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
        ({"teacher_logprobs": torch.tensor([[0.0, 0.0], [0.0, float("nan")]])}, r"teacher_logprobs is nan at row 1, token 1"),
        ({"response_ids": torch.tensor([[1, 2], [-3, 4]])}, "response_ids is -3 at row 1, token 0"),
        ({"mask": torch.tensor([[True, True], [False, True]])}, "mask is not right-padded in row 1"),
        ({"mask": torch.ones(2, 2)}, r"TokenBatch.mask must be a boolean \[B, T\] tensor, got torch.float32 \[2, 2\]"),
        ({"prompt_mask": torch.tensor([[True, False], [True, True]])}, "prompt_mask is not left-padded in row 0"),
        ({"old_logprobs": torch.zeros(2, 3)}, r"old_logprobs has shape \[2, 3\], expected \[2, 2\]"),
        (
            {"prompt_ids": torch.ones(3, 2, dtype=torch.long), "prompt_mask": torch.ones(3, 2, dtype=torch.bool)},
            "3 prompts and 2 responses",
        ),
    ],
)
def test_token_batch_checks_name_field_and_row(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "prompt_ids": torch.ones(2, 2, dtype=torch.long),
        "prompt_mask": torch.ones(2, 2, dtype=torch.bool),
        "response_ids": torch.ones(2, 2, dtype=torch.long),
        "mask": torch.ones(2, 2, dtype=torch.bool),
        "old_logprobs": torch.zeros(2, 2),
        "teacher_logprobs": torch.zeros(2, 2),
    }
    assert len(TokenBatch(**fields)) == 2
    with pytest.raises(ValueError, match=message):
        TokenBatch(**{**fields, **change})


def test_anything_may_stand_in_the_padding() -> None:
    nan = torch.full((1, 2), float("nan"))
    nan[0, 0] = -1.0
    TokenBatch(
        prompt_ids=torch.tensor([[-5, 1]]),
        prompt_mask=torch.tensor([[False, True]]),
        response_ids=torch.tensor([[1, -100]]),
        mask=length_mask([1], width=2),
        old_logprobs=nan,
        teacher_logprobs=nan,
    )


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
