"""The echo test: known sequences through every path that scores, compared with the model's own log-probs and each other.

A path that is off by one token, serves another model, forgets the temperature or counts ids that do not exist returns numbers
that look all right. Here they must be the right ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from iwopd.lm import Context
from iwopd.modes import eval_mode
from iwopd.own_head import plain_logprobs
from iwopd.teacher.scorer import Scorer, ScoringPath
from iwopd.train.doctor.findings import Finding, failure, passed
from iwopd.types import Rollout

TOLERANCE = 1e-3
"""Largest difference of two log-probs of a token in float32."""
TOLERANCE_HALF = 5e-2
"""Mean difference in half precision, where single tokens differ by more."""


def own_logprobs(
    model: Any, rollouts: Sequence[Rollout], temperature: float, vocab_size: int, autocast: Context = nullcontext
) -> list[Tensor]:
    """Log-probs [T] of each response from the model's plain forward pass in its context: nothing packed, fused or batched.

    Logits exist for a few tokens at a time; a response of more tokens takes several passes.
    """
    device = next(model.parameters()).device
    results = []
    with eval_mode(model), autocast():
        for rollout in rollouts:
            ids = torch.cat([torch.tensor(rollout.prompt.token_ids), rollout.response_ids]).to(device)
            places = torch.arange(len(rollout.prompt.token_ids) - 1, len(ids) - 1, device=device)
            values = plain_logprobs(model, ids[:-1], places, ids[places + 1], temperature=temperature, vocab_size=vocab_size)
            results.append(values.float().cpu())
    return results


Score = Callable[[Scorer, Sequence[Rollout]], list[Tensor]]


def check_echo(
    paths: Sequence[ScoringPath],
    own: Mapping[str, list[Tensor]],
    rollouts: Sequence[Rollout],
    score: Score = lambda scorer, rollouts: scorer.score(rollouts),
) -> Iterator[Finding]:
    """Score the rollouts through every path. `own` has the log-probs of the models that are here, by name."""
    known: dict[str, tuple[str, list[Tensor]]] = {name: ("its own logits", values) for name, values in own.items()}
    for path in paths:
        read = path.read(rollouts)
        if not any(map(len, read)):  # a teacher with another tokenizer
            remedy = "choose a teacher whose tokenizer knows their text"
            yield failure("echo", f"{path.name} can read nothing of the student's answers", remedy)
            continue
        scores = score(path.scorer, read)
        if (problem := _malformed(scores, read)) is not None:
            yield failure("echo", f"{path.name}: {problem}", _remedy(path))
            continue
        if path.model_name in known:
            against, expected = known[path.model_name]
            yield _compare(path, scores, against, expected)
        else:  # the first path to a model that is not here: the others are compared with it
            yield _causal(path, scores, read)
            known[path.model_name] = (path.name, scores)


def agreement(scores: Sequence[Tensor], expected: Sequence[Tensor], *, half: bool) -> tuple[bool, float, float]:
    """Whether log-probs agree, and their largest and mean difference."""
    difference = (torch.cat(list(scores)).double() - torch.cat(list(expected)).double()).abs()
    largest, mean = float(difference.max()), float(difference.mean())
    return mean <= TOLERANCE_HALF if half else largest <= TOLERANCE, largest, mean


def _compare(path: ScoringPath, scores: list[Tensor], against: str, expected: list[Tensor]) -> Finding:
    agree, largest, mean = agreement(scores, expected, half=path.half)
    if agree:
        count = sum(map(len, scores))
        return passed("echo", f"{path.name} agrees with {against} on {count} tokens (largest difference {largest:.1g})")
    return failure(
        "echo",
        f"{path.name} differs from {against} by {mean:.3g} on average and up to {largest:.3g}: "
        f"{_diagnosis(scores, expected, mean)}",
        _remedy(path),
    )


def _diagnosis(scores: list[Tensor], expected: list[Tensor], mean: float) -> str:
    """Which mistake would explain it."""
    for shift, words in ((1, "the scores are those of the token after"), (-1, "the scores are those of the token before")):
        pairs = [_shifted(one, other, shift) for one, other in zip(scores, expected, strict=True) if len(one) > 2]
        if pairs and _mean_difference(pairs) < 0.1 * mean:
            return f"off by one, {words}"
    others = [(a, b) for i, a in enumerate(scores) for j, b in enumerate(expected) if i != j and len(a) == len(b) > 2]
    if any(_mean_difference([pair]) < 0.1 * mean for pair in others):
        return "the answers come back in another order"
    return "another model, another temperature, or a softmax over other ids"


def _shifted(one: Tensor, other: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    return (one[:-1], other[1:]) if shift == 1 else (one[1:], other[:-1])


def _mean_difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    one, other = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
    return float((one.double() - other.double()).abs().mean())


def _causal(path: ScoringPath, scores: list[Tensor], rollouts: Sequence[Rollout]) -> Finding:
    """Without a model to compare with: another last token must change the last score, and no other."""
    rollout, before = max(zip(rollouts, scores, strict=True), key=lambda pair: len(pair[0]))
    if len(rollout) < 3:
        return passed("echo", f"{path.name} answers, but the rollouts are too short to test it")
    ids = rollout.response_ids.clone()
    ids[-1] = rollout.response_ids[0] if ids[-1] != rollout.response_ids[0] else rollout.prompt.token_ids[0]
    if bool(ids[-1] == rollout.response_ids[-1]):
        return passed("echo", f"{path.name} answers, but the rollouts are too uniform to test it")
    after = path.scorer.score([replace(rollout, response_ids=ids, stop_reason="length")])[0]
    changed = (before - after).abs() > (TOLERANCE_HALF if path.half else TOLERANCE)
    if bool(changed[:-1].any()):
        first = int(changed.nonzero()[0])
        return failure(
            "echo",
            f"{path.name}: another last token changes the score of token {first} of {len(rollout)}: its scores are off by one, "
            "or it does not score the sequence that it is given",
            _remedy(path),
        )
    return passed(
        "echo", f"{path.name} scores every token by those before it (there is no local copy to compare the numbers with)"
    )


def _malformed(scores: Sequence[Tensor], rollouts: Sequence[Rollout]) -> str | None:
    if len(scores) != len(rollouts):
        return f"{len(scores)} answers for {len(rollouts)} rollouts"
    for values, rollout in zip(scores, rollouts, strict=True):
        if values.shape != (len(rollout),):
            return f"scores of shape {list(values.shape)} for {len(rollout)} tokens"
        if bool(values.isnan().any()) or float(values.max()) > TOLERANCE_HALF or math.isinf(float(values.max())):
            return "scores that are no log-probs (NaN, or above 0)"
    return None


def _remedy(path: ScoringPath) -> str:
    return f"look at what serves the {path.model_name}: which model, which version, and that it gets the ids as they are"
