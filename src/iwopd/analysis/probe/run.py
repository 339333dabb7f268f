"""A probe from beginning to end: rollouts, scores, parts, verdict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import iwopd
from iwopd import algo
from iwopd.analysis.handoff import handoff_scores
from iwopd.analysis.probe.agreement import measure_agreement
from iwopd.analysis.probe.alignment import REGIONS, SIDES, AlignmentBatch, gradient_passes, measure_alignment
from iwopd.analysis.probe.horizons import METHODS, measure_horizons, probe_cuts
from iwopd.analysis.probe.inputs import Material, Pair
from iwopd.analysis.probe.intervals import Bootstrap
from iwopd.analysis.probe.kept import Kept, identity_of, rollouts_as_json, rollouts_from_json
from iwopd.analysis.probe.positions import measure_drift, measure_likelihood, measure_positions, measure_top_k_overlap
from iwopd.analysis.probe.proposal import propose
from iwopd.analysis.probe.result import Curve, Estimate, Handoff, Part, Probe, ProbeError, Rollouts
from iwopd.analysis.probe.rules import iw_key, measure_rules, probe_rules
from iwopd.analysis.probe.scoring import Tokens, score_tokens, with_verdicts
from iwopd.analysis.probe.settings import PARTS, ProbeSettings
from iwopd.analysis.probe.verdict import judge
from iwopd.eval.answers import answer_text, check_answers
from iwopd.eval.statistics import interval_over_problems
from iwopd.lm import ResponseModel, default_head_precision
from iwopd.models import stop_ids
from iwopd.rollout.engine import EngineChoice, Student
from iwopd.rollout.sampler import Sampler
from iwopd.rollout.sampling import SamplingError, SamplingSettings
from iwopd.rope import fix_rope
from iwopd.stages import StageListener
from iwopd.types import Rollout, number_prompts

WORTH_SAYING = 10.0
"""Seconds from which on a part's time is estimated aloud."""
CHUNK_PROMPTS = 64
"""Prompts that are sampled in one call: enough to fill a batch, few enough to show progress."""


def run_probe(
    pair: Pair,
    material: Material,
    settings: ProbeSettings,
    progress: StageListener | None = None,
    keep: Path | None = None,
) -> Probe:
    """Measure what can be measured, and say what cannot and why. The pair's teacher is let go of on the way.

    keep: a folder for what is measured on the way; a probe of the same models, prompts and settings goes on from it. It may go
    once the result is in a safe place.
    """
    kept = Kept() if keep is None else Kept(keep, identity_of(pair, material, settings))
    return _Run(pair, material, settings, progress or StageListener(), kept).finish()


