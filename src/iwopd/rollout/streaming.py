"""Answers of an engine that takes requests, read while they are written, and called off where a watcher stops them.

Each answer is one request with one seed, as without a watcher. It writes on while its last block is looked at; where it stops,
the request is aborted, and what was written past that place is dropped. So its tokens are those of the whole answer, cut; no
token is computed twice; and neither side waits for the other: the watcher looks in a thread of its own, each time at all pieces
that are due. The price is what stopped answers write during their last look (`Sampler.overrun`).

Requests that are continued block by block would not pay it. But their tokens would not be those of whole answers (each block
needs a seed of its own, because a repeated one repeats the noise), they would wait during every look, and they would read again
what the engine's prefix cache does not keep: it keeps whole pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from iwopd.background import in_background
from iwopd.rollout.sampler import Watcher
from iwopd.types import Piece, Prompt


class Answer(NamedTuple):
    """What an engine wrote to one request, or the next part of it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    finish_reason: str | None


Part = tuple[int, Answer]
"""Number of a request, and what is new of its answer."""
Seen = list[tuple[Piece, bool]]
"""Pieces that were looked at, and whether their answers stop there."""
Inbox = SimpleQueue[Part | Seen | BaseException]
"""What the engine wrote, what the watcher said, and what either failed with."""


class Stream(ABC):
    """Requests under way in an engine. Parts of their answers go to an inbox."""

    @abstractmethod
    def start(self, number: int, request: dict[str, Any]) -> None:
        """One more request."""

    @abstractmethod
    def stop(self, number: int) -> None:
        """No more of this answer is wanted; it may have ended already."""

    @abstractmethod
    def advance(self) -> bool:
        """Write on in this thread. False: the engine writes elsewhere, by itself."""

    @abstractmethod
    def close(self) -> None:
        """Nothing stays under way."""


@dataclass
class Growing:
    """An answer that is being written."""

    prompt: Prompt
    sample: int
    limit: int
    request: dict[str, Any]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    looked_at: int = 0
    """Tokens that were looked at."""
    shown: int = 0
    """Tokens that were looked at or are being looked at."""

    @property
    def size(self) -> int:
        """Tokens that it may have together with its prompt."""
        return len(self.prompt.token_ids) + self.limit


class Writing:
    """All answers of one call, from the first request to the last look."""

    def __init__(
        self,
        answers: Sequence[Growing],
        watcher: Watcher,
        *,
        take: Callable[[Growing, Answer], None],
        done: Callable[[int, Growing], None],
    ) -> None:
        """`take` adds a part to an answer, or refuses it; `done` hears of answers, of which what was looked at counts."""
        self._answers, self._watcher, self._take, self._done = answers, watcher, take, done
        self._look_after = cache(watcher.next_look)
        self.inbox: Inbox = SimpleQueue()
        self.overrun = 0
        """Tokens that were written past the places where their answers stopped."""
        self._waiting = deque(range(len(answers)))
        self._under_way: set[int] = set()
        self._room = watcher.room
        self._due: SimpleQueue[list[Piece] | None] = SimpleQueue()

    def run(self, open_stream: Callable[[Inbox], Stream]) -> None:
        """Until every answer is done. Whatever fails, nothing stays under way in the engine."""
        stream = open_stream(self.inbox)
        in_background(self._look)
        try:
            while self._waiting or self._under_way:
                self._admit(stream)
                pieces: list[Piece] = []
                for event in self._events(stream):
                    if isinstance(event, BaseException):
                        raise event
                    pieces += self._judge(stream, event) if isinstance(event, list) else self._extend(*event)
                if pieces:
                    self._due.put(pieces)
        finally:
            self._due.put(None)
            stream.close()

    def _admit(self, stream: Stream) -> None:
        """As many as the watcher can keep in mind, one at least."""
        while self._waiting and (not self._under_way or self._answers[self._waiting[0]].size <= self._room):
            number = self._waiting.popleft()
            self._under_way.add(number)
            self._room -= self._answers[number].size
            stream.start(number, self._answers[number].request)

    def _events(self, stream: Stream) -> list[Part | Seen | BaseException]:
        """What has happened; waits for something to happen."""
        while self.inbox.empty() and self._may_write() and stream.advance():
            pass
        events = [self.inbox.get()]
        while not self.inbox.empty():
            events.append(self.inbox.get())
        return events

    def _may_write(self) -> bool:
        """Whether an answer is within reach of its next look; further ahead none is written on purpose."""
        found = (self._answers[number] for number in self._under_way)
        return any(not one.ended and len(one.token_ids) < self._look_after(one.shown) for one in found)

    def _extend(self, number: int, part: Answer) -> list[Piece]:
        if number not in self._under_way:  # it was stopped
            return []
        self._take(self._answers[number], part)
        return self._next_piece(number)

    def _judge(self, stream: Stream, seen: Seen) -> list[Piece]:
        pieces = []
        for piece, stops in seen:
            answer = self._answers[piece.row]
            answer.looked_at = answer.shown
            if not (stops or piece.ended):
                pieces += self._next_piece(piece.row)
                continue
            if not piece.ended:
                stream.stop(piece.row)
            self.overrun += len(answer.token_ids) - answer.looked_at
            self._under_way.remove(piece.row)
            self._room += answer.size
            self._done(piece.row, answer)
        return pieces

    def _next_piece(self, number: int) -> list[Piece]:
        """The piece that is due, if one is."""
        answer = self._answers[number]
        written, first = len(answer.token_ids), answer.looked_at
        look = self._look_after(first)
        if answer.shown > first or (written < look and not answer.ended):
            return []
        answer.shown = last = min(look, written)
        ids, logprobs = torch.tensor(answer.token_ids[first:last]), torch.tensor(answer.logprobs[first:last])
        return [Piece(number, answer.prompt, ids, logprobs, answer.ended and last == written)]

    def _look(self) -> None:
        """The watcher's thread."""
        try:
            while (pieces := self._due.get()) is not None:
                while not self._due.empty():
                    more = self._due.get()
                    if more is None:
                        return
                    pieces = pieces + more
                self.inbox.put(list(zip(pieces, self._watcher.look(pieces), strict=True)))
        except BaseException as error:
            self.inbox.put(error)
