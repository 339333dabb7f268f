"""What vLLM, in this process or on a server, is asked for and may answer, and the sampler that asks.

Log-probs must be the trainer's: over the whole real vocabulary, at the sampling temperature. vLLM's `processed_logprobs` are,
if top-p and top-k are off. Its default, `raw_logprobs`, knows no temperature.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from iwopd.rollout.engine import Engine, Student
from iwopd.rollout.noise import stream_key
from iwopd.rollout.sampler import Listener, Sampler
from iwopd.rollout.sampling import SamplingError, SamplingSettings
from iwopd.rollout.settings import ServerSettings, VllmSettings
from iwopd.types import Prompt, Rollout

LEAST_TEMPERATURE = 0.01
"""vLLM raises what is smaller (and not 0) to this, without an error."""
MOST_BIASED = 1024
"""vLLM's newer model runner takes no more biased ids per request."""
IMPOSSIBLE = -100.0
"""The strongest bias that vLLM's server lets through: e^-100 of the probability is left."""


@dataclass(frozen=True)
class Vocabulary:
    """The ids that exist, and the rows of the output matrix, of which the last may be padding."""

    size: int
    rows: int

    def __post_init__(self) -> None:
        if self.rows - self.size > MOST_BIASED:
            raise SamplingError(
                f"the tokenizer has {self.size} ids, the student's output matrix {self.rows} rows: vLLM can rule out at most "
                f"{MOST_BIASED} padded ids; use rollout.engine = 'local'"
            )

    @property
    def bias(self) -> dict[int, float] | None:
        """The `logit_bias` that makes the padded ids impossible; None if there are none."""
        return dict.fromkeys(range(self.size, self.rows), IMPOSSIBLE) or None


class Answer(NamedTuple):
    """What an engine wrote to one request."""

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    finish_reason: str | None


class RequestEngine(Engine):
    """An engine that takes requests."""

    context: int
    """Tokens that a prompt and its answer may have together."""

    def __init__(self, student: Student, settings: VllmSettings | ServerSettings) -> None:
        super().__init__(student, settings)
        self._synced: list[float] | None = None
        """`weights_version` of what it writes with."""

    @property
    def dtype(self) -> str:
        return self.settings.dtype or self.student.computes or self.student.dtype

    def sampler(self, settings: SamplingSettings) -> RequestSampler:
        return RequestSampler(self, settings)

    def answers(self, requests: Sequence[dict[str, Any]]) -> Generator[tuple[int, Answer], None, None]:
        """Number and answer of each request, as they are finished."""
        raise NotImplementedError


class RequestSampler(Sampler):
    """Asks an engine, with one request per rollout, because each has a seed of its own."""

    too_long = "the engine takes {context}; raise max_model_len (engine.vllm, or --max-model-len of the server), "

    def __init__(self, engine: RequestEngine, settings: SamplingSettings) -> None:
        check_settings(settings)
        self.engine, self.settings = engine, settings
        self.vocab_size, self.rows = engine.student.vocab_size, engine.student.rows
        self.vocabulary = Vocabulary(self.vocab_size, self.rows)

    @property
    def context(self) -> int:
        return self.engine.context

    def write(
        self, prompts: Sequence[Prompt], limits: Sequence[int], samples: int, seed: int, step: int, finished: Listener | None
    ) -> list[Rollout]:
        places = [(prompt, sample, limit) for prompt, limit in zip(prompts, limits, strict=True) for sample in range(samples)]
        fields, requests = request_fields(self.settings, self.vocabulary), []
        for prompt, sample, limit in places:
            own = {"prompt": list(prompt.token_ids), "max_tokens": limit, "seed": request_seed(seed, step, prompt.id, sample)}
            requests.append(fields | own)
        self.engine.update_weights()
        rollouts: dict[int, Rollout] = {}
        with closing(self.engine.answers(requests)) as answers:
            for number, answer in answers:
                prompt, sample, limit = places[number]
                rollouts[number] = read_rollout(prompt, sample, answer, limit, self.settings.stop_ids, self.vocabulary)
                if finished is not None:
                    finished(number, rollouts[number])
        return [rollouts[number] for number in range(len(places))]


def check_settings(settings: SamplingSettings) -> None:
    """Refuse what would make the engine's log-probs something else than the trainer's."""
    if settings.top_p < 1 or settings.top_k:
        raise SamplingError(
            f"top_p is {settings.top_p} and top_k {settings.top_k}: vLLM's log-probs would then be over the ids that are left, "
            "and the correction of the rollouts wrong; set top_p = 1 and top_k = 0, or rollout.engine = 'local'"
        )
    if 0 < settings.temperature < LEAST_TEMPERATURE:
        raise SamplingError(
            f"temperature is {settings.temperature}: vLLM would sample at {LEAST_TEMPERATURE} instead; take 0 (greedy), "
            f"{LEAST_TEMPERATURE} or more"
        )


def request_fields(settings: SamplingSettings, vocabulary: Vocabulary) -> dict[str, Any]:
    """All parameters of a request but prompt, limit and seed, by vLLM's names. A server's own defaults do not count."""
    return {
        "temperature": settings.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,  # that of the drawn token, and of no other
        "stop_token_ids": sorted(stop for stop in settings.stop_ids if stop < vocabulary.rows),
        "ignore_eos": True,  # ours are in stop_token_ids
        "logit_bias": vocabulary.bias,
    }


def request_seed(seed: int, step: int, prompt_id: str, sample: int) -> int:
    """One rollout's seed: a function of its coordinates alone, as in `noise`. Not negative (-1 means none to vLLM)."""
    return stream_key(seed, step, prompt_id, sample)[0] & (2**63 - 1)


def read_rollout(
    prompt: Prompt, sample: int, answer: Answer, limit: int, stop_ids: Collection[int], vocabulary: Vocabulary
) -> Rollout:
    """An engine's answer of at most `limit` tokens as a `Rollout`, or an error that says what is wrong with it."""
    what = f"the engine's answer to prompt {prompt.id!r}"
    token_ids, logprobs, finish_reason = answer
    if not token_ids or len(token_ids) != len(logprobs):
        raise SamplingError(f"{what} has {len(token_ids)} tokens and {len(logprobs)} log-probs")
    if outside := [token for token in token_ids if not 0 <= token < vocabulary.size]:
        raise SamplingError(
            f"{what} has id {outside[0]}, but the tokenizer has {vocabulary.size} ids: is it the student that the engine runs?"
        )
    values = [math.nan if value is None else value for value in logprobs]
    if not all(map(math.isfinite, values)):
        raise SamplingError(f"{what} has log-probs that are not finite: the student's weights may hold NaN")
    ended = token_ids[-1] in stop_ids
    if not ended and (finish_reason != "length" or len(token_ids) != limit):
        raise SamplingError(
            f"{what} ended after {len(token_ids)} of {limit} tokens with id {token_ids[-1]} and reason {finish_reason!r}: "
            f"neither a stop id ({sorted(stop_ids)}) nor the limit. Does the server have stop tokens of its own, or a smaller "
            "--max-model-len? (--generation-config vllm switches the former off)"
        )
    return Rollout(prompt, torch.tensor(token_ids), torch.tensor(values), "eos" if ended else "length", sample)
