"""The engine in this process against transformers: log-probs, padded ids, seeds, stops, weights after a sync."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from iwopd.rollout.requests import RequestSampler, Vocabulary
from iwopd.rollout.sampling import SamplingError, SamplingSettings
from iwopd.rollout.settings import VllmSettings
from iwopd.rollout.vllm import VllmEngine, VllmError
from iwopd.teacher.local import LocalScorer
from iwopd.types import Prompt, Rollout
from vllm_support import IDS, ROWS

TOLERANCE = 1e-4


def prompts(count: int = 6, length: int = 9) -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    return [
        Prompt(f"p{number}", tuple(torch.randint(2, IDS, (length + number,), generator=generator).tolist()))
        for number in range(count)
    ]


def sampler(
    engine: VllmEngine, temperature: float = 1.0, max_tokens: int = 24, stop_ids: Sequence[int] = (1,)
) -> RequestSampler:
    return engine.sampler(SamplingSettings(max_tokens, temperature, stop_ids=stop_ids))


def worst(rollouts: list[Rollout], model: Any, temperature: float = 1.0) -> float:
    """Largest difference between the engine's log-probs and those of transformers, over the real vocabulary."""
    scores = LocalScorer(model, temperature=temperature or 1.0, vocab_size=IDS).score(rollouts)
    pairs = zip(rollouts, scores, strict=True)
    return max(float((rollout.rollout_logprobs - score).abs().max()) for rollout, score in pairs)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_sampled_logprobs_agree_with_transformers(engine: VllmEngine, student: Any, temperature: float) -> None:
    rollouts = sampler(engine, temperature).sample(prompts(), seed=0, step=1, samples=2)
    assert [(rollout.prompt.id, rollout.sample) for rollout in rollouts] == [(f"p{i}", j) for i in range(6) for j in range(2)]
    assert worst(rollouts, student, temperature) < TOLERANCE


def test_prompt_scores_agree_with_transformers(engine: VllmEngine, student: Any) -> None:
    vllm: Any = importlib.import_module("vllm")
    engine.update_weights()
    ids = [prompt.token_ids for prompt in prompts(length=40)]
    parameters = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    results = engine.llm.generate([{"prompt_token_ids": list(row)} for row in ids], parameters, use_tqdm=False)
    for row, result in zip(ids, results, strict=True):
        assert result.prompt_logprobs[0] is None
        scores = torch.tensor([place[token].logprob for place, token in zip(result.prompt_logprobs[1:], row[1:], strict=True)])
        with torch.no_grad():
            logprobs = student(torch.tensor([row])).logits[0].log_softmax(-1)  # all rows: prompts know no bias
        expected = logprobs[:-1].gather(-1, torch.tensor(row[1:])[:, None]).squeeze(-1)
        assert float((scores - expected).abs().max()) < TOLERANCE


def test_weights_after_an_update_are_the_students(engine: VllmEngine, student: Any) -> None:
    """Long prompts fill whole blocks of the prefix cache, which must not outlive the weights it was computed with."""
    texts = prompts(length=150)
    before = sampler(engine).sample(texts, seed=0, step=1)
    assert worst(before, student) < TOLERANCE
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.02, fused=True)
    for _ in range(2):
        for parameter in student.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        assert worst(before, student) > 0.1  # the update matters
        after = sampler(engine).sample(texts, seed=0, step=1)
        assert worst(after, student) < TOLERANCE
    optimizer.zero_grad()


def test_padded_ids_are_impossible(engine: VllmEngine, student: Any) -> None:
    """Rows of the output matrix beyond the tokenizer that would win every draw."""
    with torch.no_grad():
        student.get_output_embeddings().weight[IDS:] = student.get_output_embeddings().weight[5:6] * 1.5
    for temperature in (1.0, 0.0):
        rollouts = sampler(engine, temperature, stop_ids=()).sample(prompts(), seed=0, step=1, samples=4)
        assert max(int(rollout.response_ids.max()) for rollout in rollouts) < IDS
        assert worst(rollouts, student, temperature) < TOLERANCE
    loose = engine.sampler(SamplingSettings(24))
    loose.vocabulary = Vocabulary(ROWS, ROWS)
    drawn = loose.sample(prompts(), seed=0, step=1, samples=4)
    assert max(int(rollout.response_ids.max()) for rollout in drawn) >= IDS  # the test could have failed


