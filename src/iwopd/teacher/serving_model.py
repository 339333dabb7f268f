"""A model that scores for many clients at once: all requests that wait when it is free become its next batch."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from iwopd.lm import Sequences, default_head_precision
from iwopd.model_facts import output_rows
from iwopd.models import ModelError, brings_tokenizer, load_tokenizer
from iwopd.own_head import plain_logits
from iwopd.teacher.dialects import Drawn
from iwopd.teacher.local import LocalScorer
from iwopd.types import Prompt, Rollout

MOST_TOKENS = 2**18
"""Of one batch: no client waits longer than for so many."""


@dataclass
class _Job:
    sequences: list[list[int]]
    draw: bool
    future: Future[Scored] = field(default_factory=Future)


@dataclass(frozen=True)
class Scored:
    """The answer to one request."""

    logprobs: list[list[float]]
    """Of each sequence's second id and all after it."""
    drawn: list[Drawn]
    """One more token per sequence, where it was asked for."""


class ServingModel:
    """Log-probs of whole token sequences at temperature 1, from one thread that owns the model."""

    def __init__(self, model: Any, *, vocab_size: int, max_length: int, token_budget: int | None = None) -> None:
        self.vocab_size, self.max_length = vocab_size, max_length
        precision = default_head_precision(model)
        self.scorer = LocalScorer(model, vocab_size=vocab_size, token_budget=token_budget, head_precision=precision)
        self.batches = 0
        # Models that do more to their logits than a product (soft caps) are found out before they score.
        ids = torch.randint(vocab_size, (min(32, max_length),), generator=torch.Generator().manual_seed(0))
        self.scorer.check_head(Sequences.build([ids[:1]], [ids[1:]]))
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def score(self, sequences: list[list[int]], *, draw: bool = False) -> Scored:
        """Wait for the scores; called from any thread."""
        job = _Job(sequences, draw)
        self._jobs.put(job)
        return job.future.result()

    def _work(self) -> None:
        while True:
            jobs = [self._jobs.get()]
            while sum(len(ids) for job in jobs for ids in job.sequences) < MOST_TOKENS and not self._jobs.empty():
                jobs.append(self._jobs.get())
            self.batches += 1
            try:
                scores = iter(self.scorer.score([_rollout(ids) for job in jobs for ids in job.sequences]))
                for job in jobs:
                    logprobs = [next(scores).tolist() for _ in job.sequences]
                    job.future.set_result(Scored(logprobs, [self._draw(ids) for ids in job.sequences] if job.draw else []))
            except Exception as error:  # each client is told; the thread lives on
                for job in jobs:
                    if not job.future.done():
                        job.future.set_exception(error)

    @torch.no_grad()
    def _draw(self, ids: list[int]) -> Drawn:
        """One more token at temperature 1, with its log-prob: for clients that check whether scores belong to their tokens."""
        lm = self.scorer.lm
        read = torch.tensor(ids, device=lm.device)
        logits = plain_logits(lm.model, read, torch.tensor([len(ids) - 1]))[0, : self.vocab_size]
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


def _rollout(ids: list[int]) -> Rollout:
    response = torch.tensor(ids[1:], dtype=torch.long)
    return Rollout(Prompt("", (ids[0],)), response, torch.zeros(len(response)), "length")
