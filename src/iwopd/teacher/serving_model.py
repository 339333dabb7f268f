"""A model that scores for many clients at once: all requests of a kind that wait when it is free become its next batch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from iwopd import devices
from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.lm import Sequences, default_head_precision
from iwopd.model_facts import output_rows
from iwopd.models import ModelError, brings_tokenizer, load_tokenizer
from iwopd.own_head import plain_logits
from iwopd.teacher import wire
from iwopd.teacher.kept_sequences import KeptSequences
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.questions import Drawn, TokenSequence
from iwopd.types import Prompt, Rollout

CACHE_SHARE = 0.5
"""Of an accelerator's memory that is free when the model is loaded: for the caches of answers that are followed."""
MOST_TOKENS = 2**18
"""Of one batch: no client waits longer than for so many."""


@dataclass
class _Job:
    sequences: list[TokenSequence]
    wanted: Wanted
    draw: bool
    abandoned: Callable[[], bool]
    """Whether nobody waits for it any more."""
    future: Future[Scored] = field(default_factory=Future)

    @property
    def kind(self) -> tuple[Wanted, int, bool]:
        """Jobs of one kind go through the model together."""
        chosen, grows = self.sequences[0].chosen, self.sequences[0].more is not None
        return self.wanted, 0 if chosen is None else chosen.shape[1], grows

    @property
    def tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)


@dataclass(frozen=True)
class Scored:
    """The answer to one request."""

    scores: list[TokenScores]
    """Of each sequence's tokens from `start` on."""
    drawn: list[Drawn]
    """One more token per sequence, where it was asked for."""


class ServingModel:
    """What a model says of token sequences at temperature 1, from one thread that owns it."""

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        max_length: int,
        token_budget: int | None = None,
        half_states: bool = True,
        cache_bytes: int | None = None,
    ) -> None:
        """`half_states`: hidden states of a model in float32 are sent in 16 bits (`wire.half_states`). `cache_bytes`: for keys
        and values of answers that clients follow; None: half of what is free on an accelerator, 2 GB on a CPU.
        """
        self.vocab_size, self.max_length, self.half_states = vocab_size, max_length, half_states
        precision = default_head_precision(model)
        self.scorer = LocalScorer(model, vocab_size=vocab_size, token_budget=token_budget, head_precision=precision)
        self.batches = self.dropped = 0
        # Models that do more to their logits than a product (soft caps) are found out before they score.
        ids = torch.randint(vocab_size, (min(32, max_length),), generator=torch.Generator().manual_seed(0))
        self.scorer.check_head(Sequences.build([ids[:1]], [ids[1:]]))
        follower, device = self.scorer.follow(), self.scorer.lm.device
        size = devices.cache_bytes(device, CACHE_SHARE) if cache_bytes is None else cache_bytes
        self.growing = KeptSequences(follower, size // follower.token_bytes)
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._held: _Job | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def score(
        self,
        sequences: list[TokenSequence],
        wanted: Wanted = NOTHING,
        *,
        draw: bool = False,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> Scored:
        """Wait for the scores; called from any thread. All sequences grow (`TokenSequence.more`), or none.

        A request that is abandoned before its turn is dropped, with a `ConnectionAbortedError`.
        """
        job = _Job(sequences, wanted, draw, abandoned)
        self._jobs.put(job)
        return job.future.result()

    @cached_property
    def matrix(self) -> tuple[wire.MatrixFacts, Tensor, Tensor | None]:
        """The rows of real ids of the output matrix [V, H], its bias [V], and what clients are told of them."""
        weight, bias = self.scorer.lm.head
        weight, bias = weight.detach()[: self.vocab_size], None if bias is None else bias.detach()[: self.vocab_size]
        dtype = next((name for name, one in wire.DTYPES.items() if one == weight.dtype), "float32")
        weight, bias = weight.to(wire.DTYPES[dtype]), None if bias is None else bias.to(wire.DTYPES[dtype])
        shape = (int(weight.shape[0]), int(weight.shape[1]))
        precision = self.scorer.lm.head_precision
        return wire.MatrixFacts(shape, dtype, bias is not None, precision, wire.digest(weight, bias)), weight, bias

    def _work(self) -> None:
        while True:
            jobs = self._batch()
            self.batches += 1
            try:
                found = iter(self._look(jobs))
                for job in jobs:
                    scores = [next(found) for _ in job.sequences]
                    job.future.set_result(Scored(scores, [self._draw(one) for one in job.sequences] if job.draw else []))
            except Exception as error:  # each client is told; the thread lives on
                for job in jobs:
                    if not job.future.done():
                        job.future.set_exception(error)

    def _batch(self) -> list[_Job]:
        """What waits, up to a limit; the first that is of another kind begins the next batch."""
        first = self._held or self._jobs.get()
        while self._is_dropped(first):
            first = self._jobs.get()
        jobs = [first]
        self._held = None
        room = MOST_TOKENS if not jobs[0].wanted.states else MOST_TOKENS // 16  # their states wait in memory
        while sum(job.tokens for job in jobs) < room and not self._jobs.empty():
            job = self._jobs.get()
            if self._is_dropped(job):
                continue
            if job.kind != jobs[0].kind:
                self._held = job
                break
            jobs.append(job)
        return jobs

    def _is_dropped(self, job: _Job) -> bool:
        """Whether nobody waits for a job any more; it is not looked at then."""
        if not job.abandoned():
            return False
        self.dropped += 1
        job.future.set_exception(ConnectionAbortedError("the client has left"))
        return True

    def _look(self, jobs: list[_Job]) -> list[TokenScores]:
        sequences = [sequence for job in jobs for sequence in job.sequences]
        if sequences[0].more is not None:
            return self.growing.scores(sequences, jobs[0].wanted)
        chosen = [sequence.chosen for sequence in sequences if sequence.chosen is not None]
        return self.scorer.look([_rollout(one) for one in sequences], jobs[0].wanted, chosen or None)

    @torch.no_grad()
    def _draw(self, sequence: TokenSequence) -> Drawn:
        """One more token at temperature 1, with its log-prob: for clients that check whether scores belong to their tokens."""
        lm = self.scorer.lm
        read = torch.tensor(sequence.ids, device=lm.device)
        logits = plain_logits(lm.model, read, torch.tensor([len(read) - 1]))[0, : self.vocab_size]
        logprobs = logits.float().log_softmax(-1)
        token = int(torch.multinomial(logprobs.exp(), 1))
        return Drawn(token, float(logprobs[token]))


def served_vocabulary(source: str, model: Any, *, given: int | None = None, trust_remote_code: bool = False) -> int:
    """Ids that can occur: as many as given, else those of the model's tokenizer, or all rows if it has none."""
    rows = output_rows(model)
    if given is not None and not 1 <= given <= rows:
        raise ModelError(f"--vocab-size is {given}, and the model has {rows} output rows: it must lie between 1 and {rows}")
    if given is not None or not brings_tokenizer(source):
        return given or rows
    try:
        return min(rows, len(load_tokenizer(source, trust_remote_code=trust_remote_code)))
    except ModelError as error:
        raise ModelError(
            f"{error}. It tells how many of the {rows} output rows are real ids: pass --trust-remote-code if the repository "
            "brings code that you trust, or give their number with --vocab-size"
        ) from None


def _rollout(sequence: TokenSequence) -> Rollout:
    response = torch.tensor(sequence.answer, dtype=torch.long)
    return Rollout(Prompt("", sequence.ids[: sequence.start]), response, torch.zeros(len(response)), "length")
