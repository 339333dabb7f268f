"""A teacher with another tokenizer: it reads the student's text in ids of its own, after a prompt of its own.

The answer is cut where both tokenisations have a boundary (`algo.spans`). The teacher's log-prob of a span is the sum over its
own tokens. Any scorer can be inside: a model here, or servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from iwopd.algo.spans import UNSCORED, cut_spans
from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.retokenizing import Retokenizer, Unit
from iwopd.teacher.scorer import HasModel, Scorer, ScoringPath
from iwopd.types import Prompt, Rollout
from iwopd.vocabulary import Vocabulary, answer_end, special_ids

LEAST_KNOWN = 0.5
"""Of the prompts' text, so much must be representable."""
MEASURED = 64
"""Prompts on which two tokenizers are compared."""


@dataclass(frozen=True)
class Reading:
    """An answer as the teacher reads it."""

    ids: tuple[int, ...]
    student: tuple[int, ...]
    """The span of each token of the student; `UNSCORED`: the teacher says nothing of it."""
    teacher: tuple[int, ...]
    """The span of each of `ids`; `UNSCORED`: it is context only."""
    bytes: int
    lost: int
    """Bytes that the teacher's tokenizer cannot write."""

    def spread(self, logprobs: Tensor) -> TokenScores:
        """The teacher's log-probs of `ids` as scores of the student's tokens: a span's sum on its last token."""
        last = {span: place for place, span in enumerate(self.student) if span != UNSCORED}
        sums = dict.fromkeys(last, 0.0)
        for span, value in zip(self.teacher, logprobs.double().tolist(), strict=True):
            if span in sums:
                sums[span] += value
        values = torch.zeros(len(self.student), dtype=logprobs.dtype)
        if last:
            values[list(last.values())] = torch.tensor([sums[span] for span in last], dtype=logprobs.dtype)
        return TokenScores(values, spans=torch.tensor(self.student, dtype=torch.long))


@dataclass(frozen=True)
class Coverage:
    """How the tokens of two tokenizers lie over one another, on some texts."""

    tokens: int
    """Of the student."""
    teacher_tokens: int
    spans: int
    alone: int
    """The student's tokens that are a span by themselves."""
    unscored: int
    """The student's tokens, special ones included, of which the teacher says nothing."""
    bytes: int
    lost: int
    """Bytes that the teacher's tokenizer cannot write."""

    @property
    def tokens_per_span(self) -> float:
        return (self.tokens - self.unscored) / max(1, self.spans)

    @property
    def alone_share(self) -> float:
        return self.alone / max(1, self.tokens)

    @property
    def lost_share(self) -> float:
        return self.lost / max(1, self.bytes)

    @property
    def ratio(self) -> float:
        """Tokens of the teacher for one of the student."""
        return self.teacher_tokens / max(1, self.tokens)


