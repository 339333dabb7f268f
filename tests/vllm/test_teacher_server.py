"""The client of teacher servers against a real vLLM server. Runs in vLLM's environment (`make test-vllm`), skipped elsewhere.

`vllm_server` is the server's URL and `vllm_folder` the model that it serves (tests/vllm/conftest.py): its output matrix has
more rows than its tokenizer ids, and a server's softmax goes over all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from iwopd.algo.views import Wanted
from iwopd.config.engines import TeacherSource
from iwopd.models import load_model
from iwopd.teacher.checks import check_server
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.server import ServerScorer
from iwopd.types import Prompt, Rollout

pytest.importorskip("vllm.version")  # not `vllm`: this folder itself would pass for it


def rollouts(vocab: int, count: int) -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        ids = torch.randint(vocab, (4 + 5 * (number % 9),), generator=generator)
        prompt = torch.randint(vocab, (1 + number % 7,), generator=generator).tolist()
        made.append(Rollout(Prompt(str(number), tuple(prompt)), ids, torch.zeros(len(ids)), "length"))
    return made


def test_vllms_scores_are_those_of_transformers(vllm_server: str, vllm_folder: Path) -> None:
    model = load_model(vllm_folder)
    rows = int(model.get_output_embeddings().weight.shape[0])
    asked = rollouts(rows, 40)
    remote = ServerScorer(TeacherSource(urls=[vllm_server], tokens_per_request=200, patience=30.0))
    check_server(remote, vocab_size=rows, longest=60, examples=[asked[0].prompt.token_ids, (1, 2, 3)])
    for ours, theirs in zip(remote.score(asked), LocalScorer(model).score(asked), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_vllms_likeliest_ids_are_those_of_transformers(vllm_server: str, vllm_folder: Path) -> None:
    """The rest is 1 minus their sum, so it is as exact as float32 sums are."""
    model = load_model(vllm_folder)
    rows = int(model.get_output_embeddings().weight.shape[0])
    asked, wanted = rollouts(rows, 20), Wanted(top_k=8)
    remote = ServerScorer(TeacherSource(urls=[vllm_server], tokens_per_request=200, patience=30.0))
    remote.try_out([rollout.prompt for rollout in asked[:2]], vocab_size=rows, max_tokens=50, wanted=wanted)
    for ours, theirs in zip(remote.look(asked, wanted), LocalScorer(model).look(asked, wanted), strict=True):
        assert ours.top_logprobs is not None
        assert theirs.top_logprobs is not None
        assert ours.rest is not None
        assert theirs.rest is not None
        assert torch.allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        assert torch.allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-4)
        assert torch.allclose(ours.rest.exp(), theirs.rest.exp(), atol=1e-4)
        assert ours.top_ids is not None
        assert theirs.top_ids is not None
        clear = theirs.top_logprobs[:, 0] - theirs.top_logprobs[:, 1] > 1e-3  # nearly equal ones may change places
        assert torch.equal(ours.top_ids[clear, 0], theirs.top_ids[clear, 0])


def test_more_likeliest_ids_than_vllm_gives_are_refused_before_training(vllm_server: str) -> None:
    remote = ServerScorer(TeacherSource(urls=[vllm_server], patience=30.0))
    with pytest.raises(TeacherError, match=r"k = 21\).*--max-logprobs"):
        remote.try_out([Prompt("a", (1, 2))], vocab_size=258, max_tokens=10, wanted=Wanted(top_k=21))


def test_what_vllm_does_not_have_is_found_out_before_training(vllm_server: str, vllm_folder: Path) -> None:
    rows = int(load_model(vllm_folder).get_output_embeddings().weight.shape[0])

    def check(model: str | None = None, vocab_size: int = rows, longest: int = 60) -> None:
        remote = ServerScorer(TeacherSource(urls=[vllm_server], name=model, patience=30.0))
        check_server(remote, vocab_size=vocab_size, longest=longest, examples=[])

    with pytest.raises(TeacherError, match=r"say with teacher\.name which it is"):
        check(model="another")
    with pytest.raises(TeacherError, match="serve it with a longer context"):
        check(longest=10**7)
    with pytest.raises(TeacherError, match="cannot be scored"):
        check(vocab_size=rows + 1000)
