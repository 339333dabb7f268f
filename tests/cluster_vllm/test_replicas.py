"""verl's vLLM replicas against transformers and our scorer: what was written, scores of given ids, the likeliest ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from iwopd.teacher.local import LocalScorer
from iwopd.types import Prompt, Rollout

TOLERANCE = 1e-4
Asked = tuple[dict[str, Any], list[list[dict[str, Any]]]]
MODELS = pytest.mark.parametrize("number", [0, 1], ids=["world", "padded-vocabulary"])


def compared(asked: Asked, number: int) -> tuple[Any, int, int, list[tuple[list[int], dict[str, Any]]]]:
    """The model, its real ids, k, and each prompt with its answer."""
    questions, answers = asked
    path = questions["models"][number]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    pairs = list(zip(questions["prompts"][number], answers[number], strict=True))
    return model, len(AutoTokenizer.from_pretrained(path)), questions["k"], pairs


@MODELS
def test_written_tokens(asked: Asked, number: int) -> None:
    model, ids, _, pairs = compared(asked, number)
    rollouts = [
        Rollout(Prompt(str(place), tuple(prompt)), torch.tensor(answer["ids"]), torch.tensor(answer["logprobs"]), "length")
        for place, (prompt, answer) in enumerate(pairs)
    ]
    assert max(len(rollout) for rollout in rollouts) > 10
    scores = LocalScorer(model, vocab_size=ids).score(rollouts)
    apart = max(float((rollout.rollout_logprobs - score).abs().max()) for rollout, score in zip(rollouts, scores, strict=True))
    print(f"largest difference of {sum(map(len, rollouts))} log-probs of written tokens: {apart:.1e}")
    assert apart < TOLERANCE


@MODELS
def test_scores_of_given_ids(asked: Asked, number: int) -> None:
    """In verl's layout: entry t is for id t + 1, the last one is a filler."""
    model, ids, _, pairs = compared(asked, number)
    apart = 0.0
    for prompt, answer in pairs:
        whole = [*prompt, *answer["ids"]]
        told = answer["scores"]
        assert [entry[0] for entry in told["ids"][:-1]] == whole[1:]
        given = Rollout(Prompt("given", tuple(whole[:1])), torch.tensor(whole[1:]), torch.zeros(len(whole) - 1), "length")
        (score,) = LocalScorer(model, vocab_size=ids).score([given])
        apart = max(apart, float((torch.tensor(told["logprobs"][:-1]).squeeze(-1) - score).abs().max()))
    print(f"largest difference of scores: {apart:.1e}")
    assert apart < TOLERANCE


@MODELS
def test_likeliest_ids(asked: Asked, number: int) -> None:
    model, ids, k, pairs = compared(asked, number)
    apart = 0.0
    for prompt, answer in pairs:
        whole = [*prompt, *answer["ids"]]
        with torch.no_grad():
            best = model(torch.tensor([whole])).logits[0, :-1, :ids].log_softmax(-1).topk(k)
        told_ids, told = (torch.tensor(answer["likeliest"][name][:-1]) for name in ("ids", "logprobs"))
        assert told_ids.shape == (len(whole) - 1, k)
        apart = max(apart, float((told - best.values).abs().max()))
        clear = (best.values[:, :-1] - best.values[:, 1:] > TOLERANCE).all(-1)  # no ties
        assert clear.sum() > 0.9 * len(clear)
        assert torch.equal(told_ids[clear], best.indices[clear])
    print(f"largest difference of the {k} likeliest: {apart:.1e}")
    assert apart < TOLERANCE
