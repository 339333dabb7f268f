"""The output head in chunks of rows: logits of a few tokens at a time, never a [T, V] tensor.

Shape letters: N tokens (all leading dimensions flattened), H hidden size, V vocabulary, R rows of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS_CPU = 2**24
CHUNK_ELEMENTS_GPU = 2**27
"""Elements of the chunk's [R, V] buffers: 64 MB of float32 on a CPU, 512 MB on an accelerator (more rows, fuller kernels).
`bench/logprobs.py` is where these numbers come from; the accelerator's was never measured."""
UPCAST_ELEMENTS = 2**22
"""Elements of the output matrix that are converted at a time when it is stored in half precision."""
COLUMNS_CPU = 2**14
"""Columns of the logits that one matrix product makes on a CPU: MKL's product by a transposed matrix takes working memory
as large as its result, which this bounds at no loss of speed."""


@dataclass(frozen=True)
class OutputHead:
    """The last layer of a language model: `logits = (hidden @ weight.T + bias) / temperature` over real ids."""

    weight: Tensor
    """[V, H], detached, without the rows of ids that do not exist."""
    bias: Tensor | None
    """[V], detached."""
    temperature: float
    rows: int
    """Rows of the whole matrix, padding ids included."""
    dtype: torch.dtype
    """Dtype of the logits: float32, or float64 if hidden states or weights are."""

    @classmethod
    def build(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, vocab_size: int | None
    ) -> OutputHead:
        """Check the arguments that all functions of the head share."""
        if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
            raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [..., H] and [V, H]")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias has shape {list(bias.shape)}, the output matrix {list(weight.shape)}")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature must be positive, got {temperature}; score greedy rollouts at temperature 1")
        size = len(weight) if vocab_size is None else vocab_size
        if not 0 < size <= len(weight):
            raise ValueError(f"vocab_size is {vocab_size}, the output matrix has {len(weight)} rows")
        dtype = torch.promote_types(torch.float32, torch.promote_types(hidden.dtype, weight.dtype))
        if not dtype.is_floating_point:
            raise TypeError(f"hidden states and weights must be floating point, got {hidden.dtype} and {weight.dtype}")
        bias = None if bias is None else bias.detach()[:size].to(dtype)
        return cls(weight.detach()[:size], bias, float(temperature), len(weight), dtype)

    def check_targets(self, targets: Tensor, *, inside: bool = False) -> Tensor:
        """Token ids as int64, refused where no row of the matrix stands for them."""
        if targets.dtype.is_floating_point or targets.dtype == torch.bool:
            raise TypeError(f"targets must be token ids (integers), got {targets.dtype}")
        limit = len(self.weight) if inside else self.rows
        if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= limit):
            raise ValueError(f"targets hold ids {int(targets.min())}..{int(targets.max())}; the vocabulary ends at {limit - 1}")
        return targets.long()

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, H], written into `out`."""
        hidden = hidden.to(self.dtype)
        for columns, block in self._blocks(COLUMNS_CPU if out.device.type == "cpu" else len(self.weight)):
            torch.mm(hidden, block.t(), out=out[:, columns])
        if self.bias is not None:
            out.add_(self.bias)
        if self.temperature != 1.0:
            out.div_(self.temperature)
        return out

    def _blocks(self, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of `step` rows of the output matrix in the compute dtype: views if it has it, else small copies."""
        if self.weight.dtype != self.dtype:
            step = max(1, UPCAST_ELEMENTS // self.weight.shape[1])
        for start in range(0, len(self.weight), step):
            yield slice(start, start + step), self.weight[start : start + step].to(self.dtype)

    def times_weight(self, dlogits: Tensor) -> Tensor:
        """`dlogits [R, V] @ weight [V, H]`, [R, H]."""
        out = dlogits.new_zeros(len(dlogits), self.weight.shape[1])
        for columns, block in self._blocks(len(self.weight)):
            out.addmm_(dlogits[:, columns], block)
        return out


class Chunk(NamedTuple):
    """A few tokens on their way through the head."""

    rows: slice
    """Their place among the tokens that are worked through."""
    source: slice | Tensor
    """Their rows in the hidden states."""
    hidden: Tensor
    logits: Tensor
    """[R, V]; the buffer is reused for the next chunk, so consumers may overwrite it."""
    spare: tuple[Tensor, ...]
    """Working memory [R, V] of the same kind, also reused: allocating it for each chunk would cost page faults."""


def row_chunks(head: OutputHead, hidden: Tensor, index: Tensor | None = None, spare: int = 0) -> Iterator[Chunk]:
    """Hidden states [N, H], or those of `index`, in equal chunks that fit the budget, with `spare` more [R, V] tensors."""
    count, vocabulary = len(hidden) if index is None else len(index), len(head.weight)
    if not count:
        return
    budget = CHUNK_ELEMENTS_CPU if hidden.device.type == "cpu" else CHUNK_ELEMENTS_GPU
    most = max(1, budget // (vocabulary * (1 + spare)))
    step = math.ceil(count / math.ceil(count / most))
    with torch.autocast(hidden.device.type, enabled=False):
        buffers = torch.empty(1 + spare, step, vocabulary, dtype=head.dtype, device=hidden.device)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            source = rows if index is None else index[rows]
            chunk = hidden[source]
            logits, *rest = buffers[:, : rows.stop - start]
            yield Chunk(rows, source, chunk, head.logits(chunk, logits), tuple(rest))


@dataclass(frozen=True)
class HeadGradients:
    """Gradients by hidden states, output matrix and bias, filled chunk by chunk; None where nobody asked."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    like: tuple[torch.dtype, torch.dtype]
    """Dtypes of hidden states and output matrix, in which the gradients are handed on."""

    @classmethod
    def allocate(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> HeadGradients:
        dtype = torch.promote_types(torch.float32, torch.promote_types(hidden.dtype, weight.dtype))

        def zeros(tensor: Tensor | None, need: bool) -> Tensor | None:
            return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device) if need and tensor is not None else None

        return cls(zeros(hidden, needs[0]), zeros(weight, needs[1]), zeros(bias, needs[2]), (hidden.dtype, weight.dtype))

    @property
    def any(self) -> bool:
        return any(gradient is not None for gradient in (self.hidden, self.weight, self.bias))

    def add(self, head: OutputHead, chunk: Chunk, dlogits: Tensor) -> None:
        """Add a chunk: `dlogits` [R, V] is d loss / d logits of its rows, after the temperature. Overwrites `dlogits`."""
        if head.temperature != 1.0:
            dlogits.div_(head.temperature)
        with torch.autocast(dlogits.device.type, enabled=False):
            if self.hidden is not None:
                self.hidden[chunk.source] = head.times_weight(dlogits)
            if self.weight is not None:
                # In place, without a [V, H] temporary: that alone would be 600 MB for a vocabulary of 152k.
                self.weight[: len(head.weight)].addmm_(dlogits.t(), chunk.hidden.to(head.dtype))
            if self.bias is not None:
                self.bias[: len(head.weight)] += dlogits.sum(0)

    def scaled(self, factor: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients times the upstream gradient, in place, in the dtypes of their tensors."""

        def finish(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            return None if gradient is None else gradient.mul_(factor.to(gradient.dtype)).to(dtype)

        hidden, weight = self.like
        return finish(self.hidden, hidden), finish(self.weight, weight), finish(self.bias, weight)
