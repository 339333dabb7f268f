"""Whether who scores can be believed, without a second copy of its model: ask again, change a token, look at the numbers.

repeat   the same rollouts again, in the opposite order, beside others and one by one: the answers must be the same
shift    another token in the middle of an answer changes its own score first: not the one before it, not the one after
spread   scores differ from token to token: a server that has lost its weights finds every id as likely as any other
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iwopd.algo import LOGPROB_FLOOR, mean_difference
from iwopd.algo.views import Wanted
from iwopd.teacher.scorer import ScoringPath
from iwopd.train.doctor.echo import TOLERANCE, agreement
from iwopd.train.doctor.findings import Finding, failure, passed, warning
from iwopd.types import Rollout

LARGEST_HALF = 1.0
"""Largest difference of one token's log-prob that rounding in half precision explains: a logit of 60 is rounded to 0.25."""
CHANGED = 0.02
"""Least difference that counts as another score in half precision, where nothing else was seen to differ."""
SAME, SAME_HALF = 1e-3, 1e-2
"""Standard deviation of scores that are all the same."""
CERTAIN = 0.1
"""Share of log V: scores that are all nearer to 0 than this are those of a teacher that is sure of everything."""
UNIFORM = 0.98
"""Share of log V from which the mean entropy is that of a model that knows nothing."""
SHIFTED = 0.5
"""Scores that fit a neighbour's log-probs in so small a part of their own distance are the neighbour's."""
FEWEST = 8
"""Tokens from which the spread of scores says something."""
REMEDY = "do not train on it: restart the server with its weights loaded, without settings that change answers, or use another"


@dataclass(frozen=True, eq=False)
class Answers:
    """What one path said of the rollouts, the first time that it was asked."""

    path: ScoringPath
    scores: list[Tensor]
    noise: float
    """Largest difference of a token's log-prob between two times."""


def examine_answers(
    path: ScoringPath, rollouts: Sequence[Rollout], old: Sequence[Tensor], vocab_size: int
) -> Iterator[Finding]:
    """All of it; a path that contradicts itself is not asked about shifts. `old`: the student's log-probs."""
    first = path.scorer.score(rollouts)
    repeat, noise = check_repeat(path, first, rollouts)
    yield repeat
    said = Answers(path, first, noise)
    yield check_spread(said, rollouts, vocab_size)
    if repeat.level != "fail":
        yield check_shift(said, rollouts, old, vocab_size)


def check_repeat(path: ScoringPath, first: Sequence[Tensor], rollouts: Sequence[Rollout]) -> tuple[Finding, float]:
    """The same question again, alone and in other company; and the largest difference."""
    every, half = range(len(rollouts)), len(rollouts) // 2
    ways = {
        "asked the same again": [list(every)],
        "asked in the opposite order": [list(reversed(every))],
        "asked one by one": [[row] for row in every],
        "asked in other company": [[*every[half:], *every[half:]], [*every[:half], *every[:half]]] if half else [],
    }
    noise, worst = 0.0, 0.0
    for way, questions in ways.items():
        for rows in questions:
            found = path.scorer.score([rollouts[row] for row in rows])
            expected = [first[row] for row in rows]
            agree, largest, mean = agreement(_finite(found), _finite(expected), half=path.half)
            if not agree or largest > (LARGEST_HALF if path.half else TOLERANCE):
                words = f"{path.name}, {way}, differs by {mean:.3g} on average and up to {largest:.3g} from its first answer"
                return failure("self repeat", f"{words}: no rounding does that", REMEDY), largest
            noise, worst = max(noise, largest), max(worst, mean)
    tokens = sum(map(len, first))
    words = f"{path.name} says the same of {tokens} tokens when asked again, in other orders and batches"
    return passed("self repeat", f"{words} (largest difference {noise:.1g}, mean {worst:.1g})"), noise


