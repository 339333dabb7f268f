"""Logits as everybody who scores makes them: the output matrix multiplies in float32, whatever the rest of the model does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from iwopd.algo.head import OutputHead


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, vocab_size: int | None = None) -> Tensor:
    """[N, V] of hidden states [N, H]."""
    head = OutputHead.build(hidden, weight, bias, 1.0, vocab_size)
    with torch.autocast(hidden.device.type, enabled=False):
        return head.logits(hidden, hidden.new_empty(len(hidden), len(head.weight), dtype=head.dtype))


@contextmanager
def scorers_head(model: Any) -> Iterator[None]:
    """The model's output layer gives these logits in here, where autocast or weights in half precision would round them."""
    layer: Any = model.get_output_embeddings()
    rounds = torch.is_autocast_enabled(layer.weight.device.type) or layer.weight.itemsize == 2
    plain = type(layer) is nn.Linear
    if not plain or not rounds or "forward" in vars(layer):
        yield
        return

    def forward(hidden: Tensor) -> Tensor:
        logits = head_logits(hidden.flatten(0, -2), layer.weight, layer.bias)
        return logits.reshape(*hidden.shape[:-1], -1)

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
