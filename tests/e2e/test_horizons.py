"""Answers that stop while they are written, on tiny random models: against "write everything, then cut"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from iwopd.algo.horizons import cut_lengths
from iwopd.algo.views import Wanted
from iwopd.rollout import local
from iwopd.rollout.horizons import Drift
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingError, SamplingSettings
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.router import RoutedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.train.watching import Watching
from iwopd.types import Piece, Prompt, Rollout

transformers = pytest.importorskip("transformers")

VOCAB = 83
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 400,
}
STOPS = (3,)
LIMIT = 90


def build(kind: str, seed: int, spread: float = 0.12) -> Any:
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=400, initializer_range=spread
        )
        return transformers.GPT2LMHeadModel(config).eval()
    shape = {**SHAPE, "initializer_range": spread}
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**shape, sliding_window=9)).eval()
    if kind == "gemma2":  # a soft cap: its logits are not those of its matrix
        config = transformers.Gemma2Config(**shape, head_dim=8, final_logit_softcapping=2.0, sliding_window=400)
        return transformers.Gemma2ForCausalLM(config).eval()
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=8)).eval()


def make_prompts(count: int, longest: int = 24, teachers: Sequence[str | None] = (None,)) -> list[Prompt]:
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    ids = [tuple(torch.randint(0, VOCAB, (size,), generator=generator).tolist()) for size in sizes]
    return [Prompt(f"p{i}", tokens, teacher=teachers[i % len(teachers)]) for i, tokens in enumerate(ids)]


def written(student: Any, prompts: Sequence[Prompt], watcher: Any = None, samples: int = 1, **options: Any) -> list[Rollout]:
    settings = SamplingSettings(LIMIT, stop_ids=STOPS)
    return LocalSampler(student, settings, **options).sample(prompts, seed=5, step=2, samples=samples, watcher=watcher)


def cut(rollouts: Sequence[Rollout], teacher: Scorer, horizon: Drift) -> tuple[list[int], list[torch.Tensor]]:
    """Lengths that the horizon leaves of whole answers, and the teacher's log-probs of them."""
    scores = teacher.score(rollouts)
    gaps = [theirs.double() - one.rollout_logprobs.double() for theirs, one in zip(scores, rollouts, strict=True)]
    mask = pad_sequence([torch.ones(len(gap), dtype=torch.bool) for gap in gaps], batch_first=True)
    options: Any = {"threshold": horizon.threshold, "block": horizon.block, "rule": horizon.weights, "params": horizon.params}
    return cut_lengths(pad_sequence(gaps, batch_first=True), mask, **options).tolist(), scores


def check_cut(
    stopped: Sequence[Rollout], whole: Sequence[Rollout], teacher: Scorer, horizon: Drift, watching: Watching
) -> None:
    lengths, scores = cut(whole, teacher, horizon)
    assert len(stopped) == len(whole)
    for one, other, length, theirs, kept in zip(stopped, whole, lengths, scores, watching.scores(), strict=True):
        assert one.response_ids.tolist() == other.response_ids[:length].tolist()
        assert one.stop_reason == ("horizon" if length < len(other) else other.stop_reason)
        assert one.sample == other.sample
        assert one.prompt == other.prompt
        torch.testing.assert_close(one.rollout_logprobs, other.rollout_logprobs[:length], atol=1e-5, rtol=0)
        torch.testing.assert_close(kept.logprobs, theirs[:length], atol=1e-5, rtol=0)
    reasons = {one.stop_reason for one in stopped}
    assert "horizon" in reasons
    assert reasons != {"horizon"}  # some answers go on to their end


@pytest.mark.parametrize("teacher_kind", ["qwen3", "llama", "gpt2", "mistral", "gemma2"])
@pytest.mark.parametrize(("kind", "path"), [("qwen3", "lean"), ("gpt2", "model"), ("mistral", "model")])
def test_stopped_answers_are_whole_ones_cut(kind: str, path: Any, teacher_kind: str) -> None:
    student, teacher = build(kind, 1), LocalScorer(build(teacher_kind, 2))
    if teacher_kind == "gemma2":
        teacher.lm.fused = False
    prompts = make_prompts(8)
    horizon = Drift(threshold=0.02, block=4, params={"tau": 6.0})
    watching = Watching(horizon, teacher.follow())
    stopped = written(student, prompts, watching, path=path)
    check_cut(stopped, written(student, prompts, path=path), teacher, horizon, watching)


