"""A causal language model as this project uses it: log-probs of response tokens, through a head that never holds [N, V].

Any transformers causal LM whose logits are `hidden @ weight.T + bias` of its last hidden states takes the fused head. Some
do more (soft caps, logit scales). `ResponseModel.check_head` finds them on a few hundred tokens before anything is scored: they
use their own logits, a chunk of tokens at a time (`own_head`), or a sequence at a time where that fails, which takes [T, V].
Sequences stand one after the other without padding. Where the model allows it (`packing`) they also go through it that way.

Shape letters: B sequences, M tokens that the model reads, N response tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from iwopd import algo
from iwopd.algo.head import Precision
from iwopd.algo.objectives import TokenStates
from iwopd.algo.views import NOTHING, TokenScores, Wanted
from iwopd.devices import upload
from iwopd.lean_model import LeanModel, has_adapters, lean_obstacle
from iwopd.modes import eval_mode, train_mode
from iwopd.own_head import at_temperature, chunk_rows, output_states, own_logits, own_logprobs, picked_logprobs, plain_logprobs
from iwopd.packing import enable_packing, micro_batches, packed_batches, packed_inputs, padding_waste
from iwopd.types import Rollout, TokenBatch

TOLERANCE = 1e-3
"""Largest difference of log-probs between the fused head and a model's own logits."""
TOLERANCE_HALF = 0.5
"""The same in half precision, where a model rounds its own logits."""
CHECKED = 256
"""Tokens of a sequence on which paths are compared: half of them the first ones, half the last."""
Context = Callable[[], AbstractContextManager[Any]]
ALL = slice(None)


@dataclass(frozen=True)
class Sequences:
    """Prompts and responses, one after the other in a single row."""

    input_ids: Tensor
    """[M]: prompt and response of each, without the response's last token, which predicts nothing we need."""
    lengths: Tensor
    """[B]: tokens of each in `input_ids`; always on the CPU."""
    source: Tensor
    """[N]: the place in `input_ids` whose hidden state predicts each response token."""
    response_ids: Tensor
    """[N]."""
    answers: Tensor
    """[B]: response tokens of each; always on the CPU."""

    @classmethod
    def build(cls, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Sequences:
        rows, source, first = [], [], 0
        for prompt, response in zip(prompts, responses, strict=True):
            rows.append(torch.cat([prompt, response[:-1]]))
            source.append(torch.arange(len(response)) + first + len(prompt) - 1)
            first += len(rows[-1])
        lengths, answers = torch.tensor([len(row) for row in rows]), torch.tensor([len(response) for response in responses])
        return cls(torch.cat(rows), lengths, torch.cat(source), torch.cat(list(responses)), answers)

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout]) -> Sequences:
        prompts = [torch.tensor(rollout.prompt.token_ids) for rollout in rollouts]
        return cls.build(prompts, [rollout.response_ids for rollout in rollouts])

    @classmethod
    def from_batch(cls, batch: TokenBatch, rows: Sequence[int]) -> Sequences:
        prompts = batch.prompt_ids.split(batch.prompt_lengths.tolist())
        responses = batch.response_ids.split(batch.lengths.tolist())
        return cls.build([prompts[row] for row in rows], [responses[row] for row in rows])

    def to(self, device: torch.device) -> Sequences:
        ids = {name: upload(getattr(self, name), device) for name in ("input_ids", "source", "response_ids")}
        return replace(self, **ids)

    def only(self, tokens: Tensor) -> Sequences:
        """The sequences whose response tokens are chosen by `tokens` [N], boolean: of each all or none."""
        chosen = [row for row, part in enumerate(self.split(tokens.cpu())) if len(part) and bool(part[0])]
        inputs, responses = self.input_ids.cpu().split(self.lengths.tolist()), self.split(self.response_ids.cpu())
        prompts = [inputs[row][: len(inputs[row]) - len(responses[row]) + 1] for row in chosen]
        return Sequences.build(prompts, [responses[row] for row in chosen])

    def split(self, values: Tensor) -> list[Tensor]:
        """[N] of the response tokens by sequence."""
        return list(values.split(self.answers.tolist()))