class Reader:
    """Rollouts of a student as a teacher with another tokenizer reads them."""

    def __init__(
        self,
        student: Any,
        teacher: Any,
        see: Callable[[Prompt], Prompt],
        *,
        leads: tuple[str, str] = ("", ""),
        end: int | None = None,
        name: str = "teacher",
    ) -> None:
        """Two tokenizers; `see` makes the teacher's prompt, with its text and ids, of the student's.

        `leads`: with what white space the answers of each begin by its chat template (`data.chat.Chat.lead`); `end`: with
        which id the teacher's answers end, if not as its own template says.
        """
        self.student, self.see, self.name = student, see, name
        self.leads = leads[0].encode(), leads[1].encode()
        self.vocabulary = Vocabulary.of(student)
        self.writer = Retokenizer(teacher)
        self.end = answer_end(teacher) if end is None else end
        self.ids = len(teacher)
        """Of the teacher's tokenizer."""
        self.room: int | None = None
        """Tokens that the teacher can read at once, if it is known. Of what lies beyond it says nothing."""

    def read(self, rollout: Rollout) -> tuple[Prompt, Reading]:
        """The teacher's prompt, and the answer."""
        prompt = self.see(rollout.prompt)
        ids = rollout.response_ids.tolist()
        room = None if self.room is None else max(0, self.room - len(prompt.token_ids) - 1)
        return prompt, self.align(ids, ended=rollout.stop_reason == "eos", after=rollout.prompt, before=prompt, room=room)

    def rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """As the teacher's model gets them: its own prompts and ids. Those without a text to read are left out."""
        read = ((rollout, *self.read(rollout)) for rollout in self.readable(rollouts))
        return [_as_rollout(*one) for one in read if one[2].ids]

    def readable(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Those whose prompts have a text: ids alone mean nothing to the teacher."""
        return [rollout for rollout in rollouts if rollout.prompt.text or "messages" in rollout.prompt.metadata]

    def align(
        self,
        ids: Sequence[int],
        *,
        ended: bool = False,
        after: Prompt | None = None,
        before: Prompt | None = None,
        room: int | None = None,
    ) -> Reading:
        """Ids of the student as the teacher reads them, behind the student's prompt `after` and the teacher's `before`.

        `ended`: the last one ends the answer, and becomes the teacher's own end. Other special tokens have no text: nothing is
        said of them, and the teacher reads the text without them.
        """
        written = ids[:-1] if ended else ids
        pieces = self._pieces(written)
        data = b"".join(piece for piece in pieces if piece is not None)
        front = self._front(after, data)
        natural = before is not None and len(data) > front and data.startswith(self.leads[0], front)
        own, theirs_lead = self.leads if natural else (b"", b"")
        front += len(own)
        data = data[front:]
        lengths = []
        for piece in pieces:
            if piece is not None:
                hidden = min(front, len(piece))
                lengths.append(len(piece) - hidden)
                front -= hidden
        units = _without(len(theirs_lead), self.writer.units(theirs_lead + data, None if before is None else before.text))
        ours, theirs = cut_spans(lengths, [unit.length for unit in units])
        teacher_ids = [i for unit in units for i in unit.ids]
        of_ids = [span for unit, span in zip(units, theirs, strict=True) for _ in unit.ids]
        spans = iter(ours)
        of_tokens = [UNSCORED if piece is None else next(spans) for piece in pieces]
        unknown = {span for unit, span in zip(units, theirs, strict=True) if not unit.exact}
        if ended:
            of_tokens.append(UNSCORED if self.end is None else max([*ours, *theirs], default=-1) + 1)
            if self.end is not None:
                teacher_ids.append(self.end)
                of_ids.append(of_tokens[-1])
        if room is not None:
            unknown.update(of_ids[room:])
            teacher_ids, of_ids = teacher_ids[:room], of_ids[:room]
        numbers = {span: place for place, span in enumerate(sorted((set(of_tokens) & set(of_ids)) - unknown - {UNSCORED}))}
        return Reading(
            tuple(teacher_ids),
            tuple(numbers.get(span, UNSCORED) for span in of_tokens),
            tuple(numbers.get(span, UNSCORED) for span in of_ids),
            len(data),
            sum(unit.length for unit in units if not unit.exact),
        )

    def _pieces(self, ids: Sequence[int]) -> list[bytes | None]:
        """What each id writes; None: nothing, it is special. A space that the tokenizer puts after added tokens is no text."""
        found = [self.vocabulary.pieces.get(i) for i in ids]
        for place in range(1, len(found)) if self._spaces_after_added else ():
            piece = found[place]
            if ids[place - 1] in self._added and piece is not None and piece[:1] == b" ":
                found[place] = piece[1:]
        return found

    @cached_property
    def _spaces_after_added(self) -> bool:
        name = next((str(token) for token in getattr(self.student, "added_tokens_decoder", {}).values()), None)
        if name is None or not self.vocabulary.marks_spaces:
            return False
        rest = self._student_ids(name + "a")[1:]
        return b"".join(self.vocabulary.pieces.get(i, b"") for i in rest) == b" a"

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(map(int, getattr(self.student, "added_tokens_decoder", {})))

    def _front(self, prompt: Prompt | None, data: bytes) -> int:
        """Bytes at the beginning that only the student's tokenizer sees: a space that it puts before every text."""
        if not (self.vocabulary.marks_spaces and data[:1] == b" "):
            return 0
        before = prompt.text if prompt is not None else ""
        known = self._student_ids(before) if before else []
        longer = self._student_ids(before + "a")
        written = b"".join(self.vocabulary.pieces.get(i, b"") for i in longer[len(known) :])
        return int(longer[: len(known)] == known and written == b" a")

    def _student_ids(self, text: str) -> list[int]:
        return [int(i) for i in self.student(text, add_special_tokens=False)["input_ids"]]

    def measure(self, rollouts: Sequence[Rollout]) -> Coverage:
        """How both tokenizers lie over one another on these answers."""
        return _coverage(self.read(rollout)[1] for rollout in rollouts)

    def measure_texts(self, texts: Sequence[str]) -> Coverage:
        """The same on texts by themselves."""
        return _coverage(self.align(self._student_ids(text)) for text in texts)

    def check(self, prompts: Sequence[Prompt]) -> Coverage:
        """Refuse tokenizers whose ids cannot be told in bytes, on the text of prompts."""
        some = [prompt for prompt in prompts if prompt.text][:MEASURED]
        wrong = sum(not self._writes(prompt) for prompt in some)
        if 2 * wrong > len(some):
            raise TeacherError(
                f"the bytes behind the student's ids are not those of its text (in {wrong} of {len(some)} prompts): its "
                "tokenizer changes texts, or is of a kind that is not known here, so its answers cannot be read with another "
                "tokenizer. Choose a teacher of the student's family"
            )
        found = _coverage(self.align(prompt.token_ids, after=None) for prompt in prompts[:MEASURED])
        if found.bytes and found.lost_share > 1 - LEAST_KNOWN:
            raise TeacherError(
                f"the tokenizer of the {self.name} cannot write {found.lost_share:.0%} of the prompts' text (it changes or "
                "does not know these characters), so it could say nothing of such answers: choose another teacher, or name its "
                f"right tokenizer with {self.name}.tokenizer"
            )
        return found

    def _writes(self, prompt: Prompt) -> bool:
        names = getattr(self.student, "added_tokens_decoder", {})
        special = special_ids(self.student)
        pieces = [str(names.get(i, "")).encode() if i in special else self.vocabulary.pieces[i] for i in prompt.token_ids]
        return b"".join(pieces).lstrip(b" ") == prompt.text.encode().lstrip(b" ")


class ForeignScorer(Scorer):
    """Scores what a `Reader` reads."""

    def __init__(self, scorer: Scorer, reader: Reader) -> None:
        self.scorer, self.reader = scorer, reader
        self.here = scorer.here

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        return [scores.logprobs for scores in self.look(rollouts)]

    def look(
        self, rollouts: Sequence[Rollout], wanted: Wanted = NOTHING, chosen: Sequence[Tensor] | None = None
    ) -> list[TokenScores]:
        if wanted != NOTHING:
            raise TypeError(f"a teacher with another tokenizer gives log-probs only, not {', '.join(sorted(wanted.names))}")
        read = [self.reader.read(rollout) for rollout in rollouts]
        rows = [row for row, (_, reading) in enumerate(read) if reading.ids]
        found = self.scorer.score([_as_rollout(rollouts[row], *read[row]) for row in rows])
        values = dict(zip(rows, found, strict=True))
        return [reading.spread(values.get(row, torch.zeros(0))) for row, (_, reading) in enumerate(read)]

    def local(self, name: str) -> dict[str, HasModel]:
        return self.scorer.local(name)

    def paths(self, name: str) -> Iterator[ScoringPath]:
        """Those of the scorer inside, which read what it reads."""
        yield from (replace(path, reader=self.reader) for path in self.scorer.paths(name))

    def try_out(self, prompts: Sequence[Prompt], *, vocab_size: int, max_tokens: int, wanted: Wanted = NOTHING) -> None:
        """The teacher's template must fit every prompt, and its context the longest answer in its own tokens, as far as the
        prompts tell how many these are.
        """
        coverage = self.reader.check(prompts)
        seen = [self.reader.see(prompt) for prompt in prompts]
        most = math.ceil(max_tokens * max(1.0, coverage.ratio))
        longest = max((len(prompt.token_ids) for prompt in seen), default=0)
        if self.reader.room is not None and longest + most + 1 > self.reader.room:
            raise TeacherError(
                f"the {self.reader.name} has room for {self.reader.room} tokens, but its longest prompt has {longest} and an "
                f"answer of {max_tokens} tokens of the student about {most} of its own: lower rollout.max_tokens, or choose a "
                "teacher with a longer context"
            )
        self.scorer.try_out(seen, vocab_size=self.reader.ids, max_tokens=most)
        self.reader.room = self.reader.room or getattr(self.scorer, "room", None)


def _without(front: int, units: list[Unit]) -> list[Unit]:
    """The same with so many bytes less at the beginning: they are read, but are no part of what was written."""
    found = []
    for unit in units:
        hidden = min(front, unit.length)
        found.append(replace(unit, length=unit.length - hidden))
        front -= hidden
    return found


def _as_rollout(rollout: Rollout, prompt: Prompt, reading: Reading) -> Rollout:
    ids = torch.tensor(reading.ids, dtype=torch.long)
    return replace(
        rollout,
        prompt=prompt,
        response_ids=ids,
        rollout_logprobs=torch.zeros(len(ids)),
        stop_reason=rollout.stop_reason if len(ids) else "length",
    )


def _coverage(readings: Iterator[Reading]) -> Coverage:
    tokens = teacher_tokens = spans = alone = unscored = total = lost = 0
    for one in readings:
        sizes: dict[int, int] = {}
        for span in one.student:
            sizes[span] = sizes.get(span, 0) + 1
        unscored += sizes.pop(UNSCORED, 0)
        tokens += len(one.student)
        teacher_tokens += len(one.ids)
        spans += len(sizes)
        alone += sum(size == 1 for size in sizes.values())
        total, lost = total + one.bytes, lost + one.lost
    return Coverage(tokens, teacher_tokens, spans, alone, unscored, total, lost)
