"""What vLLM, in this process or on a server, is asked for and may answer, and the sampler that asks.

Log-probs must be the trainer's: over the whole real vocabulary, at the sampling temperature. vLLM's `processed_logprobs` are,
if top-p and top-k are off. Its default, `raw_logprobs`, knows no temperature.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from iwopd.rollout.engine import Engine, Student
from iwopd.rollout.noise import stream_key
from iwopd.rollout.sampler import Listener, Sampler, Watcher
from iwopd.rollout.sampling import SamplingError, SamplingSettings
from iwopd.rollout.settings import ServerSettings, VllmSettings
from iwopd.rollout.streaming import Answer, Growing, Inbox, Stream, Writing
from iwopd.types import Prompt, Rollout, StopReason

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


class RequestEngine(Engine):
    """An engine that takes requests."""

    watched = True
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

    def stream(self, inbox: Inbox, like: dict[str, Any]) -> Stream:
        """Requests whose answers are read while they are written; `like` is one of them."""
        raise NotImplementedError


class RequestSampler(Sampler):
    """Asks an engine, with one request per rollout, because each has a seed of its own."""

    watched = True
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
        self,
        prompts: Sequence[Prompt],
        limits: Sequence[int],
        samples: int,
        seed: int,
        step: int,
        finished: Listener | None,
        watcher: Watcher | None = None,
    ) -> list[Rollout]:
        fields, answers = request_fields(self.settings, self.vocabulary), []
        for prompt, limit in zip(prompts, limits, strict=True):
            for sample in range(samples):
                own = {"prompt": list(prompt.token_ids), "max_tokens": limit}
                own["seed"] = request_seed(seed, step, prompt.id, sample)
                answers.append(Growing(prompt, sample, limit, fields | own))
        rollouts: dict[int, Rollout] = {}

        def done(number: int, rollout: Rollout) -> None:
            rollouts[number] = rollout
            if finished is not None:
                finished(number, rollout)

        self.engine.update_weights()
        self.overrun = 0
        if watcher is None:
            with closing(self.engine.answers([asked.request for asked in answers])) as found:
                for number, answer in found:
                    done(number, self._read(answers[number], answer))
        else:
            writing = Writing(answers, watcher, take=self._take, done=lambda number, one: done(number, self._cut(one)))
            writing.run(lambda inbox: self.engine.stream(inbox, answers[0].request))
            self.overrun = writing.overrun
        return [rollouts[number] for number in range(len(answers))]

    def _read(self, asked: Growing, answer: Answer) -> Rollout:
        return read_rollout(asked.prompt, asked.sample, answer, asked.limit, self.settings.stop_ids, self.vocabulary)

    def _take(self, growing: Growing, part: Answer) -> None:
        """Add what is new to an answer, or say what is wrong with it."""
        what = f"the engine's answer to prompt {growing.prompt.id!r}"
        if growing.ended and part.token_ids:
            raise SamplingError(f"{what} goes on after its end, with id {part.token_ids[0]}")
        growing.token_ids += part.token_ids
        growing.logprobs += check_tokens(what, part, self.vocabulary)
        last = growing.token_ids[-1] if growing.token_ids else None
        growing.ended = last in self.settings.stop_ids or len(growing.token_ids) == growing.limit
        if part.finish_reason is not None and not growing.ended:
            self._read(growing, Answer(growing.token_ids, growing.logprobs, part.finish_reason))  # says why not

    def _cut(self, growing: Growing) -> Rollout:
        """Of what was looked at."""
        count = growing.looked_at
        reason: StopReason = "horizon"
        if growing.ended and count == len(growing.token_ids):
            reason = "eos" if growing.token_ids[-1] in self.settings.stop_ids else "length"
        ids, logprobs = torch.tensor(growing.token_ids[:count]), torch.tensor(growing.logprobs[:count])
        return Rollout(growing.prompt, ids, logprobs, reason, growing.sample)


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


def continued(request: dict[str, Any], written: Sequence[int]) -> dict[str, Any]:
    """The rest of an answer that broke off after these tokens: with noise of its own, because the same seed would repeat it."""
    if not written:
        return request
    rest = {"prompt": [*request["prompt"], *written], "max_tokens": request["max_tokens"] - len(written)}
    return request | rest | {"seed": request_seed(request["seed"], len(written), "", 0)}


def request_seed(seed: int, step: int, prompt_id: str, sample: int) -> int:
    """One rollout's seed: a function of its coordinates alone, as in `noise`. Not negative (-1 means none to vLLM)."""
    return stream_key(seed, step, prompt_id, sample)[0] & (2**63 - 1)


def read_rollout(
    prompt: Prompt, sample: int, answer: Answer, limit: int, stop_ids: Collection[int], vocabulary: Vocabulary
) -> Rollout:
    """An engine's answer of at most `limit` tokens as a `Rollout`, or an error that says what is wrong with it."""
    what = f"the engine's answer to prompt {prompt.id!r}"
    token_ids, logprobs, finish_reason = answer
    if not token_ids:
        raise SamplingError(f"{what} has 0 tokens and {len(logprobs)} log-probs")
    values = check_tokens(what, answer, vocabulary)
    ended = token_ids[-1] in stop_ids
    if not ended and (finish_reason != "length" or len(token_ids) != limit):
        raise SamplingError(
            f"{what} ended after {len(token_ids)} of {limit} tokens with id {token_ids[-1]} and reason {finish_reason!r}: "
            f"neither a stop id ({sorted(stop_ids)}) nor the limit. Does the server have stop tokens of its own, or a smaller "
            "--max-model-len? (--generation-config vllm switches the former off)"
        )
    return Rollout(prompt, torch.tensor(token_ids), torch.tensor(values), "eos" if ended else "length", sample)


def check_tokens(what: str, part: Answer, vocabulary: Vocabulary) -> list[float]:
    """The log-probs of an answer or a part of it, whose ids must exist."""
    token_ids, logprobs, _ = part
    if len(token_ids) != len(logprobs):
        raise SamplingError(f"{what} has {len(token_ids)} tokens and {len(logprobs)} log-probs")
    if outside := [token for token in token_ids if type(token) is not int or not 0 <= token < vocabulary.size]:
        raise SamplingError(
            f"{what} has id {str(outside[0])[:40]}, but the tokenizer has {vocabulary.size} ids: is it the student that the "
            "engine runs?"
        )
    values = [_finite(value) for value in logprobs]
    if any(map(math.isnan, values)):
        raise SamplingError(f"{what} has log-probs that are not finite: the student's weights may hold NaN")
    return values


def _finite(value: Any) -> float:
    """A log-prob; NaN for everything that is none."""
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # JSON's whole numbers have no limit
        return math.nan
    return number if math.isfinite(number) else math.nan
