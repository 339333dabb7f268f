"""A causal language model as this project uses it: log-probs of response tokens, through a head that never holds [T, V].

Any transformers causal LM whose logits are `hidden @ weight.T + bias` of its last hidden states takes the fused head. Some
do more (soft caps, logit scales); `ResponseModel.check_head` finds out on a real batch, and from then on the model's own
logits are used, one sequence at a time, recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from iwopd import algo
from iwopd.types import TokenBatch


@dataclass(frozen=True)
class Sequences:
    """Prompts and responses as one row each, padded on the right, so that causal attention needs no mask."""

    input_ids: Tensor
    """[B, L]: prompt and response without the response's last token, which predicts nothing we need."""
    source: Tensor
    """[B, T]: the position whose hidden state predicts each response token; 0 outside the mask."""
    response_ids: Tensor
    """[B, T]; 0 outside the mask."""
    mask: Tensor
    """[B, T] bool."""

    @classmethod
    def build(cls, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Sequences:
        def pad(rows: Sequence[Tensor]) -> Tensor:
            return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

        rows = [torch.cat([prompt, response[:-1]]) for prompt, response in zip(prompts, responses, strict=True)]
        places = [torch.arange(len(response)) + len(prompt) - 1 for prompt, response in zip(prompts, responses, strict=True)]
        lengths = torch.tensor([len(response) for response in responses])
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        return cls(pad(rows), pad(places), pad(responses), mask)

    @classmethod
    def from_batch(cls, batch: TokenBatch) -> Sequences:
        prompts = [ids[mask] for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
        return cls.build(prompts, [ids[mask] for ids, mask in zip(batch.response_ids, batch.mask, strict=True)])

    def to(self, device: torch.device) -> Sequences:
        return Sequences(*(getattr(self, name).to(device) for name in ("input_ids", "source", "response_ids", "mask")))


class ResponseModel:
    """Log-probs of response tokens under a transformers causal LM, at the sampling temperature, over the real vocabulary."""

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, vocab_size: int | None = None) -> None:
        self.model: Any = model
        self.temperature = temperature
        self.vocab_size = vocab_size
        self.fused = True

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        """Output matrix [V, H] and bias [V] or None."""
        layer = self.model.get_output_embeddings()
        return layer.weight, getattr(layer, "bias", None)

    def hidden(self, sequences: Sequences) -> Tensor:
        """Last hidden states at the positions that predict the response tokens, [B, T, H]."""
        output = self.model.base_model(input_ids=sequences.input_ids, use_cache=False)
        states: Tensor = output.last_hidden_state
        index = sequences.source[..., None].expand(-1, -1, states.shape[-1])
        return states.gather(1, index)

    def logprobs(self, sequences: Sequences) -> Tensor:
        """Log-probs of the response tokens, [B, T]; differentiable; 0 outside the mask."""
        return self._fused_logprobs(sequences) if self.fused else self._own_logprobs(sequences)

    def _fused_logprobs(self, sequences: Sequences) -> Tensor:
        weight, bias = self.head
        values = algo.token_logprobs(
            self.hidden(sequences),
            weight,
            sequences.response_ids,
            bias=bias,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
        )
        return torch.where(sequences.mask, values, 0.0)

    def check_head(self, sequences: Sequences, tolerance: float = 1e-3) -> float:
        """Largest difference between the fused head and the model's own logits; beyond the tolerance, stop using it."""
        with torch.no_grad():
            fused, own = self._fused_logprobs(sequences), self._own_logprobs(sequences)
        difference = float((fused - own).abs().max()) if fused.numel() else 0.0
        half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in self.model.parameters())
        self.fused = difference <= (0.5 if half else tolerance)  # a half-precision model rounds its own logits
        return difference

    def _own_logprobs(self, sequences: Sequences) -> Tensor:
        """The same from the model's own logits, one sequence at a time."""
        rows = zip(sequences.input_ids, sequences.source, sequences.response_ids, strict=True)
        return torch.where(sequences.mask, torch.stack([self._own_row(*row) for row in rows]), 0.0)

    def _own_row(self, input_ids: Tensor, source: Tensor, response_ids: Tensor) -> Tensor:
        def compute(ids: Tensor) -> Tensor:
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, source, : self.vocab_size]
            scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
            logprobs: Tensor = scaled.log_softmax(-1).gather(-1, response_ids[:, None]).squeeze(-1)
            return logprobs

        values: Tensor = checkpoint(compute, input_ids, use_reentrant=False) if torch.is_grad_enabled() else compute(input_ids)
        return values


def micro_batches(lengths: Sequence[int], budget: int, fill: float = 0.7) -> list[list[int]]:
    """Deal rows to micro-batches of at most `budget` padded tokens (or one row), longest first, of similar lengths.

    A row joins a micro-batch only if it is at least `fill` as long as its longest, which bounds the padding.
    """
    if budget < 1:
        raise ValueError(f"the token budget must be at least 1, got {budget}")
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        current = batches[-1] if batches else []
        if current and (len(current) + 1) * longest <= budget and lengths[row] >= fill * longest:
            current.append(row)
        else:
            batches.append([row])
            longest = lengths[row]
    return batches


def padding_waste(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of the padded tokens that are padding."""
    padded = sum(len(rows) * max(lengths[row] for row in rows) for rows in batches)
    return 1.0 - sum(lengths) / padded if padded else 0.0