class _Run:
    def __init__(self, pair: Pair, material: Material, settings: ProbeSettings, progress: StageListener, kept: Kept) -> None:
        self.pair, self.material, self.settings, self.progress, self.kept = pair, material, settings, progress, kept
        self.missing: dict[str, str] = {part: "left out with --skip" for part in PARTS if part in settings.skip}
        self.notes = list(material.notes)
        self.seconds: dict[str, float] = {}
        self.parts: dict[str, Any] = {}
        self.rules = probe_rules(settings.gamma, settings.rules)
        # An answer, and the teacher's continuation of it.
        longest = max((len(prompt.token_ids) for prompt in material.prompts), default=0) + 2 * settings.max_tokens
        self.notes += [words for model in (pair.student, pair.teacher) if (words := fix_rope(model, longest)) is not None]
        self.student = self._lm(pair.student)
        for rule in self.rules:
            if (k := rule.objective.asks.student.top_k) > pair.vocab_size:
                raise ProbeError(f"the rule {rule.key!r} looks at {k} likely ids (k), but the vocabulary has {pair.vocab_size}")

    def finish(self) -> Probe:
        rollouts = self._sample()
        about = self._look_at(rollouts)
        verdicts = self._judge(rollouts)
        answers = [rollout for rollout in rollouts if not _empty(rollout)]
        tokens = self._score(answers)
        self._handoff(rollouts, verdicts, about)
        self.pair.teacher = None
        if tokens is not None:
            scores = [score for rollout, score in zip(rollouts, verdicts, strict=True) if not _empty(rollout)]
            self._measure(with_verdicts(tokens, scores), answers)
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
        part = probe.horizons
        if part is not None:
            part = part.model_copy(update={"proposal": propose(part, bias, self.settings.max_tokens)})
        return probe.model_copy(update={"bias": bias, "verdict": sentences, "horizons": part})

    def _sample(self) -> list[Rollout]:
        prompts = self.material.prompts
        if (before := self.kept.read("rollouts")) is not None:
            self.progress.say(
                f"going on with a probe that was stopped: {len(before)} rollouts, {len(self.kept.numbers)} cosines"
            )
            return rollouts_from_json(before, prompts)
        rollouts: list[Rollout] = []
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
        self.kept.write("rollouts", rollouts_as_json(rollouts))
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
        limit = f"--max-tokens {self.settings.max_tokens}"
        if truncated == len(rollouts):
            cut = "positions are those of the cut answers, and the student's own accuracy is unknown"
            self.notes.append(f"all rollouts were cut off at {limit}: {cut}. Raise --max-tokens")
        elif truncated > 0.2 * len(rollouts):
            self.notes.append(f"{truncated} of {len(rollouts)} rollouts were cut off at {limit}")
        if len(self.material.prompts) < 2:
            self.notes.append("one prompt: there are no intervals")
        return Rollouts(
            prompts=len(self.material.prompts),
            rollouts=len(rollouts),
            empty=empty,
            truncated=truncated,
            mean_tokens=sum(len(rollout) for rollout in rollouts) / len(rollouts),
        )

    def _judge(self, rollouts: Sequence[Rollout]) -> list[float]:
        """The score of each rollout in [0, 1]; NaN where nobody can judge it. Without any, rules that need it are left out."""
        check = self.material.check
        scores = [math.nan] * len(rollouts)
        known = [row for row, rollout in enumerate(rollouts) if rollout.prompt.id in self.material.checkable]
        if check is not None and known and not self.missing.keys() >= {"handoff", "rules", "alignment"}:
            with self._stage("verdicts", len(known)):
                texts = [answer_text(self.pair.tokenizer, rollouts[row].response_ids) for row in known]
                verdicts = check_answers(check, [rollouts[row].prompt for row in known], texts)
                for row, verdict in zip(known, verdicts, strict=True):
                    scores[row] = verdict.score
                self.progress.advance(len(known))
        if all(map(math.isnan, scores)):
            blind = [rule for rule in self.rules if "correct" in rule.objective.needs]
            self.rules = [rule for rule in self.rules if rule not in blind]
            if blind and "rules" not in self.missing:
                names = " and ".join(rule.title for rule in blind)
                self.notes.append(f"{names}: left out, because nobody judges the rollouts (name a --task, or add 'answer')")
        return scores

    def _score(self, answers: Sequence[Rollout]) -> Tokens | None:
        if not answers or all(part in self.missing for part in PARTS if part != "handoff"):
            return None
        top_k = min(self.settings.top_k, self.pair.vocab_size)
        methods = [rule.objective for rule in self.rules]
        groups = [] if "agreement" in self.missing else self._groups(_by_prompt_id(answers, range(len(answers))))
        with self._stage("scores", len(answers)):
            try:
                teacher, advance = self._lm(self.pair.teacher), self.progress.advance
                asked: Any = {"top_k": top_k, "methods": methods, "groups": groups}
                tokens = score_tokens(self.student, teacher, answers, advance=advance, **asked)
            except algo.NonFiniteError as error:
                raise ProbeError(f"the pair cannot be scored: {error}; the weights of one of them may hold NaN") from None
        self._agreement(tokens, [answers[row].prompt.id for row in groups[0]] if groups else [])
        return tokens

    def _agreement(self, tokens: Tokens, prompts: Sequence[str]) -> None:
        """`prompts`: of the rollouts of a batch."""
        found = measure_agreement(tokens.agreements, len(set(prompts)))
        if found is not None:
            self.parts["agreement"] = found
        elif tokens.agreements:
            nothing = "the rollouts lose nothing under the teacher, or the student is certain of all its tokens"
            self._miss(["agreement"], f"no batch has a gradient both before and after drifts: {nothing}")
        else:
            self._miss(["agreement"], "the output head of one of the models is more than a matrix")

    def _handoff(self, rollouts: Sequence[Rollout], verdicts: Sequence[float], about: Rollouts) -> None:
        material, settings = self.material, self.settings
        if "handoff" in self.missing:
            return
        judged = [row for row, score in enumerate(verdicts) if not math.isnan(score)]
        known = [rollouts[row] for row in judged]
        if material.check is None or not known:
            self._miss(["handoff"], "the prompts have no answers to check: name a --task, or add the field 'answer'")
            return
        if (before := self.kept.read("handoff")) is not None:
            self.parts["handoff"] = Handoff.model_validate(before)
            return
        longest = max(len(rollout.prompt.token_ids) + len(rollout) for rollout in known) + settings.max_tokens
        opened = self._sampler(settings.teacher_engine, self.pair.teacher, longest)
        asked: Any = {name: getattr(settings, name) for name in ("fractions", "continuations", "seed")}
        with self._stage("hand-off", len(known)):
            try:
                with opened as sampler:
                    tokenizer, advance = self.pair.tokenizer, self.progress.advance
                    scores = handoff_scores(known, sampler, tokenizer, material.check, advance=advance, **asked)
            except (SamplingError, FloatingPointError) as error:
                self._miss(["handoff"], f"the teacher cannot continue the student's prefixes: {error}")
                return
        numbers = number_prompts(known)
        own = by_prompt(torch.tensor([verdicts[row] for row in judged], dtype=torch.float64), numbers)
        values = [by_prompt(scores[fraction].mean(1), numbers) for fraction in settings.fractions]
        mean, low, high = zip(*(interval_over_problems([value]) for value in values), strict=True)
        cut_off = about.truncated == about.rollouts
        self.parts["handoff"] = Handoff(
            fractions=list(settings.fractions),
            teacher=Curve(mean=list(mean), low=list(low), high=list(high)),
            student=None if cut_off else Estimate(**interval_over_problems([own])._asdict()),
            fall=Estimate(**interval_over_problems([values[0] - values[-1]], bounds=(-1.0, 1.0))._asdict()),
            problems=len(own),
            continuations=settings.continuations,
        )
        self.kept.write("handoff", self.parts["handoff"].model_dump())

    def _measure(self, tokens: Tokens, answers: Sequence[Rollout]) -> None:
        settings, vocabulary, advance = self.settings, self.pair.vocab_size, self.progress.advance
        bootstrap = Bootstrap(tokens.prompts, seed=settings.seed)
        drift = measure_drift(tokens, bootstrap, settings.drift)
        given = (tokens, bootstrap, settings.bins)
        measures: dict[str, Callable[[], Part]] = {
            "positions": lambda: measure_positions(*given),
            "overlap": lambda: measure_top_k_overlap(*given, k=min(settings.top_k, vocabulary), vocabulary=vocabulary),
            "likelihood": lambda: measure_likelihood(*given),
            "rules": lambda: measure_rules(*given, self.rules),
        }
        with self._stage("positions", len(measures)):
            for part, measure in measures.items():
                if part not in self.missing:
                    self.parts[part] = measure()
                advance(1)
        if "positions" in self.parts:
            self.parts["drift"] = drift
        batches = self._batches(tokens, answers)
        if "alignment" not in self.missing and batches:
            split = [key for key in ("opd", iw_key(settings.gamma), "survival") if key in {rule.key for rule in self.rules}]
            split = split if tokens.correct is not None else []
            directions = len(self.rules) + len(REGIONS)
            numbers = self.kept.numbers
            before, passes = len(numbers), gradient_passes(batches, directions, len(split))
            with self._stage("alignment", len(batches) * (directions + len(SIDES) * len(split))):
                heard = self._costs("alignment", passes, before, lambda _: len(numbers) > before)
                self.parts["alignment"] = measure_alignment(self.student, batches, self.rules, drift, split, heard, numbers)
        if "horizons" not in self.missing:
            self._horizons(tokens, bootstrap, batches)

    def _horizons(self, tokens: Tokens, bootstrap: Bootstrap, batches: Sequence[AlignmentBatch]) -> None:
        rules = [rule for rule in self.rules if rule.key in METHODS]
        cuts = len(probe_cuts(float(tokens.mask.sum(-1).double().mean())))
        before = sum(self.kept.read(f"horizons-{number}") is not None for number in range(len(batches))) * (
            cuts * len(rules) + 1
        )
        with self._stage("horizons", len(batches) * cuts * len(rules)):
            heard = self._costs("horizons", len(batches) * (cuts * len(rules) + 1), before, lambda count: count == 1)
            found = measure_horizons(self.student, tokens, bootstrap, batches, rules, heard, self.kept)
        self.parts["horizons"] = found

    def _batches(self, tokens: Tokens, answers: Sequence[Rollout]) -> list[AlignmentBatch]:
        """Batches of different prompts, all rollouts of a prompt in one batch; prompts with solutions, where there are some."""
        if self.missing.keys() >= {"alignment", "horizons"}:
            return []
        solved = [row for row, rollout in enumerate(answers) if rollout.prompt.id in self.material.solutions]
        if not solved:
            self._miss(["alignment"], "there are no correct solutions: add the field 'solution' to the data")
        if self.missing.keys() >= {"alignment", "horizons"}:
            return []
        rows = _by_prompt_id(answers, solved or range(len(answers)))
        count, size = self._batch_sizes(len(rows))
        if size < self.settings.batch_prompts:
            which = f"{len(rows)} prompts have solutions" if solved else f"there are {len(rows)} prompts"
            self.notes.append(f"{which}: gradients over {count} batches of {size} prompts")
        return [self._batch(tokens, answers, group) for group in self._groups(rows)]

    def _batch_sizes(self, prompts: int) -> tuple[int, int]:
        """How many batches so many prompts make, and how many prompts each has."""
        count = min(self.settings.batches, prompts)
        return count, min(self.settings.batch_prompts, prompts // count)

    def _groups(self, rows: dict[str, list[int]]) -> list[list[int]]:
        """The rollouts of each batch, from those of each prompt: consecutive prompts."""
        count, size = self._batch_sizes(len(rows))
        prompts = list(rows)
        return [[row for id_ in prompts[start * size : (start + 1) * size] for row in rows[id_]] for start in range(count)]

    def _batch(self, tokens: Tokens, answers: Sequence[Rollout], rows: list[int]) -> AlignmentBatch:
        rollouts = [answers[row] for row in rows]
        known, asked = self.material.solutions, dict.fromkeys(rollout.prompt.id for rollout in rollouts)
        solutions = {id_: torch.tensor(known[id_]) for id_ in asked if id_ in known}
        return AlignmentBatch(rollouts, tokens.part(rows), solutions)

    def _lm(self, model: Any) -> ResponseModel:
        options: Any = {"temperature": self.settings.temperature, "vocab_size": self.pair.vocab_size}
        return ResponseModel(model, head_precision=default_head_precision(self.pair.student), **options)

    @contextmanager
    def _sampler(self, choice: EngineChoice, model: Any, longest: int) -> Iterator[Sampler]:
        stops = stop_ids(self.pair.tokenizer, self.pair.student)
        settings = SamplingSettings(self.settings.max_tokens, self.settings.temperature, stop_ids=stops)
        student = Student.of(model, self.pair.tokenizer, longest=longest, seed=self.settings.seed)
        with choice.open(student) as engine:
            yield engine.sampler(settings)

    def _costs(self, part: str, passes: int, before: int, is_pass: Callable[[int], bool]) -> Callable[[int], None]:
        """Say what a part costs before it begins, and how long that takes once its first update is known.

        `before`: passes of a probe that was stopped. Returns who hears of progress; `is_pass` tells what was measured just now.
        """
        left = passes - before
        again = f", {before} of which were there already" if before else ""
        how = f"--skip {part} leaves it out, and what is measured is kept if it is stopped"
        self.progress.say(f"{part}: up to {passes} passes with gradients{again} ({how})")
        began, told = time.perf_counter(), False

        def heard(count: int) -> None:
            nonlocal told
            self.progress.advance(count)
            if not told and is_pass(count):
                told = True
                seconds = (time.perf_counter() - began) / 2  # the first update, and the way to the solutions before it
                if seconds * left > WORTH_SAYING:
                    self.progress.say(
                        f"{part}: the first pass took {seconds:.1f} s; all {left} take about {_duration(seconds * left)}"
                    )

        return heard

    def _miss(self, parts: Sequence[str], reason: str) -> None:
        for part in parts:
            self.missing.setdefault(part, reason)

    @contextmanager
    def _stage(self, name: str, total: int) -> Iterator[None]:
        self.progress.stage(name, total)
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def by_prompt(values: Tensor, numbers: Sequence[int]) -> Tensor:
    """Means [N] over the rollouts [B] of each prompt."""
    index = torch.tensor(numbers)
    sums = torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add_(0, index, values.double())
    return sums / index.bincount()


def _by_prompt_id(rollouts: Sequence[Rollout], rows: Iterable[int]) -> dict[str, list[int]]:
    """These rollouts' numbers by the prompts that they answer, in order."""
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(rollouts[row].prompt.id, []).append(row)
    return found


def _empty(rollout: Rollout) -> bool:
    """Nothing but the end-of-sequence token."""
    return rollout.stop_reason == "eos" and len(rollout) == 1
