"""Likeliest ids from vLLM and SGLang. Their servers are not here: a stand-in answers in their formats, with the numbers of a
real small model. tests/vllm asks a real vLLM.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from iwopd.algo.views import TokenScores, Wanted
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.json_answers import LEAST_REST
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.questions import TokenSequence
from iwopd.teacher.sglang_dialect import SglangDialect
from iwopd.teacher.vllm_dialect import VllmDialect
from iwopd.types import Prompt, Rollout
from models import make_model
from served_teacher import asking, rollouts

K = 4
LONG = TokenSequence(tuple(range(1, 20)), 1)
MAX_LOGPROBS = 20
"""vLLM's default of --max-logprobs."""


def told(scorer: LocalScorer, ids: list[int], k: int) -> TokenScores:
    """What the model says of all ids but the first."""
    rest = torch.tensor(ids[1:], dtype=torch.long)
    return scorer.look([Rollout(Prompt("", (ids[0],)), rest, torch.zeros(len(rest)), "length")], Wanted(top_k=k))[0]


def vllm_answer(scorer: LocalScorer, prompts: list[list[int]], k: int) -> dict[str, Any]:
    """As vLLM 0.32 answers: the prompt's own id first, then the k likeliest, each with rank and text; an id has one entry."""
    choices = []
    for index, ids in enumerate(prompts):
        entries: list[Any] = [None]
        found = told(scorer, ids, max(k, 1))
        assert found.top_ids is not None
        assert found.top_logprobs is not None
        for place, token in enumerate(ids[1:]):
            entry = {str(token): {"logprob": float(found.logprobs[place]), "rank": 9, "decoded_token": "x"}}
            for rank in range(k):
                likely = {"logprob": float(found.top_logprobs[place, rank]), "rank": rank + 1, "decoded_token": "x"}
                entry[str(int(found.top_ids[place, rank]))] = likely
            entries.append(entry)
        drawn = {"token_ids": [3], "logprobs": {"token_logprobs": [float(told(scorer, [*ids, 3], 1).logprobs[-1])]}}
        choices.append({"index": index, "prompt_token_ids": ids, "prompt_logprobs": entries, **drawn})
    return {"choices": choices}


def sglang_answer(scorer: LocalScorer, sequences: list[TokenSequence], k: int) -> list[dict[str, Any]]:
    """As SGLang's sources have it: lists of [log-prob, id, text] from one token before `start` on, the first without any."""
    answer = []
    for sequence in sequences:
        found = told(scorer, list(sequence.ids), k)
        assert found.top_ids is not None
        assert found.top_logprobs is not None
        values = zip(found.logprobs.tolist(), sequence.ids[1:], strict=True)
        tokens: list[Any] = [[value, token, None] for value, token in values][sequence.start - 1 :]
        tops: list[Any] = [
            [[value, token, None] for value, token in zip(row.tolist(), ids.tolist(), strict=True)]
            for row, ids in zip(found.top_logprobs, found.top_ids, strict=True)
        ][sequence.start - 1 :]
        first = [None, sequence.ids[sequence.start - 1], None]
        about = {"input_token_logprobs": [first, *tokens], "input_top_logprobs": [None, *tops]}
        answer.append({"text": "", "meta_info": about})
    return answer


def sequences() -> list[TokenSequence]:
    found = []
    for rollout in rollouts():
        prompt = rollout.prompt.token_ids
        found.append(TokenSequence((*prompt, *rollout.response_ids.tolist()), len(prompt)))
    return found


@pytest.fixture(scope="module")
def scorer() -> LocalScorer:
    return LocalScorer(make_model("qwen3"))


def assert_models(found: list[TokenScores], scorer: LocalScorer, k: int) -> None:
    for ours, theirs in zip(found, scorer.look(rollouts(), Wanted(top_k=k)), strict=True):
        assert torch.equal(ours.top_ids, theirs.top_ids)
        assert torch.allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-6)
        assert torch.allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        assert ours.rest is not None
        assert theirs.rest is not None
        assert torch.allclose(ours.rest.exp(), theirs.rest.exp(), atol=2 * LEAST_REST)


@pytest.mark.parametrize("k", [1, K, 20])
def test_likeliest_ids_and_the_rest_are_the_models(k: int, scorer: LocalScorer) -> None:
    asked = sequences()
    answer = json.loads(json.dumps(vllm_answer(scorer, [list(sequence.ids) for sequence in asked], k)))
    assert_models(VllmDialect().scores(answer, asked, Wanted(top_k=k)), scorer, k)
    answer = json.loads(json.dumps(sglang_answer(scorer, asked, k)))
    assert_models(SglangDialect().scores(answer, asked, Wanted(top_k=k)), scorer, k)


