"""A causal language model as this project uses it: log-probs of response tokens, through a head that never holds [T, V].

Any transformers causal LM whose logits are `hidden @ weight.T + bias` of its last hidden states takes the fused head. Some
do more (soft caps, logit scales); `ResponseModel.check_head` finds out on a real batch, and from then on the model's own
logits are used: a chunk of tokens at a time (`own_head`), or a sequence at a time where that does not work.

Where the model allows it (`packing`), the sequences of a micro-batch go through it one behind the other, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from iwopd import algo
from iwopd.lean_model import LeanModel, has_adapters, lean_obstacle
from iwopd.own_head import own_logprobs, picked_logprobs
from iwopd.packing import enable_packing, packed_inputs
from iwopd.types import Rollout, TokenBatch


@dataclass(frozen=True)
class Sequences:
    """Prompts and responses as one row each, padded on the right, so that causal attention needs no mask."""

    input_ids: Tensor
    """[B, L]: prompt and response without the response's last token, which predicts nothing we need."""
    lengths: Tensor
    """[B]: tokens of each row."""
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
        answers = torch.tensor([len(response) for response in responses])
        mask = torch.arange(int(answers.max()))[None] < answers[:, None]
        return cls(pad(rows), torch.tensor([len(row) for row in rows]), pad(places), pad(responses), mask)

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout]) -> Sequences:
        prompts = [torch.tensor(rollout.prompt.token_ids) for rollout in rollouts]
        return cls.build(prompts, [rollout.response_ids for rollout in rollouts])

    @classmethod
    def from_batch(cls, batch: TokenBatch) -> Sequences:
        prompts = [ids[mask] for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
        return cls.build(prompts, [ids[mask] for ids, mask in zip(batch.response_ids, batch.mask, strict=True)])

    def to(self, device: torch.device) -> Sequences:
        return Sequences(*(getattr(self, field.name).to(device) for field in fields(self)))


class ResponseModel:
    """Log-probs of response tokens under a transformers causal LM, at the sampling temperature, over the real vocabulary."""

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, vocab_size: int | None = None) -> None:
        self.model: Any = model
        self.temperature = temperature
        self.vocab_size = vocab_size
        self.fused = True
        self.chunked = True
        """Where the head is not fused: whether the model's own logits can be had a chunk at a time."""

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        """Output matrix [V, H] and bias [V] or None."""
        layer = self.model.get_output_embeddings()
        return layer.weight, getattr(layer, "bias", None)

    @cached_property
    def packing_obstacle(self) -> str | None:
        """Why sequences need padding in this model; None if they do not. Found out when it is first asked for."""
        return enable_packing(self.model, self.vocab_size)

    def micro_batches(self, lengths: Sequence[int], budget: int) -> list[list[int]]:
        """Deal rows to micro-batches that this model runs within a budget of tokens, padding included."""
        return packed_batches(lengths, budget) if self.packing_obstacle is None else micro_batches(lengths, budget)

    def padding_waste(self, lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
        """Share of the tokens of these micro-batches that is padding."""
        return 0.0 if self.packing_obstacle is None else padding_waste(lengths, batches)

    def token_hidden(self, sequences: Sequences) -> Tensor:
        """Last hidden states at the positions that predict the N response tokens, row after row, [N, H]."""
        first = sequences.lengths.cumsum(0) - sequences.lengths
        if self._is_lean():
            lengths = sequences.lengths.tolist()
            lean = LeanModel(self.model, width=max(lengths), few_rows=False)
            real = torch.arange(sequences.input_ids.shape[1]) < sequences.lengths[:, None]
            return lean.sequence_states(sequences.input_ids[real], lengths, (first[:, None] + sequences.source)[sequences.mask])
        if self.packing_obstacle is None:
            inputs = packed_inputs(self.model, sequences.input_ids, sequences.lengths)
        else:
            inputs = {"input_ids": sequences.input_ids, "use_cache": False}
            count, width = sequences.input_ids.shape
            first = torch.arange(count, device=sequences.input_ids.device) * width
        states: Tensor = self.model.base_model(**inputs).last_hidden_state
        rows = (first[:, None] + sequences.source)[sequences.mask]
        return states.flatten(0, 1)[rows.to(states.device)]  # a model that is spread may end on another device than it begins

    def _is_lean(self) -> bool:
        """Whether this pass takes the lean path: scores of a plain model on a CPU."""
        if torch.is_grad_enabled() or self.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return False
        plain = next(self.model.parameters()).dtype == torch.float32 and not has_adapters(self.model)
        return plain and lean_obstacle(self.model) is None

    def hidden(self, sequences: Sequences) -> Tensor:
        """The same, padded: [B, T, H]; 0 outside the mask."""
        states = self.token_hidden(sequences)
        padded = states.new_zeros(*sequences.mask.shape, states.shape[-1])
        return padded.masked_scatter(sequences.mask[..., None], states)

    def logprobs(self, sequences: Sequences) -> Tensor:
        """Log-probs of the response tokens, [B, T]; differentiable; 0 outside the mask."""
        return self._fused_logprobs(sequences) if self.fused else self._own_logprobs(sequences)

    def _fused_logprobs(self, sequences: Sequences) -> Tensor:
        values = self.head_logprobs(self.token_hidden(sequences), sequences.response_ids[sequences.mask])
        values = values.to(sequences.mask.device)
        return values.new_zeros(sequences.mask.shape).masked_scatter(sequences.mask, values)

    def head_logprobs(self, hidden: Tensor, response_ids: Tensor) -> Tensor:
        """Log-probs [N] of tokens [N] from the hidden states [N, H] that predict them."""
        weight, bias = self.head
        hidden, response_ids = hidden.to(weight.device), response_ids.to(weight.device)
        return algo.token_logprobs(
            hidden, weight, response_ids, bias=bias, temperature=self.temperature, vocab_size=self.vocab_size
        )

    def check_head(self, sequences: Sequences, tolerance: float = 1e-3) -> float:
        """Largest difference between the fused head and the model's own logits; beyond the tolerance, stop using it."""
        sequences = sequences.to(self.device)
        half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in self.model.parameters())
        tolerance = 0.5 if half else tolerance  # a half-precision model rounds its own logits
        with torch.no_grad():
            own = self._row_logprobs(sequences)
            difference = _difference(self._fused_logprobs(sequences), own)
            self.fused = difference <= tolerance
            if not self.fused:
                try:
                    self.chunked = _difference(self._chunk_logprobs(sequences), own) <= tolerance
                except Exception:  # whatever a model says to a body that is not its own, it means no
                    self.chunked = False
        return difference

    def _own_logprobs(self, sequences: Sequences) -> Tensor:
        """The same from the model's own logits."""
        return self._chunk_logprobs(sequences) if self.chunked else self._row_logprobs(sequences)

    def _chunk_logprobs(self, sequences: Sequences) -> Tensor:
        hidden, ids = self.token_hidden(sequences), sequences.response_ids[sequences.mask]
        values = own_logprobs(self.model, hidden, ids, temperature=self.temperature, vocab_size=self.vocab_size)
        return values.new_zeros(sequences.mask.shape).masked_scatter(sequences.mask, values)

    def _row_logprobs(self, sequences: Sequences) -> Tensor:
        """From whole forward passes, one sequence at a time."""
        rows = zip(sequences.input_ids, sequences.source, sequences.response_ids, strict=True)
        return torch.where(sequences.mask, torch.stack([self._own_row(*row) for row in rows]), 0.0)

    def _own_row(self, input_ids: Tensor, source: Tensor, response_ids: Tensor) -> Tensor:
        def compute(ids: Tensor) -> Tensor:
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, source, : self.vocab_size]
            return picked_logprobs(logits, response_ids, self.temperature)

        values: Tensor = checkpoint(compute, input_ids, use_reentrant=False) if torch.is_grad_enabled() else compute(input_ids)
        return values


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) if one.numel() else 0.0


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


def packed_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Deal rows to micro-batches of at most `budget` tokens (or one row), longest first: like lengths are neighbours."""
    if budget < 1:
        raise ValueError(f"the token budget must be at least 1, got {budget}")
    batches: list[list[int]] = []
    room = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or lengths[row] > room:
            batches.append([])
            room = budget
        batches[-1].append(row)
        room -= lengths[row]
    return batches


def padding_waste(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of the padded tokens that are padding."""
    padded = sum(len(rows) * max(lengths[row] for row in rows) for rows in batches)
    return 1.0 - sum(lengths) / padded if padded else 0.0
