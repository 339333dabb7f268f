"""Who writes the answers of others: the data set, an embedded world, or the teacher."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from iwopd import tiny
from iwopd.config import Config, ConfigError
from iwopd.data.answers import AnswerTokens, answer_text, check_answers
from iwopd.data.chat import Chat
from iwopd.data.fields import DataError
from iwopd.model_facts import pad_id
from iwopd.models import stop_ids
from iwopd.rollout.local import LocalSampler
from iwopd.rollout.sampling import SamplingSettings
from iwopd.teacher.cached import CachedScorer
from iwopd.teacher.local import LocalScorer
from iwopd.teacher.prompted import PromptedScorer
from iwopd.teacher.scorer import Scorer
from iwopd.train.mix import Author
from iwopd.train.ranks import Ranks
from iwopd.train.refusals import Refused
from iwopd.types import Prompt, Rollout

TRIED = 256
"""Answers of a data set that are tokenised before training, to see whether any of them is short enough."""


def answers_refuse(config: Config, prompts: Sequence[Prompt]) -> Iterator[Refused]:
    """Training prompts without an answer that the mix could take."""
    mix = config.rollout.mix
    if not mix.active or mix.source != "data" or config.models.world is not None:
        return
    try:
        check_answers(prompts, mix.field)
    except DataError as error:
        remedy = "name the field with whole answers (rollout.mix.field), filter those prompts out, or set source = 'teacher'"
        yield Refused(f"rollout.mix.source is 'data', but {error}", remedy)


def build_author(
    config: Config,
    chat: Chat,
    prompts: Sequence[Prompt],
    stops: Collection[int],
    max_tokens: int,
    teacher: Scorer,
    ranks: Ranks,
) -> Author:
    """Who the settings say, tried out on real prompts; a `ConfigError` says why it cannot write."""
    for refused in answers_refuse(config, prompts):
        raise ConfigError(f"{refused.message}: {refused.remedy}")
    if config.rollout.mix.source == "teacher":
        return TeacherAuthor.of(config, chat, prompts, stops, max_tokens, teacher, ranks)
    author = DataAuthor.of(config, AnswerTokens.of(chat, stops), max_tokens)
    tried = prompts[:TRIED]
    if all(answer is None for answer in author(tried, 0)):
        raise ConfigError(
            f"rollout.mix.source is 'data', but the first {len(tried)} answers are all longer than an answer may be "
            f"({max_tokens} tokens, their end included): raise rollout.max_tokens, or leave rollout.mix out"
        )
    return author


@dataclass(frozen=True, eq=False)
class DataAuthor:
    """Answers that are there already. The same on every rank."""

    text: Callable[[Prompt], str | None]
    tokens: AnswerTokens
    max_tokens: int

    @classmethod
    def of(cls, config: Config, tokens: AnswerTokens, max_tokens: int) -> DataAuthor:
        field = config.rollout.mix.field
        if config.models.world is not None:
            return cls(tiny.right_solution, tokens, max_tokens)
        return cls(lambda prompt: answer_text(prompt, field), tokens, max_tokens)

    def __call__(self, prompts: Sequence[Prompt], step: int) -> list[Rollout | None]:
        return [self._rollout(prompt) for prompt in prompts]

    def fingerprint(self, prompts: Sequence[Prompt]) -> str:
        """Hash of the answers to these prompts."""
        digest = hashlib.sha256()
        for prompt in prompts:
            digest.update(repr((prompt.id, self.text(prompt))).encode(errors="surrogatepass"))
        return digest.hexdigest()[:16]

    def _rollout(self, prompt: Prompt) -> Rollout | None:
        text = self.text(prompt)
        assert text is not None  # the data were checked
        ids = self.tokens.ids(prompt, text)
        if len(ids) > self.max_tokens:
            return None
        return Rollout(prompt, torch.tensor(ids), torch.zeros(len(ids)), "eos", writer="data")


@dataclass(frozen=True, eq=False)
class TeacherAuthor:
    """A teacher in this process, which writes with the prompts that it sees; each rank has its share of them."""

    sampler: LocalSampler
    scorer: LocalScorer
    seen: Callable[[Prompt], Prompt]
    ranks: Ranks
    seed: int

    @classmethod
    def of(
        cls,
        config: Config,
        chat: Chat,
        prompts: Sequence[Prompt],
        stops: Collection[int],
        max_tokens: int,
        teacher: Scorer,
        ranks: Ranks,
    ) -> TeacherAuthor:
        inner = teacher.scorer if isinstance(teacher, PromptedScorer) else teacher
        inner = inner.scorer if isinstance(inner, CachedScorer) else inner  # what is kept are scores: it writes all the same
        if not isinstance(inner, LocalScorer):
            raise ConfigError(
                f"rollout.mix.source is 'teacher', but the teacher (a {type(inner).__name__}) only scores answers: load one "
                "here that has the student's tokenizer, or set source = 'data'"
            )
        rollout, model = config.rollout, inner.lm.model
        temperature = rollout.temperature if rollout.mix.temperature is None else rollout.mix.temperature
        ends = frozenset(stops) | stop_ids(chat.tokenizer, model)
        settings = SamplingSettings(max_tokens, temperature, rollout.top_p, rollout.top_k, ends)
        sampler = LocalSampler(model, settings, pad_id=pad_id(chat.tokenizer), vocab_size=len(chat.tokenizer))
        seen = teacher.seen if isinstance(teacher, PromptedScorer) else _as_it_is
        longest = max(len(seen(prompt).token_ids) for prompt in prompts) + max_tokens
        if longest > sampler.context:
            raise ConfigError(
                f"rollout.mix.source is 'teacher', but its longest prompt and answer have {longest} tokens together, and its "
                f"context {sampler.context}: lower rollout.max_tokens or data.max_prompt_tokens"
            )
        return cls(sampler, inner, seen, ranks, config.seed)

    def __call__(self, prompts: Sequence[Prompt], step: int) -> list[Rollout | None]:
        def work(mine: Sequence[Prompt]) -> list[Rollout | None]:
            self.scorer.arrive()
            with self.scorer.lm.autocast():
                written = self.sampler.sample([self.seen(prompt) for prompt in mine], seed=self.seed, step=step)
            return [replace(one, prompt=prompt, writer="teacher") for one, prompt in zip(written, mine, strict=True)]

        return self.ranks.share(prompts, work)


def _as_it_is(prompt: Prompt) -> Prompt:
    return prompt
