"""Whether what a server says of tokens can be true: shapes, numbers that are log-probs, and parts that fit each other.

Shape letters: T tokens of one answer, K ids of one token, C numbers that are known of one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from iwopd.algo.views import NO_ID, TokenScores, Wanted
from iwopd.teacher.errors import TeacherError
from iwopd.teacher.questions import TokenSequence

ROUNDING = 1e-3
"""A log-prob may exceed 0 by this much (half precision), a sum of probabilities be off 1, two log-probs of one id differ."""


def check_scores(found: TokenScores, sequence: TokenSequence, wanted: Wanted, vocab_size: int | None = None) -> None:
    """Refuse scores of a sequence's answer that contradict themselves. `vocab_size`: ids that the server's model has."""
    asked = _Asked(found, sequence, vocab_size)
    asked.check_shapes(wanted)
    asked.check_logprobs()
    if found.top_ids is not None and found.top_logprobs is not None:
        asked.check_likeliest(found.top_ids, found.top_logprobs)
    if found.entropy is not None:
        asked.check_entropy(found.entropy)
    if found.states is not None:
        asked.refuse(~found.states.isfinite().all(-1), lambda row: "the hidden state is not finite")
    if found.rest is not None:
        asked.check_support(found.rest)


class _Asked:
    def __init__(self, found: TokenScores, sequence: TokenSequence, vocab_size: int | None) -> None:
        self.found, self.start, self.vocab_size = found, sequence.start, vocab_size
        self.written = torch.tensor(sequence.answer)
        self.chosen = sequence.chosen

    def refuse(self, bad: Tensor, say: Callable[[int], str]) -> None:
        """Raise for the first token of a mask [T]."""
        if bool(bad.any()):
            row = int(bad.int().argmax())
            raise TeacherError(f"at position {self.start + row} {say(row)}")

    def check_shapes(self, wanted: Wanted) -> None:
        tokens = len(self.written)
        width = 0 if self.chosen is None else self.chosen.shape[1]
        shapes: dict[str, list[int]] = {"logprobs": [tokens]}
        if wanted.entropy:
            shapes["entropy"] = [tokens]
        if wanted.top_k:
            shapes |= {"top_ids": [tokens, wanted.top_k], "top_logprobs": [tokens, wanted.top_k], "rest": [tokens]}
        if wanted.chosen:
            shapes |= {"chosen_logprobs": [tokens, width], "rest": [tokens]}
        for name, shape in shapes.items():
            values = getattr(self.found, name)
            if values is None or list(values.shape) != shape:
                got = "is not there" if values is None else f"has shape {list(values.shape)}"
                raise TeacherError(f"{name} should have shape {shape} and {got}: it gave something else than was asked for")
        states = self.found.states
        if wanted.states and (states is None or states.dim() != 2 or len(states) != tokens):
            got = "are not there" if states is None else f"have shape {list(states.shape)}"
            raise TeacherError(f"hidden states of {tokens} tokens {got}")

    def check_logprobs(self) -> None:
        for name in ("logprobs", "top_logprobs", "chosen_logprobs", "rest"):
            values = getattr(self.found, name)
            if values is not None:
                self._check_numbers(name, values.view(len(values), -1))

    def _check_numbers(self, name: str, values: Tensor) -> None:
        if name == "chosen_logprobs" and self.chosen is not None:
            values = values.masked_fill(self.chosen == NO_ID, 0.0)
        wrong = values.isnan() | (values > ROUNDING)
        self.refuse(
            wrong.any(-1), lambda row: f"a number in {name} is {float(values[row][wrong[row]][0])}: it must be at most 0"
        )

    def check_likeliest(self, ids: Tensor, logprobs: Tensor) -> None:
        beyond = ids >= (torch.iinfo(torch.int64).max if self.vocab_size is None else self.vocab_size)
        outside = ((ids < 0) | beyond).any(-1)
        self.refuse(outside, lambda row: f"the likeliest ids are no ids of the vocabulary: {ids[row].tolist()[:8]}")
        ordered = ids.sort(-1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
        self.refuse(twice, lambda row: f"an id is twice among the likeliest: {ids[row].tolist()[:8]}")
        rising = (logprobs[:, 1:] > logprobs[:, :-1]).any(-1)
        self.refuse(rising, lambda row: "the likeliest ids are not in the order of their log-probs")

    def check_entropy(self, entropy: Tensor) -> None:
        most = math.inf if self.vocab_size is None else math.log(self.vocab_size)
        top = self.found.top_logprobs
        least = torch.zeros_like(entropy) if top is None else -top[:, 0]  # no distribution has less than its largest says
        wrong = ~((entropy >= least - ROUNDING) & (entropy <= most + ROUNDING))
        limits = "" if self.vocab_size is None else f" and log {self.vocab_size} = {most:.4f}"
        self.refuse(wrong, lambda row: f"the entropy is {float(entropy[row])}, outside {float(least[row]):.4f}{limits}")

    def check_support(self, rest: Tensor) -> None:
        """The written token, the likeliest and the chosen ids agree where they meet, and with the rest they make 1."""
        ids, values = [self.written[:, None]], [self.found.logprobs[:, None]]
        if self.chosen is not None and self.found.chosen_logprobs is not None:
            ids.append(self.chosen)
            values.append(self.found.chosen_logprobs)
        if self.found.top_ids is not None and self.found.top_logprobs is not None:
            self._check_beyond_likeliest(torch.cat(ids, -1), torch.cat(values, -1), self.found.top_ids, self.found.top_logprobs)
            ids.append(self.found.top_ids)
            values.append(self.found.top_logprobs)
        known, order = torch.cat(ids, -1).sort(stable=True, dim=-1)  # [T, C]
        logprobs = torch.cat(values, -1).gather(-1, order)
        same = (known[:, 1:] == known[:, :-1]) & (known[:, 1:] != NO_ID)
        one, other = logprobs[:, 1:], logprobs[:, :-1]
        differ = same & (one != other) & ~((one - other).abs() <= ROUNDING)
        self.refuse(differ.any(-1), lambda row: f"id {int(known[row, 1:][differ[row]][0])} has two different log-probs")
        inside = _is_in(self.written[:, None], torch.cat(ids[1:], -1))
        counted = (known != NO_ID) & (inside | (order != 0))  # a written token outside the support belongs to the rest
        counted[:, 1:] &= ~same
        mass = torch.where(counted, logprobs.double().exp(), 0.0).sum(-1) + rest.double().exp()
        wrong = (mass - 1).abs() > ROUNDING
        self.refuse(wrong, lambda row: f"the probabilities of its ids and of the rest sum to {float(mass[row]):.4f}, not to 1")
        more = ~inside[:, 0] & (self.found.logprobs.exp() > rest.exp() + ROUNDING)
        self.refuse(more, lambda row: f"id {int(self.written[row])} is likelier than the whole rest, to which it belongs")

    def _check_beyond_likeliest(self, ids: Tensor, logprobs: Tensor, top_ids: Tensor, top: Tensor) -> None:
        likelier = ~_is_in(ids, top_ids) & (ids != NO_ID) & (logprobs > top[:, -1:] + ROUNDING)
        self.refuse(likelier.any(-1), lambda row: f"id {int(ids[row][likelier[row]][0])} is likelier than one of the likeliest")


def _is_in(ids: Tensor, table: Tensor) -> Tensor:
    """Which of the ids [T, C] are among those of the same row of `table` [T, K]."""
    ordered = table.sort(-1).values
    places = torch.searchsorted(ordered, ids.contiguous()).clamp(max=table.shape[1] - 1)
    return ordered.gather(-1, places) == ids
