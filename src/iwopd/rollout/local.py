"""A fast sampler for any transformers causal LM, on CPU or GPU.

Fast: all prompts of a step share one batch as far as memory allows, waiting prompts take the place of finished rows, several
samples of a prompt read it once, and Qwen3, Qwen2 and Llama models take a lean path (`lean_decoder`).
Reproducible: the noise of a token depends on (seed, step, prompt, sample, position) alone (`noise`). Batching changes the
rounding of logits, which seldom moves a draw: the tests demand 99.9 % equal rollouts in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from iwopd.lean_model import lean_obstacle
from iwopd.model_facts import context_length, text_config
from iwopd.modes import eval_mode
from iwopd.rollout.decoding import Decoder, ModelDecoder
from iwopd.rollout.engine import Engine
from iwopd.rollout.lean_decoder import LeanDecoder
from iwopd.rollout.noise import stream_key, uniforms
from iwopd.rollout.sampler import UNLIMITED, Listener, Sampler
from iwopd.rollout.sampling import SamplingSettings, choose
from iwopd.types import Prompt, Rollout

Path = Literal["auto", "lean", "model"]

CACHE_BYTES_CPU = 2**31
"""Key/value cache on a CPU: 2 GB. On a CUDA device: half of the memory that is free when a call starts."""
PREFILL_TOKENS = 2**14
"""Prompt tokens, padding included, that are read at a time."""
REFILL_SHARE = 1 / 8
"""Waiting prompts come in when this share of the batch is free: reading them one by one would cost a pass each."""
TELLINGS = 16
"""How often a listener is told of finished rollouts: putting their tokens together costs a pass over those of all rows."""
NOISE_AHEAD = 32
"""Positions whose noise is made at a time: the number of operations is what it costs, not their size."""


class LocalEngine(Engine):
    """The student itself, in this process."""

    exact = several_ranks = restricts = True
    weights = "student"

    def sampler(self, settings: SamplingSettings) -> LocalSampler:
        student = self.student
        return LocalSampler(student.model, settings, pad_id=student.pad_id, vocab_size=student.vocab_size)


class LocalSampler(Sampler):
    """Writes rollouts with a model in this process, whose weights it reads again at every call."""

    def __init__(
        self,
        model: nn.Module,
        settings: SamplingSettings,
        *,
        pad_id: int = 0,
        vocab_size: int | None = None,
        path: Path = "auto",
        cache_tokens: int | None = None,
    ) -> None:
        """Sample from `model`.

        pad_id: fills the left of shorter prompts; any id that the model can embed.
        vocab_size: ids from here on do not exist (padding rows of the output matrix); by default all rows do.
        path: `lean` insists on the lean path, `model` on the model's own forward, `auto` takes the lean one where it can.
        cache_tokens: rows x tokens (prompt and answer) under way at a time; by default what fits in memory.
        """
        if path not in ("auto", "lean", "model"):
            raise ValueError(f"path must be 'auto', 'lean' or 'model', got {path!r}")
        if cache_tokens is not None and cache_tokens < 1:
            raise ValueError(f"cache_tokens must be >= 1, got {cache_tokens}")
        self.model: Any = model
        self.settings, self.path, self.cache_tokens = settings, path, cache_tokens
        self.rows = len(self._embedding)
        if vocab_size is not None and not 0 < vocab_size <= self.rows:
            raise ValueError(f"vocab_size is {vocab_size}, the model has {self.rows} ids")
        if not 0 <= pad_id < self.rows:
            raise ValueError(f"pad_id is {pad_id}, the model embeds ids 0..{self.rows - 1}")
        self.pad_id, self.vocab_size = pad_id, vocab_size

    def write(
        self, prompts: Sequence[Prompt], limits: Sequence[int], samples: int, seed: int, step: int, finished: Listener | None
    ) -> list[Rollout]:
        """Prompts that share an id share their noise."""
        plan = _Plan(prompts, limits, samples, seed, step)
        rollouts: dict[int, Rollout] = {}
        at_once = len(plan) if finished is None else max(1, len(plan) // TELLINGS)
        obstacle = self._lean_obstacle()
        # Inference mode makes small operations a tenth faster than no_grad; what a model keeps of it could not be trained on.
        with eval_mode(self.model), torch.inference_mode() if obstacle is None else torch.no_grad():
            decoder, rows = self._decoder(plan, lean=obstacle is None)
            run = _Run(decoder, self.settings, plan, self.pad_id, rows, self._embedding.device)
            for row, tokens, logprobs in run.finish(at_once):
                ended = int(tokens[-1]) in self.settings.stop_ids
                prompt, sample = divmod(row, samples)
                rollouts[row] = Rollout(prompts[prompt], tokens, logprobs, "eos" if ended else "length", sample)
                if finished is not None:
                    with torch.inference_mode(False), torch.no_grad():  # what a listener computes may be trained on
                        finished(row, rollouts[row])
        return [rollouts[row] for row in range(len(plan))]

    @property
    def _embedding(self) -> Tensor:
        """[ids, H]: on the device where prompts go."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def context(self) -> int:
        return context_length(self.model.config) or UNLIMITED

    def _lean_obstacle(self) -> str | None:
        """Why the model's own forward is used, or None if it is not."""
        if self.path == "model":
            return "it was asked for"
        obstacle = lean_obstacle(self.model)
        if self.path == "lean" and obstacle is not None:
            raise ValueError(f"the lean path cannot run this model: {obstacle}; use path='auto' or 'model'")
        return obstacle

    def _decoder(self, plan: _Plan, *, lean: bool) -> tuple[Decoder, int]:
        """A decoder over the weights of this moment, and how many rows may be under way."""
        budget = self.cache_tokens if self.cache_tokens is not None else self._affordable_tokens()
        rows = min(len(plan), max(1, budget // plan.width))
        if lean:
            return LeanDecoder(self.model, self.vocab_size, rows=rows, width=plan.width), rows
        return ModelDecoder(self.model, self.vocab_size), rows

    def _affordable_tokens(self) -> int:
        config = text_config(self.model.config)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        weight = next(self.model.parameters())
        token_bytes = 2 * config.num_hidden_layers * heads * size * weight.element_size()
        on_gpu = weight.device.type == "cuda"
        available = torch.cuda.mem_get_info(weight.device)[0] // 2 if on_gpu else CACHE_BYTES_CPU
        return max(1, available // int(token_bytes))


class _Plan:
    """What is to be written: rows in the caller's order, each a sample of a prompt."""

    def __init__(self, prompts: Sequence[Prompt], limits: Sequence[int], samples: int, seed: int, step: int) -> None:
        self.prompts = [prompt.token_ids for prompt in prompts]
        self.names = [prompt.id for prompt in prompts]
        self.samples = samples
        self.limits = torch.tensor(limits).repeat_interleave(samples)
        names = [stream_key(seed, step, prompt.id, sample) for prompt in prompts for sample in range(samples)]
        self.keys = torch.tensor(names, dtype=torch.long)
        self.width = max(len(prompt.token_ids) + limit for prompt, limit in zip(prompts, limits, strict=True))
        # Long prompts first: those that are read together are then of like length, and none is longer than the rows that it
        # joins. All samples of a prompt stand together.
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].token_ids))
        self.queue = [prompt * samples + sample for prompt in order for sample in range(samples)]

    def __len__(self) -> int:
        return len(self.limits)

    def take(self, room: int) -> list[int]:
        """The next rows of the queue: at most `room`, with at most `PREFILL_TOKENS` of prompt (one prompt at least)."""
        prompts = list(dict.fromkeys(row // self.samples for row in self.queue[:room]))
        most_prompts = max(1, PREFILL_TOKENS // len(self.prompts[prompts[0]]))
        fitting = set(prompts[:most_prompts])
        count = sum(row // self.samples in fitting for row in self.queue[:room])  # a prompt's rows stand together
        taken, self.queue = self.queue[:count], self.queue[count:]
        return taken


@dataclass
class _Run:
    """The loop: admit, draw, retire, step. Tensors of state are [n], one entry for each row under way."""

    decoder: Decoder
    settings: SamplingSettings
    plan: _Plan
    pad_id: int
    capacity: int
    """Most rows under way."""
    device: torch.device
    history: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Of each draw: rows, ids, log-probs; only of rows that were not handed out yet."""
    ended: list[Tensor] = field(default_factory=list)
    """Finished rows that were not handed out yet."""

    def __post_init__(self) -> None:
        self.keys = self.plan.keys.to(self.device)
        self.limits = self.plan.limits.to(self.device)
        self.stops = torch.empty(0)
        self.rows = torch.empty(0, dtype=torch.long, device=self.device)
        """Which row of the plan stands here."""
        self.ids = self.rows
        """The token drawn last."""
        self.lengths = self.rows
        """Tokens drawn so far."""
        self.left = self.rows
        """Tokens that may still be drawn."""
        self.noise = torch.empty(0, 0)
        """[n, NOISE_AHEAD] for the coming positions, of which `used` are past; greedy needs none."""
        self.used = NOISE_AHEAD

    def finish(self, at_once: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every row of the plan with its ids and log-probs, on the CPU, whenever `at_once` are finished."""
        while self.plan.queue or len(self.rows):
            if self.plan.queue and self._has_room():
                self._admit(self.plan.take(self.capacity - len(self.rows)))
            else:
                logits = self.decoder.step(self.ids)
                self.ids = self._draw(logits, self._next_noise(), self.rows, self.lengths)
                self.lengths, self.left = self.lengths + 1, self.left - 1
            self._retire()
            if sum(map(len, self.ended)) >= at_once or not (self.plan.queue or len(self.rows)):
                yield from self._hand_out()

    def _hand_out(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        rows, ids, logprobs = (torch.cat(values) for values in zip(*self.history, strict=True))
        goes = torch.isin(rows, torch.cat(self.ended))
        self.history, self.ended = [(rows[~goes], ids[~goes], logprobs[~goes])], []
        rows, ids, logprobs = rows[goes].cpu(), ids[goes].cpu(), logprobs[goes].cpu()
        order = rows.argsort(stable=True)  # within a row: as they were drawn
        numbers, lengths = rows.unique(return_counts=True)
        parts = zip(ids[order].split(lengths.tolist()), logprobs[order].split(lengths.tolist()), strict=True)
        for row, (own_ids, own_logprobs) in zip(numbers.tolist(), parts, strict=True):
            # Copies: a view would keep every rollout of the step alive for as long as one of them. And ordinary tensors.
            with torch.inference_mode(False):
                own_ids, own_logprobs = own_ids.clone(), own_logprobs.clone()
            yield row, own_ids, own_logprobs

    def _has_room(self) -> bool:
        free = self.capacity - len(self.rows)
        enough = free > 0 and free >= min(len(self.plan.queue), REFILL_SHARE * self.capacity)
        return len(self.rows) == 0 or (self.decoder.joins and enough)

    def _admit(self, taken: list[int]) -> None:
        prompts = list(dict.fromkeys(row // self.plan.samples for row in taken))
        place = {prompt: index for index, prompt in enumerate(prompts)}
        token_ids = [self.plan.prompts[prompt] for prompt in prompts]
        longest = max(len(ids) for ids in token_ids)
        padded = torch.tensor([(self.pad_id,) * (longest - len(ids)) + ids for ids in token_ids], device=self.device)
        lengths = torch.tensor([len(ids) for ids in token_ids], device=self.device)
        mask = torch.arange(longest, device=self.device) >= longest - lengths[:, None]
        source = torch.tensor([place[row // self.plan.samples] for row in taken], device=self.device)
        rows = torch.tensor(taken, device=self.device)
        first = torch.zeros_like(rows)
        noise = None if self.settings.greedy else uniforms(self.keys[rows], first)
        ids = self._draw(self.decoder.admit(padded, mask, source), noise, rows, first)
        self.ids = torch.cat((self.ids, ids))
        self.rows = torch.cat((self.rows, rows))
        self.lengths = torch.cat((self.lengths, first + 1))
        self.left = torch.cat((self.left, self.limits[rows] - 1))
        self.used = NOISE_AHEAD

    def _next_noise(self) -> Tensor | None:
        """[n] for the token that every row draws next."""
        if self.settings.greedy:
            return None
        if self.used == NOISE_AHEAD:
            ahead = self.lengths[:, None] + torch.arange(NOISE_AHEAD, device=self.device)
            keys = self.keys[self.rows].repeat_interleave(NOISE_AHEAD, 0)
            self.noise, self.used = uniforms(keys, ahead.flatten()).view_as(ahead), 0
        self.used += 1
        return self.noise[:, self.used - 1]

    def _draw(self, logits: Tensor, noise: Tensor | None, rows: Tensor, lengths: Tensor) -> Tensor:
        """Draw and record a token for each of `rows`, which have `lengths` so far."""
        if not len(self.stops):
            self.stops = torch.zeros(logits.shape[1], dtype=torch.bool, device=self.device)
            known = [stop for stop in self.settings.stop_ids if stop < logits.shape[1]]
            self.stops[torch.tensor(known, dtype=torch.long, device=self.device)] = True
        chosen = choose(logits.to(self.device), noise, self.settings)
        if not math.isfinite(float(chosen.logprobs.sum())):
            bad = ~torch.isfinite(chosen.logprobs)
            raise FloatingPointError(
                f"the model's logits are not finite at token {int(lengths[bad][0])} of an answer to prompt "
                f"{self.plan.names[int(rows[bad][0]) // self.plan.samples]!r}: its weights may hold NaN"
            )
        self.history.append((rows, chosen.ids, chosen.logprobs))
        return chosen.ids

    def _retire(self) -> None:
        """Take finished rows out: the last rows move to their places, so that the others stay where they are."""
        goes_on = ~(self.stops[self.ids] | (self.left == 0))
        count = int(goes_on.sum())
        if count == len(goes_on):
            return
        self.ended.append(self.rows[~goes_on])
        order = torch.arange(count, device=self.device)
        order[~goes_on[:count]] = goes_on[count:].nonzero().squeeze(1) + count
        if count:
            self.decoder.select(order)
        else:
            self.decoder.clear()
        self.ids, self.rows, self.lengths, self.left = (x[order] for x in (self.ids, self.rows, self.lengths, self.left))
        if self.used < NOISE_AHEAD:
            self.noise = self.noise[order]
