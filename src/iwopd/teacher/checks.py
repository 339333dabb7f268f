"""Checks of a teacher server before training: the right model, all ids, enough context, scores that belong to their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.config.distributions import in_words
from iwopd.http_clients import parse
from iwopd.teacher.errors import TeacherError, TeacherGoneError
from iwopd.teacher.questions import Dialect, TokenSequence

TOLERANCE = 0.5
"""Largest difference of two log-probs of one token: half-precision servers compute them with different kernels."""


class AskedServer(Protocol):
    """What is asked of `server.ServerScorer`."""

    model: str | None
    room: int | None

    @property
    def dialect(self) -> Dialect: ...
    def ask(self, path: str, body: Any = None, read: Callable[[bytes], Any] = parse) -> dict[str, Any]: ...
    def look_at(self, sequences: Sequence[TokenSequence], wanted: Wanted = NOTHING) -> list[TokenScores]: ...


def check_server(
    scorer: AskedServer, *, vocab_size: int, longest: int, examples: Sequence[Sequence[int]], wanted: Wanted = NOTHING
) -> None:
    """Check every server that responds; `longest` is the longest prompt plus answer, `examples` are prompts.

    This cannot check that the server's ids mean the same as ours: `iwopd doctor` compares the tokenizers, if the
    model's files are available.
    """
    _check_model(scorer, vocab_size, longest)
    _check_largest_id(scorer, vocab_size)
    for ids in examples:
        _check_alignment(scorer, ids)
    if wanted != NOTHING:
        _check_wanted(scorer, wanted, vocab_size)


def _check_model(scorer: AskedServer, vocab_size: int, longest: int) -> None:
    try:
        answers = scorer.ask("/v1/models")
    except TeacherError as error:
        if "HTTP 404" in str(error):
            return  # it has no such endpoint
        raise
    names: dict[str, str] = {}
    for url, answer in answers.items():
        cards = answer.get("data") if isinstance(answer, dict) else None
        served = {str(card["id"]): card for card in cards or [] if isinstance(card, dict) and "id" in card}
        if not served:
            continue
        names[url] = name = _choose(scorer, url, served)
        room, ids = served[name].get("max_model_len"), served[name].get("vocab_size")
        if isinstance(room, int):
            scorer.room = room if scorer.room is None else min(scorer.room, room)
        if isinstance(room, int) and room < longest + 1:
            raise TeacherError(
                f"the teacher at {url} takes {room} tokens, but a prompt with its answer can have {longest} and the server "
                "adds one: serve it with a longer context (vLLM: --max-model-len), or lower rollout.max_tokens"
            )
        if isinstance(ids, int) and ids < vocab_size:
            raise TeacherError(
                f"the teacher at {url} has {ids} ids, the tokenizer that it is asked with {vocab_size}: choose a pair of one "
                "vocabulary, or name the teacher's own with teacher.tokenizer"
            )
    if len(set(names.values())) > 1:
        raise TeacherError(f"the replicas of one teacher serve different models: {names}")
    scorer.model = next(iter(names.values()), scorer.model)


def _choose(scorer: AskedServer, url: str, served: dict[str, Any]) -> str:
    wanted, names = scorer.model, ", ".join(sorted(served))
    if wanted in served:
        return wanted
    if wanted:
        raise TeacherError(f"the teacher at {url} serves {names}, not {wanted!r}: say with teacher.name which it is")
    if len(served) > 1:
        raise TeacherError(f"the teacher at {url} serves several models: choose with teacher.name one of {names}")
    return next(iter(served))


def _check_largest_id(scorer: AskedServer, vocab_size: int) -> None:
    """Servers reject ids that they do not have."""
    last = vocab_size - 1
    try:
        scorer.look_at([TokenSequence((0, last), 1)])
    except TeacherError as error:
        raise type(error)(f"the largest id of the tokenizer that it is asked with, {last}, cannot be scored: {error}") from None


def _check_alignment(scorer: AskedServer, ids: Sequence[int]) -> None:
    """Let the server sample a token, then score it: both log-probs must agree."""
    dialect = scorer.dialect
    for url, answer in scorer.ask(dialect.drawing_path, dialect.drawing(scorer.model, ids)).items():
        drawn = dialect.drawn(answer)
        sequence = TokenSequence((*ids, drawn.id), len(ids))
        again = scorer.ask(dialect.path, dialect.scoring(scorer.model, [sequence]), dialect.parse)
        if url not in again:
            continue  # it has become unreachable
        score = float(dialect.scores(again[url], [sequence])[0].logprobs)
        if abs(score - drawn.logprob) > TOLERANCE:
            raise TeacherError(
                f"the teacher at {url} drew id {drawn.id} with log-prob {drawn.logprob:.3f}, and scores it with {score:.3f}: "
                "its scores are shifted by a token, or taken at another temperature"
            )


def _check_wanted(scorer: AskedServer, wanted: Wanted, vocab_size: int) -> None:
    """Every server must give what training will ask of it."""
    dialect, last = scorer.dialect, vocab_size - 1
    sequence = TokenSequence((0, last), 1, torch.tensor([[0, last]]) if wanted.chosen else None)
    try:
        scorer.look_at([sequence], wanted)
        for answer in scorer.ask(dialect.path, dialect.scoring(scorer.model, [sequence], wanted), dialect.parse).values():
            dialect.scores(answer, [sequence], wanted)
    except TeacherGoneError:
        raise
    except TeacherError as error:
        asked = in_words(wanted.names) + (f", k = {wanted.top_k}" if wanted.top_k else "")
        raise TeacherError(f"the teacher does not give what the method asks for ({asked}): {error}. {dialect.limits}") from None