def test_rollouts_depend_on_their_coordinates_alone(engine: VllmEngine, student: Any) -> None:
    endless = sampler(engine, stop_ids=())
    everyone = endless.sample(prompts(), seed=4, step=7, samples=3)
    alone = endless.sample(prompts()[2:3], seed=4, step=7, samples=3)
    for one, other in zip(everyone[6:9], alone, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
    texts = {tuple(rollout.response_ids.tolist()) for rollout in everyone}
    assert len(texts) == len(everyone)
    for seed, step in ((5, 7), (4, 8)):
        others = endless.sample(prompts(), seed=seed, step=step, samples=3)
        assert all(
            one.response_ids.tolist() != other.response_ids.tolist() for one, other in zip(everyone, others, strict=True)
        )


def test_stops_and_limits(engine: VllmEngine, student: Any) -> None:
    stops = (*range(1, 40), 500)  # the last one does not exist
    rollouts = sampler(engine, max_tokens=12, stop_ids=stops).sample(prompts(), seed=0, step=1, samples=8)
    assert {rollout.stop_reason for rollout in rollouts} == {"eos", "length"}
    for rollout in rollouts:
        *body, last = rollout.response_ids.tolist()
        assert not set(body) & set(stops)
        assert (last in stops) == (rollout.stop_reason == "eos")
        assert rollout.stop_reason == "eos" or len(rollout) == 12


def test_each_prompt_may_have_a_limit_of_its_own(engine: VllmEngine, student: Any) -> None:
    limits = [1, 2, 3, 4, 5, 6]
    rollouts = sampler(engine, stop_ids=()).sample(prompts(), seed=0, step=1, max_tokens=limits)
    assert [len(rollout) for rollout in rollouts] == limits
    assert worst(rollouts, student) < TOLERANCE


def test_draws_follow_the_distribution(engine: VllmEngine, student: Any) -> None:
    """4,000 first tokens against their probabilities: chi-square stays within five standard deviations."""
    prompt = prompts()[0]
    drawn = sampler(engine, 0.8, max_tokens=1, stop_ids=()).sample([prompt], seed=0, step=1, samples=4000)
    counts = torch.bincount(torch.cat([rollout.response_ids for rollout in drawn]), minlength=IDS)
    with torch.no_grad():
        probabilities = (student(torch.tensor([prompt.token_ids])).logits[0, -1, :IDS] / 0.8).softmax(-1).double()
    kept = probabilities * 4000 > 5
    expected = torch.cat([probabilities[kept], probabilities[~kept].sum()[None]]) * 4000
    observed = torch.cat([counts[kept], counts[~kept].sum()[None]])
    freedom = len(expected) - 1
    assert freedom > 20
    assert float(((observed - expected) ** 2 / expected).sum()) < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_p": 0.9}, "top_p = 1"),
        ({"top_k": 3}, "top_k = 0"),
        ({"temperature": 0.001}, "0.01"),
    ],
)
def test_settings_whose_logprobs_would_be_others_are_refused(engine: VllmEngine, settings: Any, words: str) -> None:
    with pytest.raises(SamplingError, match=words):
        engine.sampler(SamplingSettings(8, **settings))


def test_what_does_not_fit_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(SamplingError, match=r"'long' has 250 tokens.*max_model_len"):
        sampler(engine).sample([Prompt("long", (2,) * 250)], seed=0, step=1)
    with pytest.raises(SamplingError, match="has id 300"):
        sampler(engine).sample([Prompt("odd", (2, 300))], seed=0, step=1)
    with pytest.raises(VllmError, match="no GPU"):
        VllmEngine(engine.student, VllmSettings(max_model_len=256, sleep=True))


def test_the_trainer_keeps_its_process(engine: VllmEngine) -> None:
    """Left to itself vLLM lowers the number of threads for good and preloads a library into the trainer's processes."""
    before = torch.get_num_threads()
    for count in (2, 1):
        torch.set_num_threads(count)
        assert torch.get_num_threads() == count
    torch.set_num_threads(before)
    assert "tcmalloc" not in os.environ.get("LD_PRELOAD", "")
    assert "LOCAL_WORLD_SIZE" not in os.environ


def test_a_listener_hears_of_each_rollout_and_its_failure_leaves_nothing_behind(engine: VllmEngine, student: Any) -> None:
    writer = sampler(engine, stop_ids=tuple(range(1, 40)))
    silent = writer.sample(prompts(), seed=0, step=1, samples=3)
    heard: list[tuple[int, Rollout]] = []
    told = writer.sample(prompts(), seed=0, step=1, samples=3, finished=lambda place, rollout: heard.append((place, rollout)))
    assert [rollout.response_ids.tolist() for rollout in told] == [rollout.response_ids.tolist() for rollout in silent]
    assert sorted(place for place, _ in heard) == list(range(18))
    assert all(told[place] is rollout for place, rollout in heard)
    assert [len(rollout) for _, rollout in heard] == sorted(len(rollout) for _, rollout in heard)  # as they were finished

    def fail(place: int, rollout: Rollout) -> None:
        raise ArithmeticError("the teacher is gone")

    with pytest.raises(ArithmeticError):
        writer.sample(prompts(), seed=0, step=1, samples=3, finished=fail)
    again = writer.sample(prompts(), seed=0, step=1, samples=3)
    assert [rollout.response_ids.tolist() for rollout in again] == [rollout.response_ids.tolist() for rollout in silent]
