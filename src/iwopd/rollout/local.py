"""A fast sampler for any transformers causal LM, on CPU or GPU.

Fast: all prompts of a step share one batch as far as memory allows, waiting prompts take the place of finished rows, several
samples of a prompt read it once, and Qwen3, Qwen2 and Llama models take a lean path (`lean_decoder`).
Reproducible: the noise of a token depends on (seed, step, prompt, sample, position) alone (`noise`). Batching changes the
rounding of logits, which seldom moves a draw: the tests demand 99.9 % equal rollouts in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from iwopd.devices import cache_bytes, upload
from iwopd.lean_model import lean_obstacle
from iwopd.model_facts import context_length
from iwopd.modes import eval_mode
from iwopd.rollout.decoding import Decoder, model_decoder
from iwopd.rollout.engine import Engine
from iwopd.rollout.head import scorers_head
from iwopd.rollout.lean_decoder import LeanDecoder
from iwopd.rollout.looks import Looks
from iwopd.rollout.noise import stream_key, uniforms
from iwopd.rollout.sampler import UNLIMITED, Listener, Progress, Sampler, Watcher
from iwopd.rollout.sampling import SamplingSettings, choose
from iwopd.rollout.store import slack
from iwopd.types import Prompt, Rollout, StopReason

Path = Literal["auto", "lean", "model"]

CACHE_SHARE = 0.5
"""Of an accelerator's memory: this share of what is free when a call starts. The other half is for reading prompts, for the
logits of all rows, for whoever scores rollouts meanwhile, and for what the allocator cannot piece together."""
PREFILL_TOKENS = 2**14
PREFILL_SHARE = 1 / 16
MASK_ELEMENTS = 2**26
"""Prompt tokens, padding included, that are read at a time; the same as a share of the tokens that the cache holds; and
elements of the mask of prompts that are read together. One prompt is always read, of any length, and needs no mask."""
REFILL_SHARE = 1 / 8
"""Waiting prompts come in when this share of the batch is free: reading them one by one would cost a pass each."""
TELLINGS = 16
"""How often a listener is told of finished rollouts: putting their tokens together costs a pass over those of all rows."""
NOISE_AHEAD = 32
"""Positions whose noise is made at a time: the number of operations is what it costs, not their size."""


class LocalEngine(Engine):
    """The student itself, in this process."""

    exact = several_ranks = restricts = watched = True
    weights = "student"

    @property
    def dtype(self) -> str:
        return self.student.computes or self.student.dtype

    def sampler(self, settings: SamplingSettings) -> LocalSampler:
        student = self.student
        rounded = None if self.dtype == student.dtype else self.dtype
        return LocalSampler(student.model, settings, pad_id=student.pad_id, vocab_size=student.vocab_size, dtype=rounded)


class LocalSampler(Sampler):
    """Writes rollouts with a model in this process, whose weights it reads again at every call."""

    watched = counts_tokens = True

    def __init__(
        self,
        model: nn.Module,
        settings: SamplingSettings,
        *,
        pad_id: int = 0,
        vocab_size: int | None = None,
        path: Path = "auto",
        cache_tokens: int | None = None,
        dtype: str | None = None,
    ) -> None:
        """Sample from `model`.

        pad_id: fills the left of shorter prompts; any id that the model can embed.
        vocab_size: ids from here on do not exist (padding rows of the output matrix); by default all rows do.
        path: `lean` insists on the lean path, `model` on the model's own forward, `auto` takes the lean one where it can.
        cache_tokens: rows x tokens (prompt and answer) under way at a time; by default what fits in memory.
        dtype: half precision in which autocast runs the model where it is scored and trained, so that it writes as the same
        policy; None: as its weights are.
        """
        if path not in ("auto", "lean", "model"):
            raise ValueError(f"path must be 'auto', 'lean' or 'model', got {path!r}")
        if cache_tokens is not None and cache_tokens < 1:
            raise ValueError(f"cache_tokens must be >= 1, got {cache_tokens}")
        self.model: Any = model
        self.settings, self.path, self.cache_tokens = settings, path, cache_tokens
        self.half: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self.rows = len(self._embedding)
        if vocab_size is not None and not 0 < vocab_size <= self.rows:
            raise ValueError(f"vocab_size is {vocab_size}, the model has {self.rows} ids")
        if not 0 <= pad_id < self.rows:
            raise ValueError(f"pad_id is {pad_id}, the model embeds ids 0..{self.rows - 1}")
        self.pad_id, self.vocab_size = pad_id, vocab_size

    def write(
        self,
        prompts: Sequence[Prompt],
        limits: Sequence[int],
        samples: int,
        seed: int,
        step: int,
        finished: Listener | None,
        watcher: Watcher | None = None,
    ) -> list[Rollout]:
        """Prompts that share an id share their noise."""
        plan = _Plan(prompts, limits, samples, seed, step)
        rollouts: dict[int, Rollout] = {}
        at_once = len(plan) if finished is None else max(1, len(plan) // TELLINGS)
        obstacle = self._lean_obstacle()
        looks = None if watcher is None else Looks(watcher, lambda row: prompts[row // samples], self._outside)
        with eval_mode(self.model), self._context(lean=obstacle is None):
            decoder, rows = self._decoder(plan, lean=obstacle is None, room=None if watcher is None else watcher.room)
            run = _Run(decoder, self.settings, plan, self.pad_id, rows, self._embedding.device, looks, self.progress)
            for row, tokens, logprobs in run.finish(at_once):
                reason: StopReason = "eos" if int(tokens[-1]) in self.settings.stop_ids else "length"
                if looks is not None and row in looks.stopped:
                    reason = "horizon"
                prompt, sample = divmod(row, samples)
                rollouts[row] = Rollout(prompts[prompt], tokens, logprobs, reason, sample)
                if finished is not None:
                    with self._outside():
                        finished(row, rollouts[row])
        return [rollouts[row] for row in range(len(plan))]

    @contextmanager
    def _context(self, *, lean: bool) -> Iterator[None]:
        """In which the model writes."""
        if lean:  # inference mode makes small operations a tenth faster than no_grad
            with torch.inference_mode():
                yield
        else:  # what a model keeps of inference mode could not be trained on
            kind = self._embedding.device.type
            with torch.no_grad(), torch.autocast(kind, self.half, enabled=self.half is not None), scorers_head(self.model):
                yield

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """For a listener in the midst of it: what it computes has its own precision, and may be trained on."""
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self._embedding.device.type, enabled=False):
            yield

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

    def _decoder(self, plan: _Plan, *, lean: bool, room: int | None) -> tuple[Decoder, int]:
        """A decoder over the weights of this moment, and how many rows may be under way; `room`: tokens of a watcher."""
        decoder: Decoder
        if lean:
            decoder = LeanDecoder(self.model, self.vocab_size, width=plan.width, dtype=self.half)
        else:
            decoder = model_decoder(self.model, self.vocab_size)
        tokens = self.cache_tokens
        if tokens is None:
            sizes = decoder.token_bytes.items()
            tokens = min((cache_bytes(device, CACHE_SHARE) // size for device, size in sizes), default=UNLIMITED)
        rows, columns = plan.settle(tokens if room is None else min(tokens, room))
        decoder.reserve(rows, columns)
        return decoder, rows


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
        self.reading = PREFILL_TOKENS

    def settle(self, tokens: int) -> tuple[int, int]:
        """Most rows under way, and the columns that they need, in a cache for so many tokens; one row is always allowed."""
        self.reading = min(PREFILL_TOKENS, max(1, int(PREFILL_SHARE * tokens)))
        together = max(map(len, self.prompts)) + int(self.limits.max())
        if len(self) * together <= tokens:
            return len(self), together
        columns = self.width + slack(self.width)
        rows = min(len(self), tokens // columns)
        return (rows, columns) if rows > 1 else (1, self.width)

    def __len__(self) -> int:
        return len(self.limits)

    def take(self, room: int) -> list[int]:
        """The next rows of the queue: at most `room`, with no more prompts than are read at a time (one at least)."""
        prompts = list(dict.fromkeys(row // self.samples for row in self.queue[:room]))
        longest = len(self.prompts[prompts[0]])
        most_prompts = max(1, min(self.reading // longest, MASK_ELEMENTS // longest**2))
        fitting = set(prompts[:most_prompts])
        count = sum(row // self.samples in fitting for row in self.queue[:room])  # a prompt's rows stand together
        taken, self.queue = self.queue[:count], self.queue[count:]
        return taken


@dataclass
class _Run:
    """The loop: admit, draw, retire, step. Tensors of state are [n], one entry for each row under way.

    An accelerator holds what it computes: the ids and their noise. The rest is known without it and stays on the CPU, so that
    the host waits once a token, in `_retire`.
    """

    decoder: Decoder
    settings: SamplingSettings
    plan: _Plan
    pad_id: int
    capacity: int
    """Most rows under way."""
    device: torch.device
    looks: Looks | None = None
    progress: Progress | None = None
    history: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Of each draw: rows, ids, log-probs; only of rows that were not handed out yet."""
    ended: list[Tensor] = field(default_factory=list)
    """Finished rows that were not handed out yet."""

    def __post_init__(self) -> None:
        self.stops = torch.empty(0)
        self.ids = torch.empty(0, dtype=torch.long, device=self.device)
        """The token drawn last."""
        self.rows = torch.empty(0, dtype=torch.long)
        """Which row of the plan stands here."""
        self.lengths = self.rows
        """Tokens drawn so far."""
        self.left = self.rows
        """Tokens that may still be drawn."""
        self.noise = torch.empty(0, 0)
        """[n, NOISE_AHEAD] for the coming positions, of which `used` are past; greedy needs none."""
        self.used = NOISE_AHEAD

    def finish(self, at_once: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every row of the plan with its ids and log-probs, on the CPU, whenever `at_once` are finished."""
        looks = self.looks
        while self.plan.queue or len(self.rows):
            under_way, waiting = len(self.rows), len(self.plan.queue)
            if self.plan.queue and self._has_room() and (looks is None or looks.may_join(self.lengths)):
                self._admit(self.plan.take(self.capacity - len(self.rows)))
            else:
                logits = self.decoder.step(self.ids)
                self.ids = self._draw(logits, self._next_noise(), self.rows)
                self.lengths, self.left = self.lengths + 1, self.left - 1
            self._retire()
            if looks is not None and looks.is_due(self.lengths):
                self._keep(~looks.look(self.rows, self.lengths))
            if self.progress is not None:
                joined = waiting - len(self.plan.queue)
                self.progress(under_way + joined - len(self.rows), joined or under_way)
            if sum(map(len, self.ended)) >= at_once or not (self.plan.queue or len(self.rows)):
                yield from self._hand_out()

    def _hand_out(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        rows, ids, logprobs = (torch.cat(values) for values in zip(*self.history, strict=True))
        goes = torch.isin(rows, torch.cat(self.ended))
        stay, leave = (upload(which.nonzero().squeeze(1), self.device) for which in (~goes, goes))
        self.history, self.ended = [(rows[~goes], ids[stay], logprobs[stay])], []
        rows, ids, logprobs = rows[goes], ids[leave].cpu(), logprobs[leave].cpu()
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
        padded = torch.tensor([(self.pad_id,) * (longest - len(ids)) + ids for ids in token_ids])
        mask = torch.arange(longest) >= longest - torch.tensor([len(ids) for ids in token_ids])[:, None]
        source = torch.tensor([place[row // self.plan.samples] for row in taken])
        rows = torch.tensor(taken)
        first = torch.zeros_like(rows)
        noise = None if self.settings.greedy else uniforms(*self._to_device(self.plan.keys[rows], first))
        ids = self._draw(self.decoder.admit(padded, mask, source), noise, rows)
        self.ids = torch.cat((self.ids, ids))
        self.rows = torch.cat((self.rows, rows))
        self.lengths = torch.cat((self.lengths, first + 1))
        self.left = torch.cat((self.left, self.plan.limits[rows] - 1))
        self.used = NOISE_AHEAD

    def _next_noise(self) -> Tensor | None:
        """[n] for the token that every row draws next."""
        if self.settings.greedy:
            return None
        if self.used == NOISE_AHEAD:
            ahead = self.lengths[:, None] + torch.arange(NOISE_AHEAD)
            keys = self.plan.keys[self.rows].repeat_interleave(NOISE_AHEAD, 0)
            self.noise, self.used = uniforms(*self._to_device(keys, ahead.flatten())).view(ahead.shape), 0
        self.used += 1
        return self.noise[:, self.used - 1]

    def _to_device(self, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(upload(value, self.device) for value in values)

    def _draw(self, logits: Tensor, noise: Tensor | None, rows: Tensor) -> Tensor:
        """Draw and record a token for each of `rows`."""
        if not len(self.stops):
            stops = torch.zeros(logits.shape[1], dtype=torch.bool)
            stops[[stop for stop in self.settings.stop_ids if stop < logits.shape[1]]] = True
            self.stops = upload(stops, self.device)
        chosen = choose(logits.to(self.device), noise, self.settings)
        self.history.append((rows, chosen.ids, chosen.logprobs))
        if self.looks is not None:
            self.looks.drawn(rows, chosen.ids, chosen.logprobs)
        return chosen.ids

    def _retire(self) -> None:
        """Take finished rows out."""
        rows, _, logprobs = self.history[-1]
        finite = torch.isfinite(logprobs)
        *stopped, sound = torch.cat((self.stops[self.ids], finite.all()[None])).tolist()  # here the host waits
        if not sound:
            self._refuse(int((~finite).nonzero()[0]) - len(rows))
        goes_on = ~torch.tensor(stopped, dtype=torch.bool) & (self.left > 0)
        if self.looks is not None:
            self.looks.ended(self.rows[~goes_on])
        self._keep(goes_on)

    def _keep(self, goes_on: Tensor) -> None:
        """Take the others out: the last rows move to their places, so that those that stay do so where they are."""
        count = int(goes_on.sum())
        if count == len(goes_on):
            return
        self.ended.append(self.rows[~goes_on])
        order = torch.arange(count)
        order[~goes_on[:count]] = goes_on[count:].nonzero().squeeze(1) + count
        if count:
            self.decoder.select(order)
        else:
            self.decoder.clear()
        self.rows, self.lengths, self.left = (x[order] for x in (self.rows, self.lengths, self.left))
        order = upload(order, self.device)
        self.ids = self.ids[order]
        if self.used < NOISE_AHEAD:
            self.noise = self.noise[order]

    def _refuse(self, place: int) -> None:
        """The row that stands at this place has drawn a token from logits that are not numbers."""
        raise FloatingPointError(
            f"the model's logits are not finite at token {int(self.lengths[place]) - 1} of an answer to prompt "
            f"{self.plan.names[int(self.rows[place]) // self.plan.samples]!r}: its weights may hold NaN"
        )
