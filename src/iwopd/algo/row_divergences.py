"""Divergences of the rows of one chunk of logits, with their derivatives by the logits (`algo.divergences` has the formulas).

Shape letters: N tokens, V vocabulary, H hidden size, K ids of one token, R rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from iwopd.algo.divergences import DivergenceKind, support_terms
from iwopd.algo.head import Chunk, OutputHead

BLOCK_ELEMENTS_CPU = 2**17
BLOCK_ELEMENTS_GPU = 2**22
"""Elements of the columns that formulas work on at a time: on a CPU their temporaries stay in its cache, on an accelerator
they are small beside the chunk. `bench/divergence.py` measures the first; the second was never measured."""


@dataclass(frozen=True)
class FullDivergence:
    """D of each row over the full vocabulary."""

    teacher: OutputHead
    teacher_hidden: Tensor
    """[N, H], detached; the teacher's own hidden size."""
    kind: DivergenceKind
    spare: ClassVar[int] = 1
    """[R, V] buffers beside the student's logits: the teacher's."""

    @classmethod
    def build(
        cls,
        head: OutputHead,
        hidden: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        vocab_size: int | None,
        kind: DivergenceKind,
    ) -> FullDivergence:
        """The teacher beside the student's head, if both speak of the same tokens [...] and ids."""
        teacher = OutputHead.build(teacher_hidden, teacher_weight, teacher_bias, head.temperature, vocab_size, head.precision)
        if hidden.shape[:-1] != teacher_hidden.shape[:-1]:
            raise ValueError(f"student has tokens {list(hidden.shape[:-1])}, teacher {list(teacher_hidden.shape[:-1])}")
        if len(head.weight) != len(teacher.weight):
            raise ValueError(
                f"student vocabulary has {len(head.weight)} ids, teacher {len(teacher.weight)}: pass vocab_size, the number "
                "of ids that both share"
            )
        teacher = replace(teacher, dtype=head.dtype)  # both softmaxes in the student's precision
        return cls(teacher, teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1]), kind)

    def value(self, chunk: Chunk) -> Tensor:
        """D [R]. Overwrites the chunk's buffers."""
        return self._weigh(chunk)[0]

    def gradient(self, chunk: Chunk, value: Tensor, upstream: Tensor) -> Tensor:
        """The derivative of `sum(upstream * D)` by the logits, [R, V]; `upstream` is [R, 1]."""
        return self.value_and_gradient(chunk, upstream)[1]

    def value_and_gradient(self, chunk: Chunk, upstream: Tensor) -> tuple[Tensor, Tensor]:
        """Both, from logits that are made once."""
        value, total = self._weigh(chunk)
        p, slopes = chunk.logits, chunk.spare[0]
        for columns in _blocks(p):
            p[:, columns].mul_(-total).add_(slopes[:, columns]).mul_(upstream)
        return value, p

    def _weigh(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """D [R] and the sum of slopes [R, 1]; leaves p in place of the logits, and the slopes in the spare buffer."""
        student, teacher = chunk.logits, self.teacher.logits(self.teacher_hidden[chunk.source], chunk.spare[0])
        ours, theirs = _Normalizer.of(student), _Normalizer.of(teacher)
        value, total = torch.zeros_like(ours.largest), torch.zeros_like(ours.largest)
        for columns in _blocks(student):
            log_p, log_q = ours.logprobs(student[:, columns]), theirs.logprobs(teacher[:, columns])
            values, slopes = self.kind.terms(log_p, log_q)
            value += values.sum(1, keepdim=True)
            total += slopes.sum(1, keepdim=True)
            torch.exp(log_p, out=student[:, columns])
            teacher[:, columns] = slopes
        return value.squeeze(1), total


@dataclass(frozen=True)
class TopKDivergence:
    """D of each row over K ids and a bucket for all others; the student's softmax is over the full vocabulary."""

    ids: Tensor
    """[N, K] int64, each at most once in a row; anything where there is no id."""
    valid: Tensor
    """[N, K] bool: there is an id."""
    logprobs: Tensor
    """[N, K] of the teacher."""
    rest: Tensor
    """[N] of the teacher."""
    kind: DivergenceKind
    spare: ClassVar[int] = 0

    def value_and_gradient(self, chunk: Chunk, upstream: Tensor) -> tuple[Tensor, Tensor]:
        """D [R], and the derivative of `sum(upstream * D)` by the logits, [R, V]; `upstream` is [R, 1].

        With slopes g by the log-probs of ids and rest: `g_j - p_j sum(g)` at an id of the support. Elsewhere the rest's slope
        spreads in proportion to p: `p_j (g_rest / p_rest - sum(g))`.
        """
        valid, ids = self.valid[chunk.source], self._places(chunk.source)
        largest = chunk.logits.amax(1, keepdim=True)
        picked = chunk.logits.gather(1, ids) - largest
        scaled = chunk.logits.sub_(largest).exp_()
        total = scaled.sum(1, keepdim=True)
        # An empty place stands for the row's first id, and is zeroed with it. A row without ids keeps everything.
        scaled.scatter_(1, ids, torch.where(valid.any(1, keepdim=True), 0.0, scaled.gather(1, ids)))
        others = scaled.sum(1, keepdim=True)  # not total minus the ids: nothing would be left of a small rest
        log_p = picked - total.log()
        terms = support_terms(
            self.kind,
            log_p,
            (others.log() - total.log()).squeeze(1),
            self.logprobs[chunk.source],
            self.rest[chunk.source],
            valid,
        )
        slopes, of_rest = terms.slopes[:, :-1], terms.slopes[:, -1:]
        pull = terms.slopes.sum(1, keepdim=True)
        some = others >= torch.finfo(others.dtype).tiny
        scaled.mul_((torch.where(some, of_rest / others, 0.0) - pull / total) * upstream)
        scaled.scatter_add_(1, ids, torch.where(valid, slopes - log_p.exp() * pull, 0.0) * upstream)
        return terms.values.sum(1), scaled

    def _places(self, source: slice | Tensor) -> Tensor:
        """Ids [R, K], an empty place filled with the first id of its row; 0 in a row without ids."""
        ids, valid = self.ids[source], self.valid[source]
        if not ids.shape[1]:
            return ids
        first = ids.gather(1, valid.int().argmax(1, keepdim=True))
        return torch.where(valid, ids, torch.where(valid.any(1, keepdim=True), first, 0))


class _Normalizer(NamedTuple):
    """The two parts of a row's log-sum-exp, [R, 1]."""

    largest: Tensor
    log_total: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> _Normalizer:
        largest = logits.amax(1, keepdim=True)
        total = torch.zeros_like(largest)
        for columns in _blocks(logits):
            total += (logits[:, columns] - largest).exp_().sum(1, keepdim=True)
        return cls(largest, total.log_())

    def logprobs(self, logits: Tensor) -> Tensor:
        """Of some columns. The largest logit first: the difference is exact where they are close, where it matters."""
        return (logits - self.largest).sub_(self.log_total)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Columns of [R, V] in blocks."""
    elements = BLOCK_ELEMENTS_CPU if logits.device.type == "cpu" else BLOCK_ELEMENTS_GPU
    step = max(1, elements // len(logits))
    for start in range(0, logits.shape[1], step):
        yield slice(start, start + step)
