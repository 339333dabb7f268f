"""A model with verl's server interface: the student's samples with their log-probs, or a teacher's scores of given ids.

Requests arrive one by one; waiting ones are batched. A sample's noise depends on (seed, step, prompt,
sample), as in the local engine, so a resumed run draws the same samples.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from verl.workers.rollout.replica import TokenOutput

from iwopd.adapters import adapter_tensors, add_adapter, has_adapter
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.teacher.local import LocalScorer
from iwopd.types import Prompt, Rollout

GATHERING_SECONDS = 0.1
"""How long the first request of a batch waits for others."""


@dataclass(frozen=True)
class _Request:
    prompt: Prompt
    settings: SamplingSettings | None
    """None: score the ids instead of continuing them."""
    limit: int
    answer: asyncio.Future[TokenOutput]


class Server:
    """A Ray actor with the methods that verl calls on its servers."""

    def __init__(self, path: str, max_tokens: int, seed: int, dtype: str = "float32") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        self._model = model.eval()
        self._stop_ids = frozenset(_stop_ids(self._model, AutoTokenizer.from_pretrained(path)))
        self._max_tokens = max_tokens
        self._seed = seed
        self._step: int | None = None
        self._drawn: Counter[str] = Counter()
        self._waiting: list[_Request] = []
        self._busy = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def address(self) -> str:
        """A name for verl's load balancer; not a network address."""
        import ray

        return f"hf-{ray.get_runtime_context().get_actor_id()}"

    async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **_: Any) -> TokenOutput:
        """One answer to these ids, or with `prompt_logprobs` their own log-probs."""
        ids = tuple(int(token) for token in prompt_ids)
        scoring = sampling_params.get("prompt_logprobs") is not None
        name = "given" if scoring else self._name(ids)
        settings = None if scoring else self._settings(sampling_params)
        limit = int(sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens") or self._max_tokens)
        request = _Request(Prompt(name, ids), settings, limit, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if len(self._waiting) == 1:
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await request.answer

    async def update_weights(self, weights: dict[str, Tensor], step: int | None, adapter: dict[str, Any] | None = None) -> None:
        """Load all of the trainer's weights; with an adapter's settings, its matrices beside the model's own weights."""
        async with self._busy:
            if adapter is not None:
                self._load_adapter(weights, adapter)
                self._step = step
                self._drawn.clear()
                return
            names = {name for name, _ in self._model.named_parameters()}  # tied ones once
            if lost := names - weights.keys():
                raise ValueError(f"weight sync brought no {sorted(lost)[0]!r} ({len(lost)} of {len(names)} are missing)")
            unknown = self._model.load_state_dict(weights, strict=False).unexpected_keys
            if unknown:
                raise ValueError(f"weight sync brought {unknown[0]!r}, which the model does not have")
            self._step = step
            self._drawn.clear()

    def _load_adapter(self, given: dict[str, Tensor], settings: dict[str, Any]) -> None:
        if not has_adapter(self._model):
            add_adapter(self._model, settings["r"], settings["lora_alpha"], sorted(settings["target_modules"]))
        own = adapter_tensors(self._model)
        if own.keys() != given.keys():
            odd = sorted(own.keys() ^ given.keys())
            raise ValueError(f"weight sync brought another adapter: {len(odd)} names differ, such as {odd[0]!r}")
        with torch.no_grad():
            for name, values in own.items():
                values.copy_(given[name])

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the step of the current weights."""
        self._step = global_steps

    async def nothing(self, *_: Any, **__: Any) -> None:
        """No memory to free, nothing to pause: weights are loaded between batches."""

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = nothing

    def _name(self, ids: tuple[int, ...]) -> str:
        name = blake2b(repr(ids).encode(), digest_size=8).hexdigest()
        self._drawn[name] += 1
        return f"{name}/{self._drawn[name]}"

    def _settings(self, params: dict[str, Any]) -> SamplingSettings:
        return SamplingSettings(
            max_tokens=self._max_tokens,
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            top_k=max(0, params.get("top_k", 0)),  # verl: -1 for all
            stop_ids=self._stop_ids,
        )

    async def _work(self) -> None:
        await asyncio.sleep(GATHERING_SECONDS)
        async with self._busy:
            batch, self._waiting = self._waiting, []
            by_settings: dict[SamplingSettings | None, list[_Request]] = {}
            for request in batch:
                by_settings.setdefault(request.settings, []).append(request)
            for settings, requests in by_settings.items():
                try:
                    outputs = await asyncio.to_thread(self._outputs, settings, requests)
                except Exception as error:  # the caller handles it; the server continues
                    for request in requests:
                        request.answer.set_exception(error)
                else:
                    for request, output in zip(requests, outputs, strict=True):
                        request.answer.set_result(output)

    def _outputs(self, settings: SamplingSettings | None, requests: list[_Request]) -> list[TokenOutput]:
        prompts = [request.prompt for request in requests]
        if settings is None:
            return self._scores(prompts)
        limits = [min(request.limit, settings.max_tokens) for request in requests]
        sampler = LocalSampler(self._model, settings)
        rollouts = sampler.sample(prompts, seed=self._seed, step=self._step or 0, max_tokens=limits)
        return [
            TokenOutput(
                token_ids=rollout.response_ids.tolist(),
                log_probs=rollout.rollout_logprobs.tolist(),
                stop_reason="completed",
                extra_fields={"global_steps": self._step},
            )
            for rollout in rollouts
        ]

    def _scores(self, prompts: list[Prompt]) -> list[TokenOutput]:
        """Scores in verl's layout: entry t is for token t + 1, the last one is padding."""
        given = [
            Rollout(
                Prompt(prompt.id, prompt.token_ids[:1]),
                torch.tensor(prompt.token_ids[1:]),
                torch.zeros(len(prompt.token_ids) - 1),
                "length",
            )
            for prompt in prompts
        ]
        scores = LocalScorer(self._model).score(given)
        return [
            TokenOutput(
                token_ids=[],
                extra_fields={
                    "prompt_ids": [[token] for token in (*prompt.token_ids[1:], 0)],
                    "prompt_logprobs": [[value] for value in (*values.tolist(), 0.0)],
                    "global_steps": self._step,
                },
            )
            for prompt, values in zip(prompts, scores, strict=True)
        ]


class StudentServer(Server):
    """Its name shows in the list of processes."""


class TeacherServer(Server):
    """Its name shows in the list of processes."""


def _stop_ids(model: Any, tokenizer: Any) -> set[int]:
    """End-of-sequence ids of generation settings and tokenizer."""
    configured = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    return {stop for stop in ids if stop is not None}