def check_shift(said: Answers, rollouts: Sequence[Rollout], old: Sequence[Tensor], vocab_size: int) -> Finding:
    """Scores belong to their tokens: another id at a place changes the score there, and none before.

    Beside it, how well the scores fit the student's log-probs `old` of the same tokens, and of their neighbours.
    """
    path = said.path
    generator = torch.Generator().manual_seed(0)
    changed: list[Rollout] = []
    rows: list[int] = []
    for row, rollout in enumerate(rollouts):
        if len(rollout) >= 3:
            ids = rollout.response_ids.clone()
            middle = len(ids) // 2
            ids[middle] = (ids[middle] + torch.randint(1, vocab_size, (), generator=generator)) % vocab_size
            changed.append(replace(rollout, response_ids=ids))
            rows.append(row)
    if not changed:
        return passed("self shift", f"{path.name}: the answers are too short to tell")
    least = max(CHANGED if path.half else TOLERANCE, 4 * said.noise)
    offsets: list[int] = []
    for row, after in zip(rows, path.scorer.score(changed), strict=True):
        differs = (torch.nan_to_num(said.scores[row] - after).abs() > least).nonzero()
        if len(differs):
            offsets.append(int(differs[0]) - len(after) // 2)
    if not offsets:
        words = f"{path.name}: another token in the middle of {len(rows)} answers changes no score: it does not read them"
        return failure("self shift", words, REMEDY)
    early, right = [offset for offset in offsets if offset < 0], offsets.count(0)
    if early:
        words = "each score is that of the token after" if early.count(-1) > len(offsets) / 2 else "it looks ahead"
        return failure("self shift", _off(path, len(early), len(rows), -max(early), "before", words), REMEDY)
    if right <= len(offsets) / 2:
        late = len(offsets) - right
        words = "each score is that of the token before"
        return failure("self shift", _off(path, late, len(rows), min(filter(None, offsets)), "after", words), REMEDY)
    here, before, after_it = (_distance(said.scores, old, shift) for shift in (0, -1, 1))
    fit = f"mean distance from the student's log-probs {here:.2f}, shifted by one {before:.2f} and {after_it:.2f}"
    if min(before, after_it) < SHIFTED * here:
        return failure("self shift", f"{path.name}: its scores fit the neighbours of their tokens ({fit})", REMEDY)
    words = f"{path.name}: another token changes its own score first, in {right} of {len(rows)} answers"
    return passed("self shift", f"{words}; {fit}")


def check_spread(said: Answers, rollouts: Sequence[Rollout], vocab_size: int) -> Finding:
    """Not uniform, and not worse than uniform."""
    path, most = said.path, math.log(vocab_size)
    values = torch.cat(_finite(said.scores)).double()
    if len(values) < FEWEST:
        return passed("self spread", f"{path.name}: {len(values)} tokens are too few to tell")
    mean, deviation = float(values.mean()), float(values.std())
    entropy = None
    if "entropy" in path.scorer.gives:
        looked = path.scorer.look(rollouts, Wanted(entropy=True))
        entropy = float(torch.cat([one.entropy for one in looked if one.entropy is not None]).double().mean())
    flat = deviation < (SAME_HALF if path.half else SAME) and mean < -CERTAIN * most
    if flat or (entropy is not None and entropy > UNIFORM * most):
        found = f"log-probs {mean:.3f} with a deviation of {deviation:.1g}" if entropy is None or flat else ""
        found = found or f"a mean entropy of {entropy:.3f} nats"
        words = f"{path.name} finds every id as likely as any other: {found}, and log V = {most:.3f}"
        return failure("self spread", f"{words}. It has lost its weights, or woke up without them", REMEDY)
    if mean < -most:
        words = f"{path.name} finds the student's answers less likely ({mean:.2f} nats a token) than ids drawn at random"
        remedy = "nothing to do if these models have nothing in common; else check that the server has the right weights"
        return warning("self spread", f"{words} ({-most:.2f})", remedy)
    more = "" if entropy is None else f", mean entropy {entropy:.2f}"
    words = f"{path.name} tells tokens apart: log-probs {mean:.2f} on average, deviation {deviation:.2f}{more}"
    return passed("self spread", f"{words}; log V = {most:.2f}")


def _distance(scores: Sequence[Tensor], old: Sequence[Tensor], shift: int) -> float:
    """Mean |difference| of each score and the student's log-prob of the token `shift` places on."""
    pairs = [
        (one[max(0, -shift) : len(one) - max(0, shift)], other[max(0, shift) : len(other) - max(0, -shift)])
        for one, other in zip(_finite(scores), _finite(old), strict=True)
        if len(one) > 1
    ]
    return mean_difference(torch.cat([one.float() for one, _ in pairs]), torch.cat([other.float() for _, other in pairs]))


def _off(path: ScoringPath, count: int, of: int, places: int, where: str, words: str) -> str:
    return f"{path.name}: in {count} of {of} answers another token first changes the score {places} {where} its own: {words}"


def _finite(scores: Sequence[Tensor]) -> list[Tensor]:
    """-inf, which two answers may share, as a number."""
    return [values.clamp(min=LOGPROB_FLOOR) for values in scores]
