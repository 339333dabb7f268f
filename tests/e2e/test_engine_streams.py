"""Answers that are stopped while an engine of requests writes them, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from iwopd.algo.horizons import next_look
from iwopd.rollout.connection import ServerError
from iwopd.rollout.engine import Student
from iwopd.rollout.requests import RequestSampler
from iwopd.rollout.sampler import UNLIMITED
from iwopd.rollout.sampling import SamplingError, SamplingSettings
from iwopd.rollout.server import ServerEngine
from iwopd.rollout.settings import ServerSettings
from iwopd.types import Piece, Prompt, Rollout
from models import make_model
from rollout_server import RolloutServer, serving
from waiting import wait_until

PROMPTS = [Prompt(f"p{number}", (2, 3 + number, 5)) for number in range(6)]
BLOCK = 4
SETTINGS = SamplingSettings(24, stop_ids=(1,))


def divisible(ids: Sequence[int]) -> bool:
    """A rule that stops some answers."""
    return sum(ids) % 3 == 0


@dataclass
class Watch:
    """Checks what it is shown, and stops answers by a rule."""

    stops: Callable[[Sequence[int]], bool] = divisible
    before: Callable[[Sequence[Piece]], None] = lambda pieces: None
    room: int = UNLIMITED
    seen: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    looks: list[int] = field(default_factory=list)
    """Pieces of each look."""
    prompts: Sequence[Prompt] = tuple(PROMPTS)
    _looking: bool = False

    def next_look(self, length: int) -> int:
        return next_look(length, BLOCK)

    def look(self, pieces: Sequence[Piece]) -> list[bool]:
        assert not self._looking, "two looks at once"
        self._looking = True
        self.before(pieces)
        self.looks.append(len(pieces))
        found = []
        for piece in pieces:
            assert piece.row not in self.ended
            ids = self.seen.setdefault(piece.row, [])
            look = self.next_look(len(ids))
            ids += piece.ids.tolist()
            assert len(piece.logprobs) == len(piece.ids) > 0
            assert len(ids) == look or (piece.ended and len(ids) < look)
            assert piece.prompt == self.prompts[piece.row]
            stops = self.stops(ids)
            if stops or piece.ended:
                self.ended.add(piece.row)
            found.append(stops)
        assert len({piece.row for piece in pieces}) == len(pieces)
        self._looking = False
        return found


@pytest.fixture
def server() -> RolloutServer:
    return RolloutServer(make_model("qwen3"))


@pytest.fixture
def url(server: RolloutServer) -> Iterator[str]:
    with serving(server) as address:
        yield address


def sampler(url: str, **settings: Any) -> RequestSampler:
    def load() -> Any:
        raise AssertionError("the server has the model")

    student = Student(load, vocab_size=21, rows=21)
    return ServerEngine(student, ServerSettings(url=url, **settings)).sampler(SETTINGS)


def cut(rollouts: Sequence[Rollout], stops: Callable[[Sequence[int]], bool] = divisible) -> list[tuple[list[int], str]]:
    """Whole answers, cut where the rule stops them."""
    found = []
    for rollout in rollouts:
        ids, look = rollout.response_ids.tolist(), 0
        while (look := next_look(look, BLOCK)) < len(ids) and not stops(ids[:look]):
            pass
        found.append((ids[:look], "horizon") if look < len(ids) else (ids, rollout.stop_reason))
    return found


def told(rollouts: Sequence[Rollout]) -> list[tuple[list[int], str]]:
    return [(rollout.response_ids.tolist(), rollout.stop_reason) for rollout in rollouts]


def test_stopped_answers_are_whole_ones_cut(url: str, server: RolloutServer) -> None:
    writer = sampler(url)
    whole = writer.sample(PROMPTS, seed=0, step=1)
    watch, heard = Watch(), {}
    stopped = writer.sample(PROMPTS, seed=0, step=1, watcher=watch, finished=heard.__setitem__)
    assert told(stopped) == cut(whole)
    reasons = [rollout.stop_reason for rollout in stopped]
    assert len(set(reasons)) > 1, "the rule must stop some answers and not others"
    assert "horizon" in reasons
    assert [watch.seen[row] for row in range(len(PROMPTS))] == [rollout.response_ids.tolist() for rollout in stopped]
    assert heard == dict(enumerate(stopped))
    for one, other in zip(stopped, whole, strict=True):
        assert torch.equal(one.rollout_logprobs, other.rollout_logprobs[: len(one)])
    few = writer.sample(PROMPTS[3:5], seed=0, step=1, watcher=Watch(prompts=PROMPTS[3:5]))
    assert told(few) == told(stopped[3:5])


def test_a_stopped_answer_is_aborted_at_the_server(url: str, server: RolloutServer) -> None:
    server.token_seconds = 0.1
    writer = sampler(url)
    stopped = writer.sample(PROMPTS, seed=0, step=1, watcher=Watch(stops=lambda ids: True))
    assert {len(rollout) for rollout in stopped if rollout.stop_reason == "horizon"} == {BLOCK}
    wait_until(lambda: not server.under_way)
    count = sum(rollout.stop_reason == "horizon" for rollout in stopped)
    assert len(server.aborted) == count > 0
    assert max(server.aborted) < 20  # they would have been 24 tokens long
    assert 0 <= writer.overrun < 20 * count


def test_neither_side_waits(url: str, server: RolloutServer) -> None:
    """During a look that does not return, other answers are written, and the next look is at all pieces that came due."""
    server.token_seconds = 0.002
    slow = threading.Event()

    def once(pieces: Sequence[Piece]) -> None:
        if not slow.is_set():
            slow.set()
            while len(server.streams) < len(PROMPTS) or server.under_way:  # all answers are whole before it returns
                time.sleep(0.01)

    watch = Watch(stops=lambda ids: False, before=once)
    writer = sampler(url)
    rollouts = writer.sample(PROMPTS, seed=0, step=1, watcher=watch)
    assert told(rollouts) == told(writer.sample(PROMPTS, seed=0, step=1))
    assert watch.looks[1] >= len(PROMPTS) - watch.looks[0]


def test_what_the_watcher_fails_with_reaches_the_caller(url: str, server: RolloutServer) -> None:
    server.token_seconds = 0.1

    def fail(pieces: Sequence[Piece]) -> None:
        raise ArithmeticError("the teacher is gone")

    with pytest.raises(ArithmeticError, match="the teacher is gone"):
        sampler(url).sample(PROMPTS, seed=0, step=1, watcher=Watch(before=fail))
    wait_until(lambda: not server.under_way)  # on a busy machine an answer may end by itself before it is aborted
    assert server.aborted
    with pytest.raises(ZeroDivisionError):
        sampler(url).sample(PROMPTS, seed=0, step=1, watcher=Watch(), finished=lambda place, rollout: 1 / 0)


def test_requests_and_room_are_bounded(url: str, server: RolloutServer) -> None:
    server.token_seconds = 0.001
    whole = told(sampler(url).sample(PROMPTS, seed=0, step=1))
    for in_flight, room, most in ((3, UNLIMITED, 3), (64, 2 * 27, 2), (64, 1, 1)):  # one at least
        server.most_under_way = 0
        watch = Watch(stops=lambda ids: False, room=room)
        assert told(sampler(url, max_in_flight=in_flight).sample(PROMPTS, seed=0, step=1, watcher=watch)) == whole
        assert server.most_under_way == most


def test_an_answer_that_breaks_off_is_continued(url: str, server: RolloutServer) -> None:
    server.breaks = [0, 3]
    (rollout,) = sampler(url).sample(PROMPTS[:1], seed=0, step=1, watcher=Watch(stops=lambda ids: False))
    first, again, rest = server.streams
    assert first == again
    assert rest["prompt"] == [*first["prompt"], *rollout.response_ids[:3].tolist()]
    assert rest["seed"] != first["seed"]
    assert rest["max_tokens"] == 21
    assert rollout.stop_reason == "eos" or len(rollout) == 24


def test_a_server_that_is_away_or_talks_nonsense(url: str, server: RolloutServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.breaks = [0] * 100
    with pytest.raises(ServerError, match=r"away for 0\.5 s \(engine\.server\.patience\): an answer broke off"):
        sampler(url, patience=0.5).sample(PROMPTS[:2], seed=0, step=1, watcher=Watch())
    server.breaks = []

    def answers(choice: dict[str, Any]) -> None:
        monkeypatch.setattr(server, "_complete", lambda body: {"prompt_token_ids": body["prompt"], **choice})

    answers({"token_ids": [4, 99], "logprobs": {"token_logprobs": [-1.0, -1.0]}, "finish_reason": "length"})
    with pytest.raises(SamplingError, match="has id 99"):
        sampler(url).sample(PROMPTS[:2], seed=0, step=1, watcher=Watch())
    answers({"token_ids": [4, 5], "logprobs": {"token_logprobs": [-1.0, -1.0]}, "finish_reason": "stop"})
    with pytest.raises(SamplingError, match="ended after 2 of 24 tokens with id 5 and reason 'stop'"):
        sampler(url).sample(PROMPTS[:2], seed=0, step=1, watcher=Watch())
    answers({"token_ids": [4], "prompt_token_ids": [9], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"})
    with pytest.raises(ServerError, match="read other ids than those of the prompt"):
        sampler(url).sample(PROMPTS[:2], seed=0, step=1, watcher=Watch())
    monkeypatch.setattr(server, "events", lambda body: iter([b"data: {}\n\n"]))
    with pytest.raises(ServerError, match=r"streams what is no answer: \{\}"):
        sampler(url).sample(PROMPTS[:2], seed=0, step=1, watcher=Watch())
