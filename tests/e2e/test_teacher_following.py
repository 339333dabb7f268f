"""Teacher servers that score answers while they are written: the scores of whole answers, and nothing computed twice."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest
import torch

from iwopd.algo.views import NOTHING, TokenScores, Wanted, joined_scores
from iwopd.teacher import wire
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.scorer import Follower
from iwopd.teacher.serving import TeacherServer
from iwopd.teacher.serving_model import ServingModel
from iwopd.types import Piece, Prompt, Rollout
from models import make_model
from served_teacher import asking, served, some_ids

TOLERANCE = 1e-5
KINDS = ["qwen3", "llama", "gpt2"]


def answers(count: int = 7, tokens: int = 30, prompt: int = 3) -> list[Rollout]:
    generator = torch.Generator().manual_seed(count)
    made = []
    for number in range(count):
        ids = torch.randint(21, (tokens + 5 * number,), generator=generator)
        prompts = Prompt(f"p{number // 2}", tuple(range(1, 1 + prompt + number // 2)))
        made.append(Rollout(prompts, ids, torch.zeros(len(ids)), "length"))
    return made


def pieces(rollouts: Sequence[Rollout], size: int = 8) -> Iterator[list[Piece]]:
    """What is new of all answers, look by look."""
    for first in range(0, max(map(len, rollouts)), size):
        found = []
        for row, rollout in enumerate(rollouts):
            if first < len(rollout):
                last = first + size
                ids, logprobs = rollout.response_ids[first:last], rollout.rollout_logprobs[first:last]
                found.append(Piece(row, rollout.prompt, ids, logprobs, last >= len(rollout)))
        yield found


def followed(follower: Follower, rollouts: Sequence[Rollout], size: int = 8) -> list[TokenScores]:
    found: dict[int, list[TokenScores]] = {}
    for block in pieces(rollouts, size):
        for piece, scores in zip(block, follower.read(block), strict=True):
            found.setdefault(piece.row, []).append(scores)
        follower.leave([piece.row for piece in block if piece.ended])
    return [joined_scores(found[row]) for row in range(len(rollouts))]


def same(found: Sequence[TokenScores], expected: Sequence[TokenScores], tolerance: float = TOLERANCE) -> None:
    for one, other in zip(found, expected, strict=True):
        for field in fields(TokenScores):
            ours, theirs = getattr(one, field.name), getattr(other, field.name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance)


def all_tokens(rollouts: Sequence[Rollout]) -> int:
    """Tokens that must be read: all but the last of each."""
    return sum(len(rollout.prompt.token_ids) + len(rollout) - 1 for rollout in rollouts)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_blocks_are_those_of_whole_answers(kind: str) -> None:
    model, rollouts = make_model(kind), answers()
    with served(model, half_states=False) as server:
        local = LocalScorer(model, vocab_size=21)
        for wanted in (NOTHING, Wanted(entropy=True, top_k=3), Wanted(states=True)):
            before = server.model.growing.read
            same(followed(asking(server.url).follow(wanted), rollouts), local.look(rollouts, wanted))
            assert server.model.growing.read - before == all_tokens(rollouts)  # each token once
        assert server.model.growing.kept == 0  # all answers have ended


def test_what_was_read_is_continued_by_its_ids_alone() -> None:
    """Another client, a longer wait between two looks and an answer that was lost on its way change nothing but the cost."""
    model, rollouts = make_model("qwen3"), answers(4)
    expected = LocalScorer(model, vocab_size=21).look(rollouts)
    with served(model) as server:
        growing = server.model.growing
        blocks = list(pieces(rollouts))
        follower = asking(server.url).follow()
        follower.read(blocks[0])
        assert growing.continued == 0
        again = asking(server.url).follow()
        again.read(blocks[0])  # equal sequences of two clients
        assert growing.continued == 0
        longer = [
            Piece(one.row, one.prompt, torch.cat([one.ids, two.ids]), one.logprobs)
            for one, two in zip(*blocks[1:3], strict=True)
        ]
        found = follower.read(longer)
        assert growing.continued == len(rollouts)
        same(found, [TokenScores(one.logprobs[8:24]) for one in expected])
        same(again.read(blocks[1]), [TokenScores(one.logprobs[8:16]) for one in expected])
        assert growing.continued == 2 * len(rollouts)
        lost = asking(server.url).follow()
        lost.read(longer_than(rollouts, 8))
        before = growing.continued
        same(asking(server.url).follow().read(longer_than(rollouts, 8)), [TokenScores(one.logprobs[:8]) for one in expected])
        assert growing.continued == before  # they begin anew: what is kept is as long as they are already


def longer_than(rollouts: Sequence[Rollout], size: int) -> list[Piece]:
    return [Piece(row, one.prompt, one.response_ids[:size], torch.zeros(size)) for row, one in enumerate(rollouts)]


@pytest.mark.parametrize("room", [0, 100, 300])
def test_the_cache_is_bounded(room: int) -> None:
    """What went for others is read again."""
    model, rollouts = make_model("qwen3"), answers()
    with served(model, cache_bytes=room * LocalScorer(model).follow().token_bytes) as server:
        growing = server.model.growing
        assert growing.room == room
        follower, found = asking(server.url).follow(), []
        for block in pieces(rollouts):
            found.append(dict(zip([piece.row for piece in block], follower.read(block), strict=True)))
            assert growing.kept <= room
        parts = [joined_scores([part[row] for part in found if row in part]) for row in range(len(rollouts))]
        same(parts, LocalScorer(model, vocab_size=21).look(rollouts))
        assert growing.read > all_tokens(rollouts)
        assert (growing.continued > 0) == (room > 0)


def test_many_clients_at_once() -> None:
    model = make_model("qwen3")
    with served(model) as server, ThreadPoolExecutor(6) as pool:
        sets = [answers(3 + number % 3, tokens=12 + number) for number in range(6)]
        found = list(pool.map(lambda rollouts: followed(asking(server.url).follow(), rollouts, 5), sets))
        for scores, rollouts in zip(found, sets, strict=True):
            same(scores, LocalScorer(model, vocab_size=21).look(rollouts))
        assert server.model.growing.kept == 0


def test_a_server_that_was_started_again_has_forgotten_everything() -> None:
    model, rollouts = make_model("qwen3"), answers(4)
    with served(model) as server:
        follower, found = asking(server.url).follow(), []
        for number, block in enumerate(pieces(rollouts)):
            if number == 2:
                server.model = ServingModel(model, vocab_size=21, max_length=256)
            found.append(dict(zip([piece.row for piece in block], follower.read(block), strict=True)))
        parts = [joined_scores([part[row] for part in found if row in part]) for row in range(len(rollouts))]
        same(parts, LocalScorer(model, vocab_size=21).look(rollouts))


def test_a_fault_leaves_nothing_half_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rollouts = make_model("qwen3"), answers(4)
    with served(model) as server:
        growing = server.model.growing
        blocks = list(pieces(rollouts))
        follower = asking(server.url, patience=0.1).follow()
        follower.read(blocks[0])
        with monkeypatch.context() as patch:
            patch.setattr(growing._follower._reader, "scores", lambda *_: 1 / 0)
            with pytest.raises(TeacherError, match="ZeroDivisionError"):
                follower.read(blocks[1])
        assert growing.kept == 0
        expected = LocalScorer(model, vocab_size=21).look(rollouts)
        same(follower.read(blocks[1]), [TokenScores(one.logprobs[8:16]) for one in expected])


def test_each_answer_stays_with_its_replica() -> None:
    """Prompts take turns; a replica that is gone hands its answers to the others, which read them anew."""
    model, rollouts = make_model("qwen3"), answers()
    expected = LocalScorer(model, vocab_size=21).look(rollouts)
    with served(model) as first, served(model) as second:
        same(followed(asking(first.url, second.url).follow(), rollouts), expected)
        assert first.model.growing.read + second.model.growing.read == all_tokens(rollouts)
        assert first.model.growing.read > 0
        assert second.model.growing.read > 0
        follower, blocks = asking(first.url, second.url).follow(), list(pieces(rollouts))
        follower.read(blocks[0])
        gone = _closed(first)
        same(follower.read(blocks[1]), [TokenScores(one.logprobs[8:16]) for one in expected])
        assert gone


def _closed(server: TeacherServer) -> bool:
    """Whoever asks it from now on gets a 500."""
    server.model = None  # type: ignore[assignment]
    return True


@pytest.mark.parametrize("dialect", ["vllm", "iwopd"])
def test_servers_that_keep_nothing_are_right_too(dialect: str) -> None:
    """Of vLLM's dialect: everything is read again at every look."""
    model, rollouts = make_model("qwen3"), answers(3)
    with served(model) as server:
        found = followed(asking(server.url, dialect=dialect).follow(), rollouts)
        same(found, LocalScorer(model, vocab_size=21).look(rollouts))
        assert (server.model.growing.read > 0) == (dialect == "iwopd")


def test_questions_that_make_no_sense_are_refused() -> None:
    rollouts = answers(2)
    with served(make_model("qwen3")) as server:
        chosen = torch.cat(some_ids(rollouts)).int()
        ids = torch.cat([torch.tensor([*one.prompt.token_ids, *one.response_ids.tolist()]) for one in rollouts]).int()
        lengths = torch.tensor([len(one.prompt.token_ids) + len(one) for one in rollouts]).int()
        starts = torch.tensor([len(one.prompt.token_ids) for one in rollouts]).int()
        asked = {"ids": ids, "lengths": lengths, "starts": starts}
        for more, words in (
            ({"more": torch.ones(2).int(), "chosen": chosen}, "whole sequences only"),
            ({"more": torch.ones(3).int()}, "one for each sequence"),
            ({"more": torch.ones(2)}, "must be int32"),
        ):
            request = urllib.request.Request(server.url + wire.SCORES, wire.pack({**asked, **more}, {"model": "m"}))
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request)
            assert refused.value.code == 400
            assert words in refused.value.read().decode()
