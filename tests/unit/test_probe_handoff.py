"""The hand-off curve: which prefixes are continued, how often, and that sharing work changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from iwopd.analysis.handoff import FRACTIONS, handoff_scores, prefix_length
from iwopd.eval.task import Verdict, one_by_one
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.tiny import build_tokenizer
from iwopd.types import Prompt, Rollout
from models import make_model

EOS = 1


def make_rollout(number: int, ids: Sequence[int], sample: int = 0) -> Rollout:
    reason: Any = "eos" if ids[-1] == EOS else "length"
    return Rollout(Prompt(f"p{number}", (2, 3 + number)), torch.tensor(ids), torch.zeros(len(ids)), reason, sample)


ROLLOUTS = [
    make_rollout(0, [4, 5, 6, 7, 8, 9, 10, 11, 4, 5, 6, EOS]),
    make_rollout(0, [5, 6, EOS], sample=1),
    make_rollout(1, [EOS]),
    make_rollout(2, [4, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
]


@pytest.fixture(scope="module")
def sampler() -> LocalSampler:
    return LocalSampler(make_model("qwen3", seed=2), SamplingSettings(6, stop_ids={EOS}), vocab_size=21)


def text_number(_: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
    """A score that tells texts apart, so that a continuation in the wrong place is noticed."""
    return [Verdict("x", (sum(ord(letter) * (place + 1) for place, letter in enumerate(text)) % 997) / 997) for text in texts]


@pytest.fixture(scope="module")
def one_at_a_time(sampler: LocalSampler) -> dict[float, Tensor]:
    """The same without any sharing: a call for every prefix of every rollout."""
    tokenizer: Any = build_tokenizer()
    found = {}
    for fraction in FRACTIONS:
        rows = []
        for rollout in ROLLOUTS:
            prefix = rollout.response_ids[: math.ceil(Fraction(str(fraction)) * len(rollout))].tolist()
            wholes = [prefix] * 2
            if not (prefix and prefix[-1] == EOS):
                prompt = Prompt(f"{rollout.prompt.id}@{rollout.sample}", (*rollout.prompt.token_ids, *prefix))
                answers = sampler.sample([prompt], seed=3, step=0, samples=2)
                wholes = [prefix + answer.response_ids.tolist() for answer in answers]
            texts = [tokenizer.decode(whole, skip_special_tokens=True) for whole in wholes]
            rows.append([verdict.score for verdict in text_number([], texts)])
        found[fraction] = torch.tensor(rows, dtype=torch.float64)
    return found


@pytest.mark.parametrize("group", [1, 3, 32])
def test_sharing_work_changes_nothing(sampler: LocalSampler, one_at_a_time: dict[float, Tensor], group: int) -> None:
    heard: list[int] = []
    found = handoff_scores(
        ROLLOUTS, sampler, build_tokenizer(), text_number, continuations=2, seed=3, group=group, advance=heard.append
    )
    assert list(found) == list(FRACTIONS)
    assert sum(heard) == len(ROLLOUTS)
    for fraction in FRACTIONS:
        torch.testing.assert_close(found[fraction], one_at_a_time[fraction], rtol=0, atol=0)
    assert len(found[0.1].unique()) > 4


def test_equal_prefixes_are_continued_once(sampler: LocalSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[tuple[int, ...]]] = []
    real = sampler.sample

    def listen(prompts: Sequence[Prompt], **options: Any) -> list[Rollout]:
        asked.append([prompt.token_ids for prompt in prompts])
        return real(prompts, **options)

    monkeypatch.setattr(sampler, "sample", listen)
    handoff_scores(ROLLOUTS[1:3], sampler, build_tokenizer(), text_number, continuations=2)
    # Three tokens: 0, 1 (10, 20, 30 %), 2 (50 %); 70 and 90 % are the whole answer. Nothing but the end: only 0.
    assert asked == [[(2, 3), (2, 3, 5), (2, 3, 5, 6), (2, 4)]]


def test_a_continuation_ends_with_the_context() -> None:
    """256 positions: 250 are taken, so six are left although twelve are allowed."""
    sampler = LocalSampler(make_model("qwen3", seed=2), SamplingSettings(12, stop_ids=set()), vocab_size=21)
    rollout = Rollout(Prompt("long", (2,) * 250), torch.tensor([4, 5]), torch.zeros(2), "length")
    lengths: list[int] = []

    def measure(_: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        lengths.extend(len(build_tokenizer()(text, add_special_tokens=False)["input_ids"]) for text in texts)
        return [Verdict("x", 0.0) for _ in texts]

    handoff_scores([rollout], sampler, build_tokenizer(), measure, fractions=(0.0, 0.5))
    assert max(lengths) <= 6


def test_one_continuation_per_prefix(sampler: LocalSampler) -> None:
    check = one_by_one(lambda prompt, text: prompt.id == "p2")
    found = handoff_scores(ROLLOUTS, sampler, build_tokenizer(), check, fractions=(0.0, 0.5))
    assert {fraction: scores.tolist() for fraction, scores in found.items()} == {
        0.0: [[0.0], [0.0], [0.0], [1.0]],
        0.5: [[0.0], [0.0], [0.0], [1.0]],
    }


def test_prefix_lengths_are_exact() -> None:
    assert [prefix_length(0.3, tokens) for tokens in (0, 1, 10, 20, 64)] == [0, 1, 3, 6, 20]
    assert prefix_length(0.1, 30) == 3