@pytest.mark.parametrize(("cache_tokens", "samples", "block"), [(None, 1, 8), (800, 3, 8), (500, 1, 1), (120, 1, 8)])
def test_waiting_prompts_take_the_place_of_those_that_stop(cache_tokens: int | None, samples: int, block: int) -> None:
    student, teacher = build("qwen3", 1), LocalScorer(build("llama", 2), token_budget=70)
    prompts = make_prompts(10)
    horizon = Drift(threshold=0.02, block=block, params={"tau": 6.0})
    watching = Watching(horizon, teacher.follow())
    stopped = written(student, prompts, watching, samples, cache_tokens=cache_tokens)
    check_cut(stopped, written(student, prompts, samples=samples), teacher, horizon, watching)


def test_the_teacher_reads_every_token_once() -> None:
    student, model = build("qwen3", 1), build("qwen3", 2)
    teacher, read = LocalScorer(model), []
    from iwopd.lean_model import LeanModel

    states = LeanModel.states

    def counted(self: LeanModel, ids: torch.Tensor, *more: Any) -> torch.Tensor:
        if self.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr():
            read.append(len(ids))
        return states(self, ids, *more)

    watching = Watching(Drift(threshold=0.02, params={"tau": 6.0}), teacher.follow())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeanModel, "states", counted)
        stopped = written(student, make_prompts(12), watching)
    assert sum(read) == sum(len(one.prompt.token_ids) + len(one) - 1 for one in stopped)


def test_all_that_an_objective_asks_for_comes_with_the_blocks() -> None:
    student, teacher = build("qwen3", 1), LocalScorer(build("llama", 2))
    wanted = Wanted(entropy=True, top_k=5, states=True)
    watching = Watching(Drift(threshold=0.02, params={"tau": 6.0}), teacher.follow(wanted))
    stopped = written(student, make_prompts(8), watching)
    for kept, whole in zip(watching.scores(), teacher.look(stopped, wanted), strict=True):
        for name in ("logprobs", "entropy", "top_logprobs", "rest", "states"):
            torch.testing.assert_close(getattr(kept, name), getattr(whole, name), atol=1e-5, rtol=1e-4)
        assert kept.top_ids is not None
        assert torch.equal(kept.top_ids, whole.top_ids)


def test_each_answer_is_followed_by_its_own_teacher() -> None:
    student = build("qwen3", 1)
    teacher = RoutedScorer({None: LocalScorer(build("llama", 2)), "other": LocalScorer(build("gpt2", 3))})
    prompts = make_prompts(10, teachers=(None, "other"))
    horizon = Drift(threshold=0.02, params={"tau": 6.0})
    watching = Watching(horizon, teacher.follow())
    check_cut(written(student, prompts, watching), written(student, prompts), teacher, horizon, watching)


def test_rows_under_way_fit_the_teachers_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower says how many tokens it can keep; the sampler has no more rows under way than that."""
    student, teacher = build("qwen3", 1), LocalScorer(build("qwen3", 2))
    follower = teacher.follow()
    monkeypatch.setattr(type(follower), "room", property(lambda _: 3 * (LIMIT + 24 + 40)))
    most = []

    class Counting(Watching):
        def look(self, pieces: Sequence[Piece]) -> list[bool]:
            found = super().look(pieces)
            most.append(len(follower._reader._rows))  # type: ignore[attr-defined]
            return found

    horizon = Drift(threshold=0.02, params={"tau": 6.0})
    watching = Counting(horizon, follower)
    stopped = written(student, make_prompts(12), watching)
    assert 0 < max(most) <= 3
    assert most[-1] == 0  # nothing is kept of answers that are finished
    check_cut(stopped, written(student, make_prompts(12)), teacher, horizon, watching)


def test_a_listener_hears_of_stopped_answers_too() -> None:
    student, teacher = build("qwen3", 1), LocalScorer(build("llama", 2))
    heard: dict[int, Rollout] = {}
    watching = Watching(Drift(threshold=0.02, params={"tau": 6.0}), teacher.follow())
    sampler = LocalSampler(student, SamplingSettings(LIMIT, stop_ids=STOPS))
    stopped = sampler.sample(make_prompts(9), seed=5, step=2, finished=heard.__setitem__, watcher=watching)
    assert [heard[row] for row in range(9)] == stopped


def test_what_a_watcher_fails_with_is_raised() -> None:
    class Broken(Watching):
        def look(self, pieces: Sequence[Piece]) -> list[bool]:
            raise RuntimeError("the teacher is gone")

    student, teacher = build("qwen3", 1), LocalScorer(build("llama", 2))
    with pytest.raises(RuntimeError, match="the teacher is gone"):
        written(student, make_prompts(3), Broken(Drift(), teacher.follow()))
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_sampler_that_cannot_stop_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.LocalSampler, "watched", False)
    student, teacher = build("qwen3", 1), LocalScorer(build("llama", 2))
    with pytest.raises(SamplingError, match="LocalSampler cannot stop answers"):
        written(student, make_prompts(3), Watching(Drift(), teacher.follow()))
