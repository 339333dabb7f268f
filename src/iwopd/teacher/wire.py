"""How `iwopd serve-teacher` and its clients write numbers: safetensors, with what else is to say as JSON in its metadata.

    POST /v1/iwopd/scores   ids int32 [M], lengths and starts int32 [B], chosen int32 [N, K], more int32 [B]; metadata: model,
                            wanted. `more`: these sequences grow, and more of those with 1 will come
      -> ids and lengths as they were, and of the N tokens from `start` on what was wanted (`algo.views.TokenScores`)
    POST /v1/iwopd/matrix   JSON: model, rows [first, last)
      -> these rows of the output matrix (and its bias); metadata: its whole shape, dtype and SHA-256

Shape letters: B sequences, M tokens of all, N tokens that are scored, K ids of one token, H hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from iwopd.algo.views import Wanted
from iwopd.http_clients import GarbledError

SCORES, MATRIX = "/v1/iwopd/scores", "/v1/iwopd/matrix"
MOST_ANSWER = 2**30
"""Bytes of one answer."""
BLOCK = 2**24
"""Bytes of the output matrix that travel at a time."""
ENVELOPE = 2**16
"""Bytes of an answer beside its numbers, at most."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""In which states and matrices may travel."""
ABOUT = "about"


def pack(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    content: bytes = save({name: values.contiguous() for name, values in tensors.items()}, {ABOUT: json.dumps(about)})
    return content


def unpack(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and what was said about them; a `GarbledError` if the content is not what `pack` makes."""
    try:
        tensors = load(content)
        size = int.from_bytes(content[:8], "little")
        about = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][ABOUT])
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise GarbledError(f"not in the format of `iwopd serve-teacher` ({type(error).__name__}: {error})") from None
    if not isinstance(about, dict):
        raise GarbledError("not in the format of `iwopd serve-teacher` (its metadata are no object)")
    return tensors, about


def answer_bytes(wanted: Wanted, *, chosen: int = 0, hidden: int = 0, item: int = 2) -> int:
    """Of one scored token; with states `hidden` is H and `item` the bytes of a number in them."""
    count = 8  # its id and its log-prob
    count += 4 * wanted.entropy + 8 * wanted.top_k
    count += 4 * chosen if wanted.chosen else 0
    count += 4 if wanted.top_k or wanted.chosen else 0
    return count + (item * hidden if wanted.states else 0)


def half_states(states: Tensor) -> Tensor:
    """States in 16 bits: as they are if the model computes in 16 bits; else float16, which rounds eight times less than
    bfloat16 and reaches to 65,504 (bfloat16 where a state is larger).
    """
    if states.dtype in (torch.float16, torch.bfloat16):
        return states
    narrow = states.to(torch.float16)
    return narrow if bool(narrow.isfinite().all()) else states.to(torch.bfloat16)


@dataclass(frozen=True)
class MatrixFacts:
    """What a server says about its output matrix before it sends it."""

    shape: tuple[int, int]
    """[V, H]."""
    dtype: str
    bias: bool
    precision: str
    """Of the head's products there (`algo.head.Precision`)."""
    sha256: str

    @property
    def bytes(self) -> int:
        return self.shape[0] * (self.shape[1] + int(self.bias)) * self.item

    @property
    def item(self) -> int:
        return DTYPES[self.dtype].itemsize

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Rows [first, last) that travel together."""
        step = max(1, BLOCK // (self.shape[1] * self.item))
        for first in range(0, self.shape[0], step):
            yield first, min(first + step, self.shape[0])


def digest(weight: Tensor, bias: Tensor | None) -> str:
    """SHA-256 of an output matrix [V, H], row by row, and its bias [V]."""
    found = hashlib.sha256()
    step = max(1, BLOCK // (weight.shape[1] * weight.element_size()))
    for rows in [*weight.split(step), *([] if bias is None else [bias])]:
        found.update(rows.detach().contiguous().cpu().view(torch.uint8).numpy())
    return found.hexdigest()
