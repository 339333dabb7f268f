"""A model's own logits of hidden states that are known already, a chunk of tokens at a time.

For heads that are more than a matrix (soft caps, scales): the model's forward pass is run with a stand-in for its body that
returns the known states. This does not work for every model, so `lm.ResponseModel.check_head` compares it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

CHUNK_ELEMENTS = 2**24
"""Logits that exist at a time: 64 MB in float32, and a few times that with what a cap makes of them."""


class _KnownStates(nn.Module):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.answer = BaseModelOutputWithPast(last_hidden_state=hidden)  # type: ignore[arg-type]

    def forward(self, *arguments: Any, **options: Any) -> BaseModelOutputWithPast:
        return self.answer


@contextmanager
def _known_states(model: Any, hidden: Tensor) -> Iterator[None]:
    name = model.base_model_prefix
    body = getattr(model, name)
    setattr(model, name, _KnownStates(hidden))
    try:
        yield
    finally:
        setattr(model, name, body)


def own_logprobs(model: Any, hidden: Tensor, ids: Tensor, *, temperature: float, vocab_size: int | None) -> Tensor:
    """Log-probs [N] of tokens `ids` [N] from hidden states [N, H]; the backward pass computes each chunk's logits again."""

    def compute(states: Tensor, targets: Tensor) -> Tensor:
        with _known_states(model, states[None]):
            logits = model(input_ids=targets[None], use_cache=False).logits[0]
        return picked_logprobs(logits[:, :vocab_size], targets, temperature)

    rows = max(1, CHUNK_ELEMENTS // int(model.get_output_embeddings().weight.shape[0]))
    chunks = list(zip(hidden.split(rows), ids.split(rows), strict=True))
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(compute, *chunk, use_reentrant=False) for chunk in chunks])
    return torch.cat([compute(*chunk) for chunk in chunks])


def picked_logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-probs [N] of tokens `ids` [N] from logits [N, V]."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return scaled.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