def test_what_is_asked_for() -> None:
    asked = sequences()
    assert VllmDialect().scoring("m", asked, Wanted(top_k=K))["prompt_logprobs"] == K
    assert SglangDialect().scoring("m", asked, Wanted(top_k=K))["top_logprobs_num"] == K


def entry(answer: Any) -> dict[str, Any]:
    """The last token's entry of the first sequence, which has more than the likeliest: the written id is none of them."""
    entries = [one for one in answer["choices"][0]["prompt_logprobs"] if one is not None and len(one) == K + 1]
    return entries[-1]


def drop_likely(answer: Any) -> None:
    found = entry(answer)
    for key in list(found)[1:3]:
        del found[key]


def raise_likely(answer: Any) -> None:
    for one in list(entry(answer).values())[1:]:
        one["logprob"] = -0.5


def lower_likely(answer: Any) -> None:
    for one in list(entry(answer).values())[1:]:
        one["logprob"] = -50.0


def spoil_number(answer: Any) -> None:
    list(entry(answer).values())[1]["logprob"] = "much"


def spoil_key(answer: Any) -> None:
    found = entry(answer)
    found["x"] = found.pop(list(found)[1])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_likely, "4 likeliest ids were asked for; at position"),
        (raise_likely, "sum to 2"),
        (lower_likely, "likelier than"),
        (spoil_number, "is str 'much', not a number"),
        (spoil_key, "4 likeliest ids were asked for; at position"),
    ],
)
def test_vllms_likeliest_ids_are_not_believed(spoil: Any, words: str, scorer: LocalScorer) -> None:
    answer = vllm_answer(scorer, [list(LONG.ids)], K)
    assert VllmDialect().scores(answer, [LONG], Wanted(top_k=K))
    spoil(answer)
    with pytest.raises(TeacherError, match=words):
        VllmDialect().scores(answer, [LONG], Wanted(top_k=K))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda about: about.pop("input_top_logprobs"), "no usable 'input_top_logprobs'"),
        (lambda about: about["input_top_logprobs"].pop(), "shifted or cut"),
        (lambda about: about["input_top_logprobs"].pop(0), "shifted or cut"),
        (lambda about: about["input_top_logprobs"][1].pop(), "4 likeliest ids were asked for; at position 1"),
        (lambda about: about["input_top_logprobs"][1].reverse(), "not in the order"),
        (lambda about: about["input_top_logprobs"][1][0].__setitem__(1, -3), "where a token id should be"),
        (lambda about: about["input_top_logprobs"].insert(1, about["input_top_logprobs"].pop()), "likelier than|two different"),
    ],
)
def test_sglangs_likeliest_ids_are_not_believed(spoil: Any, words: str, scorer: LocalScorer) -> None:
    answer = sglang_answer(scorer, [LONG], K)
    assert SglangDialect().scores(answer, [LONG], Wanted(top_k=K))
    spoil(answer[0]["meta_info"])
    with pytest.raises(TeacherError, match=words):
        SglangDialect().scores(answer, [LONG], Wanted(top_k=K))


@contextmanager
def stand_in(scorer: LocalScorer) -> Iterator[str]:
    """A server that answers as vLLM does, its limit included."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "m", "max_model_len": 256}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            k = body.get("prompt_logprobs", 0)
            if k > MAX_LOGPROBS:
                words = f"Requested prompt logprobs of {k}, which is greater than max allowed: {MAX_LOGPROBS}"
                return self.reply(400, {"error": {"message": words, "code": 400}})
            return self.reply(200, vllm_answer(scorer, body["prompt"], k))

        def reply(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_more_than_vllm_gives_is_refused_before_training_with_the_remedy(scorer: LocalScorer) -> None:
    prompts = [Prompt("a", (1, 2)), Prompt("b", (3,))]
    with stand_in(scorer) as url:
        remote = asking(url, dialect="vllm")
        remote.try_out(prompts, vocab_size=21, max_tokens=4, wanted=Wanted(top_k=20))
        assert_models(remote.look(rollouts(), Wanted(top_k=K)), scorer, K)
        with pytest.raises(TeacherError, match=r"k = 21\).*greater than max allowed: 20.*--max-logprobs"):
            asking(url, dialect="vllm").try_out(prompts, vocab_size=21, max_tokens=4, wanted=Wanted(top_k=21))