@dataclass(frozen=True)
class HeadCheck:
    """How a model's paths to log-probs agree with its own logits."""

    difference: float
    """Largest difference of a log-prob, over all paths."""
    fused: bool
    """Whether its logits come from the output matrix alone."""
    packing_obstacle: str | None
    """Why sequences are padded to equal lengths; None if they are not."""
    chunked: bool = True
    """Whether its own logits can be had for a few tokens at a time; if not, those of a whole sequence exist at once."""


class ResponseModel:
    """Log-probs of response tokens under a transformers causal LM, at the sampling temperature, over the real vocabulary."""

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        autocast: Context = nullcontext,
        head_precision: Precision = "float32",
    ) -> None:
        """`autocast` is the context in which the model runs; `head_precision` is that of the fused head's products."""
        self.model: Any = model
        self.temperature, self.vocab_size = temperature, vocab_size
        self.autocast, self.head_precision = autocast, head_precision
        self.fused = self.chunked = True
        """Whether the head is fused; if not, whether the model's own logits can be had a chunk at a time."""

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        """Output matrix [V, H] and bias [V] or None."""
        layer = self.model.get_output_embeddings()
        return layer.weight, getattr(layer, "bias", None)

    @property
    def half(self) -> bool:
        """Whether anything on the way to its log-probs is rounded to less than float32."""
        if _stored_in_half(self.model):
            return True
        rounds = self.head_precision == "bf16" or (self.head_precision == "tf32" and self.device.type == "cuda")
        with self.autocast():
            return rounds or torch.is_autocast_enabled(self.device.type)

    @cached_property
    def packing_obstacle(self) -> str | None:
        """Why sequences need padding in this model; None if they do not. Found out when it is first asked for."""
        with self.autocast():
            return enable_packing(self.model, self.vocab_size)

    def micro_batches(self, lengths: Sequence[int], budget: int) -> list[list[int]]:
        """Deal rows to micro-batches that this model runs within a budget of tokens, padding included."""
        return packed_batches(lengths, budget) if self.packing_obstacle is None else micro_batches(lengths, budget)

    def padding_waste(self, lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
        """Share of the tokens of these micro-batches that is padding."""
        return 0.0 if self.packing_obstacle is None else padding_waste(lengths, batches)

    def token_hidden(self, sequences: Sequences) -> Tensor:
        """Last hidden states [N, H] at the places that predict the response tokens."""
        with self.autocast():
            if self._is_lean():
                lengths = sequences.lengths.tolist()
                lean = LeanModel(self.model, width=max(lengths), few_rows=False)
                return lean.sequence_states(sequences.input_ids, lengths, sequences.source)
            inputs, places = self._inputs(sequences)
            return _at(self.model.base_model(**inputs).last_hidden_state, places)

    def _output_states(self, sequences: Sequences) -> Tensor:
        """What its output layer reads at the same places [N, H]: other states than the last hidden ones in some models."""
        with self.autocast():
            inputs, places = self._inputs(sequences)
            return _at(output_states(self.model, inputs), places)

    def _inputs(self, sequences: Sequences) -> tuple[dict[str, Any], Tensor]:
        """Arguments of a forward pass, and where the states [N] that predict the response tokens stand in its rows."""
        if self.packing_obstacle is None:
            return packed_inputs(self.model, sequences.input_ids, sequences.lengths), sequences.source
        rows = sequences.input_ids.split(sequences.lengths.tolist())
        padded = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)  # on the right: causal attention needs no mask
        shift = torch.arange(len(rows)) * padded.shape[1] - (sequences.lengths.cumsum(0) - sequences.lengths)
        places = sequences.source + upload(shift.repeat_interleave(sequences.answers), padded.device)
        return {"input_ids": padded, "use_cache": False}, places

    def _is_lean(self) -> bool:
        """Whether this pass takes the lean path: scores of a plain model on a CPU."""
        if torch.is_grad_enabled() or self.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return False
        plain = next(self.model.parameters()).dtype == torch.float32 and not has_adapters(self.model)
        return plain and lean_obstacle(self.model) is None

    def token_states(self, hidden: Tensor, response_ids: Tensor) -> TokenStates:
        """What an objective needs of tokens [N] and the hidden states [N, H] that predict them."""
        weight, bias = self.head
        return TokenStates(hidden, response_ids, weight, bias, self.temperature, self.vocab_size, self.head_precision)

    def logprobs(self, sequences: Sequences) -> Tensor:
        """Log-probs [N] of the response tokens; differentiable."""
        if self.fused:
            return self._fused_logprobs(sequences)
        return self._chunk_logprobs(sequences) if self.chunked else self._row_logprobs(sequences)

    def _fused_logprobs(self, sequences: Sequences, chosen: Tensor | slice = ALL) -> Tensor:
        ids = sequences.response_ids[chosen]
        return self.head_logprobs(self.token_hidden(sequences)[chosen], ids).to(ids.device)

    def head_logprobs(self, hidden: Tensor, response_ids: Tensor) -> Tensor:
        """Log-probs [N] of tokens [N] from the hidden states [N, H] that predict them."""
        weight, bias = self.head
        hidden, ids = hidden.to(weight.device), response_ids.to(weight.device)
        return algo.token_logprobs(
            hidden,
            weight,
            ids,
            bias=bias,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            precision=self.head_precision,
        )

    @torch.no_grad()
    def scores(self, sequences: Sequences, wanted: Wanted = NOTHING, chosen: Tensor | None = None) -> TokenScores:
        """Log-probs of the response tokens and what else is wanted of them; `chosen` [N, K] are ids per token."""
        ids = sequences.response_ids
        if wanted == NOTHING:
            return TokenScores(self.logprobs(sequences))
        if self.fused:
            return self.head_scores(self.token_hidden(sequences), ids, wanted, chosen).map(lambda values: values.to(ids.device))
        logits, step = self.own_logits(sequences), chunk_rows(self.model)
        parts = []
        for rows in (slice(start, start + step) for start in range(0, max(1, len(ids)), step)):  # once for no tokens, too
            given = None if chosen is None else chosen[rows]
            parts.append(algo.scores_of_logits(logits(rows).clone(), ids[rows], wanted, given))
        return algo.joined_scores(parts)

    def head_scores(self, hidden: Tensor, response_ids: Tensor, wanted: Wanted, chosen: Tensor | None = None) -> TokenScores:
        """What is wanted of tokens [N], from the hidden states [N, H] that predict them."""
        weight, bias = self.head
        return algo.token_scores(
            hidden.to(weight.device),
            weight,
            response_ids.to(weight.device),
            wanted,
            chosen=None if chosen is None else chosen.to(weight.device),
            bias=bias,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            precision=self.head_precision,
        )

    def check_head(self, sequences: Sequences, *, trained: bool = True) -> HeadCheck:
        """Compare every path that this model takes with its own logits. Beyond the tolerance the fused head is not used.

        Without gradients a plain model on a CPU takes the lean path; `trained` also checks the path that carries gradients.
        """
        sequences = sequences.to(self.device)
        tolerance = TOLERANCE_HALF if self.half else TOLERANCE
        chosen, own = self._plain_logprobs(sequences)

        with torch.no_grad():
            values = [self._fused_logprobs(sequences, chosen)]
        if trained:
            with torch.enable_grad():
                values.append(self._fused_logprobs(sequences, chosen).detach())
        found = _largest_difference(own, *values)
        self.fused = found <= tolerance
        if not self.fused:
            try:
                with torch.no_grad():
                    self.chunked = _largest_difference(own, self._chunk_logprobs(sequences, chosen)) <= tolerance
            except Exception:  # any error means that this model's output layer cannot be given other states
                self.chunked = False
        return HeadCheck(found, self.fused, self.packing_obstacle, self.chunked)

    def training_difference(self, sequences: Sequences) -> float:
        """How far the log-probs of two passes in training mode are from each other, and from those of eval mode, at most."""
        sequences = sequences.to(self.device)

        def passed() -> Tensor:
            with torch.enable_grad():
                return self.logprobs(sequences).detach()

        with train_mode(self.model):
            one, two = passed(), passed()
        with eval_mode(self.model):
            still = passed()
        return _largest_difference(one, two, still)

    def _plain_logprobs(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Some of the response tokens, and their log-probs from plain forward passes: nothing packed, fused or batched."""
        chosen, values = [], []
        of_responses = sequences.split(torch.arange(len(sequences.response_ids), device=sequences.response_ids.device))
        first = sequences.lengths.cumsum(0) - sequences.lengths
        for row, ids in enumerate(sequences.input_ids.split(sequences.lengths.tolist())):
            here = spread(of_responses[row], CHECKED)
            places, targets = sequences.source[here] - first[row], sequences.response_ids[here]
            options: dict[str, Any] = {"temperature": self.temperature, "vocab_size": self.vocab_size}
            with self.autocast():
                values.append(plain_logprobs(self.model, ids, places, targets, **options).to(ids.device))
            chosen.append(here)
        return torch.cat(chosen), torch.cat(values)

    def own_logits(self, sequences: Sequences) -> Callable[[slice], Tensor]:
        """The model's own logits at the sampling temperature of any of the response tokens: [R, V] of a slice of [N]."""
        states = self._output_states(sequences) if self.chunked else self._whole_logits(sequences)

        def of(rows: slice) -> Tensor:
            with self.autocast():
                logits = own_logits(self.model, states[rows]) if self.chunked else states[rows]
            return at_temperature(logits[:, : self.vocab_size], self.temperature)

        return of

    def _whole_logits(self, sequences: Sequences) -> Tensor:
        """[N, V]: for a model that gives nothing less."""
        with self.autocast():
            inputs, places = self._inputs(sequences)
            return _at(self.model(**inputs).logits, places)

    def _chunk_logprobs(self, sequences: Sequences, chosen: Tensor | slice = ALL) -> Tensor:
        """From the model's own logits of known states."""
        states, ids = self._output_states(sequences)[chosen], sequences.response_ids[chosen]
        with self.autocast():
            values = own_logprobs(self.model, states, ids, temperature=self.temperature, vocab_size=self.vocab_size)
        return values.to(ids.device)

    def _row_logprobs(self, sequences: Sequences) -> Tensor:
        """From whole forward passes, one sequence at a time."""
        first = sequences.lengths.cumsum(0) - sequences.lengths
        first = upload(first.repeat_interleave(sequences.answers), sequences.source.device)
        places = sequences.split(sequences.source - first)
        rows = sequences.input_ids.split(sequences.lengths.tolist())
        responses = sequences.split(sequences.response_ids)
        with self.autocast():
            return torch.cat([self._own_row(*row) for row in zip(rows, places, responses, strict=True)])

    def _own_row(self, input_ids: Tensor, source: Tensor, response_ids: Tensor) -> Tensor:
        def compute(ids: Tensor) -> Tensor:
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, source, : self.vocab_size]
            return picked_logprobs(logits, response_ids, self.temperature)

        values: Tensor = checkpoint(compute, input_ids, use_reentrant=False) if torch.is_grad_enabled() else compute(input_ids)
        return values


def _largest_difference(one: Tensor, *others: Tensor) -> float:
    """Of any number; NaN if there is one."""
    return float(torch.stack([(one - other).abs().max() for other in others]).max()) if len(one) else 0.0


def default_head_precision(model: nn.Module) -> Precision:
    """That of a model that runs by itself: TF32's rounding is far below that of a body in half precision."""
    return "tf32" if _stored_in_half(model) else "float32"


def _stored_in_half(model: nn.Module) -> bool:
    return any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())


def _at(states: Tensor, places: Tensor) -> Tensor:
    """Of rows [B, M, ...] one after the other, those at `places` [N]; a model on several devices may end on another one."""
    return states.flatten(0, 1)[places.to(states.device)]


def spread(items: Tensor, most: int) -> Tensor:
    """All items, or half of `most` from the beginning and half from the end: far positions are looked at, too."""
    return items if len(items) <= most else torch.cat([items[: most // 2], items[len(items) - most // 2 :]])
