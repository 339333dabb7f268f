"""The checks before training never hold the logits of a whole answer, whatever its length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from iwopd.algo.objectives import make_objective
from iwopd.analysis.probe.scoring import score_tokens
from iwopd.lm import HeadCheck, ResponseModel, Sequences
from iwopd.teacher.questions import TokenSequence
from iwopd.teacher.serving_model import ServingModel
from iwopd.train.doctor import head_findings, own_logprobs
from iwopd.types import Prompt, Rollout
from largest import Largest
from models import COMMON

VOCAB, TOKENS = 20_000, 2048
MOST = 2**24
"""Elements: what a chunk of logits may have. Those of the whole answer are 41 million, and three such existed at a time."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    **COMMON,
}


def linear() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).eval()


def capped() -> Any:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=1.0, query_pre_attn_scalar=4)).eval()


def long_rollout() -> Rollout:
    ids = torch.randint(2, VOCAB, (TOKENS + 4,), generator=torch.Generator().manual_seed(0))
    return Rollout(Prompt("long", tuple(ids[:4].tolist())), ids[4:], torch.zeros(TOKENS), "length")


@pytest.mark.parametrize(("make", "fused"), [(linear, True), (capped, False)])
def test_the_head_check(make: Any, fused: bool) -> None:
    lm = ResponseModel(make(), vocab_size=VOCAB)
    with Largest() as largest:
        found = lm.check_head(Sequences.from_rollouts([long_rollout()]))
    assert found.fused == fused
    assert found.chunked
    assert largest.elements <= MOST


def test_the_head_check_looks_at_far_positions() -> None:
    """A fault that begins behind the first thousand tokens."""
    lm = ResponseModel(linear(), vocab_size=VOCAB)
    assert lm.packing_obstacle is None
    rope = lm.model.model.rotary_emb
    forward = rope.forward

    def wrong(x: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        packed = getattr(lm, "packed", False)
        return forward(x, position_ids.clamp(max=1000) if packed else position_ids, **options)

    rope.forward = wrong
    hidden = ResponseModel.token_hidden

    def packed_hidden(self: ResponseModel, sequences: Sequences) -> torch.Tensor:
        lm.packed = True  # type: ignore[attr-defined]
        try:
            return hidden(self, sequences)
        finally:
            lm.packed = False  # type: ignore[attr-defined]

    lm.token_hidden = packed_hidden.__get__(lm)  # type: ignore[method-assign]
    assert not lm.check_head(Sequences.from_rollouts([long_rollout()])).fused


@pytest.mark.parametrize("make", [linear, capped])
def test_the_doctors_own_pass(make: Any) -> None:
    model, rollout = make(), long_rollout()
    with Largest() as largest:
        (own,) = own_logprobs(model, [rollout], 0.8, VOCAB - 5)
    assert largest.elements <= MOST
    some = 100  # the same by hand, for as many as may be held here
    ids = torch.tensor([*rollout.prompt.token_ids, *rollout.response_ids.tolist()])
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1], use_cache=False, logits_to_keep=some).logits[0, :, : VOCAB - 5].double() / 0.8
    expected = logits.log_softmax(-1).gather(1, ids[-some:, None]).squeeze(1)
    torch.testing.assert_close(own[-some:].double(), expected, rtol=0, atol=1e-4)


def test_a_probe_of_models_with_heads_of_their_own() -> None:
    student, teacher = (ResponseModel(make(), vocab_size=VOCAB) for make in (capped, linear))
    with Largest() as largest:
        tokens = score_tokens(student, teacher, [long_rollout()], top_k=3)
    assert not student.fused
    assert tokens.kl.shape == (1, TOKENS)
    assert largest.elements <= MOST


def test_a_model_that_gives_whole_answers_only_is_told_of_with_its_memory() -> None:
    heads = {"teacher": HeadCheck(2.0, fused=False, packing_obstacle=None, chunked=False)}
    parts: Any = SimpleNamespace(heads=heads, objective=make_objective({}), max_response=16_384, tokenizer=range(151_936))
    (finding,) = head_findings(parts)
    assert finding.level == "warn"
    assert "10.0 GB and more for 16,384 tokens" in finding.text()


def test_a_teacher_that_draws_one_more_token() -> None:
    model = linear()
    serving = ServingModel(model, vocab_size=VOCAB, max_length=4096)
    ids = [*long_rollout().prompt.token_ids, *long_rollout().response_ids.tolist()]
    with Largest() as largest:
        drawn = serving._draw(TokenSequence(tuple(ids), 1))
    assert largest.elements <= MOST
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), logits_to_keep=1).logits[0, -1].log_softmax(-1)
    assert drawn.logprob == pytest.approx(float(expected[drawn.id]), abs=1e-4)
