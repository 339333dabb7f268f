"""A probe from beginning to end: rollouts, scores, parts, verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import iwopd
from iwopd import algo
from iwopd.algo.evidence import Evidence
from iwopd.analysis.handoff import handoff_scores
from iwopd.analysis.probe.alignment import AlignmentBatch, directions_of, measure_alignment
from iwopd.analysis.probe.inputs import Material, Pair
from iwopd.analysis.probe.intervals import Bootstrap
from iwopd.analysis.probe.positions import measure_drift, measure_likelihood, measure_positions, measure_top_k_overlap
from iwopd.analysis.probe.result import Curve, Estimate, Handoff, Probe, ProbeError, Rollouts
from iwopd.analysis.probe.rules import measure_rules, probe_rules
from iwopd.analysis.probe.scoring import Tokens, number_prompts, score_tokens
from iwopd.analysis.probe.settings import PARTS, ProbeSettings
from iwopd.analysis.probe.verdict import judge
from iwopd.eval.statistics import Interval, interval_over_problems
from iwopd.lm import ResponseModel
from iwopd.models import stop_ids
from iwopd.rollout.engine import EngineChoice, Student
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingError, SamplingSettings
from iwopd.stages import Silent, StageListener
from iwopd.types import Rollout

CHUNK_PROMPTS = 64
"""Prompts that are sampled in one call: enough to fill a batch, few enough to show progress."""


def run_probe(pair: Pair, material: Material, settings: ProbeSettings, progress: StageListener | None = None) -> Probe:
    """Measure what can be measured, and say what cannot and why. The pair's teacher is let go of on the way."""
    return _Run(pair, material, settings, progress or Silent()).finish()


