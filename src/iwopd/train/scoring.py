"""The rollouts of a step, and evidence made of them: old, teacher and reference log-probs, as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iwopd import algo
from iwopd.algo.agreement import split
from iwopd.algo.evidence import Evidence
from iwopd.algo.objectives import Objective, TrainingSignal
from iwopd.algo.views import TokenScores
from iwopd.config import Config
from iwopd.rollout.horizons import Drift
from iwopd.teacher.scorer import OutputMatrix
from iwopd.train.given import NOTHING_GIVEN
from iwopd.train.learner import ForwardPass
from iwopd.train.micro_batch import AFTER, BEFORE, STATES
from iwopd.train.mix import ScoredOthers
from iwopd.train.parts import Parts
from iwopd.train.pipeline import Written, look, write_step
from iwopd.train.reward import StepRewards
from iwopd.train.state import TrainingStoppedError
from iwopd.train.thinking import teaching_mask
from iwopd.train.watching import Watching
from iwopd.types import Rollout, ScoredRollout, TokenBatch, number_prompts


@dataclass(frozen=True, eq=False)
class ScoredStep:
    """The batch of a step, and what it is made into."""

    batch: TokenBatch
    evidence: Evidence
    """[B, T]: the one place where a step is padded."""
    forward: ForwardPass | None
    """The update's own forward pass, if it has run already."""
    floored: int
    """Teacher log-probs of -inf."""
    rewards: StepRewards | None
    """What the checker said, if there is one; it is part of the evidence."""
    others: ScoredOthers | None = None
    """What others wrote: no part of batch and evidence, but of the forward pass, behind the student's rollouts."""
    thinking: float | None = None
    """Share of the batch's tokens that are thinking; None: nobody asked."""


def write_rollouts(config: Config, parts: Parts, step: int, prompts: int | None = None) -> Written:
    """The rollouts of a step; teacher and checker may be at work on them already. `prompts`: how many, if not the usual."""
    parts.before_writing()
    horizon = config.rollout.horizon.made
    asked = parts.order.batch(step) if prompts is None else parts.order.some(step, prompts)
    own, given = parts.others.write(asked, step) if parts.others else (asked, NOTHING_GIVEN)
    limit = horizon.limit(parts.max_response, training_progress(step, config.steps))
    parts.activity.expect(len(own) * config.rollout.samples)
    written = write_step(
        own,
        parts.sampler,
        parts.teacher_scorer,
        parts.ranks,
        seed=config.seed,
        step=step,
        samples=config.rollout.samples,
        score_early=parts.score_early,
        wanted=parts.teacher_wanted,
        checking=parts.rewards.begin() if parts.rewards else None,
        limit=limit if limit < parts.max_response else None,
        watching=_watching(parts, horizon) if isinstance(horizon, Drift) else None,
        head=parts.teacher_scorer.whole_distribution if parts.followed.states else None,
    )
    return replace(written, given=given) if parts.others else written


def _watching(parts: Parts, horizon: Drift) -> Watching:
    return Watching(horizon, parts.teacher_scorer.follow(parts.followed), parts.agreement)


def score_step(config: Config, parts: Parts, written: Written, step: int) -> ScoredStep:
    """Score what the student wrote. The teacher may still be at work when this begins."""
    kept = _kept(config, written)
    thinking = None if parts.thinking is None else [parts.thinking.mask(rollout) for rollout in kept]
    teaching = teaching_mask(config, thinking, kept, needed=not written.given.rollouts)
    asked, everyones = parts.objective.asks, [*kept, *written.given.rollouts]
    forward = parts.learner.forward(everyones, asked.student)
    found = look(parts.student_scorer, parts.ranks, everyones, asked.student) if forward is None else forward.scores
    old, of_others = found[: len(kept)], found[len(kept) :]
    reference = parts.ranks.share(kept, parts.reference_scorer.score) if parts.reference_scorer else None
    teacher = written.teacher_scores(kept, chosen_ids(parts, old))
    scored = scored_rollouts(parts, kept, old, teacher, reference)
    count = sum(int(torch.isneginf(scores.logprobs).sum()) for scores in teacher)
    batch = TokenBatch.collate(scored, correct_rollouts=not parts.engine.exact)
    evidence = evidence_of(batch, mask=teaching, progress=training_progress(step, config.steps), agreement=parts.agreement)
    if batch.spans is not None and not evidence.mask.any() and not written.given.rollouts:
        raise TrainingStoppedError(
            f"the teacher's tokenizer can write nothing of the answers of step {step}: nothing is left to train on. Choose a "
            "teacher whose tokenizer knows their text (`iwopd doctor` measures it), or larger steps (rollout.prompts_per_step)",
            exit_code=1,
        )
    rewards = parts.rewards.step(evidence, kept, lambda: written.judged(kept)) if parts.rewards else None
    others = parts.others.score(written.given, of_others, parts.teacher_scorer, parts.ranks) if parts.others else None
    share = None if thinking is None else float(torch.cat(thinking).double().mean())
    return ScoredStep(batch, rewards.evidence if rewards else evidence, forward, count, rewards, others, share)


