"""The output head in chunks of rows: logits of a few tokens at a time, never a [T, V] tensor.

Shape letters: N tokens (all leading dimensions flattened), H hidden size, V vocabulary, R rows of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from iwopd.algo._checks import Checks

Precision = Literal["float32", "tf32", "bf16"]
"""How the head's matrix products round their operands; sums and softmaxes are float32 or better in any case."""

CHUNK_ELEMENTS_CPU = 2**24
CHUNK_ELEMENTS_GPU = 2**27
"""Elements of the chunk's [R, V] buffers: 64 MB of float32 on a CPU, 512 MB on an accelerator (more rows, fuller kernels).
`bench/logprobs.py` is where these numbers come from; the accelerator's was never measured."""
UPCAST_ELEMENTS = 2**22
"""Elements of the output matrix that are converted at a time when it is not stored as it is multiplied."""
COLUMNS_CPU = 2**14
"""Columns of the logits that one matrix product makes on a CPU: MKL's product by a transposed matrix takes working memory
as large as its result, which this bounds at no loss of speed."""
HALF_TO_FLOAT = "dtype_out" in torch.ops.aten.mm.overloads()
"""Whether CUDA's products of bfloat16 matrices can return float32 (torch 2.8)."""


@contextmanager
def fp32_products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """CUDA's float32 products in full precision or TF32; afterwards as before. A CPU has one kind only."""
    settings: Any = torch.backends.cuda.matmul
    name, value = ("fp32_precision", precision) if hasattr(settings, "fp32_precision") else ("allow_tf32", precision == "tf32")
    before = getattr(settings, name)
    setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, before)


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
    precision: Precision = "float32"

    @classmethod
    def build(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        vocab_size: int | None,
        precision: Precision = "float32",
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
        return cls(weight.detach()[:size], bias, float(temperature), len(weight), dtype, precision)

    def token_ids(self, targets: Tensor, checks: Checks, *, inside: bool = False) -> Tensor:
        """Token ids as int64; `checks` learns to refuse those that no row of the matrix stands for."""
        if targets.dtype.is_floating_point or targets.dtype == torch.bool:
            raise TypeError(f"targets must be token ids (integers), got {targets.dtype}")
        limit = len(self.weight) if inside else self.rows

        def error() -> ValueError:
            least, most = int(targets.min()), int(targets.max())
            return ValueError(f"targets hold ids {least}..{most}; the vocabulary ends at {limit - 1}")

        checks.refuse((targets < 0) | (targets >= limit), error)
        return targets.long()

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, H], written into `out`."""
        hidden = self.operand(hidden)
        for columns, block in self._blocks(COLUMNS_CPU if out.device.type == "cpu" else len(self.weight)):
            self._product(hidden, block.t(), out[:, columns])
        if self.bias is not None:
            out.add_(self.bias)
        if self.temperature != 1.0:
            out.div_(self.temperature)
        return out

    def times_weight(self, dlogits: Tensor) -> Tensor:
        """`dlogits [R, V] @ weight [V, H]`, [R, H]; `dlogits` is an operand."""
        out = torch.zeros(len(dlogits), self.weight.shape[1], dtype=self.dtype, device=dlogits.device)
        for columns, block in self._blocks(len(self.weight)):
            self.add_product(dlogits[:, columns], block, out)
        return out

    def operand(self, tensor: Tensor) -> Tensor:
        """A tensor as it is multiplied: rounded to the precision, in the dtype of the kernel."""
        if self.precision != "bf16":  # TF32 is rounded by the kernel itself
            return tensor.to(self.dtype)
        rounded = tensor.to(torch.bfloat16)
        return rounded if self._multiplies_half else rounded.to(self.dtype)

    def add_product(self, one: Tensor, other: Tensor, out: Tensor) -> None:
        """`out [M, N] += one [M, K] @ other [K, N]`, both operands."""
        if not self._multiplies_half:
            with fp32_products("ieee" if self.precision == "float32" else "tf32"):
                out.addmm_(one, other)
            return
        step = max(1, UPCAST_ELEMENTS // out.shape[1])
        for start in range(0, len(out), step):  # there is no such product in place: small temporaries instead of one of [V, H]
            rows = slice(start, start + step)
            out[rows].add_(torch.mm(one[rows], other, out_dtype=self.dtype))

    def _product(self, one: Tensor, other: Tensor, out: Tensor) -> None:
        """`out [M, N] = one [M, K] @ other [K, N]`, both operands."""
        if self._multiplies_half:
            torch.mm(one, other, out_dtype=self.dtype, out=out)
            return
        # A product of numbers that bfloat16 holds is the same in TF32, which holds them, too.
        with fp32_products("ieee" if self.precision == "float32" else "tf32"):
            torch.mm(one, other, out=out)

    @property
    def _multiplies_half(self) -> bool:
        """Whether the kernel takes bfloat16 and returns float32 (never run: there was no GPU)."""
        on_gpu = self.weight.device.type == "cuda" and HALF_TO_FLOAT
        return on_gpu and self.precision == "bf16" and self.dtype == torch.float32

    def _blocks(self, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of `step` rows of the output matrix as operands: views if it is stored like that, else small copies."""
        emulated = self.precision == "bf16" and not self._multiplies_half
        if emulated or self.weight.dtype != (torch.bfloat16 if self.precision == "bf16" else self.dtype):
            step = max(1, UPCAST_ELEMENTS // self.weight.shape[1])
        for start in range(0, len(self.weight), step):
            yield slice(start, start + step), self.operand(self.weight[start : start + step])


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


def row_chunks(
    head: OutputHead, hidden: Tensor, index: Tensor | None = None, spare: int = 0, *, two_heads: bool = False
) -> Iterator[Chunk]:
    """Hidden states [N, H], or those of `index`, in equal chunks that fit the budget, with `spare` more [R, V] tensors.

    With `two_heads` a spare tensor holds another model's logits. On a CPU each head then has the budget for itself: MKL
    packs the output matrix for every chunk, and half as many rows would make a product of logits take 1.4 times as long.
    """
    count, vocabulary = len(hidden) if index is None else len(index), len(head.weight)
    if not count:
        return
    budget = CHUNK_ELEMENTS_CPU * (1 + two_heads) if hidden.device.type == "cpu" else CHUNK_ELEMENTS_GPU
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
            if self.bias is not None:
                self.bias[: len(head.weight)] += dlogits.sum(0)
            dlogits = head.operand(dlogits)
            if self.hidden is not None:
                self.hidden[chunk.source] = head.times_weight(dlogits)
            if self.weight is not None:
                # In place, without a [V, H] temporary: that alone would be 600 MB for a vocabulary of 152k.
                head.add_product(dlogits.t(), head.operand(chunk.hidden), self.weight[: len(head.weight)])

    def scaled(self, factor: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients times the upstream gradient, in place, in the dtypes of their tensors."""

        def finish(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            return None if gradient is None else gradient.mul_(factor.to(gradient.dtype)).to(dtype)

        hidden, weight = self.like
        return finish(self.hidden, hidden), finish(self.weight, weight), finish(self.bias, weight)
