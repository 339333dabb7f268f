"""A model's own logits, of a few tokens at a time: what its output layer and everything after it make of the states before it.

For heads that are more than a matrix (soft caps, scales), and for checks that trust nothing but the model's own forward pass. A
hook gives the output layer other states than the body made: some of them, or some that are known already. This does not work
for every model, so `lm.ResponseModel.check_head` compares it first.

Shape letters: M tokens that the model reads, N tokens that are scored, R tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**24
"""Logits that exist at a time: 64 MB in float32, and a few times that with what a cap makes of them."""


@contextmanager
def _output_layer_reads(model: Any, change: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """The output layer reads `change(states)`. What it was given, [B, M, H], is added to the list."""
    given: list[Tensor] = []

    def hook(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not inputs:
            return None  # it is called in a way of its own: nothing is changed, and nothing was given
        given.append(inputs[0])
        return (change(inputs[0]), *inputs[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(hook)
    try:
        yield given
    finally:
        handle.remove()


def output_states(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The states [B, M, H] that the output layer reads in a forward pass, of which it sees one token only."""
    with _output_layer_reads(model, lambda states: states[:, :1]) as given:
        model(**inputs)
    if len(given) != 1:
        raise ValueError(f"{type(model).__name__} calls its output layer {len(given)} times")
    return given[0]


def own_logits(model: Any, states: Tensor) -> Tensor:
    """Logits [R, V] of known states [R, H]. The body runs on one token, whose states nobody reads."""
    any_token = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    with _output_layer_reads(model, lambda _: states[None]):
        logits: Tensor = model(input_ids=any_token, use_cache=False).logits[0]
    return logits


def last_logits(model: Any, inputs: dict[str, Any], count: int) -> Tensor:
    """Logits [count, V] of the last tokens of a forward pass over one sequence."""
    with _output_layer_reads(model, lambda states: states[:, -count:]):
        logits: Tensor = model(**inputs).logits[0, -count:]
    return logits


def plain_logits(model: Any, ids: Tensor, places: Tensor) -> Tensor:
    """Logits [N, V] at `places` [N] of a sequence [M], from the model's plain forward pass over the whole of it."""
    with _output_layer_reads(model, lambda states: states[:, places.to(states.device)]) as given:
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits if given else logits[places.to(logits.device)]


@torch.no_grad()
def plain_logprobs(
    model: Any, ids: Tensor, places: Tensor, targets: Tensor, *, temperature: float, vocab_size: int | None
) -> Tensor:
    """Log-probs [N] of `targets` [N] at `places` [N] of a sequence [M]: a plain forward pass for every chunk of places."""
    found = []
    for chunk, wanted in zip(*(values.split(chunk_rows(model)) for values in (places, targets)), strict=True):
        logits = plain_logits(model, ids, chunk)[:, :vocab_size]
        found.append(picked_logprobs(logits, wanted.to(logits.device), temperature))
    return torch.cat(found) if found else torch.empty(0)


def own_logprobs(model: Any, states: Tensor, ids: Tensor, *, temperature: float, vocab_size: int | None) -> Tensor:
    """Log-probs [N] of tokens `ids` [N] from states [N, H]; the backward pass computes each chunk's logits again."""

    def compute(chunk: Tensor, targets: Tensor) -> Tensor:
        return picked_logprobs(own_logits(model, chunk)[:, :vocab_size], targets, temperature)

    rows = chunk_rows(model)
    chunks = list(zip(states.split(rows), ids.to(states.device).split(rows), strict=True))
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(compute, *chunk, use_reentrant=False) for chunk in chunks])
    return torch.cat([compute(*chunk) for chunk in chunks])


def chunk_rows(model: Any) -> int:
    """Tokens whose logits may exist at a time."""
    return max(1, CHUNK_ELEMENTS // int(model.get_output_embeddings().weight.shape[0]))


def picked_logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-probs [N] of tokens `ids` [N] from logits [N, V]."""
    scaled = at_temperature(logits, temperature)
    return scaled.gather(-1, ids[:, None]).squeeze(-1) - scaled.logsumexp(-1)


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits in float32 or better, divided by the temperature."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1 else wide / temperature