def chosen_ids(parts: Parts, student: Sequence[TokenScores]) -> list[Tensor] | None:
    """The ids [T, K] of each rollout that the teacher is asked about: those that the student finds likeliest."""
    if not parts.objective.asks.student_first:
        return None
    found = [scores.top_ids for scores in student if scores.top_ids is not None]
    if len(found) < len(student):
        raise ValueError("the teacher is to be asked for the student's likeliest ids, but they are not known")
    return found


def scored_rollouts(
    parts: Parts,
    rollouts: Sequence[Rollout],
    student: Sequence[TokenScores],
    teacher: Sequence[TokenScores],
    reference: Sequence[Tensor] | None,
) -> list[ScoredRollout]:
    """Rollouts with all that the objective needs to know of them; -inf of teacher and reference floored."""
    objective, found, numbers = parts.objective, [], number_prompts(rollouts)
    for row, (rollout, ours, theirs) in enumerate(zip(rollouts, student, teacher, strict=True)):
        everywhere = torch.ones(len(rollout), dtype=torch.bool)
        lp_r = None
        if reference is not None:
            lp_r = algo.floor_logprobs(reference[row], everywhere, name="reference_logprobs").logprobs
        lp_t = algo.floor_logprobs(theirs.logprobs, everywhere).logprobs
        more = objective.further_evidence(ours, theirs)
        if "prompt" in objective.needs:
            more["prompt"] = torch.full_like(ours.logprobs, float(numbers[row]))
        if objective.needs_whole_kl:
            more["kl"] = pair_kl(ours, parts.student_scorer.output_matrix(), theirs, parts.teacher_scorer.output_matrix())
        states = theirs.states if objective.needs_teacher_distribution else None
        found.append(ScoredRollout(rollout, ours.logprobs, lp_t, lp_r, more, states, theirs.spans))
    return found


def evidence_of(
    batch: TokenBatch, *, mask: Tensor | None = None, progress: float | None = None, agreement: float | None = None
) -> Evidence:
    """A batch as formulas see it, [B, T]; `mask` leaves out tokens that do not teach, as do spans that nobody scored."""

    def padded(values: Tensor | None) -> Tensor | None:
        return None if values is None else batch.pad(values)

    mask = batch.mask if mask is None else mask
    spans = None if batch.spans is None else batch.pad(batch.spans + 1) - 1
    return Evidence(
        teacher_logprobs=batch.pad(batch.teacher_logprobs),
        old_logprobs=batch.pad(batch.old_logprobs),
        mask=mask if spans is None else mask & (spans >= 0),
        spans=spans,
        reference_logprobs=padded(batch.reference_logprobs),
        progress=progress,
        agreement=agreement,
        rollout_logprobs=padded(batch.rollout_logprobs),
        **{name: batch.pad(values) for name, values in batch.more.items()},
    )


def loss_columns(
    objective: Objective, batch: TokenBatch, evidence: Evidence, signal: TrainingSignal | None = None
) -> dict[str, Tensor]:
    """What the objective's loss needs of each of the batch's tokens, [N], and how their gradient is split in two."""
    signal = signal or objective.signal(evidence)
    columns = objective.columns(evidence, signal)
    of = signal.of_spans or signal
    before, after = split(of.gap, of.mask, of.weights, of.supervised)
    if evidence.spans is not None:
        before, after = map(algo.spans.Spans.of(evidence.spans, evidence.mask).expand, (before, after))
    columns |= {BEFORE: before, AFTER: after}
    states = {} if batch.teacher_states is None else {STATES: batch.teacher_states}
    return {name: values[batch.mask] for name, values in columns.items()} | states


@torch.no_grad()
def pair_kl(student: TokenScores, matrix: OutputMatrix, teacher: TokenScores, teacher_matrix: OutputMatrix) -> Tensor:
    """KL(student || teacher) [T] over the full vocabulary, from the hidden states of both."""
    if student.states is None or teacher.states is None:
        raise ValueError("the KL of whole distributions needs the hidden states of both models")
    device, theirs = matrix.weight.device, teacher_matrix
    return algo.token_kl(
        student.states.to(device),
        matrix.weight,
        teacher.states.to(device),
        theirs.weight.to(device),
        bias=matrix.bias,
        teacher_bias=None if theirs.bias is None else theirs.bias.to(device),
        temperature=matrix.temperature,
        vocab_size=matrix.vocab_size,
        precision=matrix.precision,
    ).cpu()


def _kept(config: Config, written: Written) -> list[Rollout]:
    """The student's rollouts that are scored. If all were cut off and others' answers are left, all of them, to be masked."""
    truncated, rollouts = config.rollout.truncated, written.rollouts
    if truncated != "keep" and all(rollout.stop_reason == "length" for rollout in rollouts):
        if written.given.rollouts:
            return rollouts
        raise TrainingStoppedError(
            f"every rollout of the step was cut off at max_tokens and rollout.truncated is {truncated!r}: "
            "nothing is left to train on. Raise rollout.max_tokens, or keep them",
            exit_code=1,
        )
    return [rollout for rollout in rollouts if truncated != "drop" or rollout.stop_reason != "length"]


def training_progress(step: int, steps: int) -> float:
    """Share of training done, in [0, 1]: 0 at the first step, 1 at the last. The curriculum follows it."""
    return min(1.0, max(0, step - 1) / max(1, steps - 1))