class _Run:
    def __init__(self, pair: Pair, material: Material, settings: ProbeSettings, progress: StageListener) -> None:
        self.pair, self.material, self.settings, self.progress = pair, material, settings, progress
        self.missing: dict[str, str] = {part: "left out with --skip" for part in PARTS if part in settings.skip}
        self.notes = list(material.notes)
        self.seconds: dict[str, float] = {}
        self.parts: dict[str, Any] = {}
        self.rules = probe_rules(settings.gamma, settings.rules)
        self.student = self._lm(pair.student)

    def finish(self) -> Probe:
        rollouts = self._sample()
        about = self._look_at(rollouts)
        answers = [rollout for rollout in rollouts if not _empty(rollout)]
        tokens = self._score(answers)
        self._handoff(rollouts, about)
        self.pair.teacher = None
        if tokens is not None:
            self._measure(tokens, answers)
        probe = Probe(
            iwopd=iwopd.__version__,
            student=self.pair.student_name,
            teacher=self.pair.teacher_name,
            task=self.material.task,
            settings=self.settings.as_dict(),
            rollouts=about,
            missing={part: self.missing[part] for part in PARTS if part in self.missing},
            notes=self.notes,
            seconds={name: round(value, 2) for name, value in self.seconds.items()},
            **self.parts,
        )
        bias, sentences = judge(probe, self.settings.gamma)
        return probe.model_copy(update={"bias": bias, "verdict": sentences})

    # --- rollouts and scores ---

    def _sample(self) -> list[Rollout]:
        prompts = self.material.prompts
        rollouts = []
        longest = max(len(prompt.token_ids) for prompt in prompts) + self.settings.max_tokens
        opened = self._sampler(self.settings.engine, self.pair.student, longest)
        with self._stage("rollouts", len(prompts)), opened as sampler:
            for start in range(0, len(prompts), CHUNK_PROMPTS):
                part = prompts[start : start + CHUNK_PROMPTS]
                try:
                    rollouts += sampler.sample(part, seed=self.settings.seed, step=0, samples=self.settings.samples)
                except FloatingPointError as error:
                    raise ProbeError(f"the student {self.pair.student_name} cannot be sampled from: {error}") from None
                self.progress.advance(len(part))
        return rollouts

    def _look_at(self, rollouts: Sequence[Rollout]) -> Rollouts:
        """Count, and say what the counts mean for the rest."""
        empty = sum(_empty(rollout) for rollout in rollouts)
        truncated = sum(rollout.stop_reason == "length" for rollout in rollouts)
        if empty == len(rollouts):
            reason = "all rollouts are empty: the student ends its answer at once. Check its chat template and --temperature"
            self._miss([part for part in PARTS if part != "handoff"], reason)
        elif empty:
            self.notes.append(f"{empty} of {len(rollouts)} rollouts are empty; only the hand-off curve counts them")
        if truncated == len(rollouts):
            self.notes.append(
                f"all rollouts were cut off at --max-tokens {self.settings.max_tokens}: positions are those of the cut "
                "answers, and the student's own accuracy is unknown. Raise --max-tokens"
            )
        elif truncated > 0.2 * len(rollouts):
            limit = self.settings.max_tokens
            self.notes.append(f"{truncated} of {len(rollouts)} rollouts were cut off at --max-tokens {limit}")
        if len(self.material.prompts) < 2:
            self.notes.append("one prompt: there are no intervals")
        return Rollouts(
            prompts=len(self.material.prompts),
            rollouts=len(rollouts),
            empty=empty,
            truncated=truncated,
            mean_tokens=sum(len(rollout) for rollout in rollouts) / len(rollouts),
        )

    def _score(self, answers: Sequence[Rollout]) -> Tokens | None:
        if not answers or all(part in self.missing for part in PARTS if part != "handoff"):
            return None
        with self._stage("scores", len(answers)):
            try:
                return score_tokens(
                    self.student,
                    self._lm(self.pair.teacher),
                    answers,
                    top_k=min(self.settings.top_k, self.pair.vocab_size),
                    advance=self.progress.advance,
                )
            except algo.NonFiniteError as error:
                raise ProbeError(f"the pair cannot be scored: {error}; the weights of one of them may hold NaN") from None

    # --- parts ---

    def _handoff(self, rollouts: Sequence[Rollout], about: Rollouts) -> None:
        material, settings = self.material, self.settings
        if "handoff" in self.missing:
            return
        known = [rollout for rollout in rollouts if rollout.prompt.id in material.checkable]
        if material.check is None or not known:
            self._miss(["handoff"], "the prompts have no answers to check: name a --task, or add the field 'answer'")
            return
        longest = max(len(rollout.prompt.token_ids) + len(rollout) for rollout in known) + settings.max_tokens
        opened = self._sampler(settings.teacher_engine, self.pair.teacher, longest)
        with self._stage("hand-off", len(known)):
            try:
                with opened as sampler:
                    scores = handoff_scores(
                        known,
                        sampler,
                        self.pair.tokenizer,
                        material.check,
                        fractions=settings.fractions,
                        continuations=settings.continuations,
                        seed=settings.seed,
                        advance=self.progress.advance,
                    )
            except (SamplingError, FloatingPointError) as error:
                self._miss(["handoff"], f"the teacher cannot continue the student's prefixes: {error}")
                return
            own = self._own_scores(known)
        numbers = number_prompts(known)
        values = {fraction: by_prompt(score.mean(1), numbers) for fraction, score in scores.items()}
        intervals = [interval_over_problems([values[fraction]]) for fraction in settings.fractions]
        fall = values[settings.fractions[0]] - values[settings.fractions[-1]]
        cut_off = about.truncated == about.rollouts
        self.parts["handoff"] = Handoff(
            fractions=list(settings.fractions),
            teacher=Curve(
                mean=[interval.mean for interval in intervals],
                low=[interval.low for interval in intervals],
                high=[interval.high for interval in intervals],
            ),
            student=None if cut_off else _estimate(interval_over_problems([by_prompt(own, numbers)])),
            fall=_estimate(interval_over_problems([fall], bounds=(-1.0, 1.0))),
            problems=len(values[settings.fractions[0]]),
            continuations=settings.continuations,
        )

    def _own_scores(self, rollouts: Sequence[Rollout]) -> Tensor:
        assert self.material.check is not None  # asked before
        decode = self.pair.tokenizer.decode
        texts = [str(decode(rollout.response_ids, skip_special_tokens=True)) for rollout in rollouts]
        verdicts = self.material.check([rollout.prompt for rollout in rollouts], texts)
        return torch.tensor([verdict.score for verdict in verdicts], dtype=torch.float64)

    def _measure(self, tokens: Tokens, answers: Sequence[Rollout]) -> None:
        settings, bins = self.settings, self.settings.bins
        bootstrap = Bootstrap(tokens.prompts, seed=settings.seed)
        drift = measure_drift(tokens, bootstrap, settings.drift)
        with self._stage("positions", 4):
            if "positions" not in self.missing:
                self.parts["positions"] = measure_positions(tokens, bootstrap, bins)
                self.parts["drift"] = drift
            self.progress.advance(1)
            if "overlap" not in self.missing:
                k, vocabulary = min(settings.top_k, self.pair.vocab_size), self.pair.vocab_size
                self.parts["overlap"] = measure_top_k_overlap(tokens, bootstrap, bins, k=k, vocabulary=vocabulary)
            self.progress.advance(1)
            if "likelihood" not in self.missing:
                self.parts["likelihood"] = measure_likelihood(tokens, bootstrap, bins)
            self.progress.advance(1)
            if "rules" not in self.missing:
                self.parts["rules"] = measure_rules(tokens, bootstrap, bins, self.rules)
            self.progress.advance(1)
        if "alignment" not in self.missing and (batches := self._batches(tokens, answers)):
            with self._stage("alignment", len(batches) * directions_of(self.rules)):
                self.parts["alignment"] = measure_alignment(
                    self.student, batches, self.rules, drift, advance=self.progress.advance
                )

    def _batches(self, tokens: Tokens, answers: Sequence[Rollout]) -> list[AlignmentBatch]:
        """Batches of different prompts that have solutions, all rollouts of a prompt in one batch."""
        rows: dict[str, list[int]] = {}
        for row, rollout in enumerate(answers):
            if rollout.prompt.id in self.material.solutions:
                rows.setdefault(rollout.prompt.id, []).append(row)
        if not rows:
            self._miss(["alignment"], "there are no correct solutions: add the field 'solution' to the data")
            return []
        count = min(self.settings.batches, len(rows))
        size = min(self.settings.batch_prompts, len(rows) // count)
        if size < self.settings.batch_prompts:
            self.notes.append(f"{len(rows)} prompts have solutions: gradient alignment over {count} batches of {size} prompts")
        groups = [list(rows)[start * size : (start + 1) * size] for start in range(count)]
        return [self._batch(tokens, answers, [row for id_ in group for row in rows[id_]]) for group in groups]

    def _batch(self, tokens: Tokens, answers: Sequence[Rollout], rows: list[int]) -> AlignmentBatch:
        rollouts = [answers[row] for row in rows]
        width = max(len(rollout) for rollout in rollouts)
        prompts = {rollout.prompt.id: torch.tensor(rollout.prompt.token_ids) for rollout in rollouts}
        return AlignmentBatch(
            rollouts,
            Evidence(
                tokens.teacher_logprobs[rows, :width],
                tokens.student_logprobs[rows, :width],
                tokens.mask[rows, :width],
                progress=0.0,
            ),
            [(ids, torch.tensor(self.material.solutions[id_])) for id_, ids in prompts.items()],
        )

    # --- small things ---

    def _lm(self, model: Any) -> ResponseModel:
        return ResponseModel(model, temperature=self.settings.temperature, vocab_size=self.pair.vocab_size)

    @contextmanager
    def _sampler(self, choice: EngineChoice, model: Any, longest: int) -> Iterator[Sampler]:
        stops = stop_ids(self.pair.tokenizer, self.pair.student)
        settings = SamplingSettings(self.settings.max_tokens, self.settings.temperature, stop_ids=stops)
        student = Student.of(model, self.pair.tokenizer, longest=longest, seed=self.settings.seed)
        with choice.open(student) as engine:
            yield engine.sampler(settings)

    def _miss(self, parts: Sequence[str], reason: str) -> None:
        for part in parts:
            self.missing.setdefault(part, reason)

    @contextmanager
    def _stage(self, name: str, total: int) -> Iterator[None]:
        self.progress.stage(name, total)
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def by_prompt(values: Tensor, numbers: Sequence[int]) -> Tensor:
    """Means [N] over the rollouts [B] of each prompt."""
    index = torch.tensor(numbers)
    sums = torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add_(0, index, values.double())
    return sums / index.bincount()


def _empty(rollout: Rollout) -> bool:
    """Nothing but the end-of-sequence token."""
    return rollout.stop_reason == "eos" and len(rollout) == 1


def _estimate(interval: Interval) -> Estimate:
    return Estimate(mean=interval.mean, low=interval.low, high=interval.high)
